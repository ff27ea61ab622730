"""One exercise in the format of the book's files, to test the loader and the checker with."""

import torch

from kda_edu import reference
from kda_edu.teach import make_inputs
from kda_edu.teach.exercises import define

SIZES = [dict(T=37, K=8, V=5), dict(T=70, K=16, V=24), dict(T=130, K=12, V=7)]


def one_head(seed):
    """q, k [T, K] and v [T, V] of one head in float64: several chunks, the last one ragged."""
    made = make_inputs(B=1, H=1, dtype=torch.float64, seed=seed, **SIZES[seed])
    q, k, v, *_ = made.head()
    return dict(q=q, k=k, v=v)


def by_the_loop(q, k, v):
    """The same answer from the oracle's loop over tokens."""
    batched = (x[None, :, None] for x in (q, k, v))
    return reference.linear_attention(*batched, scale=1.0)[0][0, :, 0]


def parallel_form(q, k, v):
    """Linear attention of one head as a masked matrix product.

    q, k [T, K], v [T, V]; returns o [T, V]. No scale, no initial state.
    """
    # BEGIN SOLUTION
    scores = q @ k.T  # [T, T]
    scores = torch.tril(scores)  # a token sees itself and the past
    return scores @ v  # [T, V]
    # END SOLUTION


define(
    parallel_form,
    title="The parallel form",
    stars=1,
    task="""
        Write linear attention without a loop: $O = (Q K^T \\odot M)\\, V$, where the mask $M$
        lets a token see itself and the tokens before it.
        """,
    hint="`torch.tril` keeps the lower triangle of a matrix, the diagonal included.",
    arguments=one_head,
    expected=by_the_loop,
    outputs={"o": "TV"},
    mutants={
        "the mask is missing, so the future leaks in": ("torch.tril(scores)", "scores"),
        "the diagonal is masked, so a token does not see itself": (
            "torch.tril(scores)",
            "torch.tril(scores, -1)",
        ),
        "the mask keeps the future instead of the past": ("torch.tril", "torch.triu"),
        "queries and keys have changed places": ("q @ k.T", "k @ q.T"),
        "the scores are scaled by 1/sqrt(K)": ("q @ k.T", "q @ k.T / q.shape[-1] ** 0.5"),
        "the mask reaches one token too far": ("torch.tril(scores)", "torch.tril(scores, 1)"),
    },
    why="It costs $T^2$ products instead of $T$ steps, but all of them at once.",
)
