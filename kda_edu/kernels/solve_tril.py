"""Step 3: the inverse of I + A_kk, chunk by chunk.

A_kk is strictly lower triangular, so the inverse X exists and is lower triangular with a unit
diagonal. First the 16 x 16 blocks on the diagonal, all at once, by forward substitution in
float32. Then blocks are merged, 16 -> 32 -> 64:

    [ P 0 ]^-1     [  P^-1          0    ]
    [ M Q ]     =  [ -Q^-1 M P^-1   Q^-1 ]

Substitution is exact where entries are small integers and needs no powers of A_kk, whose entries
grow like binomial coefficients when keys are alike. All tiles are 16 x 16, so that one warp holds
them and never waits for another.

Grid: chunks x value heads. Reads 4 C (float32), writes 2 C (bf16) bytes per token and head.
"""

import torch
import triton
import triton.language as tl

from ._common import locate_chunk, on_device_of_first_argument, operand
from .checks import check_sizes
from .sequences import chunk_layout


@triton.jit
def invert_diagonal_blocks(p_A, o_row, stride, count, NC: tl.constexpr, BC: tl.constexpr):
    """(I + A)^-1 for the NC blocks [BC, BC] on the diagonal, by forward substitution.

    Row i of the inverse is e_i - A[i, :i] X[:i]. X is kept transposed, [NC, column, row], so that
    the sum over rows stays within few threads.
    """
    o_c = tl.arange(0, BC)[None, :, None]
    o_r = tl.arange(0, BC)[None, None, :]
    b_Xt = tl.where(o_c == o_r, 1.0, 0.0) + tl.zeros([NC, BC, BC], dtype=tl.float32)
    for i in tl.static_range(1, BC):
        m_row = (o_row + i < count) & (tl.arange(0, BC)[None, :] < i)
        b_a = tl.load(p_A + i * stride, mask=m_row, other=0.0)  # [NC, BC]: A[i, :] per block
        b_x = tl.sum(b_a[:, None, :] * b_Xt, axis=2)  # [NC, BC]: A[i, :i] X[:i], by column
        b_Xt -= tl.where(o_r == i, b_x[:, :, None], 0.0)
    return tl.permute(b_Xt, [0, 2, 1])


@triton.jit
def take(b_X, n: tl.constexpr, NC: tl.constexpr):
    """Matrix n of a stack [NC, BC, BC]."""
    return tl.sum(tl.where(tl.arange(0, NC)[:, None, None] == n, b_X, 0.0), axis=0)


@triton.jit
def load_block(p, i: tl.constexpr, j: tl.constexpr, o_r, stride, count, BC: tl.constexpr):
    """Block (i, j) of A, [BC, BC]."""
    m = (i * BC + o_r < count)[:, None]
    return tl.load(p + i * BC * stride + j * BC, mask=m, other=0.0)


