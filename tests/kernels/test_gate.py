"""kda_gate_fwd: both formulas, their tails, any layout, every configuration."""

import itertools
import math

import pytest
import torch

from kda_edu import chunk_kda, fused_recurrent_kda, kda_gate_fwd, reference
from kda_edu.kernels._common import as_rows
from kda_edu.kernels.gate import kda_gate_fwd_kernel
from kda_edu.teach.check import rms_error

BUDGETS = {torch.float32: 1e-6, torch.bfloat16: 2e-3, torch.float16: 3e-4}


def inputs(*shape, dtype=torch.float32, device="cpu", seed=0):
    """(x, A_log, dt_bias) for x of this shape [..., HV, K]."""
    draw = torch.Generator().manual_seed(seed)
    HV, K = shape[-2:]
    x = 3 * torch.randn(*shape, generator=draw)
    A_log, bias = torch.randn(HV, generator=draw), torch.randn(HV * K, generator=draw)
    return x.to(device, dtype), A_log.to(device), bias.to(device)


def want(x, *parameters, **options):
    wide = [p.cpu().double() if isinstance(p, torch.Tensor) else p for p in parameters]
    return reference.kda_gate(x.cpu().double(), *wide, **options)


@pytest.mark.parametrize("lower_bound", [None, -5.0, -0.5])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", list(BUDGETS))
def test_both_formulas(lower_bound, bias, dtype, device):
    x, A_log, dt_bias = inputs(2, 9, 3, 20, dtype=dtype, device=device)
    dt_bias = dt_bias if bias else None
    g = kda_gate_fwd(x, A_log, dt_bias, lower_bound)
    assert g.dtype == torch.float32 and g.is_contiguous() and bool((g <= 0).all())
    assert rms_error(g.cpu(), want(x, A_log, dt_bias, lower_bound)) < 1e-6
    if lower_bound is not None:
        assert bool((g >= lower_bound).all())


@pytest.mark.parametrize("bias", [False, True])
def test_a_lower_bound_needs_no_A_log(bias, device):
    x, A_log, dt_bias = inputs(5, 3, 20, device=device)
    dt_bias = dt_bias if bias else None
    g = kda_gate_fwd(x, None, dt_bias, lower_bound=-5.0)
    assert rms_error(g.cpu(), want(x, None, dt_bias, -5.0)) < 1e-6
    assert torch.equal(g, kda_gate_fwd(x, 0 * A_log, dt_bias, lower_bound=-5.0))


@pytest.mark.parametrize("shape", [(3, 5), (1, 1), (40, 2, 17), (2, 70, 1, 64), (2, 1, 3, 2, 8)])
def test_any_shape(shape, device):
    """Rows beyond one tile of tokens, channels that are no power of two."""
    x, A_log, dt_bias = inputs(*shape, device=device)
    g = kda_gate_fwd(x, A_log, dt_bias)
    assert g.shape == shape and rms_error(g.cpu(), want(x, A_log, dt_bias)) < 1e-6


@pytest.mark.parametrize("K", [128, 130, 256])
def test_rows_wider_than_one_tile(K, device):
    x, A_log, dt_bias = inputs(3, 2, K, device=device)
    assert rms_error(kda_gate_fwd(x, A_log, dt_bias).cpu(), want(x, A_log, dt_bias)) < 1e-6


@pytest.mark.parametrize("shape", [(0, 3, 8), (2, 0, 3, 8)])
def test_no_tokens(shape, device):
    g = kda_gate_fwd(torch.zeros(shape, device=device), torch.zeros(3, device=device))
    assert g.shape == shape


@pytest.mark.parametrize("config", kda_gate_fwd_kernel.every_config, ids=str)
def test_every_configuration(config, device, monkeypatch):
    monkeypatch.setattr(kda_gate_fwd_kernel, "configs", [config])
    x, A_log, dt_bias = inputs(130, 2, 20, dtype=torch.bfloat16, device=device)
    for lower_bound in (None, -5.0):
        g = kda_gate_fwd(x, A_log, dt_bias, lower_bound)
        assert rms_error(g.cpu(), want(x, A_log, dt_bias, lower_bound)) < 1e-6


def test_the_tails_of_softplus(device):
    """log(1 + exp(x)) in float32 is 0 below -17 and infinite above 88; the gate must be neither."""
    x = torch.tensor([-80.0, -60, -20, -17, -9, -1, 0, 1, 19.9, 20, 20.1, 60, 89, 1e4])
    x = torch.cat([x, torch.linspace(-30, 30, 1001)])
    g = kda_gate_fwd(x.reshape(1, 1, -1).to(device), torch.zeros(1, device=device)).cpu()[0, 0]
    exact = -torch.log1p(x.double().exp())
    exact[x > 40] = -x[x > 40].double()
    error = (g.double() - exact).abs() / exact.abs()
    assert error[x >= -20].max() < 2e-6
    assert error.max() < 6e-6  # in the interpreter, whose fma rounds twice; less on a GPU
    assert abs(g[2].item() + 2.0611536e-9) < 1e-14
    assert g[13].item() == -1e4


