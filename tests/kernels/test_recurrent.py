"""The fused recurrence against the oracle: options, gates, and the properties of a recurrence."""

import itertools
import random

import pytest
import torch
from cases import assert_agree, assert_every_pair, assert_same, build, oracle, small, tokens
from recurrent_cases import assert_right, run

from kda_edu.kernels import checks, recurrent
from kda_edu.teach.check import rms_error

# -- every option, in combination --------------------------------------------------------------

OPTIONS = dict(
    dtype=(torch.float32, torch.float16, torch.bfloat16),
    dims=((16, 24), (8, 5), (20, 9), (32, 8), (3, 1)),
    heads=((1, 1), (2, 2), (2, 4), (1, 3)),
    lengths=(4, (0, 3, 0, 1, 2), (4, 3, 0)),
    index=(torch.int32, torch.int64),
    gate=("given", "softplus", "softplus, bias", "bounded", "bounded, bias, no A_log"),
    gate_dtype=(torch.float32, torch.bfloat16),
    beta=("given", "sigmoid", "2 sigmoid"),
    l2norm=(False, True),
    scale=(None, 0.3),
    initial_state=(False, True),
    final_state=(False, True),
    state_v_first=(False, True),
)
_draw = random.Random(3)
CASES = [{name: _draw.choice(values) for name, values in OPTIONS.items()} for _ in range(44)]


def test_the_cases_cover_every_pair_of_options():
    assert_every_pair(CASES, OPTIONS)


@pytest.mark.parametrize("case", CASES, ids=[str(i) for i in range(len(CASES))])
def test_options(case, device):
    x, options = build(case, device)
    assert_right(run(x, **options), oracle(x, **options))


@pytest.mark.parametrize("K, V", [(60, 100), (256, 16), (64, 128), (1, 1), (17, 257)])
def test_head_dimensions(K, V, device):
    x = small(device, T=2, H=1, HV=1, K=K, V=V)
    assert_right(run(x), oracle(x))


@pytest.mark.parametrize("width", [1, 4, 16])
def test_any_width_of_tile_gives_the_same(width, device, monkeypatch):
    x = small(device, HV=2, V=6)
    monkeypatch.setattr(recurrent, "_tile_width", lambda heads, BK, V: width)
    assert_right(run(x), oracle(x))


def test_tiles_get_wider_with_the_number_of_heads_and_stay_within_one_warp():
    width = recurrent._tile_width
    assert width(1, 128, 128) == 8 and width(4096, 128, 128) == 16
    assert width(1, 128, 5) == 8 and width(1, 16, 1) == 1
    for heads, BK, V in itertools.product((1, 64, 10**6), (16, 128, 256), (1, 100, 1024)):
        assert width(heads, BK, V) * BK <= 2048


# -- any gate ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "gate", ["none", -1e-6, -1.0, -5.0, -20.0, -100.0, -1e4, -float("inf"), "mixed", "reset"]
)
def test_any_gate(gate, device):
    x = small(device, H=1, HV=2, T=30, V=8, gate=gate)
    assert_right(run(x), oracle(x))


def test_channels_that_keep_beside_channels_that_forget(device):
    x = small(device, T=12, V=8)
    x.g[..., :8], x.g[..., 8:] = 0.0, -20.0
    got, want = run(x), oracle(x)
    assert_right(got, want)
    for channel in range(16):
        assert rms_error(got[1][:, :, channel].cpu(), want[1][:, :, channel]) < 1e-5


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("reset", [-float("inf"), -3.4e38, -1e30, -1e4])
def test_a_reset_forgets_exactly(reset, device):
    x = small(device, T=8, B=2, H=1, HV=1)
    x.g[:, 5] = reset
    fresh = x._replace(**{n: getattr(x, n)[:, 5:] for n in ("q", "k", "v", "g", "beta")})
    fresh = fresh._replace(initial_state=torch.zeros_like(x.initial_state))
    o, state = run(x)
    assert_same((o[:, 5:], state), run(fresh))


def test_decays_near_the_end_of_the_float32_range(device):
    """Factors 2^-126 to 2^-150 may be flushed to zero, but to nothing else."""
    for g in (-87.34, -88.03, -103.28, -103.97):
        x = small(device, T=1, gate=g)
        x = x._replace(initial_state=torch.full_like(x.initial_state, 2.0**100))
        (o, state), (o_want, state_want) = run(x), oracle(x)
        assert (o.cpu() - o_want).abs().max() < 1e-5
        assert (state.cpu() - state_want).abs().max() < 1e-5


def test_a_16_bit_gate_is_widened_first(device):
    x = small(device)
    x = x._replace(g=x.g.bfloat16(), beta=x.beta.bfloat16())
    assert_agree(run(x), run(x._replace(g=x.g.float(), beta=x.beta.float())))


