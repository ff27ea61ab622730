"""What must hold of the chunk pipeline bit by bit: causality, packing, hand-over, determinism."""

import itertools

import pytest
import torch
from cases import NAMES, assert_agree, assert_same, oracle, small, tokens
from chunk_cases import assert_right, run

from kda_edu import fused_recurrent_kda
from kda_edu.kernels import checks
from kda_edu.teach.check import rms_error

fp32, bf16 = torch.float32, torch.bfloat16
INF = float("inf")

# -- causality -----------------------------------------------------------------------------------


def with_future(x, t, other):
    """`x` up to token t, `other` after it."""
    mixed = {
        name: torch.cat([getattr(x, name)[:, : t + 1], getattr(other, name)[:, t + 1 :]], 1)
        for name in NAMES
    }
    return x._replace(**mixed)


def futures(x):
    """Other random tokens, and extreme ones, whose results stay finite."""
    other = small(x.q.device, T=20, H=1, HV=1, V=8, seed=1, dtype=x.q.dtype)
    yield other
    extreme = torch.tensor([0.0, -INF, -1e4, -1e-6], device=x.q.device).repeat(5)
    yield other._replace(
        q=other.q * 1e4,
        v=other.v * 1e4,
        beta=torch.full_like(other.beta, 2.0),
        g=extreme[None, :, None, None].expand_as(other.g).clone(),
    )


@pytest.mark.parametrize("bounded", [False, True])
def test_what_follows_changes_no_bit(bounded, device):
    """Chunks of 32 in blocks of 16: t lies inside a block, at its end, in a later one.

    A reference row taken from later in a block than the row it serves would show here.
    """
    x = small(device, T=20, H=1, HV=1, V=8, dtype=bf16 if bounded else fp32)
    options = dict(chunk_size=32)
    if bounded:
        options |= dict(use_gate_in_kernel=True, lower_bound=-5.0)
        x = x._replace(g=30 * x.g + 4)
    o, _ = run(x, **options)
    for t in (6, 15, 17):
        for other in futures(x):
            if bounded:
                other = other._replace(g=20 - 40 * (other.g < -1).float())  # -5 and nearly 0
            later, _ = run(with_future(x, t, other), **options)
            assert later.isfinite().all()
            assert torch.equal(later[:, : t + 1], o[:, : t + 1])
            assert not torch.equal(later[:, t + 1 :], o[:, t + 1 :])
        alone, _ = run(tokens(x, slice(0, t + 1)), **options)
        assert torch.equal(alone, o[:, : t + 1])


# -- hand-over -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [fp32, bf16])
def test_cut_anywhere_and_resume(dtype, device):
    x = small(device, T=36, H=1, HV=1, dtype=dtype)
    whole = run(x, chunk_size=16)
    for cut in (0, 1, 16, 17, 32, 36) if dtype == fp32 else (16,):
        first, state = run(tokens(x, slice(0, cut)), chunk_size=16)
        rest = tokens(x, slice(cut, 36))._replace(initial_state=state)
        o, state = run(rest, chunk_size=16)
        joined = (torch.cat([first, o], dim=1), state)
        if cut % 16 == 0 or cut == 36:  # the same chunks: the same bits
            assert_same(joined, whole)
        for a, b in zip(joined, whole, strict=True):
            assert rms_error(a, b) < 1e-6


def test_prefill_in_chunks_then_decode(device):
    x = small(device, T=24, H=1, HV=1)
    o, state = run(tokens(x, slice(0, 20)), chunk_size=16)
    outputs = [o]
    for t in range(20, 24):
        step = tokens(x, slice(t, t + 1))._replace(initial_state=state)
        o, state = fused_recurrent_kda(**step._asdict(), output_final_state=True)
        outputs.append(o)
    assert_right((torch.cat(outputs, dim=1), state), oracle(x))


# -- packed sequences ----------------------------------------------------------------------------

LENGTHS = (1, 0, 17, 0)


def packed(device, **changes):
    sizes = dict(H=1, HV=1) | changes
    return small(device, **sizes, cu_seqlens=[0, *itertools.accumulate(LENGTHS)])


@pytest.mark.parametrize("dtype", [fp32, bf16])
def test_packed_equals_separate(dtype, device):
    x = packed(device, dtype=dtype)
    o, state = run(x, chunk_size=16)
    start = 0
    for n, length in enumerate(LENGTHS):
        alone = tokens(x, slice(start, start + length))
        alone = alone._replace(initial_state=x.initial_state[n : n + 1], cu_seqlens=None)
        want = run(alone, chunk_size=16)
        assert_agree((o[:, start : start + length], state[n : n + 1]), want)
        start += length
    assert torch.equal(state[1], x.initial_state[1])  # an empty sequence keeps its state
    assert not run(x._replace(initial_state=None), chunk_size=16)[1][1].any()


def test_the_form_of_cu_seqlens_changes_no_bit(device):
    x = packed(device)
    want = run(x, chunk_size=16)
    host = x.cu_seqlens.cpu()
    wide = x._replace(cu_seqlens=x.cu_seqlens.long())
    for given, known in ((wide, None), (x, host), (x, host.long()), (wide, host)):
        assert_same(run(given, cu_seqlens_cpu=known, chunk_size=16), want)


