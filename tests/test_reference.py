"""The oracle against itself, against a loop in numpy, and against results known in closed form.

Two algorithms in float64 (token by token, chunk by chunk) must agree to 1e-12 for every gate. What
they share (scale, groups of heads, gates, norm, sigmoid, layouts) is checked by a third opinion,
a loop in numpy. The gates and the norm on their own: test_reference_gate.py.
"""

import functools
import math

import pytest
import torch
from third_opinion import numpy_kda

from kda_edu.reference import (
    chunk_kda,
    delta_net,
    gated_delta_net,
    linear_attention,
    recurrent_kda,
)
from kda_edu.teach.check import rms_error
from kda_edu.teach.inputs import make_inputs

INF = math.inf
F64 = torch.float64
BOTH = pytest.mark.parametrize("kda", [recurrent_kda, chunk_kda])
T = 70  # one chunk of 64 and a ragged one
TOKENS = ("q", "k", "v", "g", "beta")
CHUNK_SIZES = (1, 7, 16, 64, T)
GATES = (0, -1e-6, -1, -5, -20, -100, -1e4, -INF, "mixed", "reset", "holes")


def inputs(gate="random", **sizes):
    """float64 inputs; the gate "holes" has -inf in a third of its entries and 0 in another."""
    sizes = dict(B=2, T=T, H=1, HV=2, K=8, V=6, dtype=F64) | sizes
    if gate != "holes":
        return make_inputs(gate=gate, **sizes)
    x = make_inputs(**sizes)
    kind = torch.randint(3, x.g.shape, generator=torch.Generator().manual_seed(1))
    return x._replace(g=torch.where(kind == 0, -INF, torch.where(kind == 1, 0.0, x.g)))


def run(kda, x, **options):
    """(o, final state)"""
    return kda(**x._asdict() | dict(output_final_state=True) | options)


def with_gradients(kda, x, parameters=None, **options):
    """{name: tensor} of both outputs and of the gradient of every input and parameter."""
    x = x.requires_grad()
    leaves = {n: value for n, value in x._asdict().items() if value is not None}
    for name, value in (parameters or {}).items():
        options[name] = leaves[name] = value.clone().requires_grad_()
    outputs = dict(zip(("o", "final state"), run(kda, x, **options), strict=True))
    draw = torch.Generator().manual_seed(7)
    loss = sum(
        (y * torch.randn(y.shape, generator=draw, dtype=F64)).sum() for y in outputs.values()
    )
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return outputs | {f"d{n}": grad for n, grad in zip(leaves, gradients, strict=True)}


def assert_close(got, want, budget=1e-12):
    """Two {name: tensor}, or two pairs (o, state)."""
    if isinstance(got, tuple):
        got, want = (dict(zip(("o", "final state"), y, strict=True)) for y in (got, want))
    assert got.keys() == want.keys()
    for name in got:
        error = rms_error(got[name], want[name])
        assert error <= budget, f"{name}: error {error:.1e}"


def assert_equal(got, want):
    """Bit for bit."""
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


# -- two algorithms, any gate ------------------------------------------------------------------


@functools.cache
def token_by_token(gate):
    return with_gradients(recurrent_kda, inputs(gate))


@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
@pytest.mark.parametrize("gate", GATES)
def test_the_two_algorithms_agree(gate, chunk_size):
    got = with_gradients(functools.partial(chunk_kda, chunk_size=chunk_size), inputs(gate))
    assert len(got) == 8
    assert_close(got, token_by_token(gate))


def in_kernel_call(lower_bound, **changes):
    """(inputs, parameters, options) of a call where gate, norm and sigmoid are computed inside."""
    x = inputs(**dict(H=2, HV=4) | changes)
    draw = torch.Generator().manual_seed(3)
    raw = 4 * torch.randn(x.g.shape, generator=draw, dtype=F64)
    logits = 2 * torch.randn(x.beta.shape, generator=draw, dtype=F64)
    HV, K = x.g.shape[2:]
    parameters = dict(
        A_log=torch.randn(HV, generator=draw, dtype=F64),
        dt_bias=torch.randn(HV * K, generator=draw, dtype=F64),
    )
    options = dict(
        use_gate_in_kernel=True,
        lower_bound=lower_bound,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=True,
    )
    return x._replace(q=3 * x.q, k=0.01 * x.k, g=raw, beta=logits), parameters, options


