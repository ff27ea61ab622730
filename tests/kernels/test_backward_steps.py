"""Each step of the backward against its formula in float64, or autograd of the forward's formula.

As in test_chunk_steps.py the inputs are random and already rounded; what earlier steps would hand
over is drawn too, so that no step leans on another.
"""

import math

import pytest
import torch
from cases import assert_same
from test_chunk_steps import LAYOUTS, LENGTHS, cumulated, lower, sample

from kda_edu import recompute_w_u_fwd, reference
from kda_edu.kernels.backward_gate import chunk_kda_bwd_gate
from kda_edu.kernels.backward_qk import chunk_kda_bwd_dqk
from kda_edu.kernels.backward_scores import chunk_kda_bwd_dA
from kda_edu.kernels.backward_state import chunk_kda_bwd_dhu
from kda_edu.kernels.sequences import chunk_layout
from kda_edu.teach.check import rms_error

fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16


def drawn(*shape, dtype=fp32, device="cpu", seed=5):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def halves(G, device):
    """A float64 G as the kernels keep it: multiples of 2^-10, and the rest, which must count."""
    upper = (G * 1024).round() / 1024
    return upper.float().to(device), (G - upper).float().to(device)


def layout_of(x, spans, known=True):
    cu = None if spans.cu is None else spans.cu.to(x.q.device)
    return chunk_layout(*x.q.shape[:2], spans.C, cu, spans.cu if known else None)


def wide(*tensors):
    return [x.double().cpu() for x in tensors]


# -- 0: the queries decayed from the start of their chunk ------------------------------------------


@pytest.mark.parametrize("norm", [False, True])
def test_decayed_queries(norm, device):
    x, spans = sample(16, device, packed=True, H=1, HV=2)
    G = cumulated(x.g, spans)
    upper, residual = halves(G, device)
    A_inv = lower(x.beta.shape, spans, device)
    rstd = torch.linspace(0.5, 2, x.q.shape[1], device=device).reshape(1, -1, 1) if norm else None
    options = dict(G_residual=residual, k_rstd=rstd, **spans.options(device))
    arguments = (x.k, x.v, x.beta, A_inv, upper)
    *same, qg = recompute_w_u_fwd(*arguments, q=x.q, q_rstd=rstd, scale=0.3, **options)
    assert_same(same, recompute_w_u_fwd(*arguments, **options), ("w", "u", "kg"))
    q = x.q.double() * (1 if rstd is None else rstd[..., None])
    want = 0.3 * q.cpu().repeat_interleave(2, 2) * G.exp2()
    assert qg.dtype == fp32 and rms_error(qg.cpu(), want) < 1e-6


# -- 1: the reverse scan ---------------------------------------------------------------------------


def reverse_scan(qg, kg, w, do, A_qk, G, dS, spans):
    """(dS after each chunk [NT, HV, K, V], dv', dS of each initial state)."""
    qg, kg, w, do, A_qk, G, dS = wide(qg, kg, w, do, A_qk, G, dS)
    dS, dv, after = dS.clone(), torch.zeros_like(do), []
    for b, n, s, e in reversed(spans):
        after.insert(0, dS[n].clone())
        dv[b, s:e] = torch.einsum("ihj,ihv->jhv", A_qk[b, s:e, :, : e - s], do[b, s:e])
        dv[b, s:e] += torch.einsum("thk,hkv->thv", kg[b, s:e], dS[n])
        dS[n] *= G[b, e - 1].exp2()[..., None]
        dS[n] += torch.einsum("thk,thv->hkv", qg[b, s:e], do[b, s:e])
        dS[n] -= torch.einsum("thk,thv->hkv", w[b, s:e], dv[b, s:e])
    return torch.stack(after), dv, dS


def scan_inputs(C, packed, device, dtype=fp32, **sizes):
    x, spans = sample(C, device, packed, **dict(V=33) | sizes)
    B, T, HV, K = x.g.shape
    qg, kg, w = (drawn(B, T, HV, K, dtype=dtype, device=device, seed=n) / 8 for n in range(3))
    do = drawn(B, T, HV, x.v.shape[-1], dtype=dtype, device=device)
    A_qk = lower(x.beta.shape, spans, device)
    d_state = drawn(*x.initial_state.shape, device=device)
    return x, spans, (qg, kg, w, do, A_qk), cumulated(x.g, spans), d_state


