"""Each of the six steps of the chunk pipeline against its formula in float64.

The formulas are written out here once more, over the spans of tokens that make a chunk, and get
the already rounded inputs of the step.
"""

import itertools
import math

import pytest
import torch
from cases import assert_agree, assert_same
from chunk_cases import Spans

from kda_edu import kda_gate_fwd, reference
from kda_edu.kernels import (
    chunk_gated_delta_rule_fwd_h_kda,
    chunk_gla_fwd_o_gk,
    chunk_kda_scaled_dot_kkt_fwd,
    chunk_local_cumsum,
    kda_gate_chunk_cumsum,
    recompute_w_u_fwd,
    solve_tril_kda,
)
from kda_edu.kernels.sequences import chunk_layout
from kda_edu.teach.check import budget_for, max_error, rms_error
from kda_edu.teach.inputs import make_inputs

CHUNKS = (16, 32, 64)
LAYOUTS = pytest.mark.parametrize("C, packed", [(16, False), (16, True), (32, True), (64, False)])
fp32, bf16 = torch.float32, torch.bfloat16
INF = float("inf")


LENGTHS = (0, 1, 0, 0, 35, 18, 0)


def sample(C, device, packed=False, **changes):
    """Inputs of a ragged call (three chunks and a bit at C = 16), and its spans."""
    lengths = LENGTHS if packed else None
    sizes = dict(B=1, T=50, H=1, HV=2, K=20, V=9)
    if packed:
        sizes["cu_seqlens"] = [0, *itertools.accumulate(lengths)]
    x = make_inputs(**sizes | changes, device=device)
    return x, Spans(x.q.shape[0], x.q.shape[1], C, lengths)


def log2_decay(g):
    """g in log2 units, with resets bounded as in the kernel."""
    return (g.double() / math.log(2)).clamp(min=-160)


def cumulated(g, spans):
    """Step 1: the sum of log2 decays from the first token of the chunk."""
    G = torch.full(g.shape, float("nan"), dtype=torch.float64)
    for b, _, s, e in spans:
        G[b, s:e] = log2_decay(g.cpu())[b, s:e].cumsum(0)
    return G


def halves(G, device):
    """A float64 G as the two float32 tensors that the steps take."""
    upper = G.float()
    return upper.to(device), (G - upper).float().to(device)


# -- the table of chunks -------------------------------------------------------------------------


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_empty_sequences_have_no_chunk(known, index, device):
    """Sequence ids must not be counted by first tokens: an empty sequence has none."""
    for lengths in ((3, 0, 2), (0, 64, 0, 6), (0, 0), (1, 65, 128, 0, 3)):
        spans = Spans(1, 0, 64, lengths)
        layout = chunk_layout(
            1, sum(lengths), 64, spans.cu.to(device, index), spans.cu if known else None
        )
        want = [[s, e - s] for _, _, s, e in spans]
        chunks = layout.chunks.tolist()
        assert chunks[: len(want)] == want
        assert all(count == 0 for _, count in chunks[len(want) :])  # rows left over do nothing
        assert len(chunks) == layout.NT and (not known or len(chunks) == len(want))
        first = [sum(span[1] < n for span in spans) for n in range(len(lengths) + 1)]
        assert layout.offsets.tolist() == first
        assert layout.N == len(lengths) and layout.rows == 1


def test_no_sequences_at_all(device):
    layout = chunk_layout(1, 0, 64, torch.zeros(1, dtype=torch.int64, device=device))
    assert layout.N == 0 and layout.NT == 0 and layout.chunks.shape == (0, 2)


# -- 1: cumulated gate ---------------------------------------------------------------------------


@LAYOUTS
def test_cumsum(C, packed, device):
    x, spans = sample(C, device, packed, B=2)
    G = chunk_local_cumsum(x.g, C, **spans.options(device))
    want = cumulated(x.g, spans)
    assert G.dtype == fp32 and G.is_contiguous()
    assert rms_error(G.cpu(), want) < 1e-6 and max_error(G.cpu(), want) < 1e-5
    assert rms_error(G.cpu(), want / math.log2(math.e)) > 0.1  # log2 units, not nats