@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_the_two_algorithms_agree_on_gate_parameters(lower_bound, chunk_size):
    x, parameters, options = in_kernel_call(lower_bound, B=1)
    want = with_gradients(recurrent_kda, x, parameters, **options)
    got = with_gradients(chunk_kda, x, parameters, **options, chunk_size=chunk_size)
    assert {"dA_log", "ddt_bias"} < got.keys()
    assert_close(got, want)


@BOTH
@pytest.mark.parametrize("options", ["plain", "softplus", "lower bound"])
def test_gradients_are_the_derivative(kda, options):
    """Against finite differences, which know nothing of either algorithm."""
    x, parameters, switches = inputs(B=1, T=3, K=2, V=2), {}, {}
    if options != "plain":
        bound = -5.0 if options == "lower bound" else None
        x, parameters, switches = in_kernel_call(bound, B=1, T=3, H=1, HV=2, K=2, V=2)
        x = x._replace(k=100 * x.k)
    if kda is chunk_kda:
        switches["chunk_size"] = 2
    leaves = {n: value for n, value in x._asdict().items() if value is not None} | parameters
    names = list(leaves)

    def outputs(*values):
        return kda(**dict(zip(names, values, strict=True)), output_final_state=True, **switches)

    values = [value.clone().requires_grad_() for value in leaves.values()]
    assert torch.autograd.gradcheck(outputs, values, atol=1e-7, rtol=1e-6)


# -- a third opinion ---------------------------------------------------------------------------


def case(options=None, in_kernel=None, **sizes):
    """(inputs, options); `in_kernel` names the options to keep of `in_kernel_call`."""
    options = dict(options or {})
    sizes = dict(T=37) | sizes
    cu = options.pop("cu_seqlens", None)
    if in_kernel is None:
        x = inputs(cu_seqlens=cu, **sizes)
    else:
        x, parameters, switches = in_kernel_call(options.get("lower_bound"), cu_seqlens=cu, **sizes)
        options = {n: (parameters | switches)[n] for n in in_kernel.split()} | options
        if "use_gate_in_kernel" not in options:
            x = x._replace(g=inputs(cu_seqlens=cu, **dict(H=2, HV=4) | sizes).g)
        x.q[:, 2], x.k[:, 3] = 0.0, 0.0
    if cu is not None:
        options["cu_seqlens"] = x.cu_seqlens
    if options.get("state_v_first"):
        x = x._replace(initial_state=x.initial_state.transpose(-1, -2).contiguous())
    return x._replace(cu_seqlens=None), options


PACKED = [0, 0, 1, 18, 19, 19, 37, 37]  # empty at both ends and inside, two of length 1
SOFTPLUS = "use_gate_in_kernel A_log"
BETA, NORM = "use_beta_sigmoid_in_kernel", "use_qk_l2norm_in_kernel"
EVERYTHING = f"{SOFTPLUS} dt_bias {BETA} allow_neg_eigval {NORM}"
BOUNDED = dict(lower_bound=-5.0)
CASES = {
    "plain": case(),
    "correlated keys": case(keys="correlated"),
    "unstable: beta 2, correlated keys": case(keys="correlated", beta=2.0),
    "scale 0.3": case(dict(scale=0.3)),
    "scale 2": case(dict(scale=2)),
    "scale 0": case(dict(scale=0.0)),
    "scale negative": case(dict(scale=-0.7)),
    "no state": case(initial_state=False),
    "state_v_first": case(dict(state_v_first=True)),
    "H 2, HV 2": case(H=2, HV=2),
    "H 2, HV 6": case(H=2, HV=6),
    "H 1, HV 3": case(H=1, HV=3),
    "K 1, V 1": case(K=1, V=1),
    "one token": case(T=1),
    "no token": case(T=0),
    "packed": case(dict(cu_seqlens=PACKED)),
    "packed, no state": case(dict(cu_seqlens=PACKED), initial_state=False),
    "packed, no token": case(dict(cu_seqlens=[0, 0, 0])),
    "packed, H 2, HV 4, state_v_first": case(
        dict(cu_seqlens=PACKED, state_v_first=True), H=2, HV=4
    ),
    "softplus gate": case(in_kernel=SOFTPLUS),
    "softplus gate, bias": case(in_kernel=f"{SOFTPLUS} dt_bias"),
    "lower bound": case(BOUNDED, in_kernel=SOFTPLUS),
    "lower bound, bias": case(BOUNDED, in_kernel=f"{SOFTPLUS} dt_bias"),
    "lower bound, no A_log": case(dict(lower_bound=-0.5), in_kernel="use_gate_in_kernel dt_bias"),
    "norm": case(in_kernel=f"{NORM} {BETA}"),
    "sigmoid": case(in_kernel=BETA),
    "negative eigenvalues": case(in_kernel=f"{BETA} allow_neg_eigval"),
    "everything": case(dict(scale=0.5), in_kernel=EVERYTHING),
    "everything, lower bound, packed": case(
        dict(cu_seqlens=PACKED, state_v_first=True, **BOUNDED), in_kernel=EVERYTHING
    ),
}


