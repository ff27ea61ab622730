"""Exercises of chapter 1: undo a write, the form between loop and matmul, the gradient."""

import torch

from ... import reference
from ..inputs import make_inputs
from ._core import define

SIZES = [dict(T=37, K=8, V=5), dict(T=70, K=16, V=24), dict(T=53, K=12, V=7)]


def one_head(seed):
    """q, k [T, K], v [T, V] and a random state [K, V] of one head in float64."""
    made = make_inputs(B=1, H=1, dtype=torch.float64, seed=seed, **SIZES[seed])
    q, k, v, _, _, state = made.head()
    return q, k, v, state


def by_the_oracle(q, k, v, state=None):
    """(o [T, V], final state [K, V]) from the loop of the reference, scale 1."""
    batched = (x[None, :, None] for x in (q, k, v))
    start = None if state is None else state[None, None]
    o, final = reference.linear_attention(
        *batched, scale=1.0, initial_state=start, output_final_state=True
    )
    return o[0, :, 0], final[0, 0]


# -- one star ----------------------------------------------------------------------------------


def take_back(state, keys, values, j):
    """The memory as if pair j had never been written.

    state [K, V] after all the writes; keys [n, K]; values [n, V]; j a place in 0 .. n-1.
    """
    # BEGIN SOLUTION
    return state - torch.outer(keys[j], values[j])  # [K, V]
    # END SOLUTION


def take_back_arguments(seed):
    _, k, v, start = one_head(seed)
    _, state = by_the_oracle(k, k, v, start)
    return dict(state=state, keys=k, values=v, j=5 + 7 * seed)


def take_back_expected(state, keys, values, j):
    """What was there before any write, and then every write but one."""
    _, written = by_the_oracle(keys, keys, values)
    rest = torch.arange(len(keys)) != j
    _, kept = by_the_oracle(keys[rest], keys[rest], values[rest])
    return state - written + kept


define(
    take_back,
    title="Take back a write",
    stars=1,
    task="""
        The memory is a sum, so the order of the writes leaves no trace in it, and a write can be
        undone long after it happened. Remove pair `j` from `state` and leave everything else as
        it is.
        """,
    hint="""
        What did the write of pair `j` add? Use the value that was written, not the value that
        the memory returns: the two differ by the crosstalk.
        """,
    arguments=take_back_arguments,
    expected=take_back_expected,
    outputs={"state": "KV"},
    mutants={
        "the pair is added once more": ("state - torch", "state + torch"),
        "the value that is read is removed, with the crosstalk of all other pairs": (
            "values[j]",
            "state.T @ keys[j]",
        ),
        "the last pair is removed": ("keys[j], values[j]", "keys[-1], values[-1]"),
        "everything from pair j on is removed": (
            "torch.outer(keys[j], values[j])",
            "keys[j:].T @ values[j:]",
        ),
        "the wrong neighbour is removed": ("keys[j], values[j]", "keys[j], values[j - 1]"),
        "the pair is removed twice": ("state - torch", "state - 2 * torch"),
        "all pairs are removed": ("torch.outer(keys[j], values[j])", "keys.T @ values"),
    },
    why="""
        It needs the value that was written. A model that wants to replace an old value has only
        the memory to ask for it, and the answer holds crosstalk. Chapter 2 takes that answer and
        removes it, and this turns out to be the better idea.
        """,
)

# -- two stars ---------------------------------------------------------------------------------


def chunk_form(q, k, v, state, chunk):
    """Linear attention, `chunk` tokens at a time.

    q, k [T, K]; v [T, V]; state [K, V] before the first token. The scale is in q already.
    Returns (o [T, V], the state [K, V] after the last token). T need not be a multiple of chunk.
    """
    # BEGIN SOLUTION
    outputs = []
    for start in range(0, len(q), chunk):
        stop = start + chunk
        Q, K, V = q[start:stop], k[start:stop], v[start:stop]  # [C, K], [C, K], [C, V]
        within = torch.tril(Q @ K.T) @ V  # [C, V] from this chunk
        outputs.append(Q @ state + within)  # [C, V] past and present
        state = state + K.T @ V  # [K, V]
    return torch.cat(outputs), state
    # END SOLUTION


def chunk_arguments(seed):
    q, k, v, state = one_head(seed)
    return dict(q=q, k=k, v=v, state=state, chunk=(8, 16, 5)[seed])


def chunk_expected(q, k, v, state, chunk):
    return by_the_oracle(q, k, v, state)


