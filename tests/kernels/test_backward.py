"""The gradients of `chunk_kda` against autograd of the oracle: every option, gate and length."""

import itertools

import pytest
import torch
from backward_cases import (
    LOSSES,
    assert_gradients,
    assert_same_gradients,
    covering_cases,
    gradients,
    oracle_gradients,
)
from cases import NAMES, assert_every_pair, build, small, tokens

from kda_edu import chunk_kda, fused_recurrent_kda
from kda_edu.teach.check import rms_error

fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16
INF = float("inf")

# -- every option, in combination ----------------------------------------------------------------

OPTIONS = dict(
    dtype=(fp32, fp16, bf16),
    chunk_size=(16, 32, 64),
    dims=((16, 24), (20, 9), (8, 5)),
    heads=((1, 1), (1, 2), (2, 2)),
    lengths=(17, 33, (0, 1, 0, 17), (16, 0, 9)),
    index=(torch.int32, torch.int64),
    known=(False, True),  # whether cu_seqlens_cpu is given
    gate=("given", "softplus", "softplus, bias", "bounded", "bounded, bias, no A_log"),
    gate_dtype=(fp32, bf16),
    beta=("given", "sigmoid", "2 sigmoid"),
    l2norm=(False, True),
    scale=(None, 0.3),
    initial_state=(False, True),
    state_v_first=(False, True),
    loss=LOSSES,
    store=(False, True),  # what the sweep made is kept, or made anew
)
CASES = covering_cases(OPTIONS)


def test_the_cases_cover_every_pair_of_options():
    assert_every_pair(CASES, OPTIONS, largest=100)


@pytest.mark.parametrize("case", CASES, ids=[str(i) for i in range(len(CASES))])
def test_options(case, device):
    x, options = build(case | dict(final_state=True), device, B=1)
    del options["output_final_state"]  # the loss decides
    want = oracle_gradients(x, case["loss"], **options)
    options |= dict(chunk_size=case["chunk_size"], disable_recompute=case["store"])
    if x.cu_seqlens is not None and case["known"]:
        options["cu_seqlens_cpu"] = x.cu_seqlens.cpu()
    got = gradients(chunk_kda, x, case["loss"], **options)
    for name, gradient in got.items():
        given = getattr(x, name, None) if hasattr(x, name) else options[name]
        assert gradient.dtype == given.dtype and gradient.shape == given.shape
    assert_gradients(got, want, case["dtype"])


# -- shapes --------------------------------------------------------------------------------------


def in_kernel(device, HV=1, K=16, **more):
    """Norm, gate with parameters, and sigmoid inside the kernels."""
    return dict(
        A_log=torch.linspace(-0.5, 0.5, HV, device=device),
        dt_bias=torch.linspace(-2, 2, HV * K, device=device),
        use_gate_in_kernel=True,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        **more,
    )


def assert_right(x, loss="both", chunk_size=16, **options):
    got = gradients(chunk_kda, x, loss, **options, chunk_size=chunk_size)
    assert_gradients(got, oracle_gradients(x, loss, **options), x.q.dtype)
    return got


@pytest.mark.parametrize("K, V", [(60, 100), (256, 16), (1, 1), (17, 257)])
def test_head_dimensions(K, V, device):
    """Rows in one tile or two, of K for the gate and of V for the rest."""
    x = small(device, T=3, H=1, HV=1, K=K, V=V)
    options = in_kernel(device, K=K)
    if K == 1:  # a norm of one channel leaves a sign: its gradient is nothing but round-off
        options["use_qk_l2norm_in_kernel"] = False
    assert_right(x, **options)


def test_a_batch_of_several_rows(device):
    x = small(device, B=3, T=18, H=1, HV=1)
    assert_right(x, **in_kernel(device))