@BOTH
@pytest.mark.parametrize("name", CASES)
def test_every_option_against_numpy(kda, name):
    x, options = CASES[name]
    chunk = dict(chunk_size=16) if kda is chunk_kda else {}
    got = run(kda, x, **options, **chunk)
    want = numpy_kda(x, **options)
    assert [y.shape for y in got] == [y.shape for y in want]
    assert_close(got, want)


@BOTH
def test_no_final_state_unless_asked_for(kda):
    x, _ = CASES["plain"]
    o, state = run(kda, x, output_final_state=False)
    assert state is None and torch.equal(o, run(kda, x)[0])


@BOTH
def test_a_final_state_is_never_the_callers_tensor(kda):
    for name in ("no token", "packed, no token", "plain"):
        x, options = CASES[name]
        _, state = run(kda, x, **options)
        if name != "plain":
            assert torch.equal(state, x.initial_state)
        assert state.data_ptr() != x.initial_state.data_ptr() and state.is_contiguous()


# -- known results -----------------------------------------------------------------------------


def column(*values):
    """One token or more of one head and one channel: [1, T, 1, 1]."""
    return torch.tensor(values, dtype=F64).reshape(1, -1, 1, 1)


@BOTH
def test_decay_comes_before_erase(kda):
    """S = 1, decay 0.5, k = v = 1, beta = 0.5: 0.75. With the erase first it would be 0.5."""
    one, beta = column(1.0), column(0.5)[..., 0]
    o, state = kda(
        one,
        one,
        one,
        column(math.log(0.5)),
        beta,
        initial_state=one,
        output_final_state=True,
        scale=1.0,
    )
    assert o.item() == pytest.approx(0.75, rel=1e-15) and o.item() == state.item()


@BOTH
@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
def test_a_write_keeps_replaces_or_reflects(kda, beta):
    """What the key reads after the write: what it read before, v, or 2 v minus what it read."""
    x = inputs(gate="none", beta=beta, T=1, H=2, HV=2)
    x = x._replace(q=x.k)
    o, state = run(kda, x, scale=1.0)
    before = torch.einsum("bthk,bhkv->bthv", x.k, x.initial_state)
    want = {0.0: before, 1.0: x.v, 2.0: 2 * x.v - before}[beta]
    assert rms_error(o, want) <= 1e-13
    assert rms_error(torch.einsum("bthk,bhkv->bthv", x.k, state), want) <= 1e-13
    if beta == 0.0:
        assert torch.equal(state, x.initial_state)
    d_beta = with_gradients(kda, x)["dbeta"]
    assert d_beta.abs().min() > 1e-3


@BOTH
@pytest.mark.parametrize("reset", [0, 5, 16, 36])
def test_an_infinite_gate_is_a_fresh_start(kda, reset):
    x = inputs(T=37, H=2, HV=4)
    x.g[:, reset] = -INF
    o, state = run(kda, x)
    after = x._replace(**{n: value[:, reset:] for n, value in x._asdict().items() if n in TOKENS})
    fresh = run(kda, after._replace(initial_state=None))
    assert_close((o[:, reset:], state), fresh, 0 if kda is recurrent_kda else 1e-13)
    for strong in (-1e4, -1e30, -1.7e308):
        x.g[:, reset] = strong
        assert_equal(run(kda, x), (o, state))