define(
    chunk_form,
    title="The form between",
    stars=2,
    task="""
        Cut the tokens into chunks of `chunk`. Within a chunk use the masked matrix product, from
        chunk to chunk use the state. With `chunk = 1` this is the loop, with `chunk = T` the
        masked product.
        """,
    hint="""
        A token sees two things: the state as it was before its chunk, and the tokens of its own
        chunk up to itself. The two add up. Update the state after the chunk's outputs are done,
        with all of its writes at once. A slice that reaches past the end is cut by itself.
        """,
    arguments=chunk_arguments,
    expected=chunk_expected,
    outputs={"o": "TV", "state": "KV"},
    mutants={
        "the state is updated before the outputs are read": (
            "        outputs.append(Q @ state + within)  # [C, V] past and present\n"
            "        state = state + K.T @ V  # [K, V]\n",
            "        state = state + K.T @ V\n        outputs.append(Q @ state + within)\n",
        ),
        "the mask within the chunk is missing": ("torch.tril(Q @ K.T)", "(Q @ K.T)"),
        "a token does not see itself": ("torch.tril(Q @ K.T)", "torch.tril(Q @ K.T, -1)"),
        "the past is forgotten: only the chunk itself is read": ("Q @ state + within", "within"),
        "the state holds the last chunk only": ("state + K.T @ V", "K.T @ V"),
        "only the last token of each chunk is written": ("K.T @ V", "K[-1:].T @ V[-1:]"),
        "the past is subtracted": ("Q @ state + within", "within - Q @ state"),
        "queries are written in place of keys": ("K.T @ V", "Q.T @ V"),
    },
    why="""
        Each chunk is four matrix products, and only T / chunk steps depend on each other. Every
        fast kernel in this book has this shape; the erase of chapter 2 and the decay of chapter 3
        make the part within a chunk harder, and chapters 6 to 9 are about that.
        """,
)

# -- three stars -------------------------------------------------------------------------------


def gradients(q, k, v, do):
    """The gradient of linear attention from a zero state, without autograd.

    q, k [T, K]; v [T, V]; do [T, V] is the gradient with respect to o. The scale is in q already.
    Returns (dq [T, K], dk [T, K], dv [T, V]). At most one [K, V] matrix is kept at a time.
    """
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    # BEGIN SOLUTION
    state = q.new_zeros(q.shape[1], v.shape[1])  # [K, V] sum of k v^T up to t
    for t in range(len(q)):
        state = state + torch.outer(k[t], v[t])
        dq[t] = state @ do[t]
    later = torch.zeros_like(state)  # [K, V] sum of q do^T from t on
    for t in reversed(range(len(q))):
        later = later + torch.outer(q[t], do[t])
        dk[t] = later @ v[t]
        dv[t] = later.T @ k[t]
    # END SOLUTION
    return dq, dk, dv


def gradient_arguments(seed):
    q, k, v, _ = one_head(seed)
    draw = torch.Generator().manual_seed(100 + seed)
    do = torch.randn(v.shape, generator=draw, dtype=v.dtype)
    return dict(q=q, k=k, v=v, do=do)


def gradient_expected(q, k, v, do):
    """Autograd through the oracle."""
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    o, _ = by_the_oracle(*inputs)
    return torch.autograd.grad(o, inputs, do)


define(
    gradients,
    title="Backwards through time",
    stars=3,
    task="""
        Let $L$ be a number that depends on the outputs, and $do_t = \\partial L / \\partial o_t$.
        From $o_t = \\sum_{s \\le t} (q_t \\cdot k_s)\\, v_s$ derive $\\partial L / \\partial q_t$,
        $\\partial L / \\partial k_s$ and $\\partial L / \\partial v_s$, and compute them in two
        loops, each with one matrix as its memory.
        """,
    hint="""
        Sum over every place where the variable occurs. $v_s$ occurs in all outputs from $s$ on:
        $\\partial L / \\partial v_s = \\sum_{t \\ge s} (q_t \\cdot k_s)\\, do_t$. This is linear
        attention again, with $k$ as the query, $q$ as the key, $do$ as the value, and time
        running backwards.
        """,
    arguments=gradient_arguments,
    expected=gradient_expected,
    outputs={"dq": "TK", "dk": "TK", "dv": "TV"},
    mutants={
        "time runs forwards in the second loop": (
            "in reversed(range(len(q)))",
            "in range(len(q))  ",
        ),
        "dq is read before the token is written": (
            "        state = state + torch.outer(k[t], v[t])\n        dq[t] = state @ do[t]\n",
            "        dq[t] = state @ do[t]\n        state = state + torch.outer(k[t], v[t])\n",
        ),
        "the second loop leaves out the token itself": (
            "later = later + torch.outer(q[t], do[t])",
            "later = later + (torch.outer(q[t + 1], do[t + 1]) if t + 1 < len(q) else 0)",
        ),
        "the second memory holds k do^T in place of q do^T": (
            "torch.outer(q[t], do",
            "torch.outer(k[t], do",
        ),
        "dv is read with the query": ("later.T @ k[t]", "later.T @ q[t]"),
        "dk has the wrong sign": ("later @ v[t]", "-later @ v[t]"),
        "the second loop goes on with the first memory": ("torch.zeros_like(state)", "state"),
        "dk is read with the gradient": ("later @ v[t]", "later @ do[t]"),
    },
    why="""
        No state has to be stored for the way back: the first memory runs forwards once more, the
        second one backwards. Chapter 12 does the same for the full recurrence.
        """,
)
