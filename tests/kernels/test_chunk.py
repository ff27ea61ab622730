"""The chunk pipeline against the oracle: every option, every gate, every length."""

import math
import random

import pytest
import torch
from cases import assert_agree, assert_every_pair, assert_same, build, oracle, small
from chunk_cases import assert_right, run

from kda_edu import chunk_kda, reference
from kda_edu.kernels import fused_recurrent_kda
from kda_edu.teach.check import rms_error
from kda_edu.teach.inputs import make_inputs

fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16
INF = float("inf")

# -- every option, in combination ----------------------------------------------------------------

OPTIONS = dict(
    dtype=(fp32, fp16, bf16),
    chunk_size=(16, 32, 64),
    dims=((16, 24), (20, 9), (8, 5), (24, 24)),
    heads=((1, 1), (1, 2), (2, 2), (1, 3)),
    lengths=(17, 33, (0, 1, 0, 17), (16, 0, 9)),
    index=(torch.int32, torch.int64),
    known=(False, True),  # whether cu_seqlens_cpu is given
    gate=("given", "softplus", "softplus, bias", "bounded", "bounded, bias, no A_log"),
    gate_dtype=(fp32, bf16),
    beta=("given", "sigmoid", "2 sigmoid"),
    l2norm=(False, True),
    scale=(None, 0.3),
    initial_state=(False, True),
    final_state=(False, True),
    state_v_first=(False, True),
)
_draw = random.Random(2713)  # a seed for which 26 cases hold every pair, see the next test
CASES = [{name: _draw.choice(values) for name, values in OPTIONS.items()} for _ in range(26)]


def test_the_cases_cover_every_pair_of_options():
    assert_every_pair(CASES, OPTIONS, largest=10)


@pytest.mark.parametrize("case", CASES, ids=[str(i) for i in range(len(CASES))])
def test_options(case, device):
    x, options = build(case, device, B=1)
    want = oracle(x, **options)
    if x.cu_seqlens is not None and case["known"]:
        options["cu_seqlens_cpu"] = x.cu_seqlens.cpu()
    # With keys that nearly coincide, errors of w and u cancel less: the formulas of a chunk in
    # PyTorch, with w, u, kg and v' rounded to bfloat16, err by 1.2e-2 in the state.
    hard = case["l2norm"] and case["dtype"] == bf16
    got = run(x, **options, chunk_size=case["chunk_size"])
    assert_right(got, want, state_budget=2 * 1.2e-2 if hard else None)


def test_a_batch_of_several_rows(device):
    x = small(device, B=3, T=18, H=1, HV=1)
    assert_right(run(x, chunk_size=16), oracle(x))


@pytest.mark.parametrize("K, V", [(60, 100), (256, 16), (64, 128), (192, 96), (1, 1), (17, 257)])
def test_head_dimensions(K, V, device):
    x = small(device, T=3, H=1, HV=1, K=K, V=V)
    assert_right(run(x, chunk_size=16), oracle(x))


# -- every length --------------------------------------------------------------------------------


@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 63, 64, 65, 100])
def test_any_length_as_the_oracle_and_the_recurrence(T, device, canary):
    """Inputs lie between guards full of NaN: a row read past the end would show."""
    x = small(device, T=T, H=1, HV=1, V=8)
    x = type(x)(*(value if value is None else canary(value) for value in x))
    got = run(x)
    assert_right(got, oracle(x))
    for a, b in zip(got, fused_recurrent_kda(**x._asdict(), output_final_state=True), strict=True):
        assert a.shape == b.shape and rms_error(a, b) < 1e-5


def test_chunk_sizes_agree(device):
    x = small(device, H=1, HV=1, V=8, cu_seqlens=[0, 19, 40])
    results = [run(x, chunk_size=C) for C in (16, 32, 64)]
    want = oracle(x)
    for got in results:
        assert_right(got, want)
        assert rms_error(got[0], results[0][0]) < 1e-6
        assert rms_error(got[1], results[0][1]) < 1e-6


def test_no_tokens(device):
    x = small(device, B=2, T=0)
    o, state, h = run(x, return_intermediate_states=True)
    assert o.shape == (2, 0, 4, 9) and torch.equal(state, x.initial_state)
    assert h.shape == (2, 0, 4, 16, 9)
    o, state = run(x._replace(initial_state=None))
    assert state.shape == (2, 4, 16, 9) and not state.any()
    empty = small(device, cu_seqlens=[0, 0, 0])
    assert torch.equal(run(empty)[1], empty.initial_state)


def test_no_sequences(device):
    x = small(device, cu_seqlens=[0, 0])._replace(
        cu_seqlens=torch.tensor([0], device=device), initial_state=None
    )
    o, state = run(x)
    assert o.shape == (1, 0, 4, 9) and state.shape == (0, 4, 16, 9)


