"""Calls of the fused recurrence beside the float64 oracle, shared by its tests."""

import torch

from kda_edu import fused_recurrent_kda
from kda_edu.teach.check import budget_for, rms_error


def run(x, **options):
    """(o, final state) of the kernel."""
    return fused_recurrent_kda(**x._asdict() | dict(output_final_state=True) | options)


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