@pytest.mark.parametrize("T", [1, 2, 15, 16, 48, 63, 65])
def test_any_length(T, device, canary):
    """Inputs lie between guards full of NaN: a row read past the end would show."""
    x = small(device, T=T, H=1, HV=1, V=8)
    got = gradients(chunk_kda, x, copy=canary)
    assert_gradients(got, oracle_gradients(x), fp32)


def test_chunk_sizes_agree(device):
    x = small(device, H=1, HV=1, V=8, cu_seqlens=[0, 2, 35])
    results = [gradients(chunk_kda, x, chunk_size=C) for C in (16, 32, 64)]
    want = oracle_gradients(x)
    for got in results:
        assert_gradients(got, want, fp32)
        for name, gradient in got.items():
            assert rms_error(gradient, results[0][name]) < 3e-6, name


def test_loss_on_the_last_columns_of_several_tiles(device):
    """What is summed over V must be summed over every tile of it."""
    x = small(device, T=18, H=1, HV=1, V=70)
    draw = torch.Generator().manual_seed(3)
    weights = torch.randn(x.v.shape, generator=draw).to(device)
    for part in (slice(64, None), slice(0, 32)):

        def loss(o, state, part=part):
            at_state = state.transpose(2, 3) * weights.to(o)[:, -1, :, :, None]
            return (o * weights.to(o))[..., part].sum() + at_state[:, :, part].sum()

        assert_right(x, loss)


# -- any gate ------------------------------------------------------------------------------------

GATES = [0.0, -1e-6, -1.0, -5.0, -20.0, -100.0, -1e4, -INF, "mixed", "reset", "holes"]


@pytest.mark.parametrize("gate", GATES)
def test_any_gate(gate, device):
    x = small(device, H=1, HV=1, T=36, V=8, gate="random" if gate == "holes" else gate)
    if gate == "holes":
        kind = torch.randint(3, x.g.shape, generator=torch.Generator().manual_seed(1)).to(device)
        x = x._replace(g=torch.where(kind == 0, -INF, torch.where(kind == 1, 0.0, x.g)))
    got = assert_right(x, chunk_size=32)
    assert all(gradient.isfinite().all() for gradient in got.values())


@pytest.mark.parametrize("reset", [-INF, -1e4])
def test_a_reset_stops_every_gradient(reset, device):
    """A loss after it has the gradients of a sequence that starts there, and none before.

    Those of the gates are sums over later tokens, in which what does not concern them cancels.
    """
    x = small(device, T=24, H=1, HV=1, V=8)
    x.g[:, 5] = reset
    got = gradients(chunk_kda, x, lambda o, s: (o[:, 5:] ** 2).sum() + (s**2).sum(), chunk_size=32)
    for name in ("q", "k", "v", "beta"):
        assert not got[name][:, :5].any(), name
    assert got["g"][:, :6].abs().max() < 1e-6 * got["g"].abs().max()
    assert not got["initial_state"].any()
    fresh = tokens(x, slice(5, None))._replace(initial_state=None)
    want = oracle_gradients(fresh, lambda o, s: (o**2).sum() + (s**2).sum())
    rest = {name: got[name][:, 5:] for name in NAMES}
    want["g"][:, 0] = rest["g"][:, 0] = 0.0  # the reset itself, seen above
    assert_gradients(rest, want, fp32)


@pytest.mark.parametrize("lower_bound", [None, -5.0, -200.0])
def test_gates_far_out(lower_bound, device):
    """Gates of -1e4 and -inf times the round-off in their gradients must not reach dA_log."""
    x = small(device, T=20, H=1, HV=2, V=8)
    x = x._replace(g=20 * x.g)
    x.g[:, 3], x.g[:, 7], x.g[:, 9] = 1e4, -1e4, 3e38
    options = in_kernel(device, HV=2, lower_bound=lower_bound)
    if lower_bound != -200.0:
        assert_right(x, **options)
    else:  # the slope of this gate, up to 50, multiplies the round-off of terms near 1 that cancel
        got, want = gradients(chunk_kda, x, **options), oracle_gradients(x, **options)
        for name, terms in (("g", 1), ("dt_bias", 20), ("A_log", 20 * 16)):
            error = (got.pop(name).double().cpu() - want.pop(name)).abs().max()
            assert error < 50 * 2**-21 * terms**0.5, f"d{name}: {error:.1e}"
        assert_gradients(got, want, fp32)
    options["A_log"] = torch.tensor([0.0, 90.0], device=device)  # a rate beyond float32
    got = gradients(chunk_kda, x, **options, chunk_size=32)
    assert all(gradient.isfinite().all() for gradient in got.values())
    assert lower_bound is not None or got["A_log"][1] == 0