@pytest.mark.parametrize("state_v_first", [False, True])
@LAYOUTS
def test_reverse_scan(C, packed, state_v_first, device):
    x, spans, tensors, G, d_state = scan_inputs(C, packed, device)
    upper, residual = halves(G, device)
    dh, dv, d_initial = chunk_kda_bwd_dhu(
        *tensors,
        upper,
        layout_of(x, spans, known=state_v_first),
        G_residual=residual,
        d_final_state=d_state.transpose(2, 3) if state_v_first else d_state,
        output_d_initial_state=True,
        state_v_first=state_v_first,
    )
    dh_want, dv_want, d_initial_want = reverse_scan(*tensors, G, d_state, spans)
    dh = dh.flatten(0, 1)[: len(spans)].transpose(2, 3)
    assert dh.dtype == dv.dtype == d_initial.dtype == fp32
    assert rms_error(dh.cpu(), dh_want) < 1e-6 and rms_error(dv.cpu(), dv_want) < 1e-6
    d_initial = d_initial.transpose(2, 3) if state_v_first else d_initial
    assert rms_error(d_initial.cpu(), d_initial_want) < 1e-6
    if packed:  # an empty sequence hands it through
        for n, length in enumerate(LENGTHS):
            assert torch.equal(d_initial[n], d_state[n]) == (length == 0)


def test_reverse_scan_from_nothing(device):
    """No gradient of the final state means zeros, and none of the initial one is made unasked."""
    x, spans, tensors, G, d_state = scan_inputs(32, False, device)
    arguments = (*tensors, G.float().to(device), layout_of(x, spans))
    zeros = chunk_kda_bwd_dhu(*arguments, d_final_state=0 * d_state)
    none = chunk_kda_bwd_dhu(*arguments)
    assert_same(none[:2], zeros[:2], ("dh", "dv"))
    assert none[2] is None
    assert rms_error(none[1].cpu(), reverse_scan(*tensors, G, 0 * d_state, spans)[1]) < 1e-6


@pytest.mark.parametrize("dtype, kept", [(bf16, bf16), (fp16, fp32)])
def test_reverse_scan_of_16_bit_inputs(dtype, kept, device):
    """Gradients of states are not bounded by their inputs: float16 could overflow."""
    x, spans, tensors, G, d_state = scan_inputs(32, False, device, dtype)
    far = 1e6 if dtype == fp16 else 1
    dh, dv, d_initial = chunk_kda_bwd_dhu(
        *tensors,
        G.float().to(device),
        layout_of(x, spans),
        d_final_state=far * d_state,
        output_d_initial_state=True,
    )
    want = reverse_scan(*tensors, G, far * d_state, spans)
    assert dh.dtype == dv.dtype == kept and d_initial.dtype == fp32
    for a, b in zip((dh.flatten(0, 1).transpose(2, 3), dv, d_initial), want, strict=True):
        assert rms_error(a.cpu(), b) < (6e-3 if dtype == bf16 else 6e-4)  # bfloat16, tf32 factors


# -- 2: through the triangular inverse -------------------------------------------------------------


def through_the_inverse(A_inv, v_new, do, v, beta, dv_new, spans):
    A_inv, v_new, do, v, beta, dv_new = wide(A_inv, v_new, do, v, beta, dv_new)
    dr, dA_kk = torch.zeros_like(v), torch.zeros_like(A_inv)
    dA_qk = torch.zeros_like(A_inv)
    for b, _, s, e in spans:
        n = e - s
        dr[b, s:e] = torch.einsum("ihj,ihv->jhv", A_inv[b, s:e, :, :n], dv_new[b, s:e])
        row, column = torch.arange(n)[:, None, None], torch.arange(n)
        products = torch.einsum("ihv,jhv->ihj", dr[b, s:e], v_new[b, s:e])
        dA_kk[b, s:e, :, :n] = -products * (row > column)
        products = torch.einsum("ihv,jhv->ihj", do[b, s:e], v_new[b, s:e])
        dA_qk[b, s:e, :, :n] = products * (row >= column)
    return dr, beta[..., None] * dr, dA_kk, dA_qk, (dr * v).sum(-1)