@triton.jit
def store_block(p, i: tl.constexpr, j: tl.constexpr, b_Y, o_r, stride, count, BC: tl.constexpr):
    m = (i * BC + o_r < count)[:, None]
    tl.store(p + i * BC * stride + j * BC, b_Y.to(p.dtype.element_ty), mask=m)


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    a, b = operand(a, PRECISION), operand(b, PRECISION)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit(do_not_specialize=["T"])
def solve_tril_kda_kernel(
    A,
    A_inv,
    chunks,
    T,
    BHV,
    HV: tl.constexpr,
    C: tl.constexpr,
    BC: tl.constexpr,
    PACKED: tl.constexpr,
    P: tl.constexpr,  # precision of the products
):
    NC: tl.constexpr = C // BC
    i_t, i_bh = tl.program_id(0) // BHV, tl.program_id(0) % BHV
    i_b, i_h = i_bh // HV, i_bh % HV
    start, count = locate_chunk(i_t, i_b, chunks, T, C, PACKED)
    if count <= 0:
        return
    stride = HV * C  # from row to row
    o_r = tl.arange(0, BC)
    A += (start * HV + i_h) * C
    p_X = A_inv + (start * HV + i_h) * C + o_r[:, None] * stride + o_r[None, :]

    o_n = tl.arange(0, NC)[:, None] * BC  # first row and column of each diagonal block
    p_rows = A + o_n * stride + o_n + o_r[None, :]
    b_X = invert_diagonal_blocks(p_rows, o_n, stride, count, NC, BC)  # [NC, BC, BC]
    b_X0 = take(b_X, 0, NC)
    store_block(p_X, 0, 0, b_X0, o_r, stride, count, BC)
    b_zero = tl.zeros([BC, BC], dtype=tl.float32)

    p_A = A + o_r[:, None] * stride + o_r[None, :]
    if NC >= 2:  # 16 -> 32: P = X0, Q = X1
        b_X1 = take(b_X, 1, NC)
        b_10 = load_block(p_A, 1, 0, o_r, stride, count, BC)
        b_Y10 = -product(b_X1, product(b_10, b_X0, P), P)
        store_block(p_X, 1, 1, b_X1, o_r, stride, count, BC)
        store_block(p_X, 1, 0, b_Y10, o_r, stride, count, BC)
        store_block(p_X, 0, 1, b_zero, o_r, stride, count, BC)
    if NC == 4:  # the second pair, then 32 -> 64 with P = [X0 0; Y10 X1], Q = [X2 0; Y32 X3]
        b_X2, b_X3 = take(b_X, 2, NC), take(b_X, 3, NC)
        b_32 = load_block(p_A, 3, 2, o_r, stride, count, BC)
        b_Y32 = -product(b_X3, product(b_32, b_X2, P), P)
        b_20 = load_block(p_A, 2, 0, o_r, stride, count, BC)
        b_21 = load_block(p_A, 2, 1, o_r, stride, count, BC)
        b_30 = load_block(p_A, 3, 0, o_r, stride, count, BC)
        b_31 = load_block(p_A, 3, 1, o_r, stride, count, BC)
        b_M20 = product(b_20, b_X0, P) + product(b_21, b_Y10, P)  # M P^-1
        b_M30 = product(b_30, b_X0, P) + product(b_31, b_Y10, P)
        b_M21, b_M31 = product(b_21, b_X1, P), product(b_31, b_X1, P)
        store_block(p_X, 2, 0, -product(b_X2, b_M20, P), o_r, stride, count, BC)
        store_block(p_X, 2, 1, -product(b_X2, b_M21, P), o_r, stride, count, BC)
        b_Y30 = product(b_Y32, b_M20, P) + product(b_X3, b_M30, P)
        b_Y31 = product(b_Y32, b_M21, P) + product(b_X3, b_M31, P)
        store_block(p_X, 3, 0, -b_Y30, o_r, stride, count, BC)
        store_block(p_X, 3, 1, -b_Y31, o_r, stride, count, BC)
        store_block(p_X, 2, 2, b_X2, o_r, stride, count, BC)
        store_block(p_X, 3, 2, b_Y32, o_r, stride, count, BC)
        store_block(p_X, 3, 3, b_X3, o_r, stride, count, BC)
        for i in tl.static_range(3):
            for j in tl.static_range(2, 4):
                if j > i:
                    store_block(p_X, i, j, b_zero, o_r, stride, count, BC)


@on_device_of_first_argument
def solve_tril_kda(A, *, cu_seqlens=None, layout=None, output_dtype=torch.float32):
    """(I + A)^-1 of every chunk.

    Args:
        A: float32 [B, T, HV, C], strictly lower triangular per chunk, as `A_kk`; C is 16, 32 or
            64. Entries on and above the diagonal are not read.
        output_dtype: of the inverse. Blocks are merged with IEEE products for float32, else tf32.
        cu_seqlens, layout: as in `chunk_local_cumsum`.

    Returns:
        [B, T, HV, C] in `output_dtype`; entries above the diagonal are 0.
    """
    check_sizes(A=(A, "B T HV C", (torch.float32,)))
    B, T, HV, C = A.shape
    layout = layout or chunk_layout(B, T, C, cu_seqlens)
    A = A.contiguous()
    A_inv = torch.empty(A.shape, dtype=output_dtype, device=A.device)
    if A.numel() > 0:
        solve_tril_kda_kernel[(layout.programs(HV),)](
            A,
            A_inv,
            layout.chunks,
            T,
            layout.rows * HV,
            HV=HV,
            C=C,
            BC=16,
            PACKED=layout.chunks is not None,
            P="ieee" if output_dtype == torch.float32 else "tf32",
            num_warps=1,
            num_stages=1,
        )
    return A_inv
