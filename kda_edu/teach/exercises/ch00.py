"""Exercises of chapter 0: error, rounding, and a test that lets no wrong formula through."""

import math

import torch

from ..check import rms_error
from ..inputs import make_inputs
from ._core import define

# -- one star ----------------------------------------------------------------------------------


def relative_error(got, want):
    """RMS(got - want) / RMS(want) in float64, as a tensor of no dimension; inf where NaN is.

    got, want: same shape, any floating dtype. `want` is not zero.
    """
    # BEGIN SOLUTION
    got, want = got.double(), want.double()
    error = (got - want).square().mean().sqrt() / want.square().mean().sqrt()
    return error.nan_to_num(nan=math.inf)
    # END SOLUTION


def error_arguments(seed):
    """Big float32 numbers (their squares overflow), small float16 ones, and one NaN."""
    draw = torch.Generator().manual_seed(seed)
    want = torch.randn(7 + seed, 5, generator=draw)
    got = want + 0.01 * torch.randn(7 + seed, 5, generator=draw).abs()
    if seed == 0:
        return dict(got=1e25 * got, want=1e25 * want)
    if seed == 1:
        return dict(got=got.half(), want=want.half())
    got[2, 3] = math.nan
    return dict(got=got, want=want)


def error_expected(got, want):
    return torch.tensor(rms_error(got, want), dtype=torch.float64)


define(
    relative_error,
    title="One number for the error",
    stars=1,
    task="""
        Write the error measure of this book. It is computed in float64 whatever comes in, and it
        is infinite, never small, where a NaN is in the result.
        """,
    hint="""
        A NaN goes through subtraction, square and mean: it arrives at the end by itself.
        `x.nan_to_num(nan=math.inf)` turns it into infinity there. Ask what would happen if you
        removed it earlier.
        """,
    arguments=error_arguments,
    expected=error_expected,
    outputs={"error": ""},
    mutants={
        "the arithmetic stays in the dtype that came in": (
            "got, want = got.double(), want.double()",
            "pass",
        ),
        "NaN is replaced by 0 before the subtraction, so it passes": (
            "got.double(), want",
            "got.double().nan_to_num(), want",
        ),
        "NaN is returned as it is": ("error.nan_to_num(nan=math.inf)", "error"),
        "the error is not divided by the size of what is wanted": (
            " / want.square().mean().sqrt()",
            "",
        ),
        "the size is taken from the result instead of the oracle": (
            "/ want.square()",
            "/ got.square()",
        ),
        "the mean of the absolute values stands for the RMS": (
            "(got - want).square().mean().sqrt()",
            "(got - want).abs().mean()",
        ),
        "the root is missing": (
            ".mean().sqrt() / want.square().mean().sqrt()",
            ".mean() / want.square().mean()",
        ),
    },
    why="""
        The NaN is looked at last. Every earlier step would let it vanish: a maximum, a mask, a
        comparison.
        """,
)

# -- two stars ---------------------------------------------------------------------------------


def round_mantissa(x, bits):
    """Round float32 numbers to `bits` bits after the leading one, ties to the even neighbour.

    x: float32, any shape, finite; bits: 1 to 22. Returns float32. TF32 is bits = 10, bfloat16 is
    bits = 7.
    """
    # BEGIN SOLUTION
    drop = 23 - bits  # how many of the 23 stored bits go
    pattern = x.view(torch.int32)
    last_kept = (pattern >> drop) & 1
    pattern = pattern + (1 << (drop - 1)) - 1 + last_kept
    return ((pattern >> drop) << drop).view(torch.float32)
    # END SOLUTION


def round_arguments(seed):
    """Numbers of both signs and many sizes, with exact ties and carries among them."""
    draw = torch.Generator().manual_seed(seed)
    bits = (7, 10, 3)[seed]
    x = torch.randn(50 + seed, generator=draw) * 10.0 ** torch.randint(
        -8, 8, (50 + seed,), generator=draw
    )
    steps = torch.arange(1, 2 ** (bits + 1), 2)  # odd halves of a step: ties
    ties = 1 + steps[:40] * 2.0 ** -(bits + 1)
    carry = torch.tensor([2 - 2.0 ** -(bits + 3)])
    return dict(x=torch.cat([x, ties, -3 * ties, carry, -carry, torch.zeros(1)]), bits=bits)


def round_expected(x, bits):
    """By arithmetic in float64: scale the last kept bit to 1, round (ties to even), scale back."""
    mantissa, exponent = torch.frexp(x.double())  # 0.5 <= |mantissa| < 1
    return torch.ldexp(torch.round(mantissa * 2 ** (bits + 1)), exponent - bits - 1)


define(
    round_mantissa,
    title="Round to any format",
    stars=2,
    task="""
        torch has no TF32 tensors, yet a GPU rounds to TF32 inside its matrix units. Write the
        rounding yourself, on the bit pattern of a float32, for any number of mantissa bits.

        `x.view(torch.int32)` is the pattern: 1 sign bit, 8 bits of exponent, 23 of mantissa.
        """,
    hint="""
        Cutting bits off rounds towards zero. Add, before the cut, one less than half of what is
        cut off, and one more if the last bit that stays is 1. A carry runs into the exponent,
        which is right: $1.111_2$ rounds up to $10.00_2$.
        """,
    arguments=round_arguments,
    expected=round_expected,
    outputs={"x": "?"},
    mutants={
        "the bits are cut off, which rounds towards zero": (
            "pattern + (1 << (drop - 1)) - 1 + last_kept",
            "pattern",
        ),
        "ties always round away from zero": ("- 1 + last_kept", ""),
        "ties always round towards zero": (" + last_kept", ""),
        "ties go to the odd neighbour": ("- 1 + last_kept", "- last_kept"),
        "one bit too many is kept": ("23 - bits", "22 - bits"),
        "one bit too few is kept": ("23 - bits", "24 - bits"),
        "a whole step is added instead of half of one": ("(drop - 1)) - 1", "drop) - 1"),
    },
    budget=1e-12,
    why="""
        With `bits=7` this is what `.to(torch.bfloat16)` does; with `bits=10` it shows on a CPU
        what TF32 does to a product.
        """,
)

