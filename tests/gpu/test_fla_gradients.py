"""The gradients of flash-linear-attention's own KDA tests, with its thresholds halved.

Case lists and input distributions: tests/ops/test_kda.py of fla-org/flash-linear-attention (read at
commit bc3b101), its functions test_chunk, test_chunk_varlen, test_chunk_state_v_first and
test_gate. As there, upstream gradients of the output and of the final state are random, the norm
of q and k is outside of the call unless the kernel takes it, and every gradient is compared by
RMS(difference) / RMS. The want is autograd of the reference in float64 (chunk by chunk: a loop over
4096 tokens would not fit in memory), where fla takes a loop in float32.

Its test of dA_log only warns; here it fails too, at twice the threshold: a sum of gradients of
either sign over all tokens has the largest relative error of all.
"""

import pytest
import torch
import torch.nn.functional as F
from test_fla_cases import DENSE, HALF, PACKED, inputs, name, normalised

from kda_edu import chunk_kda, reference
from kda_edu.teach import rms_error

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
# fla's limits, of test_chunk and of test_chunk_varlen, in thousandths. They are halved below.
LIMITS = dict(o=5, state=5, q=8, k=8, v=8, g=20, beta=20, A_log=12, dt_bias=8, initial_state=8)
PACKED_LIMITS = LIMITS | dict(q=7, v=7, g=15, beta=15, dt_bias=5, initial_state=7)
# fla's packed tests are all in float16. Beyond them bfloat16 has this project's own budgets.
BF16_LIMITS = dict.fromkeys(LIMITS, 40) | dict(o=12, state=12)
LEAVES = ("q", "k", "v", "g", "beta")


def differentiate(function, tensors, options, upstream, outer_norm=False):
    """{name: tensor} of both outputs and of every gradient."""
    leaves = dict(zip(LEAVES, tensors, strict=True))
    leaves |= {n: y for n, y in options.items() if torch.is_tensor(y) and y.is_floating_point()}
    leaves = {n: y.detach().clone().requires_grad_() for n, y in leaves.items()}
    arguments = options | leaves
    if outer_norm:
        arguments["q"], arguments["k"] = normalised(leaves["q"], leaves["k"])
    o, state = function(**arguments, output_final_state=True)
    do, d_state = (y.to(x) for x, y in zip((o, state), upstream, strict=True))
    found = torch.autograd.grad((o, state), list(leaves.values()), (do, d_state))
    named = dict(o=o.detach(), state=state.detach()) | dict(zip(leaves, found, strict=True))
    return named, {n: y.dtype for n, y in leaves.items()}


def both(tensors, options, extra, upstream, outer_norm=False):
    """(what the kernels give, what the float64 reference gives at the same rounded inputs)."""
    got, dtypes = differentiate(
        chunk_kda, tensors, options | extra, upstream, outer_norm=outer_norm
    )
    for n, dtype in dtypes.items():
        assert got[n].dtype == dtype, n
    doubles = [x.double() for x in tensors]
    wide = {
        n: y.double() if torch.is_tensor(y) and y.is_floating_point() else y
        for n, y in options.items()
    }
    want, _ = differentiate(reference.chunk_kda, doubles, wide, upstream, outer_norm=outer_norm)
    return got, want


def compare(got, want, limits, case):
    assert got.keys() == want.keys()
    errors = {n: rms_error(got[n], want[n]) for n in got}
    print(f"{case}: " + ", ".join(f"{n} {error:.1e}" for n, error in errors.items()))
    wrong = {n: error for n, error in errors.items() if not error < limits[n] * 1e-3 / 2}
    assert not wrong, wrong


def upstream_of(*shapes, dtype):
    """Random gradients of o, rounded to its dtype, and of the final state."""
    do, d_state = (torch.randn(*shape) for shape in shapes)
    return do.to(dtype).to(DEVICE), d_state.to(DEVICE)


@pytest.mark.parametrize("c", DENSE, ids=name)
@pytest.mark.parametrize("store", [False, True], ids=["made anew", "stored"])
def test_chunk(c, store):
    tensors, options = inputs(c)
    B, T, HV, D = tensors[2].shape
    upstream = upstream_of((B, T, HV, D), (B, HV, D, D), dtype=c["dtype"])
    extra = dict(safe_gate=c["safe"], chunk_size=c["chunk"], disable_recompute=store)
    compare(*both(tensors, options, extra, upstream), LIMITS, name(c))


