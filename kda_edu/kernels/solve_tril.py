"""Step 3: the inverse of I + A_kk, chunk by chunk.

A_kk is strictly lower triangular, so the inverse exists and is lower triangular with a unit
diagonal. First the 16 x 16 blocks on the diagonal, all at once, by forward substitution in
float32; then blocks are merged in pairs, 16 -> 32 -> 64:

    [ P 0 ]^-1     [  P^-1          0    ]
    [ M Q ]     =  [ -Q^-1 M P^-1   Q^-1 ]

which for a whole chunk of pairs is X <- X - X M X, with X the block-diagonal of inverses so far.
Substitution is exact where entries are small integers and needs no powers of A_kk, whose entries
grow like binomial coefficients when keys are alike.

Grid: chunks x value heads. Reads 4 C (float32), writes 4 C bytes per token and head.
"""

import torch
import triton
import triton.language as tl

from ._common import dot_precision, locate_chunk, on_device_of_first_argument
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
def block_diagonal(b_X, NC: tl.constexpr, BC: tl.constexpr):
    """A stack [NC, BC, BC] laid along the diagonal of a matrix [NC * BC, NC * BC]."""
    o_n = tl.arange(0, NC)
    same = (o_n[:, None] == o_n[None, :])[:, None, :, None]  # [NC, 1, NC, 1]
    b_D = tl.where(same, b_X[:, :, None, :], 0.0)  # [NC, BC, NC, BC]
    return tl.reshape(b_D, [NC * BC, NC * BC])


@triton.jit
def merge_pairs(b_X, p_A, o_i, m_i, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """X - X M X, with M the blocks of A that join two neighbouring blocks of SIZE rows."""
    pair, side = o_i // (2 * SIZE), o_i // SIZE
    m_M = (pair[:, None] == pair[None, :]) & (side[:, None] > side[None, :])
    b_M = tl.load(p_A, mask=m_i & m_M, other=0.0)  # [C, C]
    b_MX = tl.dot(b_M, b_X, input_precision=PRECISION)
    return b_X - tl.dot(b_X, b_MX, input_precision=PRECISION)


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
    PRECISION: tl.constexpr,
):
    NC: tl.constexpr = C // BC
    i_t, i_bh = tl.program_id(0) // BHV, tl.program_id(0) % BHV
    i_b, i_h = i_bh // HV, i_bh % HV
    start, count = locate_chunk(i_t, i_b, chunks, T, C, PACKED)
    if count <= 0:
        return
    A += (start * HV + i_h) * C
    A_inv += (start * HV + i_h) * C

    o_n = tl.arange(0, NC)[:, None] * BC  # first row and column of each diagonal block
    p_rows = A + o_n * (HV * C) + o_n + tl.arange(0, BC)[None, :]
    b_X = invert_diagonal_blocks(p_rows, o_n, HV * C, count, NC, BC)  # [NC, BC, BC]
    b_X = block_diagonal(b_X, NC, BC)  # [C, C]

    o_i = tl.arange(0, C)
    o_ij = o_i[:, None] * (HV * C) + o_i[None, :]
    m_i = (o_i < count)[:, None]
    if C > BC:
        b_X = merge_pairs(b_X, A + o_ij, o_i, m_i, BC, PRECISION)
    if C > 2 * BC:
        b_X = merge_pairs(b_X, A + o_ij, o_i, m_i, 2 * BC, PRECISION)
    tl.store(A_inv + o_ij, b_X, mask=m_i & (o_i < C)[None, :])


@on_device_of_first_argument
def solve_tril_kda(A, *, cu_seqlens=None, layout=None, exact=True):
    """(I + A)^-1 of every chunk.

    Args:
        A: float32 [B, T, HV, C], strictly lower triangular per chunk, as `A_kk`; C is 16, 32 or
            64. Entries on and above the diagonal are not read.
        exact: merge blocks with float32 products, else with tf32 ones.
        cu_seqlens, layout: as in `chunk_local_cumsum`.

    Returns:
        float32 [B, T, HV, C]; entries above the diagonal are 0.
    """
    B, T, HV, C = A.shape
    layout = layout or chunk_layout(B, T, C, cu_seqlens)
    A = A.contiguous()
    A_inv = torch.empty_like(A)
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
            PRECISION=dot_precision(torch.float32 if exact else torch.bfloat16),
            num_warps=8 if exact else 4,
            num_stages=1,
        )
    return A_inv
