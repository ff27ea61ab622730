"""The forward cases of flash-linear-attention's own KDA tests, with its thresholds halved.

Case lists and input distributions: tests/ops/test_kda.py of fla-org/flash-linear-attention (v0.5,
read at commit bc3b101). Its thresholds are 5e-3 for outputs and states. Here the error is measured
in float64 against the float64 oracle, which is stricter than its metric in the tensors' own dtype;
and where the norm is taken in the kernel, the oracle takes it in float64 too.
"""

import pytest
import torch
import torch.nn.functional as F

from kda_edu import chunk_kda, fused_recurrent_kda, reference
from kda_edu.teach import rms_error

pytestmark = pytest.mark.gpu
LIMIT = 5e-3 / 2
HALF, BF16 = torch.float16, torch.bfloat16


def case(B, T, H, HV, D, scale=1.0, norm=1.0, mask_p=0.0, l2=False, gate=False, dtype=HALF,
         safe=False, chunk=64):  # fmt: skip
    return dict(locals())


DENSE = [
    case(1, 63, 1, 1, 64, safe=True),
    case(2, 500, 3, 3, 60, safe=True),
    case(2, 1000, 3, 3, 64, scale=0.1, mask_p=0.5),
    case(3, 1024, 4, 4, 100, norm=0.1),
    case(4, 1024, 4, 4, 128, scale=0.1, safe=True),
    case(4, 1024, 4, 4, 128, scale=0.1, safe=True, l2=True),
    case(2, 1500, 4, 4, 128, scale=0.1, norm=10, gate=True),
    case(4, 2048, 8, 8, 64, scale=0.1, gate=True, safe=True),
    case(2, 1024, 2, 4, 64),
    case(2, 1024, 2, 8, 64, gate=True),
    case(2, 1024, 4, 8, 128, l2=True, gate=True),
    case(2, 160, 2, 4, 64, gate=True, safe=True, chunk=32),
    case(2, 1024, 2, 4, 64, l2=True, gate=True, safe=True, dtype=BF16),
    case(2, 1024, 2, 4, 64, gate=True, dtype=BF16),
    case(2, 160, 2, 4, 64, gate=True, safe=True, chunk=32, dtype=BF16),
    case(2, 1024, 2, 8, 128, l2=True, gate=True, dtype=BF16),
]
PACKED = [
    ([0, 15], 60, 0.0, False, 64),
    ([0, 256, 500, 1000], 64, 0.9, False, 64),
    ([0, 256, 500, 1000], 128, 0.5, False, 64),
    ([0, 15, 100, 300, 1200, 2000], 100, 0.0, False, 64),
    ([0, 100, 300, 1200, 3000, 4096], 256, 0.0, True, 64),
    ([0, 31, 96, 160], 60, 0.0, False, 32),
]


def name(c):
    return "-".join(f"{k}{v}".replace("torch.", "") for k, v in c.items() if v is not False)


def inputs(c):
    torch.manual_seed(42)
    B, T, H, HV, D = (c[x] for x in ("B", "T", "H", "HV", "D"))
    q, k = (torch.rand(B, T, H, D, dtype=c["dtype"]).cuda() for _ in range(2))
    v = torch.rand(B, T, HV, D, dtype=c["dtype"]).cuda()
    if not c["l2"]:
        q, k = normalised(q, k)
    options = dict(
        scale=c["scale"],
        initial_state=torch.randn(B, HV, D, D).cuda(),
        use_qk_l2norm_in_kernel=c["l2"],
    )
    if c["gate"]:
        g = torch.randn(B, T, HV, D, dtype=c["dtype"]).cuda()
        options |= dict(
            use_gate_in_kernel=True,
            A_log=torch.randn(HV).cuda(),
            dt_bias=torch.randn(HV * D).cuda(),
            lower_bound=-5.0 if c["safe"] else None,
        )
    else:
        g = F.logsigmoid(torch.randn(B, T, HV, D)) / c["norm"]
        g = (g * (torch.rand_like(g) > c["mask_p"])).cuda()
        g = g.clamp(-5, 0) if c["safe"] else g
    beta = torch.randn(B, T, HV, dtype=c["dtype"]).sigmoid().cuda()
    return (q, k, v, g, beta), options


def normalised(q, k):
    return F.normalize(q, p=2, dim=-1), F.normalize(k, p=2, dim=-1)


def oracle(tensors, options):
    doubles = {n: x.double() if torch.is_tensor(x) else x for n, x in options.items()}
    return reference.recurrent_kda(
        *(x.double() for x in tensors), **doubles, output_final_state=True
    )


def compare(got, want, case):
    errors = [rms_error(a, b) for a, b in zip(got, want, strict=True)]
    print(f"{case}: o {errors[0]:.2e}, state {errors[1]:.2e}, limit {LIMIT:.1e}")
    assert max(errors) < LIMIT, errors


def run_chunk(c, tensors, options):
    return chunk_kda(
        *tensors, **options, output_final_state=True, safe_gate=c["safe"], chunk_size=c["chunk"]
    )