def test_a_reset_is_160_octaves(device):
    """-inf, and whatever lies below 2^-160, counts as -160: sums stay finite and exact."""
    g = torch.zeros(1, 40, 1, 4, device=device)
    g[:, 3:, :, 0], g[:, 5, :, 1], g[:, 7, :, 2] = -INF, -1e4, -3.4e38
    for residual in (False, True):
        G = chunk_local_cumsum(g, 16, residual=residual)
        G = (G[0] + G[1] if residual else G)[0, :, 0]
        assert G[:16, 0].tolist() == [0.0] * 3 + [-160.0 * n for n in range(1, 14)]
        assert G[16:32, 0].tolist() == [-160.0 * n for n in range(1, 17)]
        assert G[:16, 1].tolist() == [0.0] * 5 + [-160.0] * 11
        assert G[:16, 2].tolist() == [0.0] * 7 + [-160.0] * 9
        assert not G[16:, 1:].any()


def test_nan_in_a_gate_is_not_hidden(device):
    g = torch.zeros(1, 20, 1, 2, device=device)
    g[0, 5, 0, 1] = float("nan")
    for residual in (False, True):
        G = chunk_local_cumsum(g, 16, residual=residual)
        G = G[1] if residual else G
        assert G[0, 5:16, 0, 1].isnan().all() and G[..., 0].isfinite().all()
        assert G[0, :5, 0, 1].isfinite().all() and G[0, 16:, 0, 1].isfinite().all()


@pytest.mark.parametrize("gate", [-80.0, "mixed", "random"])
@pytest.mark.parametrize("packed", [False, True])
def test_the_residual_restores_what_one_float32_rounds_away(gate, packed, device):
    """64 gates near -115 sum to -7000, where a float32 has steps of 5e-4."""
    x, spans = sample(64, device, packed, T=70, gate=gate)
    jitter = -0.3 * torch.rand(x.g.shape, generator=torch.Generator().manual_seed(0))
    g = x.g + jitter.to(device)
    steps = (g * torch.tensor(1 / math.log(2), device=device)).cpu()  # float32, as the kernel's
    want = cumulated(steps.double() * math.log(2), spans)
    G, residual = chunk_local_cumsum(g, 64, **spans.options(device), residual=True)
    assert (G.double() * 1024 == (G.double() * 1024).round()).all()
    assert max_error(G.cpu(), want) > 1e-5
    assert max_error((G.double() + residual.double()).cpu(), want) < 1e-8


def test_bf16_gates_are_widened_first(device):
    x, _ = sample(64, device, T=70)
    g = (-0.01 * torch.rand(x.g.shape, generator=torch.Generator().manual_seed(0))).to(bf16)
    g = g.to(device)
    assert_agree([chunk_local_cumsum(g)], [chunk_local_cumsum(g.float())], ["G"])
    narrow = g.float().cpu().to(bf16).cumsum(1).float()
    assert (
        rms_error(narrow[:, :64] * math.log2(math.e), cumulated(g, Spans(1, 64, 64))[:, :64]) > 1e-3
    )


GATES = {
    "softplus": dict(A_log=torch.tensor([-1.0, 1.5])),
    "softplus, bias": dict(A_log=torch.tensor([-1.0, 1.5]), dt_bias=torch.linspace(-1, 1, 40)),
    "bounded": dict(A_log=torch.tensor([-1.0, 1.5]), lower_bound=-5.0),
    "bounded, bias, no A_log": dict(dt_bias=torch.linspace(-1, 1, 40), lower_bound=-3.0),
}


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("gate", GATES)
def test_the_gate_in_the_cumsum_is_the_gate_before_it(gate, residual, device):
    x, spans = sample(32, device)
    raw = 30 * x.g + 4  # about -10 to 4
    arguments = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in GATES[gate].items()
    }
    fused = kda_gate_chunk_cumsum(raw, **arguments, chunk_size=32, residual=residual)
    separate = chunk_local_cumsum(kda_gate_fwd(raw, **arguments), 32, residual=residual)
    wide = {n: v.double() if isinstance(v, torch.Tensor) else v for n, v in GATES[gate].items()}
    want = cumulated(reference.kda_gate(raw.double().cpu(), **wide), spans)
    if residual:
        fused, separate = (G.double() + r.double() for G, r in (fused, separate))
    assert max_error(fused, separate) < 1e-4 and rms_error(fused, separate) < 1e-6
    assert rms_error(fused.cpu(), want) < 1e-6


# -- 2: A_kk and A_qk ----------------------------------------------------------------------------