def test_no_jump_at_the_threshold(device):
    x = torch.nextafter(torch.tensor([20.0, 20.0]), torch.tensor([-math.inf, math.inf]))
    below, above = (
        kda_gate_fwd(x.reshape(2, 1, 1).to(device), torch.zeros(1, device=device))
        .flatten()
        .tolist()
    )
    assert 0 <= below - above < 1e-5


@pytest.mark.parametrize("beta, threshold", [(0.5, 20.0), (2.0, 4.0), (3.0, 0.0)])
def test_softplus_parameters(beta, threshold, device):
    x, A_log, dt_bias = inputs(6, 2, 30, device=device)
    g = kda_gate_fwd(x, A_log, dt_bias, beta=beta, threshold=threshold)
    expected = want(x, A_log, dt_bias, beta=beta, threshold=threshold)
    assert rms_error(g.cpu(), expected) < 1e-6


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_extreme_parameters(device):
    """A rate beyond float32 is a full reset; a saturated sigmoid is exactly the bound, or 0."""
    x = torch.tensor([[[1.0, 30.0]]], device=device)
    g = kda_gate_fwd(x, torch.tensor([100.0], device=device))
    assert bool((g < -1e30).all()) and not g.exp().any()
    x = torch.tensor([[[1e4, -1e4, 60.0, -200.0]]], device=device)
    g = kda_gate_fwd(x, torch.zeros(1, device=device), lower_bound=-5.0).flatten().tolist()
    assert g == [-5.0, 0.0, -5.0, 0.0]


def test_every_head_has_its_own_parameters(device):
    x, A_log, dt_bias = inputs(4, 3, 8, device=device)
    g = kda_gate_fwd(x, A_log, dt_bias)
    for head in range(3):
        A, bias = A_log.clone(), dt_bias.clone().view(3, 8)
        A[head] += 1
        bias[head] += 1
        for changed in (kda_gate_fwd(x, A, dt_bias), kda_gate_fwd(x, A_log, bias)):
            others = [h for h in range(3) if h != head]
            assert torch.equal(changed[:, others], g[:, others])
            assert not torch.equal(changed[:, head], g[:, head])


@pytest.mark.parametrize("dtype", list(BUDGETS))
def test_output_dtype(dtype, device):
    x, A_log, dt_bias = inputs(6, 2, 12, dtype=torch.bfloat16, device=device)
    g = kda_gate_fwd(x, A_log, dt_bias, output_dtype=dtype)
    assert g.dtype == dtype and rms_error(g.cpu(), want(x, A_log, dt_bias)) < BUDGETS[dtype]


def test_parameters_keep_their_precision(device):
    x, A_log, dt_bias = inputs(6, 2, 12, dtype=torch.bfloat16, device=device)
    full, rounded = kda_gate_fwd(x, A_log, dt_bias), kda_gate_fwd(x, A_log.bfloat16(), dt_bias)
    assert rms_error(full, rounded) > 1e-4
    assert torch.equal(rounded, kda_gate_fwd(x, A_log.bfloat16().float(), dt_bias))
    assert torch.equal(full, kda_gate_fwd(x.float(), A_log.double(), dt_bias))


def test_shapes_of_the_parameters_are_free(device):
    x, A_log, dt_bias = inputs(5, 3, 8, device=device)
    g = kda_gate_fwd(x, A_log, dt_bias)
    strided = torch.stack([A_log, A_log], dim=1)[:, 0]
    assert torch.equal(g, kda_gate_fwd(x, A_log.view(1, 1, 3, 1), dt_bias.view(3, 8)))
    assert torch.equal(g, kda_gate_fwd(x, strided, dt_bias.view(3, 8).T.contiguous().T))


def test_strided_inputs(device, canary):
    packed, A_log, dt_bias = inputs(2, 5, 3, 16, device=device)
    A_log, dt_bias = canary(A_log), canary(dt_bias.view(3, 16)[:, 8:].contiguous())
    part = packed[..., 8:]
    assert as_rows(part).data_ptr() == part.data_ptr()
    views = [part, part.transpose(0, 1), part[:, ::2], part[:, :1].expand(part.shape), part[1]]
    for view in views:
        g = kda_gate_fwd(view, A_log, dt_bias)
        assert torch.equal(g, kda_gate_fwd(canary(view.contiguous()), A_log, dt_bias))


