"""Calls of the chunk pipeline beside the float64 oracle, shared by its tests."""

import itertools

import torch

from kda_edu import chunk_kda
from kda_edu.teach.check import budget_for, rms_error


def run(x, **options):
    """(o, final state) of the pipeline."""
    return chunk_kda(**x._asdict() | dict(output_final_state=True) | options)


def assert_right(got, want, state_budget=None):
    """Both within the budget of the inputs' dtype. The pipeline multiplies rounded operands, so a
    state computed from 16-bit inputs is no more exact than their output."""
    state_budget = state_budget or budget_for(got[0].dtype)
    (o, state), (o_want, state_want) = got, want
    error = rms_error(o.cpu(), o_want)
    assert error <= budget_for(o.dtype), f"o: {error:.1e}"
    if state_want is None:
        assert state is None
        return
    assert state.dtype == torch.float32
    error = rms_error(state.cpu(), state_want)
    assert error <= state_budget, f"final state: {error:.1e}"


class Spans(list):
    """(batch, sequence, first token, end) of every chunk of a [B, T] batch, or a packed one."""

    def __init__(self, B, T, C, lengths=None):
        self.C, self.lengths = C, lengths
        starts = [0, *itertools.accumulate(lengths or ())]
        rows = [(b, b, 0, T) for b in range(B)]
        if lengths is not None:
            rows = [(0, n, starts[n], starts[n + 1]) for n in range(len(lengths))]
        for b, n, start, end in rows:
            self.extend((b, n, s, min(s + C, end)) for s in range(start, end, C))
        self.cu = torch.tensor(starts) if lengths is not None else None

    def options(self, device):
        return dict(cu_seqlens=None if self.cu is None else self.cu.to(device))
