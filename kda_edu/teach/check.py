"""One error metric for the whole project: tests, chapters and benchmarks compare with it.

    error = RMS(got - want) / RMS(want),  computed in float64

`check(got, want)` prints one line where the error is within its budget, and raises
`CheckFailed` with a map of the wrong places where it is not. The printed error is a bound
from a coarse ladder (1, 3, 10, ...), so that another processor prints the same line.
"""

import math

import torch

from .report import describe_failure, place_of

# The largest error that passes, by dtype of the result.
BUDGETS = {
    torch.float64: {"forward": 1e-12, "gradient": 1e-12},
    torch.float32: {"forward": 1e-5, "gradient": 1e-5},
    torch.bfloat16: {"forward": 6e-3, "gradient": 2e-2},
    torch.float16: {"forward": 2e-3, "gradient": 1e-2},
}

# Below this, an error is round-off and its digits mean nothing.
FLOORS = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-3, torch.float16: 1e-4}

PRECISION = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24, torch.float64: 53}


class CheckFailed(AssertionError):
    """A result is further from what was wanted than its budget allows."""


def rms(x):
    """Root of the mean square, as a Python float. 0 for an empty tensor."""
    return x.double().square().mean().sqrt().item() if x.numel() else 0.0


def rms_error(got, want):
    """RMS(got - want) / RMS(want) in float64; both tensors of one shape, any dtype.

    Where `want` is zero everywhere, the result is RMS(got) (an absolute error). It is inf
    where either holds a NaN, or an infinity that the other does not hold at the same place.
    Infinities that agree are left out of both sums. Empty tensors have error 0.
    """
    got, want = _pair(got, want)
    if not _same_nonfinite(got, want):
        return math.inf
    finite = want.isfinite()
    got, want = got[finite], want[finite]
    peak = want.abs().max().item() if want.numel() else 0.0
    if peak == 0.0:
        return rms(got)
    # Divided by the peak first, so that squares neither overflow nor vanish.
    return rms((got - want) / peak) / rms(want / peak)


def max_error(got, want):
    """The largest |got - want| in float64, with the same rule for NaN and infinity."""
    got, want = _pair(got, want)
    if not _same_nonfinite(got, want):
        return math.inf
    finite = want.isfinite()
    gap = (got[finite] - want[finite]).abs()
    return gap.max().item() if gap.numel() else 0.0


def budget_for(dtype, kind="forward"):
    """The budget of a dtype; `kind` is "forward" or "gradient"."""
    if kind not in ("forward", "gradient"):
        raise ValueError(f"kind: expected 'forward' or 'gradient', got {kind!r}")
    if dtype in BUDGETS:
        return BUDGETS[dtype][kind]
    if isinstance(dtype, torch.dtype) and not dtype.is_floating_point and not dtype.is_complex:
        return 0.0
    known = ", ".join(str(key) for key in BUDGETS)
    raise ValueError(f"dtype: expected one of {known}, or an integer dtype, got {dtype!r}")


def check(got, want, name="result", budget=None, dims=None, kind="forward"):
    """Print one line if `got` is `want` within the budget; raise CheckFailed if not.

    got, want   tensors of the same shape on the same device. `want` may be more precise than
                `got` (a float64 oracle), never less.
    name        what the line calls the tensor: "o", "S", "dq".
    budget      largest relative RMS error; default by the dtype of `got` and by `kind`,
                from BUDGETS. Integers must be equal.
    dims        one letter per dimension, for the words of the report: B batch, N sequence,
                T token, C token in chunk, H head, K key channel, V value channel. Default
                by the number of dimensions and the name: "BTHV", "BTH", "TV", "T", and
                "NHKV", "KV" for a name that says state or S.
    kind        "forward" or "gradient".

    Raises CheckFailed (an AssertionError); TypeError for what is no tensor or too imprecise
    to be an oracle; ValueError for shapes or devices that differ.
    """
    _require_comparable(got, want, name)
    dims = _dims_for(got, name) if dims is None else _require_dims(dims, got)
    if budget is None:
        budget = budget_for(got.dtype, kind)
    if not (isinstance(budget, (int, float)) and 0 <= budget < math.inf):
        raise ValueError(f"budget: expected a finite number >= 0, got {budget!r}")
    error = rms_error(got, want)
    if not error <= budget:
        raise CheckFailed(describe_failure(got, want, name, error, budget, dims))
    bound = show_bound(error, got.dtype, budget)
    round_off = error < FLOORS.get(got.dtype, 0.0) or error == 0
    place = "" if round_off else _worst(got, want, dims)
    print(f"ok  {name}  {bound} (budget {budget:g}){place}")