def test_offsets_beyond_32_bits(device):
    """Tokens so far apart that the last begins beyond element 2^31.

    On a CPU the gaps are never touched, so they cost no memory.
    """
    near, A_log, dt_bias = inputs(1, 66, 2, 8, dtype=torch.bfloat16, device=device)
    gap = 2**25 - 64
    memory = torch.empty(65 * gap + 16, dtype=torch.bfloat16, device=device)
    far = memory.as_strided(near.shape, (66 * gap, gap, 8, 1)).copy_(near)
    assert as_rows(far).data_ptr() == far.data_ptr()
    assert torch.equal(kda_gate_fwd(far, A_log, dt_bias), kda_gate_fwd(near, A_log, dt_bias))


def test_the_recurrence_computes_the_same_gate(device):
    """One formula in the project: with k = 0, a state of ones shows exp(g) itself."""
    from kda_edu import fused_recurrent_kda

    x, A_log, dt_bias = inputs(1, 1, 2, 16, device=device)
    zero = torch.zeros(1, 1, 2, 16, device=device)
    for lower_bound in (None, -5.0):
        _, state = fused_recurrent_kda(
            zero,
            zero,
            zero[..., :4],
            x,
            zero[..., 0],
            A_log=A_log,
            dt_bias=dt_bias,
            lower_bound=lower_bound,
            use_gate_in_kernel=True,
            initial_state=torch.ones(1, 2, 16, 4, device=device),
            output_final_state=True,
        )
        decay = kda_gate_fwd(x, A_log, dt_bias, lower_bound).exp()
        assert rms_error(state[..., 0], decay[0]) < 1e-6


def test_a_gradient_is_refused_not_lost(device):
    for which in range(3):
        given = list(inputs(2, 2, 8, device=device))
        given[which].requires_grad_()
        with pytest.raises(NotImplementedError, match="kda_gate_fwd has no backward"):
            kda_gate_fwd(*given).sum().backward()


X, A = torch.zeros(2, 3, 8), torch.zeros(3)
MISTAKES = [
    (dict(g=X.int(), A_log=A), TypeError, "g: .*int32"),
    (dict(g=X[0, 0], A_log=A), ValueError, "g: .*shape"),
    (dict(g=X), ValueError, "A_log: expected a tensor"),
    (dict(g=X, A_log=A[:2]), ValueError, "A_log: .*(3,).*(2,)"),
    (dict(g=X, A_log=[0, 0, 0]), TypeError, "A_log: .*list"),
    (dict(g=X, A_log=A, dt_bias=A), ValueError, "dt_bias: .*24.*(3,)"),
    (dict(g=X, A_log=A, lower_bound=0.0), ValueError, "lower_bound: .*< 0"),
    (dict(g=X, A_log=A, lower_bound=-math.inf), ValueError, "lower_bound: .*finite"),
    (dict(g=X, A_log=A, lower_bound="a"), TypeError, "lower_bound: .*str"),
    (dict(g=X, A_log=A, beta=0.0), ValueError, "beta: .*> 0"),
    (dict(g=X, A_log=A, beta=None), TypeError, "beta: .*NoneType"),
    (dict(g=X, A_log=A, threshold=-1.0), ValueError, "threshold: .*>= 0"),
    (dict(g=X, A_log=A, output_dtype=torch.float64), TypeError, "output_dtype: .*float64"),
]


@pytest.mark.parametrize("given, error, message", MISTAKES, ids=[str(i) for i in range(13)])
def test_mistakes_are_named(given, error, message):
    with pytest.raises(error, match=message):
        kda_gate_fwd(**given)


def test_the_configurations_are_few_and_differ():
    configs = [(c.kwargs["BT"], c.num_warps) for c in kda_gate_fwd_kernel.every_config]
    assert 4 <= len(set(configs)) == len(configs) <= 8
    assert len(list(itertools.groupby(sorted(BT for BT, _ in configs)))) >= 3


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_a_rate_beyond_float32_is_no_nan(lower_bound, device):
    """exp(95) overflows; times a softplus or an input of 0 it must still be 0."""
    x = torch.tensor([-200.0, -20.0, 0.0, 3.0], device=device).expand(1, 3, 1, 4)
    A_log = torch.tensor([95.0], device=device, requires_grad=True)
    gate = dict(A_log=A_log, lower_bound=lower_bound)
    g = kda_gate_fwd(x, **{**gate, "A_log": A_log.detach()})
    assert bool((g <= 0).all()) and g[0, 0, 0, 0] == 0
    for kda in (chunk_kda, fused_recurrent_kda):
        o, _ = kda(x, x, x, x, x[..., 3].sigmoid(), use_gate_in_kernel=True, **gate)
        (gradient,) = torch.autograd.grad(o.sum(), A_log)
        assert bool(o.isfinite().all()) and bool(gradient.isfinite().all())