@pytest.mark.parametrize("lower_bound", [-5.0, -5.92, -32.0])
def test_gates_near_their_bound(lower_bound, device):
    """15 steps of -5.92 pass 2^128. Bounds below -5 must take the exact path."""
    x = small(device, H=1, HV=1, T=34, V=8)
    x = x._replace(g=torch.full_like(x.g, 4.0))
    options = dict(use_gate_in_kernel=True, lower_bound=lower_bound)
    assert_right(x, chunk_size=32, **options)


@pytest.mark.parametrize("gate, cu", [(-2.0, [0, 60, 61]), (-3.0, [0, 33])])
def test_rows_past_the_end_have_no_gate(gate, cu, device):
    """A row that is not there must not count as decay 0 after 60 steps of -2: exp(120) * 0."""
    x = small(device, H=1, HV=1, V=8, gate=gate, cu_seqlens=cu)
    assert_right(x, chunk_size=64)


def test_strong_gates_beside_none_channel_by_channel(device):
    """What the weak channels contribute must not drown the strong ones."""
    x = small(device, H=1, HV=1, T=36, V=8)
    x.g[..., :4], x.g[..., 4:8], x.g[..., 8:12] = 0.0, -5.0, -20.0
    got, want = gradients(chunk_kda, x, chunk_size=32), oracle_gradients(x)
    for name in ("q", "k", "g"):
        for part in (slice(0, 4), slice(4, 8), slice(8, 12), slice(12, 16)):
            assert rms_error(got[name][..., part].cpu(), want[name][..., part]) < 1e-5, name


def test_late_gates_do_not_see_early_weights(device):
    """Sums over later tokens, made as total minus earlier, would lose the late ones."""
    x = small(device, H=1, HV=1, T=30, V=8)

    def loss(o, state):
        return 1e8 * (o[:, :15] ** 2).sum() + (o[:, 15:] ** 2).sum()

    got, want = (f(x, loss=loss) for f in (chunk_gradients, oracle_gradients))
    for name in NAMES:
        assert rms_error(got[name][:, 16:].cpu(), want[name][:, 16:]) < 1e-5, name


def chunk_gradients(x, loss, **options):
    return gradients(chunk_kda, x, loss, **options, chunk_size=64)


# -- a decay in its place ------------------------------------------------------------------------


def test_from_the_last_chunk_back_into_the_first(device):
    """The loss sees the last chunk alone: every gradient in the first has crossed a state."""
    x = small(device, H=1, HV=1, T=37, V=8, gate=-0.3)

    def loss(o, state):
        return (o[:, 32:] ** 2).sum()

    got, want = gradients(chunk_kda, x, loss, chunk_size=16), oracle_gradients(x, loss)
    for name in NAMES:
        for part in (slice(0, 16), slice(16, 32), slice(32, 37)):
            error = rms_error(got[name][:, part].cpu(), want[name][:, part])
            assert error < 1e-5, f"d{name}[{part.start}:]: {error:.1e}"