@BOTH
def test_nothing_flows_back_through_an_infinite_gate(kda):
    """Gradients of what came before are exactly zero, and none is NaN."""
    x = inputs(T=20).requires_grad()
    x.g.data[:, 9] = -INF
    o, state = run(kda, x)
    gradients = torch.autograd.grad(o[:, 9:].sum() + state.sum(), x[:6])
    for name, gradient in zip(TOKENS, gradients, strict=False):
        assert not gradient[:, :9].any(), name
    assert not gradients[5].any() and not gradients[3][:, 9].any()
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert all(gradient[:, 10:].any() for gradient in gradients[:5])


def masked_product(q, k, v, S, scale):
    """Linear attention as one causal matrix product. One head, no decay."""
    return scale * (torch.tril(q @ k.T) @ v + q @ S)


def test_linear_attention_is_a_masked_product():
    x = inputs(T=37, H=2, HV=4)
    o, state = linear_attention(
        x.q, x.k, x.v, initial_state=x.initial_state, output_final_state=True
    )
    for b in range(2):
        for h in range(4):
            q, k, v, _, _, S = x.head(b, h)
            assert rms_error(o[b, :, h], masked_product(q, k, v, S, 8**-0.5)) <= 1e-13
            assert rms_error(state[b, h], S + k.T @ v) <= 1e-13
    halved, nothing = linear_attention(x.q, x.k, x.v, scale=0.5)
    q, k, v = x.head(1, 3)[:3]
    assert nothing is None
    assert rms_error(halved[1, :, 3], masked_product(q, k, v, 0 * S, 0.5)) <= 1e-13


@pytest.mark.parametrize("gate", ["random", -INF, "holes"])
def test_gated_linear_attention_decays_then_adds(gate):
    x = inputs(gate, T=11, H=1, HV=2)
    o, state = linear_attention(
        x.q, x.k, x.v, g=x.g, initial_state=x.initial_state, output_final_state=True
    )
    q, k, v, g, _, S = x.head(1, 1)
    for t in range(11):
        S = torch.diag(g[t].exp()) @ S + torch.outer(k[t], v[t])
        assert rms_error(o[1, t, 1], S.T @ q[t] * 8**-0.5) <= 1e-13
    assert rms_error(state[1, 1], S) <= 1e-13


@pytest.mark.parametrize("decayed", [False, True])
def test_delta_rules_are_products_of_matrices(decayed):
    """S <- exp(g) (I - beta k k^T) S + beta k v^T: DeltaNet without g, Gated DeltaNet with it."""
    x = inputs(T=11, H=1, HV=2)
    options = dict(initial_state=x.initial_state, output_final_state=True)
    one_g = x.g[..., 0]
    if decayed:
        o, state = gated_delta_net(x.q, x.k, x.v, one_g, x.beta, **options)
        g = one_g[..., None].expand_as(x.g)
    else:
        o, state = delta_net(x.q, x.k, x.v, x.beta, **options)
        g = torch.zeros_like(x.g)
    assert_equal((o, state), run(recurrent_kda, x._replace(g=g)))
    q, k, v, g, beta, S = x._replace(g=g).head(1, 1)
    for t in range(11):
        step = g[t, 0].exp() * (torch.eye(8, dtype=F64) - beta[t] * torch.outer(k[t], k[t]))
        S = step @ S + beta[t] * torch.outer(k[t], v[t])
        assert rms_error(o[1, t, 1], S.T @ q[t] * 8**-0.5) <= 1e-13
    assert rms_error(state[1, 1], S) <= 1e-13


def test_the_special_cases_take_the_options():
    x = inputs(H=2, HV=4, cu_seqlens=PACKED)
    options = dict(cu_seqlens=x.cu_seqlens, scale=0.3, use_qk_l2norm_in_kernel=True)
    start = dict(initial_state=x.initial_state, output_final_state=True)
    for got, g in (
        (delta_net(x.q, x.k, x.v, x.beta, **options, **start), torch.zeros_like(x.g)),
        (
            gated_delta_net(x.q, x.k, x.v, x.g[..., 3], x.beta, **options, **start),
            x.g[..., 3:4].expand_as(x.g),
        ),
    ):
        assert_close(got, numpy_kda(x._replace(g=g), **options))


