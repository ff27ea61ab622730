"""bfloat16 in Triton's interpreter: with the shim that of PyTorch, without it garbage."""

import os
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl

import kda_edu.kernels  # noqa: F401  (installs the shim)

interpreted = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="about the interpreter; this run compiles"
)


@triton.jit
def dot_kernel(a, b, c, N: tl.constexpr):
    o = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(c + o, tl.dot(tl.load(a + o), tl.load(b + o)))


@triton.jit
def arithmetic_kernel(a, b, out, N: tl.constexpr):
    o = tl.arange(0, N)
    x, y = tl.load(a + o), tl.load(b + o)
    tl.store(out + o, x + y)
    tl.store(out + N + o, x - y)
    tl.store(out + 2 * N + o, x * y)
    tl.store(out + 3 * N + o, -x)
    tl.store(out + 4 * N + o, tl.where(x > y, x, y))


@triton.jit
def cast_kernel(x, out, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(out + o, tl.load(x + o).to(out.dtype.element_ty))


@triton.jit
def loop_kernel(x, out, count):
    total = 0.0
    for i in range(0, count):
        total += tl.load(x + i)
    for i in tl.range(0, count, num_stages=2):
        total += tl.load(x + i)
    tl.store(out, total)


@triton.jit
def sum_kernel(x, out, N: tl.constexpr):
    tl.store(out, tl.sum(tl.load(x + tl.arange(0, N)), axis=0))


@triton.jit
def assert_kernel(x):
    tl.device_assert(tl.load(x) > 0, "not positive")


@triton.jit
def add_one(x):
    return x + 1


@triton.jit
def nested_kernel(x, out):
    tl.store(out, add_one(add_one(tl.load(x))) + tl.sum(tl.zeros([4], tl.float32) + 1.0, axis=0))


def bf16(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@interpreted
def test_dot_of_bf16():
    a, b, c = bf16(16, 16), bf16(16, 16, seed=1), torch.empty(16, 16)
    dot_kernel[(1,)](a, b, c, N=16)
    assert (c - a.float() @ b.float()).abs().max() < 1e-5
    integers = torch.arange(256.0).reshape(16, 16).remainder(7).bfloat16()
    dot_kernel[(1,)](integers, integers.T.contiguous(), c, N=16)
    assert torch.equal(c, integers.float() @ integers.float().T)


@interpreted
def test_arithmetic_in_bf16_is_that_of_torch():
    a, b, out = bf16(256), bf16(256, seed=1), torch.empty(5, 256, dtype=torch.bfloat16)
    arithmetic_kernel[(1,)](a, b, out, N=256)
    assert torch.equal(out, torch.stack([a + b, a - b, a * b, -a, torch.maximum(a, b)]))


@interpreted
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16])
def test_casts_are_those_of_torch(source, target):
    """To nearest, ties to even, infinities and NaN kept."""
    ties = torch.tensor([1.00390625, 1.01171875, 3.4e38, 1e-37, 0.0, -0.0])
    special = torch.tensor([torch.inf, -torch.inf, torch.nan])
    x = torch.cat([torch.randn(247) * 100, ties, special]).to(source)
    out = torch.empty(256, dtype=target)
    cast_kernel[(1,)](x, out, N=256)
    assert torch.equal(out.isnan(), x.isnan())
    kept = ~x.isnan()
    assert torch.equal(out[kept], x.to(target)[kept])


@interpreted
@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_loop_of_dynamic_length(count):
    x, out = torch.arange(1.0, 9.0), torch.empty(1)
    loop_kernel[(1,)](x, out, count)
    assert out.item() == 2 * x[:count].sum().item()


@interpreted
def test_a_sum_of_bf16_is_refused():
    with pytest.raises(Exception, match="bfloat16 in a reduction or scan"):
        sum_kernel[(1,)](bf16(16), torch.empty(1), N=16)
    out = torch.empty(1)
    sum_kernel[(1,)](bf16(16).float(), out, N=16)
    assert abs(out.item() - bf16(16).float().sum().item()) < 1e-6


@interpreted
def test_device_assert_fires():
    assert_kernel[(1,)](torch.ones(1))
    with pytest.raises(Exception, match="not positive"):
        assert_kernel[(1,)](-torch.ones(1))


@interpreted
def test_functions_called_by_a_kernel():
    """Nested calls, again and again: triton.language is patched once a launch, and restored."""
    for _ in range(3):
        out = torch.empty(1)
        nested_kernel[(1,)](torch.tensor([3.0]), out)
        assert out.item() == 9.0
        assert tl.core.is_builtin(tl.load) and tl.core.is_builtin(tl.math.exp)
    with pytest.raises(Exception, match="not positive"):
        assert_kernel[(1,)](-torch.ones(1))
    assert tl.core.is_builtin(tl.load)


WITHOUT_THE_SHIM = """
import torch, triton, triton.language as tl

@triton.jit
def kernel(a, b, c, d, N: tl.constexpr):
    o = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(c + o, tl.dot(tl.load(a + o), tl.load(b + o)))
    tl.store(d + o, tl.load(c + o).to(tl.bfloat16))

torch.manual_seed(0)
a, b = torch.randn(16, 16).bfloat16(), torch.randn(16, 16).bfloat16()
c, d = torch.empty(16, 16), torch.empty(16, 16, dtype=torch.bfloat16)
kernel[(1,)](a, b, c, d, N=16)
print((c - a.float() @ b.float()).abs().max().item(), int((d != c.bfloat16()).sum()))
"""


def test_the_shim_is_needed(tmp_path):
    """Without it a dot and a cast are wrong, with no message. When this fails, drop the shim."""
    script = tmp_path / "probe.py"
    script.write_text(WITHOUT_THE_SHIM)
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        check=True,
    )
    error_of_dot, wrong_casts = done.stdout.split()
    assert float(error_of_dot) > 1000 and int(wrong_casts) > 50