def show_bound(error, dtype, budget):
    """`error < 3e-07`: a rung of the ladder 1, 3, 10 above the error, never above the budget."""
    if budget == 0:
        return "error = 0"
    floor = FLOORS.get(dtype, 0.0)
    if error < floor and floor <= budget:
        return f"error < {floor:g}"
    exponent = math.floor(math.log10(error)) if error > 0 else -16
    rungs = [mantissa * 10.0**power for power in (exponent, exponent + 1) for mantissa in (1, 3)]
    bound = next((rung for rung in rungs if rung > error), budget)
    return f"error < {bound:g}" if bound < budget else f"error <= {budget:g}"


def _worst(got, want, dims):
    got, want = _pair(got, want)
    finite = want.isfinite()
    if not finite.any():
        return ""
    gap = torch.where(finite, (got - want).abs(), 0.0)
    return f", worst at {place_of(gap.argmax().item(), gap.shape, dims)}"


def _pair(got, want):
    got, want = torch.as_tensor(got).detach(), torch.as_tensor(want).detach()
    if got.shape != want.shape:
        raise ValueError(f"got has shape {tuple(got.shape)}, want has shape {tuple(want.shape)}")
    return got.double(), want.double()


def _same_nonfinite(got, want):
    if got.isnan().any() or want.isnan().any():
        return False
    return bool(
        torch.equal(torch.where(got.isinf(), got, 0.0), torch.where(want.isinf(), want, 0.0))
    )


def _require_comparable(got, want, name):
    for role, value in (("got", got), ("want", want)):
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"{role}: expected a torch.Tensor for {name}, got {type(value).__name__}"
            )
    if got.shape != want.shape:
        hint = ""
        if got.ndim >= 2 and got.transpose(-1, -2).shape == want.shape:
            hint = "; the last two axes are swapped: is it transposed?"
        elif got.squeeze().shape == want.squeeze().shape:
            hint = "; they differ only in axes of length 1"
        raise ValueError(
            f"{name}: got has shape {tuple(got.shape)}, want has shape {tuple(want.shape)}{hint}"
        )
    if got.device != want.device:
        raise ValueError(f"{name}: got is on {got.device}, want is on {want.device}")
    if got.dtype == want.dtype:
        return
    if PRECISION.get(want.dtype, 0) <= PRECISION.get(got.dtype, 99):
        raise TypeError(
            f"{name}: got is {got.dtype}, want is {want.dtype}: the wanted tensor must have the "
            "same dtype or a more precise one"
        )


def _dims_for(tensor, name):
    state = name.lower().lstrip("d") in ("s", "s0", "h", "h0", "ht") or "state" in name.lower()
    if state:
        table = {2: "KV", 3: "HKV", 4: "NHKV", 5: "BTHKV"}
    else:
        table = {1: "T", 2: "TV", 3: "BTH", 4: "BTHV", 5: "BTHKV"}
    return table.get(tensor.ndim, "?" * tensor.ndim)


def _require_dims(dims, tensor):
    if len(dims) != tensor.ndim:
        raise ValueError(
            f"dims: expected {tensor.ndim} letters for shape {tuple(tensor.shape)}, got {dims!r}"
        )
    return dims