def test_sequences_and_heads_do_not_mix(device):
    """Changing head 0 of the first sequence changes that alone, and does change it."""
    x = small(device, H=2, HV=2, V=8, cu_seqlens=[0, 2, 5])
    o, state = run(x, chunk_size=16)
    for name in (*NAMES, "initial_state"):
        changed = getattr(x, name).clone()
        (changed[0, 0] if name == "initial_state" else changed[:, :2, 0]).mul_(0.5)
        o2, state2 = run(x._replace(**{name: changed}), chunk_size=16)
        assert torch.equal(o2[:, 2:], o[:, 2:]) and torch.equal(o2[:, :, 1], o[:, :, 1]), name
        assert torch.equal(state2[1:], state[1:]), name
        assert torch.equal(state2[0, 1], state[0, 1]), name
        assert not torch.equal(o2[0, :2, 0], o[0, :2, 0]), name


def test_a_head_with_no_decay_beside_heads_with_much(device):
    x = packed(device, HV=2)
    x.g[:, :, 0], x.g[:, :, 1:] = 0.0, -10.0
    assert_right(run(x, chunk_size=16), oracle(x))


@pytest.fixture
def unread(monkeypatch):
    """As on a GPU, where the values of cu_seqlens are not read."""
    monkeypatch.setattr(checks, "check_cu_values", lambda *arguments: None)


def test_tokens_after_the_last_sequence_are_ignored_and_zero(device, unread):
    x = small(device, H=1, HV=1, cu_seqlens=[0, 4, 40])
    cu = x.cu_seqlens.new_tensor([0, 4, 21])
    want = run(tokens(x, slice(0, 21))._replace(cu_seqlens=cu), chunk_size=16)
    for name in NAMES:
        getattr(x, name)[:, 21:] = float("nan")
    o, state = run(x._replace(cu_seqlens=cu), chunk_size=16)
    assert_same((o[:, :21], state), want)
    assert not o[:, 21:].any() and not o.isnan().any()


@pytest.mark.parametrize("cu", [[-5, 3, 20], [0, 4, 1000], [0, 18, 2], [2**31 - 1, -(2**31), 0]])
def test_wrong_cu_seqlens_stay_within_the_buffers(cu, device, unread, canary):
    x = small(device, H=1, HV=1, cu_seqlens=[0, 4, 20])
    x = x._replace(**{n: canary(getattr(x, n)) for n in NAMES})
    cu = torch.tensor(cu, dtype=torch.int32, device=device)
    _, state = run(x._replace(cu_seqlens=cu), chunk_size=16)
    assert state.isfinite().all()


# -- heads and states ----------------------------------------------------------------------------


@pytest.mark.parametrize("H, HV, T, bounded", [(2, 4, 3, False), (1, 2, 17, True)])
def test_more_value_heads_than_key_heads(H, HV, T, bounded, device):
    x = small(device, T=T, H=H, HV=HV, V=8)
    repeated = {n: getattr(x, n).repeat_interleave(HV // H, dim=2) for n in ("q", "k")}
    options = dict(use_qk_l2norm_in_kernel=True, chunk_size=16)
    if bounded:
        options |= dict(use_gate_in_kernel=True, lower_bound=-4.0)
    assert_same(run(x, **options), run(x._replace(**repeated), **options))


def test_state_layouts_are_transposes(device):
    """K = V, so that a transposed state has the shape of a right one."""
    x = small(device, B=2, T=17, H=1, HV=1, K=16, V=16)
    transposed = x._replace(initial_state=x.initial_state.transpose(-1, -2))
    o, state = run(transposed, state_v_first=True, chunk_size=16)
    assert state.is_contiguous()
    o_want, state_want = run(x, chunk_size=16)
    assert_right((o_want, state_want), oracle(x))
    assert torch.equal(o, o_want) and torch.equal(state.transpose(-1, -2), state_want)


def states_before_chunks(x, C, bounds):
    """The oracle's states before each chunk, [NT, HV, K, V], and those at each end."""
    for n, (start, end) in enumerate(bounds):
        for first in range(start, end, C):
            part = tokens(x, slice(start, first))
            part = part._replace(initial_state=x.initial_state[n : n + 1], cu_seqlens=None)
            yield oracle(part)[1][0]


@pytest.mark.parametrize("dtype, state_v_first", [(fp32, False), (fp32, True), (bf16, True)])
def test_intermediate_states(dtype, state_v_first, device):
    x = small(device, T=36, H=1, HV=1, dtype=dtype)
    want = torch.stack(list(states_before_chunks(x, 16, [(0, 36)])))
    cu = torch.tensor([0, 0, 17, 20])
    y = small(device, H=1, HV=1, dtype=dtype, cu_seqlens=cu.tolist())
    packed_want = torch.stack(list(states_before_chunks(y, 16, [(0, 0), (0, 17), (17, 20)])))
    for given, states, options in (
        (x, want, {}),
        (y, packed_want, dict(cu_seqlens_cpu=cu)),
        (y, packed_want, {}),
    ):
        if state_v_first:
            given = given._replace(initial_state=given.initial_state.transpose(2, 3))
        options |= dict(state_v_first=state_v_first, chunk_size=16)
        o, final, h = run(given, **options, return_intermediate_states=True)
        assert o.shape == given.v.shape and final.shape == given.initial_state.shape
        if given is x or "cu_seqlens_cpu" in options:
            assert h.shape[:2] == (1, len(states))
        h = h[0, : len(states)]  # without cu_seqlens_cpu, rows that belong to no chunk follow
        h = h.transpose(2, 3) if state_v_first else h
        assert rms_error(h.cpu(), states) < (1e-6 if dtype == fp32 else 6e-3)


@pytest.mark.parametrize("bounded", [False, True])
def test_two_calls_give_the_same_bits(bounded, device):
    x = packed(device, dtype=bf16)
    options = dict(use_gate_in_kernel=True, lower_bound=-5.0) if bounded else {}
    assert_same(run(x, **options), run(x, **options))