def scores(q, k, g, beta, scale, spans):
    """Step 2. The decay between tokens is a sum of gates, so -inf needs no care."""
    HV = g.shape[2]
    q, k = (x.double().cpu().repeat_interleave(HV // x.shape[2], 2) for x in (q, k))
    g, beta = g.double().cpu(), beta.double().cpu()
    A_kk = torch.zeros(*beta.shape, spans.C, dtype=torch.float64)
    A_qk = torch.zeros_like(A_kk)
    for b, _, s, e in spans:
        for i in range(s, e):
            between = g[b, s + 1 : i + 1].flip(0).cumsum(0).flip(0)  # after token j, up to i
            decayed = k[b, s : i + 1].clone()
            decayed[:-1] *= between.exp()
            A_kk[b, i, :, : i - s] = (decayed[:-1] * k[b, i]).sum(-1).T * beta[b, i, :, None]
            A_qk[b, i, :, : i - s + 1] = (decayed * q[b, i]).sum(-1).T * scale
    return A_kk, A_qk


def assert_scores(got, want, spans, budget):
    for name, A, A_want in zip(("A_kk", "A_qk"), got[:2], want, strict=True):
        assert A.dtype == fp32
        assert rms_error(A.cpu(), A_want) <= budget, name
    for b, _, s, e in spans:
        row = torch.arange(e - s)[:, None]
        for A, above in (
            (got[0], row <= torch.arange(spans.C)),
            (got[1], row < torch.arange(spans.C)),
        ):
            part = A[b, s:e].transpose(0, 1).cpu()
            assert not part[:, above].any(), "above the diagonal"


def kernel_scores(x, g, spans, bounded, device, scale=0.3, **options):
    G, residual = halves(cumulated(g, spans), device)
    return chunk_kda_scaled_dot_kkt_fwd(
        x.q,
        x.k,
        G,
        x.beta,
        scale,
        spans.C,
        G_residual=None if bounded else residual,
        bounded=bounded,
        **spans.options(device),
        **options,
    )


@pytest.mark.parametrize("bounded", [False, True])
@LAYOUTS
def test_scores(C, bounded, packed, device):
    x, spans = sample(C, device, packed)
    got = kernel_scores(x, x.g, spans, bounded, device)
    assert got[2] is None and got[3] is None
    assert_scores(got, scores(x.q, x.k, x.g, x.beta, 0.3, spans), spans, 1e-6)


@pytest.mark.parametrize(
    "bounded, gate",
    [(True, -5.0), (True, 0.0), (False, -20.0), (False, -1e4), (False, "mixed"), (False, "reset")],
)
def test_scores_at_the_ends_of_the_range(bounded, gate, device):
    """One float32 per G serves bounded gates alone: at -5 its rounding is 4e-6 of a product."""
    x, spans = sample(64, device, gate=gate, HV=1)
    got = kernel_scores(x, x.g, spans, bounded, device)
    want = scores(x.q, x.k, x.g, x.beta, 0.3, spans)
    assert_scores(got, want, spans, 1e-5 if bounded else 1e-6)


@pytest.mark.parametrize("bounded", [False, True])
def test_scores_with_everything_in_the_kernel(bounded, device):
    """Norm, sigmoid and doubled sigmoid; two key heads for six value heads."""
    x, spans = sample(16, device, T=21, H=2, HV=6)
    x = x._replace(q=3 * x.q, k=0.5 * x.k, beta=6 * x.beta - 3)
    got = kernel_scores(
        x,
        x.g,
        spans,
        bounded,
        device,
        scale=20**-0.5,
        use_qk_l2norm=True,
        use_beta_sigmoid=True,
        allow_neg_eigval=True,
    )
    q, k = reference.l2norm(x.q.double()), reference.l2norm(x.k.double())
    beta = 2 * x.beta.double().sigmoid()
    assert_scores(got, scores(q, k, x.g, beta, 20**-0.5, spans), spans, 1e-6)
    for rstd, t in ((got[2], x.q), (got[3], x.k)):
        assert rms_error(rstd.cpu(), (t.double().square().sum(-1) + 1e-6).rsqrt().cpu()) < 1e-6


def test_scores_of_16_bit_inputs(device):
    x, spans = sample(32, device, dtype=bf16)
    got = kernel_scores(x, x.g, spans, True, device)
    assert_scores(got, scores(x.q, x.k, x.g, x.beta, 0.3, spans), spans, 2e-3)


# -- 3: the triangular inverse -------------------------------------------------------------------


def inverse(A, spans):
    """Step 3: X with (I + A) X = I, by PyTorch's solver."""
    X = torch.zeros(A.shape, dtype=torch.float64)
    for b, _, s, e in spans:
        L = A[b, s:e, :, : e - s].double().cpu().transpose(0, 1).tril(-1)
        eye = torch.eye(e - s, dtype=torch.float64)
        solved = torch.linalg.solve_triangular(L + eye, eye.expand_as(L), upper=False)
        X[b, s:e, :, : e - s] = solved.transpose(0, 1)
    return X


def strictly_lower(A, spans):
    """A with NaN on and above the diagonal, which the solver has no business to read."""
    A = A.clone()
    for b, _, s, e in spans:
        on_or_above = torch.arange(e - s)[:, None] <= torch.arange(spans.C)
        A[b, s:e].masked_fill_(on_or_above[:, None].to(A.device), float("nan"))
    return A


@LAYOUTS
def test_inverse(C, packed, device):
    x, spans = sample(C, device, packed)
    A = 0.5 * torch.randn(*x.beta.shape, C, generator=torch.Generator().manual_seed(0)).to(device)
    A /= math.sqrt(C)
    A = strictly_lower(A, spans)
    want = inverse(A, spans)
    for dtype, budget in ((fp32, 1e-6), (bf16, 3e-3)):
        X = solve_tril_kda(A, **spans.options(device), output_dtype=dtype)
        assert X.dtype == dtype and rms_error(X.cpu(), want) < budget


@pytest.mark.parametrize("beta", [0.95, 1.0, 2.0])
@pytest.mark.parametrize("C", CHUNKS)
def test_inverse_of_nearly_parallel_keys(C, beta, device):
    """The worst case: products near 1 in every place, and a write strength of 1, or of 2.

    At 2 every row of the inverse is a sum of terms that cancel.
    """
    x, spans = sample(C, device, T=C, keys="correlated", K=32, HV=1)
    A = beta * torch.einsum("bihk,bjhk->bihj", x.k, x.k)
    X = solve_tril_kda(strictly_lower(A, spans))
    assert rms_error(X.cpu(), inverse(A, spans)) < (1e-6 if beta < 2 else 3e-5)
    L = A[0, :, 0].double().cpu().tril(-1) + torch.eye(C)
    residual = X[0, :, 0].cpu().double() @ L - torch.eye(C)
    assert residual.abs().max() < (1e-5 if beta < 2 else 2e-4)


@pytest.mark.parametrize("T", [1, 15, 16, 17, 33, 48, 63, 64])
def test_inverse_of_equal_keys_is_exact(T, device):
    """All products 1: the inverse has 1 on the diagonal and -1 below it. Small integers only."""
    A = torch.full((1, T, 1, 64), float("nan"), device=device)
    A[0, :, 0, :T] = torch.ones(T, T).tril(-1).to(device)
    want = torch.zeros(T, 64)
    want[:, :T] = torch.eye(T) - torch.diag(torch.ones(T - 1), -1)
    assert torch.equal(solve_tril_kda(A)[0, :, 0].cpu(), want)


# -- 4: w, u and the decayed keys ----------------------------------------------------------------


def w_u_kg(k, v, beta, A_inv, G, spans):
    """Step 4."""
    k = k.double().cpu().repeat_interleave(v.shape[2] // k.shape[2], 2)
    v, beta, A_inv, G = (x.double().cpu() for x in (v, beta, A_inv, G))
    w, u, kg = torch.zeros_like(G), torch.zeros_like(v), torch.zeros_like(G)
    for b, _, s, e in spans:
        A = A_inv[b, s:e, :, : e - s] * beta[b, s:e].T  # [i, h, j] beta_j
        w[b, s:e] = torch.einsum("ihj,jhk->ihk", A, G[b, s:e].exp2() * k[b, s:e])
        u[b, s:e] = torch.einsum("ihj,jhv->ihv", A, v[b, s:e])
        kg[b, s:e] = (G[b, e - 1] - G[b, s:e]).exp2() * k[b, s:e]
    return w, u, kg


def lower(shape, spans, device):
    """A random lower triangular matrix per chunk."""
    A = torch.randn(*shape, spans.C, generator=torch.Generator().manual_seed(2)) / 4
    for b, _, s, e in spans:
        keep = torch.arange(e - s)[:, None] >= torch.arange(spans.C)
        A[b, s:e] *= keep[:, None]
    return A.to(device)


@pytest.mark.parametrize("dtype, budget", [(fp32, 1e-6), (bf16, 6e-3)])
@LAYOUTS
def test_w_u_kg(C, packed, dtype, budget, device):
    x, spans = sample(C, device, packed, dtype=dtype, V=41)
    A_inv = lower(x.beta.shape, spans, device)
    G = cumulated(x.g, spans)
    got = recompute_w_u_fwd(x.k, x.v, x.beta, A_inv, G.float().to(device), **spans.options(device))
    want = w_u_kg(x.k, x.v, x.beta, A_inv, G, spans)
    for name, a, b in zip(("w", "u", "kg"), got, want, strict=True):
        assert rms_error(a.cpu(), b) < budget, name


@pytest.mark.parametrize("gate", ["mixed", -20.0, "reset"])
def test_w_u_kg_with_everything_in_the_kernel(gate, device):
    x, spans = sample(32, device, H=2, HV=4, T=40, gate=gate)
    A_inv = lower(x.beta.shape, spans, device)
    G = cumulated(x.g, spans)
    upper, residual = halves(G, device)
    rstd = torch.linspace(0.5, 2, 80, device=device).reshape(1, 40, 2)
    got = recompute_w_u_fwd(
        x.k,
        x.v,
        6 * x.beta - 3,
        A_inv,
        upper,
        G_residual=residual,
        k_rstd=rstd,
        use_beta_sigmoid=True,
        allow_neg_eigval=True,
    )
    beta = 2 * (6 * x.beta - 3).double().sigmoid()
    want = w_u_kg(x.k.double() * rstd[..., None], x.v, beta, A_inv, G, spans)
    for name, a, b in zip(("w", "u", "kg"), got, want, strict=True):
        assert rms_error(a.cpu(), b) < 1e-6, name


# -- 5: the state scan ---------------------------------------------------------------------------


def scan(kg, w, u, G, state, spans):
    """Step 5. Returns the state before each chunk, v', and the final states [N, HV, K, V]."""
    kg, w, u, G, state = (x.double().cpu() for x in (kg, w, u, G, state))
    state, v_new, before = state.clone(), torch.zeros_like(u), []
    for b, n, s, e in spans:
        S = state[n].clone()
        before.append(S)
        v_new[b, s:e] = u[b, s:e] - torch.einsum("thk,hkv->thv", w[b, s:e], S)
        state[n] = G[b, e - 1].exp2()[..., None] * S
        state[n] += torch.einsum("thk,thv->hkv", kg[b, s:e], v_new[b, s:e])
    return torch.stack(before) if before else None, v_new, state


def scan_inputs(C, packed, device, dtype=fp32):
    """w, u and kg of random keys and values, from step 4."""
    x, spans = sample(C, device, packed, dtype=dtype, V=33, B=2)
    G = cumulated(x.g, spans)
    A_inv = lower(x.beta.shape, spans, device)
    w, u, kg = recompute_w_u_fwd(
        x.k, x.v, x.beta, A_inv, G.float().to(device), **spans.options(device)
    )
    return kg, w, u, G, x.initial_state, spans


@pytest.mark.parametrize("state_v_first", [False, True])
@LAYOUTS
def test_state_scan(C, packed, state_v_first, device):
    kg, w, u, G, state, spans = scan_inputs(C, packed, device)
    h_want, v_want, final_want = scan(kg, w, u, G, state, spans)
    upper, residual = halves(G, device)
    h, v_new, final = chunk_gated_delta_rule_fwd_h_kda(
        kg,
        w,
        u,
        upper,
        C,
        G_residual=residual,
        initial_state=state.transpose(2, 3) if state_v_first else state,
        output_final_state=True,
        state_v_first=state_v_first,
        **spans.options(device),
    )
    assert h.dtype == final.dtype == v_new.dtype == fp32
    h = h.flatten(0, 1)[: len(spans)].transpose(2, 3)  # kept transposed in either layout
    assert rms_error(h.cpu(), h_want) < 1e-6
    assert rms_error(v_new.cpu(), v_want) < 1e-6
    final = final.transpose(2, 3) if state_v_first else final
    assert rms_error(final.cpu(), final_want) < 1e-6


@pytest.mark.parametrize("packed", [False, True])
def test_state_scan_from_nothing(packed, device):
    """No initial state means zeros; an empty sequence keeps its own; none is written unasked."""
    kg, w, u, G, state, spans = scan_inputs(32, packed, device)
    arguments = (kg, w, u, G.float().to(device), 32)
    options = spans.options(device)
    zeros = chunk_gated_delta_rule_fwd_h_kda(
        *arguments, initial_state=torch.zeros_like(state), output_final_state=True, **options
    )
    none = chunk_gated_delta_rule_fwd_h_kda(*arguments, output_final_state=True, **options)
    used = slice(0, len(spans) if packed else None)
    assert torch.equal(none[0][:, used], zeros[0][:, used])
    assert_same(none[1:], zeros[1:], ("v_new", "final state"))
    _, v_want, final_want = scan(kg, w, u, G, torch.zeros_like(state), spans)
    assert rms_error(none[1].cpu(), v_want) < 1e-6 and rms_error(none[2].cpu(), final_want) < 1e-6
    assert chunk_gated_delta_rule_fwd_h_kda(*arguments, **options)[2] is None
    if packed:
        final = chunk_gated_delta_rule_fwd_h_kda(
            *arguments, initial_state=state, output_final_state=True, **options
        )[2]
        for n, length in enumerate(LENGTHS):
            assert torch.equal(final[n], state[n]) == (length == 0)


def test_state_scan_of_16_bit_inputs(device):
    """States between chunks are bfloat16, for tensor cores; the carried one stays float32."""
    kg, w, u, G, state, spans = scan_inputs(32, False, device, dtype=bf16)
    h_want, v_want, final_want = scan(kg, w, u, G, state, spans)
    h, v_new, final = chunk_gated_delta_rule_fwd_h_kda(
        kg, w, u, G.float().to(device), 32, initial_state=state, output_final_state=True
    )
    assert h.dtype == bf16 and final.dtype == fp32
    h = h.flatten(0, 1).transpose(2, 3)
    for got, want in ((h, h_want), (v_new, v_want), (final, final_want)):
        assert rms_error(got.cpu(), want) < budget_for(bf16)
    kg, w, u, G, state, spans = scan_inputs(32, False, device, dtype=torch.float16)
    half = chunk_gated_delta_rule_fwd_h_kda(
        kg, w, u, G.float().to(device), 32, initial_state=65536 * state
    )
    assert half[0].dtype == fp32 and half[0].isfinite().all()  # 65536 is inf in float16


# -- 6: the output -------------------------------------------------------------------------------


def output(q, v_new, G, A_qk, before, scale, spans):
    """Step 6."""
    q = q.double().cpu().repeat_interleave(v_new.shape[2] // q.shape[2], 2)
    v_new, G, A_qk, before = (x.double().cpu() for x in (v_new, G, A_qk, before))
    o = torch.zeros_like(v_new)
    for (b, _, s, e), S in zip(spans, before, strict=True):
        read = scale * q[b, s:e] * G[b, s:e].exp2()
        o[b, s:e] = torch.einsum("thk,hkv->thv", read, S)
        o[b, s:e] += torch.einsum("ihj,jhv->ihv", A_qk[b, s:e, :, : e - s], v_new[b, s:e])
    return o


@pytest.mark.parametrize("dtype", [fp32, bf16])
@LAYOUTS
def test_output(C, packed, dtype, device):
    x, spans = sample(C, device, packed, dtype=dtype, V=33, B=2)
    A_qk = lower(x.beta.shape, spans, device)
    G = cumulated(x.g, spans)
    upper, residual = halves(G, device)
    draw = torch.Generator().manual_seed(3)
    rows, NT = (1, len(spans)) if packed else (2, len(spans) // 2)
    before = torch.randn(rows, NT, 2, 33, 20, generator=draw).to(device, dtype)
    rstd = torch.linspace(0.5, 2, x.q.shape[0] * x.q.shape[1], device=device)
    rstd = rstd.reshape(*x.q.shape[:2], 1)
    cu = spans.options(device)
    layout = chunk_layout(*x.q.shape[:2], C, *cu.values(), spans.cu)
    got = chunk_gla_fwd_o_gk(
        x.q, x.v, upper, A_qk, before, 0.3, G_residual=residual, q_rstd=rstd, layout=layout
    )
    states = before.flatten(0, 1).transpose(2, 3)
    want = output(x.q.double() * rstd[..., None], x.v, G, A_qk, states, 0.3, spans)
    assert got.dtype == dtype and rms_error(got.cpu(), want) < (1e-6 if dtype == fp32 else 6e-3)
