"""The two-kernel forward: which calls it serves, and its results beside the float64 oracle.

The tests of `chunk_kda` meet it too, wherever a bfloat16 call without gradients has a bounded gate.
"""

from unittest import mock

import pytest
import torch
from cases import assert_same, build, oracle, small, tokens
from chunk_cases import assert_right, run

from kda_edu.kernels import chunk, fused
from kda_edu.teach.check import rms_error

fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16
BOUNDED = dict(use_gate_in_kernel=True, lower_bound=-5.0)


def sample(device, **changes):
    """A call that the two kernels serve: keys of unit length, raw gates of both signs."""
    x = small(device, **dict(T=40, K=32, V=20, dtype=bf16) | changes)
    return x._replace(g=(4 * x.g.float() + 4).to(bf16))


def path(call):
    """Which of the three ways through `chunk_kda` a call takes; nothing is computed."""
    taken = []

    def way(name, results):
        return mock.patch.object(
            chunk, name, side_effect=lambda *a, **k: taken.append(name) or results
        )

    nothing = mock.Mock()  # answers for the states, too
    with (
        way("fused_chunk_kda_fwd", (None, None)),
        way("chunk_kda_fwd", (None, None, None, nothing)),
        way("chunk_kda_op", (None, None)),
    ):
        call()
    return taken[0]


def test_which_calls_are_fused(device):
    x, zero = sample(device, T=5), torch.zeros(4, device=device)
    assert path(lambda: run(x, **BOUNDED)) == "fused_chunk_kda_fwd"
    others = [
        (x, BOUNDED | dict(lower_bound=None, A_log=zero)),
        (x, BOUNDED | dict(lower_bound=-5.1)),
        (x._replace(g=-x.g.abs()), {}),  # a given gate may be anything
        *((sample(device, T=5, dtype=dtype), BOUNDED) for dtype in (fp16, fp32)),
        *((sample(device, T=5, **dims), BOUNDED) for dims in (dict(K=129), dict(V=129))),
    ]
    for inputs, options in others:
        assert path(lambda: run(inputs, **options)) == "chunk_kda_fwd"  # noqa: B023
    v = x.v.clone().requires_grad_()
    assert path(lambda: run(x._replace(v=v), **BOUNDED)) == "chunk_kda_op"
    with torch.no_grad():
        assert path(lambda: run(x._replace(v=v), **BOUNDED)) == "fused_chunk_kda_fwd"
        h = dict(return_intermediate_states=True)
        assert path(lambda: run(x, **BOUNDED, **h)) == "chunk_kda_fwd"


@pytest.mark.parametrize("gate", ["bounded", "bounded, bias", "bounded, no A_log"])
@pytest.mark.parametrize("lengths", [33, (1, 0, 17, 16, 3)])
@pytest.mark.parametrize("dims", [(16, 9), (60, 100), (128, 128)])
def test_beside_the_oracle(gate, lengths, dims, device):
    flags = dims[0] == 60
    case = dict(
        dtype=bf16, dims=dims, heads=(1, 1) if dims[0] == 128 else (1, 2), lengths=lengths,
        index=torch.int32, gate=gate, gate_dtype=fp32 if flags else bf16, l2norm=flags,
        beta="2 sigmoid" if flags else "sigmoid" if dims[0] == 16 else "given",
        scale=0.7 if flags else None, initial_state=not flags, final_state=True,
        state_v_first=flags,
    )  # fmt: skip
    x, options = build(case, device)
    call = x._asdict() | options
    assert path(lambda: chunk.chunk_kda(**call)) == "fused_chunk_kda_fwd"
    want = oracle(x, **{n: y for n, y in options.items() if n != "output_final_state"})
    assert_right(chunk.chunk_kda(**call), want)


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("raw", [-1e4, -30.0, 0.0, 30.0, 1e4])
def test_any_gate_and_any_size_of_keys(raw, size, device):
    """Gates of 0 and of -5 throughout: factors of 2^58 either way meet keys of any size."""
    x = sample(device, H=1, HV=1)
    g = torch.full_like(x.g, raw)
    x = x._replace(g=g, q=x.q * size, k=x.k * size, beta=x.beta / max(size, 1.0) ** 2)
    assert_right(run(x, **BOUNDED), oracle(x, **BOUNDED))