def test_a_positive_gate_amplifies(device):
    x = small(device)
    x = x._replace(g=torch.full_like(x.g, 0.1))
    assert_right(run(x), oracle(x))


def test_gate_parameters_in_float32_beside_16_bit_activations(device):
    x = small(device, T=8, dtype=torch.bfloat16)
    x = x._replace(g=torch.full_like(x.g, -6.0).bfloat16())
    A_log = torch.linspace(0.3, 2.7, 4, device=device)
    options = dict(use_gate_in_kernel=True, A_log=A_log)
    got = run(x, **options)
    assert_right(got, oracle(x, **options))
    rounded = run(x, **options | dict(A_log=A_log.bfloat16()))
    assert rms_error(got[1], rounded[1]) > 1e-5


# -- the formula, by hand ----------------------------------------------------------------------


def scalar(device, beta=0.5, state=1.0, g=0.5, v=1.0, k=1.0):
    """K = V = T = 1."""
    numbers = torch.tensor([k, v, g, beta, state], device=device)
    k, v, g, beta, state = (x.reshape(1, 1, 1, 1) for x in numbers)
    return dict(q=k, k=k, v=v, g=g.log(), beta=beta[..., 0], initial_state=state)


def test_the_scalar_example(device):
    """Decay first, then the residual: 0.5 + 0.5 (1 - 0.5) = 0.75. The other order gives 0.5."""
    o, state = recurrent.fused_recurrent_kda(**scalar(device), scale=1.0, output_final_state=True)
    assert abs(o.item() - 0.75) < 1e-6 and abs(state.item() - 0.75) < 1e-6


@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
def test_write_strength(beta, device):
    """A read with the key just written gives S^T k + beta (v - S^T k)."""
    x = small(device, T=1, gate="none", beta=beta)
    _, state = run(x)
    k = x.k[:, 0].repeat_interleave(2, dim=1)
    read = torch.einsum("bhkv,bhk->bhv", state, k)
    before = torch.einsum("bhkv,bhk->bhv", x.initial_state, k)
    assert rms_error(read, before + beta * (x.v[:, 0] - before)) < 1e-6
    if beta == 0:
        assert torch.equal(state, x.initial_state)


def test_scale(device):
    x = small(device)
    o, state = run(x, scale=1)
    zero, same_state = run(x, scale=0.0)
    assert not zero.any() and torch.equal(state, same_state)
    negative, _ = run(x, scale=-1.0)
    assert torch.equal(negative, -o)
    assert rms_error(run(x)[0], o * 0.25) < 1e-6


def test_small_increments_are_kept(device):
    """256 + 0.5 is 256 in bfloat16: the state between tokens must not be."""
    x = small(device, T=1, H=1, HV=1, K=1, V=1, dtype=torch.bfloat16)
    one = torch.ones_like(x.q)
    x = x._replace(q=one, k=one, v=one * 258, g=one * 0, beta=one[..., 0] * 0.5)
    x = x._replace(initial_state=x.initial_state * 0 + 256)
    for _ in range(3):
        _, state = run(x)
        x = x._replace(initial_state=state)
    assert state.item() == 258 - 0.25


# -- properties of a recurrence ----------------------------------------------------------------


def test_decoding_token_by_token_is_the_full_run(device):
    x = small(device, B=2, H=1, HV=2, T=6)
    outputs, state = [], x.initial_state
    for t in range(6):
        o, state = run(tokens(x, slice(t, t + 1))._replace(initial_state=state))
        outputs.append(o)
    assert_same((torch.cat(outputs, dim=1), state), run(x))


def test_cut_anywhere_and_resume(device):
    x = small(device, HV=2)
    whole = run(x)
    for cut in range(6):
        first, state = run(tokens(x, slice(0, cut)))
        rest, state = run(tokens(x, slice(cut, 5))._replace(initial_state=state))
        assert_same((torch.cat([first, rest], dim=1), state), whole)


def test_the_future_changes_nothing(device):
    x, other = small(device, HV=2), small(device, HV=2, seed=1)
    o, _ = run(x)
    for t in range(4):
        mixed = {
            name: torch.cat([getattr(x, name)[:, : t + 1], getattr(other, name)[:, t + 1 :]], 1)
            for name in ("q", "k", "v", "g", "beta")
        }
        later, _ = run(x._replace(**mixed))
        assert torch.equal(later[:, : t + 1], o[:, : t + 1])
        assert not torch.equal(later[:, t + 1 :], o[:, t + 1 :])


LENGTHS = (2, 1, 0, 3, 0)


def packed(device, **changes):
    return small(device, **changes, cu_seqlens=[0, *itertools.accumulate(LENGTHS)])