# -- any gate ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "gate", ["none", -1e-6, -1.0, -5.0, -20.0, -100.0, -1e4, -INF, "mixed", "reset"]
)
def test_any_gate(gate, device):
    x = small(device, H=1, HV=1, T=40, V=8, gate=gate)
    assert_right(run(x, chunk_size=32), oracle(x))


@pytest.mark.parametrize("gate", [-1.3, -1.41, -8.0])
def test_gates_around_the_limit_of_a_split_over_a_whole_chunk(gate, device):
    """64 steps of -1.41 pass exp(88.7), the largest float32."""
    x = small(device, H=1, HV=1, T=66, K=32, V=8, gate=gate)
    assert_right(run(x), oracle(x))


@pytest.mark.parametrize("lower_bound", [-5.0, -5.9, -5.92, -11.0, -11.1, -16.0, -32.0])
def test_saturated_gates_around_the_limits_of_a_reference_row(lower_bound, device):
    """15 steps of -5.92, or 8 of -11.1, pass 2^128. Bounds below -5 must take the exact path."""
    x = small(device, H=1, HV=1, T=34, V=8)
    x = x._replace(g=torch.full_like(x.g, 60.0))
    options = dict(use_gate_in_kernel=True, lower_bound=lower_bound)
    assert_right(run(x, **options, chunk_size=32), oracle(x, **options))


def test_a_promise_of_safe_gates_that_is_not_kept(device):
    x = small(device, H=1, HV=1, T=20, V=8, gate=-20.0)
    assert_right(run(x, safe_gate=True, chunk_size=32), oracle(x))


@pytest.mark.parametrize("gate, cu", [(-1.4, [0, 60]), (-2.0, [0, 60, 93, 94]), (-3.0, [0, 33])])
def test_rows_past_the_end_have_no_gate(gate, cu, device):
    """A row that is not there must not count as decay 0 after 60 steps of -2: exp(120) * 0."""
    x = small(device, H=1, HV=1, V=8, gate=gate, cu_seqlens=cu)
    assert_right(run(x), oracle(x))


def test_no_decay_is_the_delta_rule(device):
    x = small(device, H=1, HV=1, T=40, V=8, gate="none")
    wide = x.double().to("cpu")
    want = reference.delta_net(wide.q, wide.k, wide.v, wide.beta, initial_state=wide.initial_state)
    assert rms_error(run(x, chunk_size=32)[0].cpu(), want[0]) < 1e-6


def test_many_zeros_among_small_gates(device):
    """A sum in float32 may step up by one unit where nothing decays: no entry may be lost."""
    x = make_inputs(B=1, T=64, H=1, HV=1, K=64, V=8, device=device)
    draw = torch.Generator().manual_seed(0)
    half = (torch.rand(x.g.shape, generator=draw) > 0.5).float()
    g = torch.nn.functional.logsigmoid(torch.randn(x.g.shape, generator=draw)) * half
    x = x._replace(g=g.to(device))
    assert_right(run(x), oracle(x))


def test_tokens_without_decay_between_tokens_with(device):
    x = small(device, H=1, HV=1, T=40, V=8, gate=-1.0)
    x.g[:, ::2] = 0.0
    assert_right(run(x, chunk_size=32), oracle(x))


@pytest.mark.parametrize("raw", [False, True])
def test_channels_that_keep_beside_channels_that_forget(raw, device):
    x = small(device, H=1, HV=1, T=40, V=8)
    options = {}
    if raw:  # gate inputs -8 and 8, alternating
        bias = torch.tensor([-8.0, 8.0], device=device).repeat(8)
        rate = torch.ones(1, device=device)
        options = dict(use_gate_in_kernel=True, A_log=rate, dt_bias=bias)
    else:
        x.g[..., :8], x.g[..., 8:] = 0.0, -20.0
    got, want = run(x, **options, chunk_size=32), oracle(x, **options)
    assert_right(got, want)
    for channel in range(16):
        assert rms_error(got[1][:, :, channel].cpu(), want[1][:, :, channel]) < 1e-5


def test_a_reset_forgets_exactly(device):
    x = small(device, B=1, T=20, H=1, HV=1)
    x.g[:, 5] = -INF
    o, state = run(x, chunk_size=16)
    fresh = x._replace(**{n: getattr(x, n)[:, 5:] for n in ("q", "k", "v", "g", "beta")})
    fresh = fresh._replace(initial_state=None)
    o_want, state_want = run(fresh, chunk_size=16)
    assert rms_error(o[:, 5:], o_want) < 1e-6 and rms_error(state, state_want) < 1e-6
    other = run(x._replace(initial_state=10 * x.initial_state), chunk_size=16)
    assert torch.equal(other[0][:, 5:], o[:, 5:]) and torch.equal(other[1], state)
    for reset in (-3.4e38, -1e30, -1e4):
        x.g[:, 5] = reset
        assert_same(run(x, chunk_size=16), (o, state))


