"""What several kernels share: constants, strided access, launch rules, the gate formula."""

import contextlib
import functools

import torch
import triton
import triton.language as tl

RCP_LN2 = 1.4426950408889634  # 1 / ln 2: natural-log gates times this feed exp2


def next_power_of_2(n: int) -> int:
    """The smallest power of two >= n; tile sides must be powers of two."""
    return triton.next_power_of_2(n)


def key_tile(K: int) -> int:
    """Tile side that holds a whole row of K channels; tl.dot needs at least 16."""
    return max(16, next_power_of_2(K))


def dot_precision(dtype: torch.dtype) -> str:
    """Precision of `tl.dot` on float32 operands: exact for float32 inputs, tf32 for 16-bit ones.

    tf32 keeps 10 mantissa bits, more than bfloat16 (7) and as many as float16, without float16's
    small exponent range.
    """
    return "ieee" if dtype == torch.float32 else "tf32"


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """`x` [B, T, heads, D] such that token (b, t) lies at (b * T + t) * x.stride(1).

    Views of a packed projection are taken as they are; anything else is copied.
    """
    B, T, heads, D = x.shape
    contiguous_row = D == 1 or x.stride(3) == 1
    one_stride = B == 1 or T == 1 or x.stride(0) == T * x.stride(1)
    if contiguous_row and one_stride and B * T * heads > 0:
        return x
    return x.contiguous()


def row_strides(x: torch.Tensor) -> tuple[int, int]:
    """(elements between tokens, elements between heads) of a tensor from `as_rows`.

    The stride of a dimension of size 1 means nothing and may be huge, so it is not used.
    """
    B, T, heads, D = x.shape
    head = x.stride(2) if heads > 1 else D
    if T > 1:
        return x.stride(1), head
    return (x.stride(0) if B > 1 else heads * D), head


def on_device_of_first_argument(function):
    """Launch on the GPU that holds the first argument, whatever the current device is."""

    @functools.wraps(function)
    def wrapper(x, *args, **kwargs):
        on_gpu = isinstance(x, torch.Tensor) and x.device.type == "cuda"
        with torch.cuda.device(x.device) if on_gpu else contextlib.nullcontext():
            return function(x, *args, **kwargs)

    return wrapper


@triton.jit
def softplus(x, beta, threshold):
    """log(1 + exp(beta x)) / beta, and x once beta x > threshold; accurate in both tails.

    log(1 + e) loses everything below e = 6e-8. Dividing by the rounded (1 + e) - 1 repairs it.
    """
    y = beta * x
    e = tl.exp(-tl.abs(y))
    u = 1.0 + e
    log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(y > threshold, x, (tl.maximum(y, 0.0) + log1p) / beta)


@triton.jit
def log_decay(x, rate, lower_bound, beta, threshold, USE_LOWER_BOUND: tl.constexpr):
    """Natural log of the decay from the gate input x (dt_bias already added), rate = exp(A_log).

    -rate softplus(x), or lower_bound sigmoid(rate x).
    """
    if USE_LOWER_BOUND:
        g = lower_bound * tl.sigmoid(rate * x)
    else:
        g = -rate * softplus(x, beta, threshold)
    return g
