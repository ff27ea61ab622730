"""Exercises of chapter 6: the WY form."""

import torch

from ... import reference
from ..inputs import make_inputs
from ._core import define

SIZES = [dict(T=5, K=8, V=3), dict(T=11, K=16, V=24), dict(T=7, K=12, V=9)]


def one_chunk(seed):
    """Keys [C, K], values [C, V], write strengths [C] up to 2, and a state [K, V]."""
    made = make_inputs(B=1, H=1, dtype=torch.float64, seed=seed, **SIZES[seed])
    _, k, v, _, beta, state = made.head()
    return k, v, 2 * beta, state


def delta_rule(k, v, beta, state):
    """The oracle on one chunk: the last state [K, V]."""
    k, v = k[None, :, None], v[None, :, None]  # [1, C, 1, K], [1, C, 1, V]
    options = dict(initial_state=state[None, None], output_final_state=True)
    return reference.delta_net(k, k, v, beta[None, :, None], **options)[1][0, 0]


def erased_identity(k, beta):
    """The product of the erase matrices, last token on the left, by the oracle: [K, K].

    Nothing is written, and the state at the start is the unit matrix.
    """
    K = k.shape[1]
    unit = torch.eye(K, dtype=k.dtype)
    return delta_rule(k, torch.zeros_like(k), beta, unit) if len(k) else unit


def keys_and_strengths(seed):
    keys, _, betas, _ = one_chunk(seed)
    return dict(keys=keys, betas=betas)


def by_later_products(keys, betas):
    """Row t is beta_t times key t, sent through the product of the later tokens."""
    rows = []
    for t in range(len(keys)):
        later = erased_identity(keys[t + 1 :].flip(0), betas[t + 1 :].flip(0))  # [K, K]
        rows.append(betas[t] * later.T @ keys[t])
    return torch.stack(rows)


def w_backward(keys, betas):
    """Rows W [C, K] of the product with the FIRST token on the left: I - keys^T W.

    keys [C, K], betas [C].
    """
    # BEGIN SOLUTION
    rows = torch.zeros_like(keys)  # [C, K]
    for t in reversed(range(len(keys))):
        overlaps = keys[t + 1 :] @ keys[t]  # [C - 1 - t]
        rows[t] = betas[t] * (keys[t] - overlaps @ rows[t + 1 :])
    return rows
    # END SOLUTION


define(
    w_backward,
    title="The product in the other order",
    stars=1,
    task="""
        The gradient of a chunk runs through it backwards, so it meets the product
        $(I - \\beta_1 k_1 k_1^\\top) (I - \\beta_2 k_2 k_2^\\top) \\cdots$ with the first token
        on the left. Find the rows $w_t$ that make it $I - K^\\top W$, and compute them.
        """,
    hint="""
        Repeat the induction, but start with the last token and put each new factor on the left.
        Which tokens has the product already seen when it is the turn of token $t$?
        """,
    arguments=keys_and_strengths,
    expected=by_later_products,
    outputs={"W": "CK"},
    mutants={
        "earlier tokens are subtracted, which is the usual order": (
            [
                ("reversed(range(len(keys)))", "range(len(keys))"),
                ("keys[t + 1 :] @ keys[t]", "keys[:t] @ keys[t]"),
                ("rows[t + 1 :]", "rows[:t]"),
            ]
        ),
        "the rows are filled from the first to the last": (
            "reversed(range(len(keys)))",
            "range(len(keys))",
        ),
        "the corrections are added": ("keys[t] - overlaps", "keys[t] + overlaps"),
        "the write strength scales the key only": (
            "betas[t] * (keys[t] - overlaps @ rows[t + 1 :])",
            "betas[t] * keys[t] - overlaps @ rows[t + 1 :]",
        ),
        "the write strength is left out": ("betas[t] * (keys", "(keys"),
        "keys are subtracted, not their rows of W": ("@ rows[t + 1 :]", "@ keys[t + 1 :]"),
        "the overlap is taken with rows of W": (
            "keys[t + 1 :] @ keys[t]",
            "rows[t + 1 :] @ keys[t]",
        ),
    },
    why="""
        Each factor is symmetric, so this product is the transpose of the usual one, and
        $I - W^\\top K$ with the usual $W$ is the same matrix. There are two ways to write it.
        """,
)


def chunk_and_state(seed):
    keys, values, betas, state = one_chunk(seed)
    return dict(keys=keys, values=values, betas=betas, state=state)


def by_differences(keys, values, betas, state):
    """What the oracle adds to the state at each token is k d^T, and it shows d."""
    deltas = []
    for t in range(len(keys)):
        after = delta_rule(keys[t : t + 1], values[t : t + 1], betas[t : t + 1], state)
        deltas.append((after - state).T @ keys[t] / keys[t].square().sum())
        state = after
    return torch.stack(deltas)


def deltas_by_solve(keys, values, betas, state):
    """What the delta rule writes at each of C tokens: d [C, V], with no loop over tokens.

    keys [C, K], values [C, V], betas [C], state [K, V] before the chunk.
    """
    # BEGIN SOLUTION
    lower = torch.tril(betas[:, None] * (keys @ keys.T), -1)  # [C, C]
    missing = betas[:, None] * (values - keys @ state)  # [C, V]
    return torch.linalg.solve_triangular(lower, missing, upper=False, unitriangular=True)
    # END SOLUTION


