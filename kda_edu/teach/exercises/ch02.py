"""Exercises of chapter 2: the delta rule."""

import torch

from ... import reference
from ..inputs import make_inputs
from ._core import define

SIZES = [dict(T=9, K=8, V=5), dict(T=13, K=16, V=24), dict(T=7, K=12, V=7)]


def one_write(seed):
    """A state [K, V], one key [K] and value [V], and a step size between 0 and 2."""
    made = make_inputs(B=1, H=1, dtype=torch.float64, seed=seed, **SIZES[seed])
    _, k, v, _, beta, state = made.head()
    return dict(state=state, key=1.3 * k[0], value=v[0], step_size=2 * beta[0].item())


def by_one_token(state, key, value, step_size):
    """The oracle on a sequence of one token."""
    k, v = key[None, None, None], value[None, None, None]  # [1, 1, 1, K], [1, 1, 1, V]
    beta = torch.full((1, 1, 1), step_size, dtype=k.dtype)
    final = reference.delta_net(
        k, k, v, beta, initial_state=state[None, None], output_final_state=True
    )[1]
    return final[0, 0]


def gradient_step(state, key, value, step_size):
    """One step of gradient descent on |state^T key - value|^2 / 2, without autograd.

    state [K, V], key [K], value [V], step_size a number; returns the new state [K, V].
    """
    # BEGIN SOLUTION
    error = state.T @ key - value  # [V]
    gradient = torch.outer(key, error)  # [K, V]
    return state - step_size * gradient
    # END SOLUTION


define(
    gradient_step,
    title="The gradient step by hand",
    stars=1,
    task="""
        Write one step of gradient descent on the loss $\\frac12 |S^\\top k - v|^2$, without
        autograd. The key need not have length one.
        """,
    hint="""
        Read first: the prediction is $S^\\top k$. The loss depends on $S_{ij}$ only through
        entry $j$ of the prediction, with factor $k_i$.
        """,
    arguments=one_write,
    expected=by_one_token,
    outputs={"state": "KV"},
    mutants={
        "the step goes up the slope": ("state - step", "state + step"),
        "the error has the wrong sign": ("@ key - value", "@ key + value"),
        "the old value is not read, as in linear attention": ("state.T @ key - value", "-value"),
        "the factor 1/2 of the loss is forgotten": (
            "step_size * gradient",
            "2 * step_size * gradient",
        ),
        "the step size is left out": ("step_size * gradient", "gradient"),
        "the key is normalised first": (
            "torch.outer(key, error)",
            "torch.outer(key / key.norm(), error)",
        ),
        "the step size scales the error of the old value only": (
            "return state - step_size * gradient",
            "return state - torch.outer(key, step_size * (error + value) - value)",
        ),
    },
    why="""
        With `step_size` as the write strength this is the delta rule. The gradient is a product
        of a column and a row, so a step costs two passes over the state and no matrix product.
        """,
)


def two_rows(seed):
    """A state [K, V] and the numbers of two of its rows."""
    made = make_inputs(B=1, H=1, dtype=torch.float64, seed=seed, **SIZES[seed])
    first, second = [(0, 3), (7, 2), (5, 11)][seed]
    return dict(state=made.head()[-1], first=first, second=second)


def by_indexing(state, first, second):
    """Rows exchanged by indexing."""
    order = list(range(len(state)))
    order[first], order[second] = second, first
    return state[order]


def swap_rows(state, first, second):
    """Exchange two rows of the state [K, V] by one write: one key, one value, write strength 2.

    first, second are row numbers. Returns the new state [K, V].
    """
    # BEGIN SOLUTION
    key = torch.zeros(len(state), dtype=state.dtype)  # [K]
    key[first], key[second] = 1.0, -1.0
    key = key / key.norm()  # [K], length 1
    value = torch.zeros(state.shape[1], dtype=state.dtype)  # [V]
    delta = 2.0 * (value - state.T @ key)  # [V]
    return state + torch.outer(key, delta)
    # END SOLUTION