def test_decays_near_the_end_of_the_float32_range(device):
    """Factors 2^-126 to 2^-150 may be flushed to zero, but to nothing else."""
    for g in (-87.34, -88.03, -103.28, -103.97):
        x = small(device, T=1, H=1, HV=1, gate=g)
        x = x._replace(initial_state=torch.full_like(x.initial_state, 2.0**100))
        (o, state), (o_want, state_want) = run(x, chunk_size=16), oracle(x)
        assert (o.cpu() - o_want).abs().max() < 1e-5
        assert (state.cpu() - state_want).abs().max() < 1e-5


def test_a_16_bit_gate_is_widened_first(device):
    x = small(device, T=20, H=1, HV=1)
    x = x._replace(g=x.g.bfloat16(), beta=x.beta.bfloat16())
    wide = x._replace(g=x.g.float(), beta=x.beta.float())
    assert_agree(run(x, chunk_size=16), run(wide, chunk_size=16))


def test_a_positive_gate_amplifies(device):
    x = small(device, T=40, H=1, HV=1)
    x = x._replace(g=torch.full_like(x.g, 0.1))
    assert_right(run(x, chunk_size=32), oracle(x))


def test_per_step_gates_are_expected_in_nats(device):
    """Cumulated gates, or decay factors, in their place must show."""
    x = small(device, T=20, H=1, HV=1)
    o, _ = run(x, chunk_size=16)
    for g in (x.g.cumsum(1), -x.g.exp(), x.g / math.log(2)):
        assert rms_error(run(x._replace(g=g), chunk_size=16)[0], o) > 1e-2


# -- keys, write strengths, states ---------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.95, 1.0, 2.0])
def test_nearly_parallel_keys(beta, device):
    x = small(device, H=1, HV=1, T=64, K=32, V=8, gate=-1e-3, beta=beta, keys="correlated")
    assert_right(run(x), oracle(x))


@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
def test_write_strength(beta, device):
    """A read with the key just written gives S^T k + beta (v - S^T k)."""
    x = small(device, T=1, HV=2, H=1, gate="none", beta=beta)
    _, state = run(x, chunk_size=16)
    k = x.k[:, 0].repeat_interleave(2, dim=1)
    read = torch.einsum("bhkv,bhk->bhv", state, k)
    before = torch.einsum("bhkv,bhk->bhv", x.initial_state, k)
    assert rms_error(read, before + beta * (x.v[:, 0] - before)) < 1e-6
    if beta == 0:
        assert torch.equal(state, x.initial_state)


def test_zero_rows_with_the_norm_in_the_kernel(device):
    x = small(device, T=20, H=1, HV=1)
    x.q[:, 3], x.k[:, 4], x.k[:, 19] = 0.0, 0.0, 0.0
    x.k[:, 7] = 1e-20
    options = dict(use_qk_l2norm_in_kernel=True)
    assert_right(run(x, **options, chunk_size=16), oracle(x, **options))


def test_a_state_beyond_the_range_of_float16(device):
    x = small(device, T=20, H=1, HV=1, dtype=fp16, gate=-4.0)
    x.initial_state[0, 0, 0, 0] = 65536.0
    got, want = run(x, chunk_size=16), oracle(x)
    assert got[0].isfinite().all() and got[1].isfinite().all()
    assert_right(got, want)


def test_the_scalar_example(device):
    """Decay first, then the residual: 0.5 + 0.5 (1 - 0.5) = 0.75. The other order gives 0.5."""
    one = torch.ones(1, 1, 1, 1, device=device)
    o, state = chunk_kda(
        one,
        one,
        one,
        (0.5 * one).log(),
        0.5 * one[..., 0],
        scale=1.0,
        initial_state=one,
        output_final_state=True,
    )
    assert abs(o.item() - 0.75) < 1e-6 and abs(state.item() - 0.75) < 1e-6


def test_scale(device):
    x = small(device, T=18, H=1, HV=1)
    o, state = run(x, scale=1, chunk_size=16)
    zero, same_state = run(x, scale=0.0, chunk_size=16)
    assert not zero.any() and torch.equal(state, same_state)
    negative, _ = run(x, scale=-1.0, chunk_size=16)
    assert torch.equal(negative, -o)
    assert rms_error(run(x, chunk_size=16)[0], o * 0.25) < 1e-6