@pytest.mark.parametrize("T", [16, 21])
def test_the_last_token_of_a_ragged_chunk(T, device):
    """The gradient of the chunk's whole decay belongs to its last real row."""
    x = small(device, H=1, HV=1, T=T, V=8)
    got = gradients(chunk_kda, x, "final state", chunk_size=16)
    want = oracle_gradients(x, "final state")
    for part in (slice(T - 1, T), slice(T - 4, T)):
        assert rms_error(got["g"][:, part].cpu(), want["g"][:, part]) < 1e-5


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("dtype", [fp16, bf16])
def test_a_gate_before_all_writing_feels_no_rounding(dtype, bounded, device):
    """What a pair of tokens adds to dG at its row it takes away at its column, to the last bits:
    both are made of one rounded number. Otherwise gates before both keep their difference.
    """
    x = small(device, H=1, HV=1, T=64, V=16, dtype=dtype)
    x = x._replace(initial_state=None, g=x.g.float())
    options = in_kernel(device, lower_bound=-5.0) if bounded else {}
    x.k[:, :40], x.v[:, :40] = 0, 0
    got = gradients(chunk_kda, x, "output", chunk_size=64, **options)["g"].float().abs()
    assert got[:, :41].max() < 1e-5 * got[:, 41:].max()


def test_what_follows_the_loss_has_no_gradient(device):
    x = small(device, H=1, HV=1, T=36, V=8)
    for t in (6, 17, 33):
        got = gradients(chunk_kda, x, lambda o, s, t=t: (o[:, : t + 1] ** 2).sum(), chunk_size=32)
        for name in NAMES:
            assert not got[name][:, t + 1 :].any(), name
            assert got[name][:, t].any(), name


def test_an_early_loss_is_that_of_a_shorter_sequence(device):
    x = small(device, H=1, HV=1, T=36, V=8)
    got = gradients(chunk_kda, x, lambda o, s: (o[:, :18] ** 2).sum(), chunk_size=32)
    want = oracle_gradients(tokens(x, slice(0, 18)), lambda o, s: (o**2).sum())
    want = {name: want[name] for name in NAMES}
    assert_gradients({name: got[name][:, :18] for name in NAMES}, want, fp32)


# -- keys, write strengths, states ---------------------------------------------------------------


def test_write_strengths_of_0_1_and_2(device):
    x = small(device, H=1, HV=1, T=20, V=8)
    strength = torch.tensor([0.0, 1.0, 2.0, 0.5], device=device).repeat(5)
    x = x._replace(beta=strength[None, :, None].contiguous())
    got, want = gradients(chunk_kda, x, chunk_size=16), oracle_gradients(x)
    assert_gradients(got, want, fp32)
    for t in range(4):
        assert rms_error(got["beta"][:, t::4].cpu(), want["beta"][:, t::4]) < 1e-5


@pytest.mark.parametrize("beta", [0.95, 2.0])
def test_nearly_parallel_keys(beta, device):
    """Here dg is a difference of terms a hundred times as large."""
    x = small(device, H=1, HV=1, T=40, K=24, V=8, gate=-1e-3, beta=beta, keys="correlated")
    assert_right(x, chunk_size=64)


def test_zero_rows_with_the_norm_in_the_kernel(device):
    """At a zero row the norm's derivative is 1 / sqrt(eps) = 1000, and finite."""
    x = small(device, T=20, H=1, HV=1)
    x.q[:, 3], x.k[:, 4], x.k[:, 19], x.k[:, 7] = 0.0, 0.0, 0.0, 1e-20
    x = x._replace(q=3 * x.q, k=0.5 * x.k)
    options = dict(use_qk_l2norm_in_kernel=True)
    got = gradients(chunk_kda, x, **options, chunk_size=16)
    want = oracle_gradients(x, **options)
    for name, rows in (("q", [3]), ("k", [4, 19, 7])):
        others = [t for t in range(20) if t not in rows]
        for part in (rows, others):
            assert rms_error(got[name][:, part].cpu(), want[name][:, part]) < 1e-5, name