def test_no_worse_than_six_steps_where_keys_are_alike(device):
    """The inverse at its largest: equal keys, beta = 2, hardly any decay. Any rounding is felt."""
    x = sample(device, H=1, HV=1, T=48)
    same = x.k[:, :1].expand_as(x.k).contiguous()
    x = x._replace(k=same, beta=torch.full_like(x.beta, 2.0), g=torch.full_like(x.g, -9.0))
    o, state = oracle(x, **BOUNDED)
    fused_o, fused_state = run(x, **BOUNDED)
    six = x._replace(v=x.v.clone().requires_grad_())
    six_o, six_state = (y.detach() for y in run(six, **BOUNDED, chunk_size=fused.CHUNK))
    assert rms_error(fused_o.cpu(), o) < rms_error(six_o.cpu(), o) < 0.05
    assert rms_error(fused_state.cpu(), state) < rms_error(six_state.cpu(), state) < 0.1


@pytest.mark.parametrize("B", [1, 2])
def test_segments_change_no_bit(B, device, monkeypatch):
    x = sample(device, B=B, H=1, HV=1, T=53)  # 4 chunks
    want = run(x, **BOUNDED)
    for segment, pieces in ((2, 2), (1, 4)):
        monkeypatch.setattr(fused, "SEGMENT", segment)
        layout = chunk.chunk_layout(B, 53, fused.CHUNK)
        assert len(fused.segment_borders(layout)) == pieces + 1
        assert_same(run(x, **BOUNDED), want)
        o, none = run(x, **BOUNDED, output_final_state=False)
        assert none is None and torch.equal(o, want[0])


def test_where_a_batch_is_cut(device):
    def borders(T, *cu):
        return fused.segment_borders(chunk.chunk_layout(1, T, fused.CHUNK, *cu))

    whole = 16 * 2 * fused.SEGMENT
    assert borders(0) == [0, 0] and borders(whole - 16) == [0, 2 * fused.SEGMENT - 1]
    assert borders(whole) == [0, fused.SEGMENT, 2 * fused.SEGMENT]
    assert len(borders(10**6)) == 9 and borders(10**6)[-1] == 62500
    packed = torch.tensor([0, whole], device=device)
    assert borders(whole, packed) == [0, 2 * fused.SEGMENT]


def test_cut_anywhere_and_resume(device):
    x = sample(device, H=1, HV=1)
    whole = run(x, **BOUNDED)
    for cut in (0, 1, 16, 31, 40):
        first, state = run(tokens(x, slice(0, cut)), **BOUNDED)
        rest = tokens(x, slice(cut, 40))._replace(initial_state=state)
        o, state = run(rest, **BOUNDED)
        joined = (torch.cat([first, o], dim=1), state)
        if cut % 16 == 0 or cut == 40:
            assert_same(joined, whole)
        for a, b in zip(joined, whole, strict=True):
            assert rms_error(a, b) < 4e-3


def test_tokens_of_no_sequence_are_zero(device):
    """Lengths on a GPU are the caller's promise; tokens past the last sequence have an output."""
    x = sample(device, H=1, HV=1, T=23, B=1)
    with mock.patch("kda_edu.kernels.sequences.check_cu_seqlens", return_value=2):
        cu = torch.tensor([0, 7, 20], device=device)
        layout = chunk.chunk_layout(1, 23, fused.CHUNK, cu)
    tensors = (x.q, x.k, x.v, x.g, x.beta)
    o, _ = fused.fused_chunk_kda_fwd(*tensors, scale=1.0, lower_bound=-5.0, layout=layout)
    assert not o[:, 20:].any() and o[:, :20].all()
