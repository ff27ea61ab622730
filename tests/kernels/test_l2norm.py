"""l2norm_fwd: the formula at its edges, any row length, any layout, every configuration."""

import pytest
import torch

from kda_edu import l2norm_fwd, reference
from kda_edu.kernels._common import as_rows
from kda_edu.kernels.l2norm import l2norm_fwd_kernel
from kda_edu.teach.check import rms_error

# The arithmetic is float32; a 16-bit result is only rounded once.
BUDGETS = {torch.float32: 1e-6, torch.bfloat16: 2e-3, torch.float16: 3e-4}
DTYPES = list(BUDGETS)


def rows(*shape, dtype=torch.float32, device="cpu", seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw).to(device, dtype)


def assert_right(x, y, rstd, eps=1e-6):
    want = reference.l2norm(x.cpu().double(), eps)
    assert rms_error(y.cpu(), want) < BUDGETS[y.dtype]
    squares = x.cpu().double().square().sum(-1)
    assert rstd.dtype == torch.float32 and rstd.shape == x.shape[:-1]
    assert rms_error(rstd.cpu(), (squares + eps).rsqrt()) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [1, 3, 16, 60, 64, 100, 128, 256, 300, 5000])
def test_any_row_length(D, dtype, device):
    x = rows(3, 7, D, dtype=dtype, device=device)
    y, rstd = l2norm_fwd(x)
    assert y.dtype == dtype and y.is_contiguous()
    assert_right(x, y, rstd)
    if D >= 16:
        assert (y.float().norm(dim=-1) - 1).abs().max() < 3e-3


@pytest.mark.parametrize("shape", [(16,), (5, 16), (3, 5, 16), (2, 3, 4, 16), (2, 1, 3, 2, 16)])
def test_any_number_of_dimensions(shape, device):
    x = rows(*shape, device=device)
    assert_right(x, *l2norm_fwd(x))


@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 4, 16)])
def test_no_rows(shape, device):
    y, rstd = l2norm_fwd(torch.zeros(shape, device=device))
    assert y.shape == shape and rstd.shape == shape[:-1]


@pytest.mark.parametrize("config", l2norm_fwd_kernel.every_config, ids=str)
def test_every_configuration(config, device, monkeypatch):
    monkeypatch.setattr(l2norm_fwd_kernel, "configs", [config])
    for shape in ((70, 60), (3, 300)):
        x = rows(*shape, dtype=torch.bfloat16, device=device)
        assert_right(x, *l2norm_fwd(x))


def test_zero_and_tiny_rows(device):
    """eps is inside the root: a zero row gives zeros, not NaN, and rstd = 1 / sqrt(eps)."""
    x = torch.stack([torch.zeros(64), torch.full((64,), 1e-30), 1e-20 * rows(64), rows(64)])
    y, rstd = l2norm_fwd(x.to(device))
    assert not y[0].any()
    assert (rstd[:3].cpu() - 1000).abs().max() < 1e-2
    assert rms_error(y[2].cpu(), x[2].double() * 1000) < 1e-6
    assert_right(x, y, rstd)


def test_large_float16_rows_do_not_overflow(device):
    x = (1e4 * rows(5, 256)).half().to(device)
    assert not x.square().sum(-1).isfinite().any()
    assert_right(x, *l2norm_fwd(x))


def test_a_row_of_nan_stays_alone(device):
    x = rows(9, 20, device=device)
    want, _ = l2norm_fwd(x)
    x[4] = float("nan")
    y, _ = l2norm_fwd(x)
    assert y[4].isnan().all()
    y[4] = want[4]
    assert torch.equal(y, want)


@pytest.mark.parametrize("eps", [1e-12, 1e-3, 1.0])
def test_eps(eps, device):
    x = 0.1 * rows(4, 20, device=device)
    assert_right(x, *l2norm_fwd(x, eps=eps), eps=eps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_output_dtype(dtype, device):
    x = rows(5, 20, dtype=torch.bfloat16, device=device)
    y, rstd = l2norm_fwd(x, output_dtype=dtype)
    assert y.dtype == dtype
    assert_right(x, y, rstd)


def test_views_of_a_packed_projection_are_read_in_place(device, canary):
    packed = rows(2, 5, 3, 48, device=device)
    before = packed.clone()
    for part in packed.split(16, dim=-1):
        assert as_rows(part).data_ptr() == part.data_ptr()
        y, rstd = l2norm_fwd(part)
        want, want_rstd = l2norm_fwd(canary(part.contiguous()))
        assert torch.equal(y, want) and torch.equal(rstd, want_rstd) and y.is_contiguous()
    assert torch.equal(packed, before)


def test_other_strided_inputs(device):
    x = rows(4, 6, 3, 20, device=device)
    views = [x.transpose(0, 1), x[::2], x[:, :, :1].expand(4, 6, 3, 20), x[..., ::2], x[0, :, 1]]
    for view in views:
        y, _ = l2norm_fwd(view)
        assert torch.equal(y, l2norm_fwd(view.contiguous())[0])


def test_offsets_beyond_32_bits(device):
    """Rows so far apart that the last begins beyond element 2^31.

    On a CPU the gaps are never touched, so they cost no memory.
    """
    near = rows(1, 66, 1, 16, dtype=torch.float16, device=device)
    gap = 2**25 - 64
    memory = torch.empty(65 * gap + 16, dtype=torch.float16, device=device)
    far = memory.as_strided(near.shape, (66 * gap, gap, 16, 1)).copy_(near)
    assert as_rows(far).data_ptr() == far.data_ptr()
    assert torch.equal(l2norm_fwd(far)[0], l2norm_fwd(near)[0])


def test_a_gradient_is_refused_not_lost(device):
    y, rstd = l2norm_fwd(rows(2, 8, device=device).requires_grad_())
    for output in (y, rstd):
        with pytest.raises(NotImplementedError, match="l2norm_fwd has no backward"):
            output.sum().backward()


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (dict(x=torch.zeros(2, 4).double()), TypeError, "x: .*float64"),
        (dict(x=torch.zeros(2, 4).int()), TypeError, "x: .*int32"),
        (dict(x=[1.0]), TypeError, "x: .*list"),
        (dict(x=torch.tensor(1.0)), ValueError, "x: .*shape"),
        (dict(x=torch.zeros(2, 0)), ValueError, "x: .*shape"),
        (dict(x=torch.zeros(2, 4), eps="a"), TypeError, "eps: .*str"),
        (dict(x=torch.zeros(2, 4), eps=0.0), ValueError, "eps: .*> 0, got 0.0"),
        (dict(x=torch.zeros(2, 4), output_dtype=torch.int8), TypeError, "output_dtype: .*int8"),
    ],
)
def test_mistakes_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        l2norm_fwd(**arguments)