# -- one result, however it is asked for -------------------------------------------------------


@BOTH
def test_the_group_of_a_value_head(kda):
    """Value head h reads key head h // (HV / H); a gradient of a key head is that of its group."""
    x = inputs(T=20, H=2, HV=4, initial_state=False)
    repeated = x._replace(q=x.q.repeat_interleave(2, 2), k=x.k.repeat_interleave(2, 2))
    tiled = x._replace(q=x.q.repeat(1, 1, 2, 1), k=x.k.repeat(1, 1, 2, 1))
    assert_equal(run(kda, x), run(kda, repeated))
    assert rms_error(run(kda, x)[0], run(kda, tiled)[0]) > 0.5
    got, want = with_gradients(kda, x), with_gradients(kda, repeated)
    for name in ("dq", "dk"):
        assert rms_error(got[name], want[name].unflatten(2, (2, 2)).sum(3)) <= 1e-13


@BOTH
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_packed_sequences_are_separate_calls(kda, index):
    x = inputs(cu_seqlens=PACKED, H=2, HV=4)
    o, states = run(kda, x._replace(cu_seqlens=x.cu_seqlens.to(index)))
    for n, (start, end) in enumerate(zip(PACKED, PACKED[1:], strict=False)):
        alone = {name: getattr(x, name)[:, start:end] for name in TOKENS}
        alone["initial_state"] = x.initial_state[n : n + 1]
        got = kda(**alone, output_final_state=True)
        assert_close((o[:, start:end], states[n : n + 1]), got, 1e-13)


@BOTH
@pytest.mark.parametrize("cut", [0, 1, 16, 33, 37])
def test_the_final_state_is_the_next_initial_state(kda, cut):
    x = inputs(T=37, H=2, HV=4)
    first = x._replace(**{name: getattr(x, name)[:, :cut] for name in TOKENS})
    second = x._replace(**{name: getattr(x, name)[:, cut:] for name in TOKENS})
    o_1, state = run(kda, first)
    o_2, state = run(kda, second._replace(initial_state=state))
    budget = 0 if kda is recurrent_kda else 1e-13
    assert_close((torch.cat([o_1, o_2], 1), state), run(kda, x), budget)


@BOTH
@pytest.mark.parametrize("last", [0, 15, 16, 30])
def test_causality_is_exact(kda, last):
    """What follows a token changes no bit at or before it."""
    x, other = inputs(T=37, H=2, HV=4), inputs("reset", T=37, H=2, HV=4, seed=1)
    options = dict(chunk_size=16) if kda is chunk_kda else {}
    mixed = {
        name: torch.cat([getattr(x, name)[:, : last + 1], getattr(other, name)[:, last + 1 :]], 1)
        for name in TOKENS
    }
    want, got = (run(kda, y, **options)[0] for y in (x, x._replace(**mixed)))
    assert torch.equal(got[:, : last + 1], want[:, : last + 1])
    assert not torch.equal(got[:, last + 1], want[:, last + 1])


@BOTH
def test_scale_multiplies_the_read_alone(kda):
    x = inputs(T=37)
    o, state = run(kda, x, scale=1.0)
    assert_equal(run(kda, x, scale=-1.0), (-o, state))
    assert_equal(run(kda, x, scale=1), (o, state))
    nothing, same = run(kda, x, scale=0.0)
    assert not nothing.any() and torch.equal(same, state)
    assert_close(run(kda, x), (o * 8**-0.5, state), 1e-13)


@BOTH
def test_inputs_are_not_modified(kda):
    x, parameters, options = in_kernel_call(-5.0, T=20)
    given = [value.clone() for value in (*x[:6], *parameters.values())]
    run(kda, x, **parameters, **options)
    assert_equal((*x[:6], *parameters.values()), given)


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_is_rounded_only_at_the_end(kda, dtype):
    x = make_inputs(T=37, HV=4, K=8, V=6, dtype=dtype)
    o, state = run(kda, x)
    o_wide, state_wide = run(kda, x.to(torch.float32))
    assert o_wide.dtype == state_wide.dtype == torch.float32
    assert_equal((o, state), (o_wide.to(dtype), state_wide))
    assert_close((o_wide, state_wide), numpy_kda(x.double()), 1e-6)