def test_no_state_is_a_state_of_zeros(device):
    x = small(device, T=18, H=1, HV=1)
    zeros = gradients(chunk_kda, x._replace(initial_state=0 * x.initial_state), chunk_size=16)
    none = gradients(chunk_kda, x._replace(initial_state=None), chunk_size=16)
    assert_same_gradients(none, {name: zeros[name] for name in NAMES})


def test_state_layouts_are_transposes(device):
    """K = V, so that a transposed state has the shape of a right one."""
    x = small(device, B=2, T=17, H=1, HV=1, V=16)

    def loss(o, state):
        return (o**2).sum() + (state * torch.arange(16.0, device=device)).sum()

    want = gradients(chunk_kda, x, loss, chunk_size=16)
    flipped = x._replace(initial_state=x.initial_state.transpose(2, 3))
    got = gradients(
        chunk_kda,
        flipped,
        lambda o, s: loss(o, s.transpose(2, 3)),
        state_v_first=True,
        chunk_size=16,
    )
    got["initial_state"] = got["initial_state"].transpose(2, 3)
    assert_same_gradients(got, want)


def test_a_tiny_gradient_of_the_final_state_in_float16(device):
    """2^-25 is zero in float16. With k = 0 the state only decays."""
    x = small(device, T=20, H=1, HV=1, dtype=fp16)
    x = x._replace(q=0 * x.q, k=0 * x.k, v=0 * x.v)
    got = gradients(chunk_kda, x, lambda o, s: s.sum() * 2.0**-25, chunk_size=16)
    want = 2.0**-25 * x.g.double().sum(1).exp()[..., None]
    want = want.expand(x.initial_state.shape)
    assert rms_error(got["initial_state"], want) < 1e-5
    assert rms_error(got["g"][:, 0], x.initial_state.double().sum(-1) * want[..., 0]) < 1e-5


def test_a_state_beyond_the_range_of_float16(device):
    x = small(device, T=20, H=1, HV=1, dtype=fp16, gate=-4.0)
    x.initial_state[0, 0, 0, 0] = 65536.0
    assert_right(x)


def test_scale(device):
    x = small(device, T=18, H=1, HV=1)
    nothing = gradients(chunk_kda, x, "output", scale=0.0, chunk_size=16)
    assert not any(gradient.any() for gradient in nothing.values())
    got = gradients(chunk_kda, x, "both", scale=0.0, chunk_size=16)
    assert_gradients(got, oracle_gradients(x, "final state"), fp32)
    assert_right(x, "output", scale=-1.0)


# -- packed sequences, heads ---------------------------------------------------------------------

LENGTHS = (1, 0, 17, 0)


def packed(device, **changes):
    sizes = dict(H=1, HV=1) | changes
    return small(device, **sizes, cu_seqlens=[0, *itertools.accumulate(LENGTHS)])


@pytest.mark.parametrize("dtype", [fp32, bf16])
def test_packed_equals_separate(dtype, device):
    x = packed(device, dtype=dtype)

    def loss(o, state):
        return (o**2).sum() + (state**2).sum()

    got = gradients(chunk_kda, x, loss, chunk_size=16)
    start = 0
    for n, length in enumerate(LENGTHS):
        part = slice(start, start + length)
        alone = tokens(x, part)._replace(initial_state=x.initial_state[n : n + 1], cu_seqlens=None)
        want = gradients(chunk_kda, alone, loss, chunk_size=16)
        mine = {name: got[name][:, part] for name in NAMES}
        mine["initial_state"] = got["initial_state"][n : n + 1]
        assert_same_gradients(mine, want)
        start += length


def test_the_form_of_cu_seqlens_changes_no_bit(device):
    x = packed(device)
    want = gradients(chunk_kda, x, chunk_size=16)
    host = x.cu_seqlens.cpu()
    wide = x._replace(cu_seqlens=x.cu_seqlens.long())
    for given, known in ((wide, None), (wide, host)):
        got = gradients(chunk_kda, given, cu_seqlens_cpu=known, chunk_size=16)
        assert_same_gradients(got, want)


