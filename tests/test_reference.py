"""The oracle against itself, against a loop in numpy, and against results known in closed form.

Two algorithms in float64 (token by token, chunk by chunk) must agree to 1e-12 for every gate. What
they share (scale, groups of heads, gates, norm, sigmoid, layouts) is checked by the third opinion,
written in numpy with nothing of the two.
"""

import functools
import math

import numpy as np
import pytest
import torch

from kda_edu.reference import (
    chunk_kda,
    delta_net,
    gated_delta_net,
    kda_gate,
    l2norm,
    linear_attention,
    recurrent_kda,
)
from kda_edu.teach.check import rms_error
from kda_edu.teach.inputs import make_inputs

INF = math.inf
F64 = torch.float64
BOTH = pytest.mark.parametrize("kda", [recurrent_kda, chunk_kda])
T = 70  # one chunk of 64 and a ragged one
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


def numpy_head(q, k, v, g, beta, S):
    """One head, q scaled: q, k, g [T, K], v [T, V], beta [T], S [K, V]."""
    o = np.zeros_like(v)
    for t in range(len(v)):
        S = np.exp(g[t])[:, None] * S
        delta = beta[t] * (v[t] - S.T @ k[t])
        S = S + np.outer(k[t], delta)
        o[t] = S.T @ q[t]
    return o, S


def numpy_kda(x, *, scale=None, cu_seqlens=None, state_v_first=False, **options):
    """(o, final state) as tensors, head by head and sequence by sequence."""
    q, k, v, g, beta = (value.numpy() for value in x[:5])
    (B, length, H, K), (HV, V) = q.shape, v.shape[2:]
    q, k, g, beta = numpy_in_kernel(q, k, g, beta, **options)
    q = q * (1 / math.sqrt(K) if scale is None else scale)
    if cu_seqlens is None:
        pieces = [(b, slice(0, length)) for b in range(B)]
    else:
        ends = cu_seqlens.tolist()
        pieces = [(0, slice(ends[n], ends[n + 1])) for n in range(len(ends) - 1)]
    o, states = np.zeros_like(v), np.zeros((len(pieces), HV, K, V))
    for n, (b, tokens) in enumerate(pieces):
        for h in range(HV):
            S = np.zeros((K, V))
            if x.initial_state is not None:
                S = x.initial_state[n, h].numpy()
                S = S.T if state_v_first else S
            at, at_k = (b, tokens, h), (b, tokens, h // (HV // H))
            o[at], states[n, h] = numpy_head(q[at_k], k[at_k], v[at], g[at], beta[at], S)
    states = states.swapaxes(-1, -2) if state_v_first else states
    return torch.from_numpy(o), torch.from_numpy(states)


def numpy_in_kernel(
    q,
    k,
    g,
    beta,
    *,
    A_log=None,
    dt_bias=None,
    lower_bound=None,
    use_gate_in_kernel=False,
    use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
):
    if use_gate_in_kernel:
        rate = 1.0 if A_log is None else np.exp(A_log.numpy().reshape(-1, 1))
        y = g if dt_bias is None else g + dt_bias.numpy().reshape(g.shape[-2:])
        if lower_bound is None:
            g = -rate * np.where(y > 20, y, np.logaddexp(0, y))
        else:
            g = lower_bound / (1 + np.exp(-rate * y))
    if use_qk_l2norm_in_kernel:
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    if use_beta_sigmoid_in_kernel:
        beta = (2 if allow_neg_eigval else 1) / (1 + np.exp(-beta))
    return q, k, g, beta


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
    cu = options.get("cu_seqlens")
    given = dict(options, **chunk)
    got = run(kda, x._replace(cu_seqlens=None), **given)
    want = numpy_kda(x, **options)
    assert [y.shape for y in got] == [y.shape for y in want]
    assert_close(got, want)
    assert x.g.shape[1] == 0 or cu is not None or rms_error(got[0], torch.zeros_like(got[0])) >= 0


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
