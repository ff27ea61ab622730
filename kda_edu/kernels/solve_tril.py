"""Step 3: the inverse of I + A_kk, chunk by chunk.

A_kk is strictly lower triangular, so the inverse exists and is lower triangular with a unit
diagonal. First the 16 x 16 blocks on the diagonal, all at once, by forward substitution in
float32; then blocks are merged in pairs, 16 -> 32 -> 64:

    [ P 0 ]^-1     [  P^-1          0    ]
    [ M Q ]     =  [ -Q^-1 M P^-1   Q^-1 ]

which for a whole chunk of pairs is X <- X - X M X, with X the block-diagonal of inverses so far.
Substitution is exact where entries are small integers and needs no powers of A_kk, whose entries
grow like binomial coefficients when keys are alike.

Grid: chunks x value heads. Reads 4 C (float32), writes 2 C (bf16) bytes per token and head.
"""

import torch
import triton
import triton.language as tl

from ._common import dot_precision, locate_chunk, on_device_of_first_argument
from .sequences import chunk_layout


@triton.jit
def invert_diagonal_blocks(b_A, BC: tl.constexpr):
    """(I + b_A)^-1 for a stack [NC, BC, BC] of strictly lower triangular blocks."""
    o_r = tl.arange(0, BC)[None, :, None]
    o_c = tl.arange(0, BC)[None, None, :]
    b_X = -b_A  # rows 0 and 1 are final
    for i in range(2, BC):
        b_row = -tl.sum(tl.where(o_r == i, b_A, 0.0), axis=1)  # [NC, BC]: row i of -A
        b_row += tl.sum(b_row[:, :, None] * b_X, axis=1)  # plus -A[i, :i] times the rows above
        b_X = tl.where(o_r == i, b_row[:, None, :], b_X)
    return b_X + tl.where(o_r == o_c, 1.0, 0.0)


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

    # the NC blocks on the diagonal
    o_n = tl.arange(0, NC)[:, None, None]
    o_r = tl.arange(0, BC)[None, :, None]
    o_c = tl.arange(0, BC)[None, None, :]
    o_row = o_n * BC + o_r
    p_diagonal = A + o_row * (HV * C) + o_n * BC + o_c
    b_A = tl.load(p_diagonal, mask=(o_row < count) & (o_r > o_c), other=0.0)  # [NC, BC, BC]
    b_X = block_diagonal(invert_diagonal_blocks(b_A, BC), NC, BC)  # [C, C]

    o_i = tl.arange(0, C)
    o_ij = o_i[:, None] * (HV * C) + o_i[None, :]
    m_i = (o_i < count)[:, None]
    if C > BC:
        b_X = merge_pairs(b_X, A + o_ij, o_i, m_i, BC, PRECISION)
    if C > 2 * BC:
        b_X = merge_pairs(b_X, A + o_ij, o_i, m_i, 2 * BC, PRECISION)
    tl.store(A_inv + o_ij, b_X.to(A_inv.dtype.element_ty), mask=m_i & (o_i < C)[None, :])


@on_device_of_first_argument
def solve_tril_kda(A, *, cu_seqlens=None, layout=None, output_dtype=torch.float32):
    """(I + A)^-1 of every chunk.

    Args:
        A: float32 [B, T, HV, C], strictly lower triangular per chunk, as `A_kk`; C is 16, 32 or
            64. Entries on and above the diagonal are not read.
        output_dtype: of the inverse. With float32 the merges use IEEE products, else tf32.
        cu_seqlens, layout: as in `chunk_local_cumsum`.

    Returns:
        [B, T, HV, C] in `output_dtype`; entries above the diagonal are 0.
    """
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
            PRECISION=dot_precision(output_dtype),
            num_warps=8 if output_dtype == torch.float32 else 4,
            num_stages=1,
        )
    return A_inv