# -- three stars -------------------------------------------------------------------------------


def judge_all(candidates, oracle):
    """Which of the candidates are right: a boolean tensor [len(candidates)].

    Each candidate, and the oracle, takes (q, k, v, log_decay, write_strength, state) of one head,
    [T, K], [T, K], [T, V], [T, K], [T], [K, V], any sizes, and returns o [T, V]. The candidates
    work in the dtype that comes in.
    """
    # BEGIN SOLUTION
    inputs = make_inputs(T=70, K=16, V=24, dtype=torch.float64, seed=1).head()

    def is_right(candidate):
        try:
            got, want = candidate(*inputs), oracle(*inputs)
        except RuntimeError:  # shapes that do not fit
            return False
        return got.shape == want.shape and rms_error(got, want) <= 1e-10

    return torch.tensor([is_right(candidate) for candidate in candidates])
    # END SOLUTION


RIGHT = """
def candidate(q, k, v, log_decay, write_strength, state):
    outputs = []
    for t in range(len(q)):
        old = state
        state = log_decay[t].exp()[:, None] * state
        missing = v[t] - state.T @ k[t]
        before = state
        state = state + write_strength[t] * torch.outer(k[t], missing)
        outputs.append(state.T @ q[t] / q.shape[1] ** 0.5)
    return torch.stack(outputs)
"""
PLANTED = {
    "the write strength is left out": ("write_strength[t] * ", ""),
    "no erase": ("v[t] - state.T @ k[t]", "v[t]"),
    "the decay comes after the erase": ("v[t] - state.T", "v[t] - old.T"),
    "no decay": ("log_decay[t].exp()[:, None] * state", "state"),
    "one decay for all channels": ("log_decay[t].exp()[:, None]", "log_decay[t].mean().exp()"),
    "the starting state is ignored": ("outputs = []", "outputs, state = [], 0 * state"),
    "the starting state is transposed": ("outputs = []", "outputs, state = [], state.T"),
    "the state is read before the write": ("state.T @ q[t]", "before.T @ q[t]"),
    "the tail after the last full 16 is zero": (
        "state.T @ q",
        "(t < len(q) // 16 * 16) * state.T @ q",
    ),
    "NaN from token 64 on": ("state.T @ q", "(1 if t < 64 else math.nan) * state.T @ q"),
    "1/K in place of 1/sqrt(K)": ("** 0.5", "** 1.0"),
    "wrong by one part in ten thousand": ("** 0.5", "** 0.5 * 1.0001"),
}


def build_candidate(old="", new=""):
    namespace = {"torch": torch, "math": math}
    exec(RIGHT.replace(old, new) if old else RIGHT, namespace)
    return namespace["candidate"]


def judge_arguments(seed):
    """The right formula in a random place (twice), all wrong ones around it."""
    candidates = [build_candidate(*change) for change in PLANTED.values()]
    for candidate in candidates:
        candidate.right = False
    for _ in range(2):
        right = build_candidate()
        right.right = True
        candidates.append(right)
    draw = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(candidates), generator=draw).tolist()
    return dict(candidates=[candidates[i] for i in order], oracle=build_candidate())


def judge_expected(candidates, oracle):
    return torch.tensor([candidate.right for candidate in candidates])


define(
    judge_all,
    title="The test that lets nothing through",
    stars=3,
    task="""
        You get functions that claim to compute the recurrence of this chapter for one head. Two
        are right, the others each hold one mistake; some of these cannot even run on every
        shape. Write the test that tells them apart.
        """,
    hint="""
        `make_inputs(...).head()` returns the six arguments. Choose sizes that are ragged and not
        square, a random starting state, random decay and write strength. Compare in float64 with
        a budget that fits float64. A function that raises is wrong too.
        """,
    arguments=judge_arguments,
    expected=judge_expected,
    outputs={"verdicts": "?"},
    mutants={
        "the inputs have no decay": ("V=24", 'V=24, gate="none"'),
        "every write strength is 1": ("V=24", "V=24, beta=1.0"),
        "the starting state is zero": (
            "seed=1).head()",
            "seed=1).head()\n    inputs = (*inputs[:5], 0 * inputs[5])",
        ),
        "the length is a multiple of 16": ("T=70", "T=64"),
        "there is one token only": ("T=70", "T=1"),
        "the budget is an absolute 0.01": (
            "rms_error(got, want) <= 1e-10",
            "(got - want).abs().max().item() <= 1e-2",
        ),
        "a NaN passes the comparison": (
            "rms_error(got, want) <= 1e-10",
            "not (got - want).abs().max() > 1e-10",
        ),
        "only the shapes are compared": ("and rms_error(got, want) <= 1e-10", ""),
    },
    budget=0.0,
    why="""
        Make the inputs square, `K=16, V=16`, and it still holds: with a random state the
        transposed one gives other numbers. Make them square with a zero state, and two mistakes
        get through at once.
        """,
)
