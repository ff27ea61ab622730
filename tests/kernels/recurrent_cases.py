"""Calls of the fused recurrence beside the float64 oracle, shared by its tests."""

import torch

from kda_edu import fused_recurrent_kda
from kda_edu.reference import recurrent_kda
from kda_edu.teach.check import budget_for, rms_error
from kda_edu.teach.inputs import make_inputs


def small(device, **changes):
    """Inputs of a small ragged call: two heads of q and k, four of v, V in two uneven tiles."""
    sizes = dict(B=1, T=5, H=2, HV=4, K=16, V=9) | changes
    return make_inputs(device=device, **sizes)


def run(x, **options):
    """(o, final state) of the kernel."""
    return fused_recurrent_kda(**x._asdict() | dict(output_final_state=True) | options)


def oracle(x, **options):
    """(o, final state) of the reference, in float64 on the CPU."""
    given = x._asdict() | dict(output_final_state=True) | options
    return recurrent_kda(**{name: _wide(value) for name, value in given.items()})


def _wide(value):
    if not isinstance(value, torch.Tensor):
        return value
    return value.cpu().double() if value.is_floating_point() else value.cpu()


# The kernel computes in float32, so beside its round-off only the rounding of o remains: tighter
# than the budget of a 16-bit result.
BUDGETS = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def assert_right(got, want):
    """Both within their budgets. The state is float32 arithmetic, whatever the dtype of o."""
    (o, state), (o_want, state_want) = got, want
    error = rms_error(o.cpu(), o_want)
    assert error <= min(BUDGETS[o.dtype], budget_for(o.dtype)), f"o: {error:.1e}"
    if state_want is None:
        assert state is None
        return
    assert state.dtype == torch.float32
    error = rms_error(state.cpu(), state_want)
    assert error <= budget_for(torch.float32), f"final state: {error:.1e}"


def assert_same(got, want, names=("o", "final state")):
    """Bitwise equal."""
    for name, a, b in zip(names, got, want, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), name