@pytest.mark.parametrize("dtype, budget", [(fp32, 1e-6), (bf16, 6e-3)])
@LAYOUTS
def test_through_the_inverse(C, packed, dtype, budget, device):
    x, spans = sample(C, device, packed, V=70, dtype=dtype)
    v_new, do, dv_new = (drawn(*x.v.shape, dtype=dtype, device=device, seed=n) for n in range(3))
    A_inv = lower(x.beta.shape, spans, device).to(dtype)
    logits = 4 * x.beta - 2
    options = dict(use_beta_sigmoid=True, allow_neg_eigval=packed) if C == 32 or not packed else {}
    beta = logits.double().sigmoid() * (2 if packed else 1) if options else x.beta
    got = chunk_kda_bwd_dA(
        A_inv, v_new, do, x.v, logits if options else x.beta, dv_new, layout_of(x, spans), **options
    )
    want = through_the_inverse(A_inv, v_new, do, x.v, beta, dv_new, spans)
    for name, a, b in zip(("dr", "dv", "dA_kk", "dA_qk", "dbeta"), got, want, strict=True):
        assert rms_error(a.cpu(), b) < budget, name
    assert got[0].dtype == got[1].dtype == dtype
    assert got[2].dtype == got[3].dtype == got[4].dtype == fp32
    for A, A_want in zip(got[2:4], want[2:4], strict=True):  # what must be zero is written
        assert not A.cpu()[A_want == 0].any()


# -- 3: the decay inside the products --------------------------------------------------------------


def chunk_products(q, k, g, beta, do, dr, v_new, S, dS, dA_qk, dA_kk, scale, spans):
    """A scalar whose gradients are those of step 3: each given gradient times what it belongs to.

    The decays are exponentials of sums of gates. dr meets only that part of r = beta (v - 2^G k S)
    in which q, k and the gate occur.
    """
    total = 0.0
    for (b, _, s, e), before, after in zip(spans, S, dS, strict=True):
        q_c, k_c, g_c, beta_c = q[b, s:e], k[b, s:e], g[b, s:e], beta[b, s:e]
        G = g_c.cumsum(0)
        read = torch.einsum("thk,hkv->thv", scale * G.exp() * q_c, before)
        erased = torch.einsum("thk,hkv->thv", G.exp() * k_c, before)
        n = e - s
        later = torch.arange(n)[:, None] > torch.arange(n)
        sums = torch.where(later[:, :, None, None], g_c[:, None], 0.0).cumsum(0)  # [i, j, h, k]
        decay = torch.where((later | later.logical_not().tril())[:, :, None, None], sums, 0.0).exp()
        written = torch.einsum("thk,thv->hkv", decay[-1] * k_c, v_new[b, s:e])
        A_qk = scale * torch.einsum("ihk,jhk,ijhk->ihj", q_c, k_c, decay)
        A_kk = beta_c[..., None] * torch.einsum("ihk,jhk,ijhk->ihj", k_c, k_c, decay)
        total = total + (do[b, s:e] * read).sum() - (dr[b, s:e] * beta_c[..., None] * erased).sum()
        total = total + (after * (written + G[-1].exp()[..., None] * before)).sum()
        total = total + (dA_qk[b, s:e, :, :n] * A_qk).sum() + (dA_kk[b, s:e, :, :n] * A_kk).sum()
    return total