@pytest.mark.parametrize("c", DENSE, ids=name)
def test_chunk(c):
    """As in fla's test, which goes on to the gradients: the inputs ask for them."""
    tensors, options = inputs(c)
    want = oracle(tensors, options)
    got = run_chunk(c, [x.requires_grad_() for x in tensors], options)
    compare([x.detach() for x in got], want, name(c))


@pytest.mark.parametrize("c", [c for c in DENSE if c["gate"] and c["safe"] and c["dtype"] == BF16])
def test_chunk_in_two_kernels(c):
    """Without gradients these cases take the fused forward. fla's limit for the inference kernels
    that it calls there is 6e-3; halved."""
    tensors, options = inputs(c)
    want = oracle(tensors, options)
    errors = [rms_error(a, b) for a, b in zip(run_chunk(c, tensors, options), want, strict=True)]
    assert max(errors) < 3e-3, errors


@pytest.mark.parametrize("c", DENSE, ids=name)
def test_recurrent(c):
    tensors, options = inputs(c)
    want = oracle(tensors, options)
    got = fused_recurrent_kda(*tensors, **options, output_final_state=True)
    compare(got, want, name(c))


@pytest.mark.parametrize("cu, D, mask_p, safe, chunk", PACKED)
def test_packed(cu, D, mask_p, safe, chunk):
    torch.manual_seed(42)
    T, H, N = cu[-1], 4, len(cu) - 1
    q, k = normalised(*(torch.randn(1, T, H, D, dtype=HALF).cuda() for _ in range(2)))
    v = torch.randn(1, T, H, D, dtype=HALF).cuda()
    g = F.logsigmoid(torch.randn(1, T, H, D)).cuda()
    g = g.masked_fill(torch.rand_like(g) < mask_p, -1000.0)
    g = g.clamp(-5, 0) if safe else g
    beta = torch.rand(1, T, H, dtype=HALF).sigmoid().cuda()
    state = torch.randn(N, H, D, D).cuda()
    cu = torch.tensor(cu).cuda()
    options = dict(initial_state=state, cu_seqlens=cu)
    doubles = [x.double() for x in (q, k, v, g, beta)]
    want = reference.recurrent_kda(
        *doubles, initial_state=state.double(), cu_seqlens=cu, output_final_state=True
    )
    for kernel, extra in ((chunk_kda, dict(chunk_size=chunk)), (fused_recurrent_kda, {})):
        got = kernel(q, k, v, g, beta, **options, **extra, output_final_state=True)
        compare(got, want, f"{kernel.__name__} cu {cu.tolist()} D{D}")


@pytest.mark.parametrize("kernel, limit", [(chunk_kda, 6e-3), (fused_recurrent_kda, 3e-3)])
def test_flash_kda_backend(kernel, limit):
    """The inputs of fla's test of its FlashKDA backend: all in the kernel, A_log = log U(1, 16).

    That test is not one of fla's own kernels, and its limit of .006 stands for chunk_kda, which
    like that backend rounds states and corrected values to bfloat16 before each product.
    """
    torch.manual_seed(42)
    tensors, options = raw_inputs(torch.randn(1, 2048, 2, 128))
    want = oracle(tensors, options)
    got = kernel(*tensors, **options, output_final_state=True)
    errors = [rms_error(a, b) for a, b in zip(got, want, strict=True)]
    print(f"{kernel.__name__}: o {errors[0]:.2e}, state {errors[1]:.2e}")
    assert max(errors) < limit, errors


@pytest.mark.parametrize("kernel, limit", [(chunk_kda, 5e-3), (fused_recurrent_kda, 2.5e-3)])
@pytest.mark.parametrize("where", [-8.0, -4.0, 0.0, 8.0, "uniform", "normal"])
def test_gate_range(kernel, limit, where):
    """FlashKDA's accuracy sweep: gates across their whole range, and its limit of .005.

    With the gate at 0 the state lives for hundreds of tokens: what is left of the error is its
    rounding to bfloat16 before each product.
    """
    torch.manual_seed(42)
    x = torch.empty(1, 2048, 2, 128)
    x = {"uniform": x.uniform_(-8, 8), "normal": x.normal_(0, 8)}.get(where, where)
    tensors, options = raw_inputs(torch.full((1, 2048, 2, 128), x) if isinstance(x, float) else x)
    want = oracle(tensors, options)
    got = kernel(*tensors, **options, output_final_state=True)
    errors = [rms_error(a, b) for a, b in zip(got, want, strict=True)]
    print(f"{kernel.__name__} gate {where}: o {errors[0]:.2e}, state {errors[1]:.2e}")
    assert max(errors) < limit, errors


def raw_inputs(x):
    """Everything raw, in bfloat16, for a gate input x [1, T, H, D]."""
    _, T, H, D = x.shape
    q, k, v = (torch.randn(1, T, H, D, dtype=BF16).cuda() for _ in range(3))
    options = dict(
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        lower_bound=-5.0,
        A_log=torch.empty(H).uniform_(1, 16).log().cuda(),
        dt_bias=torch.randn(H * D).cuda(),
        initial_state=torch.randn(1, H, D, D).cuda(),
    )
    return (q, k, v, x.to(BF16).cuda(), torch.randn(1, T, H, dtype=BF16).cuda()), options