@pytest.mark.parametrize("cu, D, mask_p, safe, chunk", PACKED)
def test_packed(cu, D, mask_p, safe, chunk):
    torch.manual_seed(42)
    T, H, N = cu[-1], 4, len(cu) - 1
    q, k = (torch.randn(1, T, H, D, dtype=HALF).to(DEVICE) for _ in range(2))
    v = torch.randn(1, T, H, D, dtype=HALF).to(DEVICE)
    g = F.logsigmoid(torch.randn(1, T, H, D)).to(DEVICE)
    g = g.masked_fill(torch.rand_like(g) < mask_p, -1000.0)
    g = g.clamp(-5, 0) if safe else g
    beta = torch.rand(1, T, H, dtype=HALF).sigmoid().to(DEVICE)
    options = dict(
        initial_state=torch.randn(N, H, D, D).to(DEVICE), cu_seqlens=torch.tensor(cu).to(DEVICE)
    )
    upstream = upstream_of((1, T, H, D), (N, H, D, D), dtype=HALF)
    q, k = normalised(q, k)
    compare(
        *both((q, k, v, g, beta), options, dict(chunk_size=chunk), upstream),
        PACKED_LIMITS,
        f"cu {cu} D{D}",
    )


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16])
def test_packed_with_the_gate_in_the_kernel(dtype, lower_bound):
    """The packed rows that take A_log = log U(1, 16), and a bias."""
    torch.manual_seed(42)
    cu, H, HV, D = [0, 15, 100, 300, 1200, 2000], 2, 4, 64
    q, k, v = (torch.randn(1, cu[-1], n, D, dtype=dtype).to(DEVICE) for n in (H, H, HV))
    g = torch.randn(1, cu[-1], HV, D, dtype=dtype).to(DEVICE)
    beta = torch.randn(1, cu[-1], HV, dtype=dtype).to(DEVICE)
    options = dict(
        A_log=torch.empty(HV).uniform_(1, 16).log().to(DEVICE),
        dt_bias=torch.randn(HV * D).to(DEVICE),
        lower_bound=lower_bound,
        use_gate_in_kernel=True,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        initial_state=torch.randn(len(cu) - 1, HV, D, D).to(DEVICE),
        cu_seqlens=torch.tensor(cu).to(DEVICE),
    )
    upstream = upstream_of((1, cu[-1], HV, D), (len(cu) - 1, HV, D, D), dtype=dtype)
    got, want = both((q, k, v, g, beta), options, {}, upstream)
    limits = PACKED_LIMITS if dtype == HALF else BF16_LIMITS
    compare(got, want, limits, f"{dtype}, lower bound {lower_bound}")


def test_norm_outside():
    """q and k normalised before the call: the gradient goes through both."""
    c = DENSE[4]
    tensors, options = inputs(c | dict(l2=True))
    options["use_qk_l2norm_in_kernel"] = False
    B, T, HV, D = tensors[2].shape
    upstream = upstream_of((B, T, HV, D), (B, HV, D, D), dtype=c["dtype"])
    got, want = both(tensors, options, {}, upstream, outer_norm=True)
    compare(got, want, LIMITS, name(c))


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16])
def test_state_layouts(dtype):
    """The transposed layout gives the transposed gradient: fla allows 1e-4, here no bit differs."""
    torch.manual_seed(42)
    B, T, H, HV, D = 2, 1024, 2, 4, 64
    q, k = normalised(*(torch.randn(B, T, H, D, dtype=dtype).to(DEVICE) for _ in range(2)))
    v = torch.randn(B, T, HV, D, dtype=dtype).to(DEVICE)
    g = F.logsigmoid(torch.randn(B, T, HV, D)).to(DEVICE)
    beta = torch.randn(B, T, HV, dtype=dtype).sigmoid().to(DEVICE)
    state = torch.randn(B, HV, D, D).to(DEVICE)
    do, d_state = upstream_of((B, T, HV, D), (B, HV, D, D), dtype=dtype)
    tensors = (q, k, v, g, beta)
    want, _ = differentiate(chunk_kda, tensors, dict(initial_state=state), (do, d_state))
    flipped = dict(initial_state=state.mT.contiguous(), state_v_first=True)
    got, _ = differentiate(chunk_kda, tensors, flipped, (do, d_state.mT))
    for n in ("state", "initial_state"):
        got[n] = got[n].mT
    for n, y in want.items():
        assert torch.equal(got[n], y), n


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("bias", [False, True])
def test_gate(bias, lower_bound):
    """The gate's own gradients for far inputs, 10 randn: through a call whose state only decays.

    With q = k = v = 0 the loss sees the gates alone, and float32 gives fla's 1e-4, halved.
    """
    torch.manual_seed(42)
    B, T, H, D = 2, 64, 4, 64
    zeros = torch.zeros(B, T, H, D, device=DEVICE)
    raw = (torch.randn(B, T, H, D) * 10 - 8).to(DEVICE)
    options = dict(
        A_log=torch.empty(H).uniform_(0.01, 0.5).log().to(DEVICE),
        lower_bound=lower_bound,
        use_gate_in_kernel=True,
        initial_state=torch.randn(B, H, D, D).to(DEVICE),
    )
    if bias:
        options["dt_bias"] = torch.randn(H * D).to(DEVICE)
    tensors = (zeros, zeros, zeros, raw, zeros[..., 0])
    upstream = (zeros, torch.randn(B, H, D, D).to(DEVICE))
    got, want = both(tensors, options, dict(chunk_size=16), upstream)
    for n in ("g", "A_log", "dt_bias", "initial_state"):
        if n in want:
            assert rms_error(got[n], want[n]) < 1e-4 / 2, n