def test_stored_equals_made_anew(device):
    """In float32 and bfloat16, dense and packed, whether or not the lengths are known."""
    host = torch.tensor([0, 1, 1, 18, 18])
    for x, options in (
        (small(device, T=20, H=1, HV=1, dtype=bf16), {}),
        (packed(device), {}),
        (packed(device), dict(cu_seqlens_cpu=host)),
    ):
        want = gradients(chunk_kda, x, **options, chunk_size=16)
        got = gradients(chunk_kda, x, **options, disable_recompute=True, chunk_size=16)
        assert_same_gradients(got, want)


def test_sequences_and_heads_do_not_mix(device):
    """Changing head 0 of the first sequence changes the gradients there, and no others."""
    x = small(device, H=2, HV=2, V=8, cu_seqlens=[0, 2, 5])

    def loss(o, state):
        return (o**2).sum() + (state**2).sum()

    changed = {name: getattr(x, name).clone() for name in (*NAMES, "initial_state")}
    for name, value in changed.items():
        (value[0, 0] if name == "initial_state" else value[:, :2, 0]).mul_(0.5)
    want = gradients(chunk_kda, x, loss, chunk_size=16)
    got = gradients(chunk_kda, x._replace(**changed), loss, chunk_size=16)
    for name in NAMES:
        a, b = got[name], want[name]
        assert torch.equal(a[:, 2:], b[:, 2:]) and torch.equal(a[:, :, 1], b[:, :, 1]), name
        assert not torch.equal(a[:, :2, 0], b[:, :2, 0]), name
    a, b = got["initial_state"], want["initial_state"]
    assert torch.equal(a[1:], b[1:]) and torch.equal(a[0, 1], b[0, 1])


@pytest.mark.parametrize("H, HV, bounded", [(2, 4, False), (1, 3, True)])
def test_more_value_heads_than_key_heads(H, HV, bounded, device):
    """The gradients of a key head sum over its value heads."""
    x = small(device, T=5 if H == 2 else 17, H=H, HV=HV, V=8)
    repeated = x._replace(**{n: getattr(x, n).repeat_interleave(HV // H, 2) for n in ("q", "k")})
    options = dict(use_qk_l2norm_in_kernel=True, chunk_size=16)
    if bounded:
        options |= dict(use_gate_in_kernel=True, lower_bound=-4.0)
    got, want = (gradients(chunk_kda, y, **options) for y in (x, repeated))
    for name in ("q", "k"):
        want[name] = want[name].unflatten(2, (H, HV // H)).sum(3)
        assert rms_error(got[name], want[name]) < 1e-6
    others = ("v", "g", "beta", "initial_state")
    assert_same_gradients({n: got[n] for n in others}, {n: want[n] for n in others})


# -- the fused recurrence ------------------------------------------------------------------------

RECURRENT = [
    (dict(T=9, H=1, HV=2), {}, "both"),
    (dict(T=20, H=1, HV=1, dtype=bf16), dict(scale=0.3), "slice"),
    (dict(cu_seqlens=[0, 1, 1, 18], H=1, HV=1), dict(state_v_first=True), "final state"),
]


@pytest.mark.parametrize("sizes, options, loss", RECURRENT, ids=["dense", "bf16", "packed"])
@pytest.mark.parametrize("inside", [False, True])
def test_fused_recurrent(sizes, options, loss, inside, device):
    x = small(device, **sizes)
    if options.get("state_v_first"):
        x = x._replace(initial_state=x.initial_state.transpose(2, 3).contiguous())
    if inside:
        x = x._replace(g=20 * x.g + 2, beta=(4 * x.beta - 2))
        options = options | in_kernel(device, HV=x.v.shape[2], allow_neg_eigval=True)
    got = gradients(fused_recurrent_kda, x, loss, **options)
    assert_gradients(got, oracle_gradients(x, loss, **options), x.q.dtype)
