"""L2 norm of the last dimension: y = x / sqrt(sum x^2 + eps).

Grid: tiles of rows. A row is one token and head. Reads x once, writes y once and 4 bytes of rstd:
2 D + 2 D + 4 bytes per row in 16 bits. Squares and sums are float32, whatever x is.
"""

import torch
import triton
import triton.language as tl

from ._autotune import autotune
from ._common import (
    as_rows,
    cdiv,
    forward_only,
    next_power_of_2,
    on_device_of_first_argument,
    row_strides,
)
from .checks import KERNEL_DTYPES, check_tensor

EPS = 1e-6


@triton.jit
def reciprocal_norm(sum_of_squares, eps):
    """1 / sqrt(sum x^2 + eps). eps is inside the root, so a row of zeros stays zero."""
    return tl.rsqrt(sum_of_squares + eps)


@autotune(
    configs=[
        triton.Config({"TILE": TILE}, num_warps=num_warps)
        for TILE, num_warps in ((1024, 1), (2048, 4), (4096, 4), (8192, 8))
    ],
    key=["D"],
)
@triton.heuristics({"BT": lambda args: max(1, args["TILE"] // args["BD"])})
@triton.jit(do_not_specialize=["rows"])
def l2norm_fwd_kernel(
    # input, outputs
    x,
    y,
    rstd,
    # sizes
    rows,
    heads,
    stride_token,
    stride_head,
    eps,
    D: tl.constexpr,
    BD: tl.constexpr,
    TILE: tl.constexpr,
    BT: tl.constexpr,
):
    o_r = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)  # rows, in the order of y
    o_d = tl.arange(0, BD)
    m_r = o_r < rows
    m_rd = m_r[:, None] & (o_d < D)[None, :]

    start = (o_r // heads) * stride_token + (o_r % heads) * stride_head
    b_x = tl.load(x + start[:, None] + o_d[None, :], mask=m_rd, other=0.0)  # [BT, BD]
    b_x = b_x.to(tl.float32)
    b_rstd = reciprocal_norm(tl.sum(b_x * b_x, axis=1), eps)  # [BT]
    b_y = b_x * b_rstd[:, None]

    tl.store(y + o_r[:, None] * D + o_d[None, :], b_y.to(y.dtype.element_ty), mask=m_rd)
    tl.store(rstd + o_r, b_rstd, mask=m_r)


@on_device_of_first_argument
def l2norm_fwd(x, eps=EPS, output_dtype=None):
    """y = x / sqrt(sum x^2 + eps) over the last dimension.

    Args:
        x: [..., D], float32, float16 or bfloat16. A view [B, T, heads, D] of a packed projection
            is read in place, other strided views are copied first.
        eps: added to the sum of squares, inside the root. Default 1e-6.
        output_dtype: dtype of y. Default that of x.

    Returns:
        (y [..., D] contiguous, rstd [...] float32), where y = x * rstd.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came.
    """
    check_tensor("x", x, dtypes=KERNEL_DTYPES)
    if x.ndim < 1 or x.shape[-1] < 1:
        raise ValueError(f"x: expected shape [..., D] with D >= 1, got {tuple(x.shape)}")
    if not isinstance(eps, (int, float)):
        raise TypeError(f"eps: expected a number, got {type(eps).__name__}")
    if not 0 < eps < float("inf"):
        raise ValueError(f"eps: expected a finite number > 0, got {eps}")
    if output_dtype not in (None, *KERNEL_DTYPES):
        raise TypeError(f"output_dtype: expected one of {KERNEL_DTYPES}, got {output_dtype}")

    D = x.shape[-1]
    y = torch.empty(x.shape, dtype=output_dtype or x.dtype, device=x.device)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    rows = as_rows(x if x.ndim == 4 else x.reshape(1, -1, 1, D))
    stride_token, stride_head = row_strides(rows)
    if rstd.numel() > 0:
        grid = lambda meta: (cdiv(rstd.numel(), meta["BT"]),)  # noqa: E731
        l2norm_fwd_kernel[grid](
            rows,
            y,
            rstd,
            rstd.numel(),
            rows.shape[2],
            stride_token,
            stride_head,
            float(eps),
            D=D,
            BD=next_power_of_2(D),
        )
    return forward_only("l2norm_fwd", (y, rstd), (x,))