define(
    swap_rows,
    title="A reflector that swaps",
    stars=2,
    task="""
        With $\\beta = 2$ and $v = 0$ a write multiplies the state by $I - 2kk^\\top$, which
        mirrors it. Choose the unit key so that the mirror exchanges rows `first` and `second`
        and leaves all others alone. Use one delta-rule step; do not index rows of `state`.
        """,
    hint="""
        A mirror flips the sign of the direction $k$ and keeps every direction at right angles
        to it. Exchanging two coordinates keeps their sum. What does it do to their difference?
        """,
    arguments=two_rows,
    expected=by_indexing,
    outputs={"state": "KV"},
    mutants={
        "the key is the sum of the two directions": ("1.0, -1.0", "1.0, 1.0"),
        "the key does not have length one": ("key / key.norm()", "key"),
        "the write strength is 1, which makes the two rows equal": ("2.0 * (value", "1.0 * (value"),
        "the old value is added, not removed": ("value - state.T", "value + state.T"),
        "the key points at one row only, which flips its sign": ("1.0, -1.0", "1.0, 0.0"),
        "the value is one, not zero": ("torch.zeros(state.shape[1]", "torch.ones(state.shape[1]"),
    },
    why="""
        Swaps generate every permutation, so a memory that may use $\\beta$ up to 2 can keep track
        of a shuffled deck. With $\\beta \\le 1$ no eigenvalue is negative, and it cannot
        (arXiv 2411.12537).
        """,
)


def a_list_of_pairs(seed):
    """Correlated unit keys [N, K], fewer than channels, and values [N, V]."""
    sizes = [dict(T=6, K=12, V=5), dict(T=9, K=32, V=24), dict(T=4, K=8, V=7)][seed]
    made = make_inputs(B=1, H=1, dtype=torch.float64, keys="correlated", seed=seed, **sizes)
    _, k, v, *_ = made.head()
    return dict(keys=k, values=v, passes=[1, 7, 40][seed])


def by_repeated_sequences(keys, values, passes):
    """The oracle on the list written out `passes` times, then the largest error per pair."""
    k = keys.repeat(passes, 1)[None, :, None]
    v = values.repeat(passes, 1)[None, :, None]
    beta = torch.ones(k.shape[:3], dtype=k.dtype)
    state = reference.delta_net(k, k, v, beta, output_final_state=True)[1][0, 0]
    return (keys @ state - values).norm(dim=1), state


def rehearse(keys, values, passes):
    """Write a list of pairs `passes` times with the delta rule, then read every pair.

    keys [N, K] with unit rows, values [N, V]; the memory starts empty, write strength 1.
    Returns (length of the error of each read [N], state [K, V]).
    """
    # BEGIN SOLUTION
    state = torch.zeros(keys.shape[1], values.shape[1], dtype=keys.dtype)  # [K, V]
    for _ in range(passes):
        for key, value in zip(keys, values, strict=True):
            delta = value - state.T @ key  # [V]
            state = state + torch.outer(key, delta)  # [K, V]
    reads = keys @ state  # [N, V]
    return (reads - values).norm(dim=1), state
    # END SOLUTION


define(
    rehearse,
    title="Rehearsal, with keys that look alike",
    stars=3,
    task="""
        One pass of the delta rule leaves the newest pair exact and the older ones damaged, most
        of all when the keys point nearly the same way. Write the list again and again, into the
        same memory, and return how far each read is from its value at the end.

        Then explain to yourself why the error of **every** pair goes to zero if the keys are
        linearly independent.
        """,
    hint="""
        The state lives on from pass to pass. Each write makes one equation $S^\\top k_i = v_i$
        true by the shortest possible move. Draw that for two lines in a plane.
        """,
    arguments=a_list_of_pairs,
    expected=by_repeated_sequences,
    outputs={"errors": "T", "state": "KV"},
    mutants={
        "the old value is not erased, as in linear attention": ("value - state.T @ key", "value"),
        "each pass starts from an empty memory": (
            "for _ in range(passes):\n",
            "for _ in range(passes):\n        state = torch.zeros_like(state)\n",
        ),
        "one pass is missing": ("range(passes)", "range(passes - 1)"),
        "there is one pass too many": ("range(passes)", "range(passes + 1)"),
        "each pair is written so often before the next one comes": (
            [
                ("for _ in range(passes):", "for key, value in zip(keys, values, strict=True):"),
                (
                    "    for key, value in zip(keys, values, strict=True):\n            delta",
                    "    for _ in range(passes):\n            delta",
                ),
            ]
        ),
        "the list is written backwards": (
            "zip(keys, values, strict=True)",
            "zip(keys.flip(0), values.flip(0), strict=True)",
        ),
        "the write strength is one half": (
            "delta = value - state.T @ key",
            "delta = (value - state.T @ key) / 2",
        ),
        "the errors are those of squares": (".norm(dim=1)", ".square().sum(dim=1)"),
    },
    why="""
        Each write projects the state onto the solutions of one linear equation; going round
        such projections is the method of Kaczmarz (1937). It reaches the common solution
        wherever there is one, slowly if the keys are nearly parallel. A causal layer sees its
        tokens once, so it has to live with the first pass.
        """,
)