def test_packed_equals_separate(device):
    x = packed(device)
    o, state = run(x)
    start = 0
    for n, length in enumerate(LENGTHS):
        alone = tokens(x, slice(start, start + length))
        alone = alone._replace(initial_state=x.initial_state[n : n + 1], cu_seqlens=None)
        assert_same((o[:, start : start + length], state[n : n + 1]), run(alone))
        start += length
    assert torch.equal(state[2], x.initial_state[2])  # an empty sequence keeps its state
    assert not run(x._replace(initial_state=None))[1][2].any()


def test_sequences_and_heads_do_not_mix(device):
    """Changing one sequence, or one head, changes that one alone, and does change it."""
    x = packed(device, V=8)
    o, state = run(x)
    for name in ("q", "k", "v", "g", "beta", "initial_state"):
        changed = getattr(x, name).clone()
        (changed[0] if name == "initial_state" else changed[:, :2]).mul_(0.5)
        o2, state2 = run(x._replace(**{name: changed}))
        assert torch.equal(o2[:, 2:], o[:, 2:]) and torch.equal(state2[1:], state[1:]), name
        assert not torch.equal(o2, o), name

        changed = getattr(x, name).clone()
        head_axis = 1 if name == "initial_state" else 2
        changed.select(head_axis, 0).mul_(0.5)
        o2, state2 = run(x._replace(**{name: changed}))
        first = 2 if name in "qk" else 1  # value heads that read head 0
        assert torch.equal(o2[:, :, first:], o[:, :, first:]), name
        assert torch.equal(state2[:, first:], state[:, first:]), name
        for head in range(first):
            assert not torch.equal(o2[:, :, head], o[:, :, head]), name


def test_a_head_of_g_with_no_decay_beside_heads_with_much(device):
    x = small(device, T=8)
    x.g[:, :, 0], x.g[:, :, 1:] = 0.0, -10.0
    assert_right(run(x), oracle(x))


@pytest.mark.parametrize("H, HV", [(2, 8), (1, 3)])
def test_more_value_heads_than_key_heads(H, HV, device):
    x = small(device, H=H, HV=HV, V=8)
    repeated = {n: getattr(x, n).repeat_interleave(HV // H, dim=2) for n in ("q", "k")}
    options = dict(use_qk_l2norm_in_kernel=True)
    assert_same(run(x, **options), run(x._replace(**repeated), **options))


def test_state_layouts_are_transposes(device):
    x = small(device, B=2)
    transposed = x._replace(initial_state=x.initial_state.transpose(-1, -2))
    o, state = run(transposed, state_v_first=True)
    assert state.shape == (2, 4, 9, 16) and state.is_contiguous()
    o_want, state_want = run(x)
    assert rms_error(o, o_want) < 1e-6
    assert rms_error(state.transpose(-1, -2), state_want) < 1e-6


def test_two_calls_give_the_same_bits(device):
    x = small(device, dtype=torch.bfloat16)
    assert_same(run(x), run(x))


# -- nothing to do, and cu_seqlens that cannot be checked -----------------------------------------


def test_no_tokens(device):
    x = small(device, B=2, T=0)
    o, state = run(x)
    assert o.shape == (2, 0, 4, 9) and torch.equal(state, x.initial_state)
    assert not run(x._replace(initial_state=None))[1].any()


def test_no_sequences(device):
    x = small(device, cu_seqlens=[0, 0])._replace(
        cu_seqlens=torch.tensor([0], device=device), initial_state=None
    )
    o, state = run(x)
    assert o.shape == (1, 0, 4, 9) and state.shape == (0, 4, 16, 9)


@pytest.fixture
def unread(monkeypatch):
    """As on a GPU, where the values of cu_seqlens are not read."""
    monkeypatch.setattr(checks, "check_cu_values", lambda *arguments: None)


def test_tokens_after_the_last_sequence_are_ignored_and_zero(device, unread):
    x = small(device, cu_seqlens=[0, 4, 9])
    want = run(tokens(x, slice(0, 7))._replace(cu_seqlens=x.cu_seqlens.new_tensor([0, 4, 7])))
    for name in ("q", "k", "v", "g", "beta"):
        getattr(x, name)[:, 7:] = float("nan")
    o, state = run(x._replace(cu_seqlens=x.cu_seqlens.new_tensor([0, 4, 7])))
    assert_same((o[:, :7], state), want)
    assert not o[:, 7:].any() and not o.isnan().any()


@pytest.mark.parametrize("cu", [[-5, 3, 9], [0, 4, 1000], [0, 8, 2], [2**31 - 1, -(2**31), 0]])
def test_wrong_cu_seqlens_stay_within_the_buffers(cu, device, unread, canary):
    x = small(device, cu_seqlens=[0, 4, 9])
    x = x._replace(**{n: canary(getattr(x, n)) for n in ("q", "k", "v", "g", "beta")})
    _, state = run(x._replace(cu_seqlens=torch.tensor(cu, dtype=torch.int32, device=device)))
    assert state.isfinite().all()