def step_3(x, spans, device, options, bounded, residual, scale=0.3):
    """(what the kernel gives, what autograd of `chunk_products` gives)."""
    V, HV = x.v.shape[-1], x.v.shape[2]
    do, dr, v_new = (drawn(*x.v.shape, device=device, seed=n) for n in range(3))
    dA_qk, dA_kk = (lower(x.beta.shape, spans, device) * n for n in (1.0, -2.0))
    for b, _, s, e in spans:  # strictly lower
        o = torch.arange(e - s)
        dA_kk[b, s:e][o, :, o] = 0.0
    dbeta_v = drawn(*x.beta.shape, device=device, seed=4)
    S, dS = (drawn(len(spans), HV, x.q.shape[-1], V, device=device, seed=n) for n in (7, 8))
    layout = layout_of(x, spans)
    rows = (layout.rows, layout.NT, HV, V, -1)
    G = cumulated(x.g, spans)
    upper, rest = halves(G, device) if residual else (G.float().to(device), None)
    norm, sigmoid, doubled = options
    q_rstd = (x.q.square().sum(-1) + 1e-6).rsqrt() if norm else None
    k_rstd = (x.k.square().sum(-1) + 1e-6).rsqrt() if norm else None
    h, dh = (y.transpose(2, 3).reshape(rows).contiguous() for y in (S, dS))
    got = chunk_kda_bwd_dqk(
        x.q, x.k, upper, x.beta, do, dr, v_new, h, dh, dA_qk, dA_kk, dbeta_v, layout, scale,
        G_residual=rest, q_rstd=q_rstd, k_rstd=k_rstd, bounded=bounded,
        use_beta_sigmoid=sigmoid, allow_neg_eigval=doubled,
    )  # fmt: skip

    leaves = [y.requires_grad_() for y in wide(x.q, x.k, x.g, x.beta)]
    q, k, g, beta = leaves
    if norm:
        q, k = reference.l2norm(q), reference.l2norm(k)
    if sigmoid:
        beta = beta.sigmoid() * (2 if doubled else 1)
    given = wide(do, dr, v_new, S, dS, dA_qk, dA_kk)
    q, k = (y.repeat_interleave(HV // q.shape[2], 2) for y in (q, k))
    total = chunk_products(q, k, g, beta, *given, scale, spans)
    total = total + (beta * dbeta_v.double().cpu()).sum()
    return got, torch.autograd.grad(total, leaves)


def assert_step_3(got, want, spans, budget=1e-6):
    dq, dk, dG, dG_end, dbeta = got
    dg = torch.full(dG.shape, float("nan"), dtype=torch.float64)
    parts = dG_end.flatten(0, 1).double().cpu()
    for (b, _, s, e), part in zip(spans, parts, strict=False):
        ends = part[:, : -(-(e - s) // 16)].sum(1)  # one part per block of 16 rows that exists
        dg[b, s:e] = dG[b, s:e].double().cpu().flip(0).cumsum(0).flip(0) + ends
    for name, a, b in zip(("dq", "dk", "dg", "dbeta"), (dq, dk, dg, dbeta), want, strict=True):
        assert rms_error(a.cpu(), b) < budget, name


OPTIONS = pytest.mark.parametrize(
    "norm, sigmoid, doubled",
    [(False, False, False), (True, False, False), (False, True, False), (True, True, True)],
)


@pytest.mark.parametrize("bounded", [False, True])
@LAYOUTS
def test_products(C, packed, bounded, device):
    x, spans = sample(C, device, packed)
    got, want = step_3(x, spans, device, (False, False, False), bounded, residual=not bounded)
    assert_step_3(got, want, spans)


@OPTIONS
def test_products_with_norm_and_sigmoid(norm, sigmoid, doubled, device):
    """Two key heads for four value heads."""
    x, spans = sample(32, device, T=20, H=2, HV=4)
    x = x._replace(q=3 * x.q, k=0.5 * x.k, beta=4 * x.beta - 2 if sigmoid else x.beta)
    got, want = step_3(x, spans, device, (norm, sigmoid, doubled), bounded=True, residual=False)
    assert_step_3(got, want, spans)


@pytest.mark.parametrize("gate", [0.0, -5.0, -20.0, -1e4, "mixed", "reset"])
def test_products_with_any_gate(gate, device):
    x, spans = sample(64, device, T=37, HV=1, gate=gate)
    got, want = step_3(x, spans, device, (False, False, False), bounded=False, residual=True)
    assert_step_3(got, want, spans)
    if gate in (0.0, -5.0):  # one reference row per block serves these
        got, _ = step_3(x, spans, device, (False, False, False), bounded=True, residual=False)
        assert_step_3(got, want, spans, 1e-5)


# -- 4: the gate -----------------------------------------------------------------------------------


def gate_inputs(spans, shape, device):
    """dG and dG_end, NaN where no row or block is, and the gradient of g that they make."""
    dG = torch.full(shape, float("nan"))
    B, T, HV, K = shape
    NT = len(spans) // B if spans.cu is None else len(spans)
    rows = B if spans.cu is None else 1
    dG_end = torch.full((rows * NT, HV, spans.C // 16, K), float("nan"))
    dg = torch.zeros(shape, dtype=torch.float64)
    for i, (b, _, s, e) in enumerate(spans):
        dG[b, s:e] = drawn(e - s, HV, K, seed=i)
        blocks = -(-(e - s) // 16)
        dG_end[i, :, :blocks] = drawn(HV, blocks, K, seed=100 + i)
        dg[b, s:e] = dG[b, s:e].double().flip(0).cumsum(0).flip(0)
        dg[b, s:e] += dG_end[i, :, :blocks].double().sum(1)
    return dG.to(device), dG_end.reshape(rows, NT, HV, spans.C // 16, K).to(device), dg


@pytest.mark.parametrize("dtype", [fp32, bf16])
@LAYOUTS
def test_given_gates(C, packed, dtype, device):
    x, spans = sample(C, device, packed, K=70)
    dG, dG_end, want = gate_inputs(spans, x.g.shape, device)
    g = x.g.to(dtype)
    dg, dA_log, d_bias = chunk_kda_bwd_gate(dG, dG_end, g, C, layout_of(x, spans))
    assert dA_log is None and d_bias is None and dg.dtype == dtype
    assert rms_error(dg.cpu(), want) < (1e-6 if dtype == fp32 else 2**-8)


def test_a_sum_over_later_rows_has_no_cancellation(device):
    """1e8 in the first 32 rows, 1 in the last 32, whose sums are 32, 31, ..., 1."""
    dG = torch.tensor([1e8] * 32 + [1.0] * 32, device=device).reshape(1, 64, 1, 1)
    dG_end = torch.zeros(1, 1, 1, 4, 1, device=device)
    dg, *_ = chunk_kda_bwd_gate(dG, dG_end, torch.zeros_like(dG), 64, chunk_layout(1, 64, 64))
    assert dg[0, 32:, 0, 0].tolist() == list(range(32, 0, -1))


@pytest.mark.parametrize(
    "bias, A_log, lower_bound",
    [(True, True, None), (False, True, None), (True, True, -5.0), (True, False, -3.0)],
)
@pytest.mark.parametrize("packed", [False, True])
def test_gates_in_the_kernel(bias, A_log, lower_bound, packed, device):
    x, spans = sample(32, device, packed, B=2, K=70)
    HV, K = x.g.shape[2:]
    dG, dG_end, dg = gate_inputs(spans, x.g.shape, device)
    raw = 20 * x.g + 4
    options = dict(
        A_log=torch.linspace(-1, 1, HV, device=device)[None] if A_log else None,
        dt_bias=torch.linspace(-2, 2, HV * K, device=device).reshape(HV, K) if bias else None,
    )
    layout = layout_of(x, spans)
    got = chunk_kda_bwd_gate(
        dG, dG_end, raw, 32, layout, use_gate=True, lower_bound=lower_bound, **options
    )
    leaves = {n: y.double().cpu().requires_grad_() for n, y in options.items() if y is not None}
    wide_raw = raw.double().cpu().requires_grad_()
    gate = reference.kda_gate(
        wide_raw, **{n: y.flatten() for n, y in leaves.items()}, lower_bound=lower_bound
    )
    want = torch.autograd.grad((gate * dg).sum(), [wide_raw, *leaves.values()])
    want = dict(zip(("raw", *leaves), want, strict=True))
    for name, gradient in zip(("raw", "A_log", "dt_bias"), got, strict=True):
        assert (gradient is None) == (name not in want), name
        if gradient is not None:
            assert gradient.shape == want[name].shape
            assert rms_error(gradient.cpu(), want[name]) < 2e-6, name


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_tails_of_the_gate(lower_bound, device):
    """The slope keeps its digits far to the left, where 1 + e^y is 1, and its value beyond 20."""
    points = torch.tensor([-80.0, -20.0, -17.0, -1.0, 0.0, 19.9, 20.0, 20.1, 60.0, 80.0])
    raw = points.reshape(1, 10, 1, 1).to(device)
    dG = torch.zeros_like(raw)
    dG[:, -1] = 1.0  # so that every dg is 1
    dG_end = torch.zeros(1, 1, 1, 1, 1, device=device)
    got, *_ = chunk_kda_bwd_gate(
        dG, dG_end, raw, 16, chunk_layout(1, 10, 16), use_gate=True, lower_bound=lower_bound,
        A_log=torch.zeros(1, device=device),
    )  # fmt: skip
    y = points.double()
    want = -torch.sigmoid(y)
    if lower_bound is not None:
        want = lower_bound * torch.sigmoid(y) * torch.sigmoid(-y)
    for a, b in zip(got.flatten().tolist(), want.tolist(), strict=True):
        assert math.isclose(a, b, rel_tol=1e-5), (a, b)


def test_a_gate_that_lets_nothing_through_has_no_gradient(device):
    """Below e^-88 what arrives is round-off, here 1e-7: times a gate of -1e30 it must not count."""
    raw = torch.tensor([0.0, 1e30, -3.0, 3e38, 1e4], device=device).reshape(1, 5, 1, 1)
    dG = torch.full_like(raw, 1e-7)
    dG_end = torch.zeros(1, 1, 1, 1, 1, device=device)
    A_log = torch.tensor([0.5], device=device)
    dg, dA_log, _ = chunk_kda_bwd_gate(
        dG, dG_end, raw, 16, chunk_layout(1, 5, 16), use_gate=True, A_log=A_log
    )
    assert (dg[0, :, 0, 0] != 0).tolist() == [True, False, True, False, False]
    assert dA_log.abs() < 1e-5
