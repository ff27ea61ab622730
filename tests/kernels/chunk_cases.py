"""Calls of the chunk pipeline beside the float64 oracle, shared by its tests."""

from kda_edu import chunk_kda
from kda_edu.teach.check import budget_for, rms_error


def run(x, **options):
    """(o, final state) of the pipeline."""
    return chunk_kda(**x._asdict() | dict(output_final_state=True) | options)


def assert_right(got, want):
    """Both within the budget of the inputs' dtype. The pipeline multiplies rounded operands, so a
    state computed from 16-bit inputs is no more exact than their output."""
    (o, state), (o_want, state_want) = got, want
    error = rms_error(o.cpu(), o_want)
    assert error <= budget_for(o.dtype), f"o: {error:.1e}"
    if state_want is None:
        assert state is None
        return
    assert state.dtype.itemsize == 4
    error = rms_error(state.cpu(), state_want)
    assert error <= budget_for(o.dtype), f"final state: {error:.1e}"