define(
    deltas_by_solve,
    title="All deltas, without W and U",
    stars=2,
    task="""
        The deltas of a chunk are $U - W S_0$, and $W$ and $U$ solve the same triangular system.
        So neither is needed: find the one system whose solution is the deltas themselves, and
        solve it with `torch.linalg.solve_triangular`.
        """,
    hint="""
        Write $U - W S_0$ with the inverse in front, and take out the common factor. What is left
        behind it is what token $t$ would be missing if no other token of the chunk had written.
        """,
    arguments=chunk_and_state,
    expected=by_differences,
    outputs={"deltas": "CV"},
    mutants={
        "the old state is not read": ("values - keys @ state", "values"),
        "the old read is added": ("values - keys @ state", "values + keys @ state"),
        "beta stands at the columns of the matrix": (
            "betas[:, None] * (keys @ keys.T)",
            "betas * (keys @ keys.T)",
        ),
        "beta is left out of the matrix": ("betas[:, None] * (keys @ keys.T)", "keys @ keys.T"),
        "beta is left out of the right-hand side": ("betas[:, None] * (values", "(values"),
        "each token is corrected by the later ones": (
            [("torch.tril(", "torch.triu("), (", -1)", ", 1)"), ("upper=False", "upper=True")]
        ),
        "the diagonal belongs to the matrix": (
            [(", -1)", ") + torch.eye(len(keys))"), (", unitriangular=True", "")]
        ),
        "the corrections are added": ("torch.tril(", "-torch.tril("),
    },
    why="""
        FlashKDA computes a chunk like this; its `tests/torch_ref.py` is short and readable. $W$
        and $U$ are then never stored. The inverse can still be made for all chunks beforehand,
        but the product with it has to wait for the state, in the loop over chunks.
        """,
)


def keys_values_strengths(seed):
    keys, values, betas, _ = one_chunk(seed)
    return dict(keys=keys, values=values, betas=betas)


def by_earlier_products(keys, values, betas):
    """Row t of W from the product of the earlier tokens, row t of U from the state they leave."""
    w, u = [], []
    state = torch.zeros(keys.shape[1], values.shape[1], dtype=keys.dtype)
    for t in range(len(keys)):
        earlier = erased_identity(keys[:t], betas[:t])  # [K, K]
        w.append(betas[t] * earlier.T @ keys[t])
        u.append(betas[t] * (values[t] - state.T @ keys[t]))
        state = delta_rule(keys[t : t + 1], values[t : t + 1], betas[t : t + 1], state)
    return torch.stack(w), torch.stack(u)


def w_u_by_halves(keys, values, betas):
    """W [C, K] and U [C, V] of a chunk, from those of its two halves, and so on down.

    keys [C, K], values [C, V], betas [C]; C need not be a power of two.
    """
    # BEGIN SOLUTION
    if len(keys) == 1:
        return betas[:, None] * keys, betas[:, None] * values
    half = len(keys) // 2
    w1, u1 = w_u_by_halves(keys[:half], values[:half], betas[:half])
    w2, u2 = w_u_by_halves(keys[half:], values[half:], betas[half:])
    across = w2 @ keys[:half].T  # [C - half, half]
    return torch.cat([w1, w2 - across @ w1]), torch.cat([u1, u2 - across @ u1])
    # END SOLUTION


define(
    w_u_by_halves,
    title="Join two chunks",
    stars=3,
    task="""
        Two chunks follow each other. Their maps are $S \\to S + K_1^\\top (U_1 - W_1 S)$ and
        $S \\to S + K_2^\\top (U_2 - W_2 S)$. Put the first into the second and read off $W$ and
        $U$ of both together. Then use it to compute $W$ and $U$ of a whole chunk by halves, with
        no other recursion. A chunk of one token is $w = \\beta k$, $u = \\beta v$.
        """,
    hint="""
        The first half does not know of the second, so its rows stay. In the second, $W_2 S$ meets
        the state that the first has left. Which $C_2 \\times C_1$ matrix appears twice?
        """,
    arguments=keys_values_strengths,
    expected=by_earlier_products,
    outputs={"W": "CK", "U": "CV"},
    mutants={
        "the halves are laid side by side": (
            [("w2 - across @ w1", "w2"), ("u2 - across @ u1", "u2")]
        ),
        "the correction is added": (
            [("w2 - across @ w1", "w2 + across @ w1"), ("u2 - across @ u1", "u2 + across @ u1")]
        ),
        "only W is corrected": ("u2 - across @ u1", "u2"),
        "only U is corrected": ("w2 - across @ w1", "w2"),
        "keys meet keys, where W should meet keys": (
            "w2 @ keys[:half].T",
            "keys[half:] @ keys[:half].T",
        ),
        "the first half is corrected by the second": (
            [
                ("across = w2 @ keys[:half].T", "across = w1 @ keys[half:].T"),
                ("[w1, w2 - across @ w1]", "[w1 - across @ w2, w2]"),
                ("[u1, u2 - across @ u1]", "[u1 - across @ u2, u2]"),
            ]
        ),
        "one token keeps its key, without the write strength": (
            "return betas[:, None] * keys, betas",
            "return keys, betas",
        ),
        "U of one token is its value, without the write strength": (
            "keys, betas[:, None] * values",
            "keys, values",
        ),
    },
    why="""
        This is the block inverse of chapter 7 in disguise. It also says that chunks compose like
        the affine maps of chapter 5, but thin: a joined chunk is a longer list of rows, and no
        K × K matrix is ever formed.
        """,
)
