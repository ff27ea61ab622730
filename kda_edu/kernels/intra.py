"""Step 2: the two score matrices of each chunk, with the decay inside the product.

    A_kk[i, j] = beta_i sum_d k_id k_jd 2^(G_id - G_jd)     j <  i, else 0
    A_qk[i, j] = scale  sum_d q_id k_jd 2^(G_id - G_jd)     j <= i, else 0

For a matrix product the decay has to be split between the two operands, and 2^(-G_jd) alone
overflows. A reference row r between the columns and the rows of a block keeps both factors small:

    2^(G_i - G_j) = 2^(G_i - G_r) 2^(G_r - G_j),    j < r <= i:  both are at most 1

Each program owns 16 rows. For the columns before them the reference is the first of the 16. The
16 columns of the block itself are cut into squares that have a reference of their own: one square
of 8 x 8 (rows 8-15, columns 0-7), two of 4 x 4, four of 2 x 2, eight of 1 x 1, each kind in one
product of which only its squares are kept. That is right for any gate. Where no gate is below -5
the first row serves the block itself too: the factor above 1 stays below 2^(15 x 5 / ln 2) = 2^108.
No reference is a later row than the row it serves, so a prefix of the output has the same bits
whatever follows.

Grid: blocks of 16 rows x chunks x value heads. Reads 4 K (q, k in bf16) + 4 K (G) bytes per token
and value head, and k, G of the earlier rows of the chunk again, from L2. Writes 8 C (both matrices,
float32) and, with the norm in the kernel, 8 per token and key head.
"""

import torch
import triton
import triton.language as tl

from ._common import (
    as_rows,
    dot_precision,
    key_tile,
    locate_chunk,
    on_device_of_first_argument,
    operand,
    row_strides,
    write_strength,
)
from .checks import KERNEL_DTYPES, check_sizes
from .l2norm import EPS, reciprocal_norm
from .sequences import chunk_layout

BLOCK = 16  # rows per program


@triton.jit
def load_rows(p, o_r, stride, mask, eps, L2NORM: tl.constexpr):
    """Rows [BC, BK] of q or k in float32, normalised if asked for, and their 1 / norm [BC]."""
    b_x = tl.load(p + o_r[:, None] * stride, mask=mask, other=0.0).to(tl.float32)
    b_rstd = tl.zeros([b_x.shape[0]], dtype=tl.float32)
    if L2NORM:
        b_rstd = reciprocal_norm(tl.sum(b_x * b_x, axis=1), eps)
        b_x *= b_rstd[:, None]
    return b_x, b_rstd


@triton.jit
def load_gate_from(
    p_G, p_residual, o_r, b_ref, b_ref_residual, stride, mask, RESIDUAL: tl.constexpr
):
    """Rows [BC, BK] of G minus reference rows; the residual restores what G rounded away."""
    b_d = tl.load(p_G + o_r[:, None] * stride, mask=mask, other=0.0) - b_ref
    if RESIDUAL:
        b_d += tl.load(p_residual + o_r[:, None] * stride, mask=mask, other=0.0) - b_ref_residual
    return b_d


@triton.jit(do_not_specialize=["T"])
def scores_before_block_kernel(
    # inputs
    q,
    k,
    G,
    G_residual,
    beta,
    # outputs
    A_kk,
    A_qk,
    q_rstd,
    k_rstd,
    # sizes
    chunks,
    T,
    scale,
    eps,
    BHV,
    stride_q,
    stride_qh,
    stride_k,
    stride_kh,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    # options
    PACKED: tl.constexpr,
    BOUNDED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    L2NORM: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
    NEG_EIGVAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Columns before the block, and with BOUNDED the block too: the reference is its first row."""
    NC: tl.constexpr = C // BC
    i_c = tl.program_id(0) % NC
    i_bh = (tl.program_id(0) // NC) % BHV
    i_t = tl.program_id(0) // NC // BHV
    i_b, i_h = i_bh // HV, i_bh % HV
    i_hk = (i_h // (HV // H)).to(tl.int64)  # times a stride between heads, which may be large
    start, count = locate_chunk(i_t, i_b, chunks, T, C, PACKED)
    if i_c * BC >= count:
        return

    o_c, o_k = tl.arange(0, BC), tl.arange(0, BK)
    o_i = i_c * BC + o_c  # rows of this program, within the chunk
    m_i, m_k = o_i < count, (o_k < K)[None, :]
    m_ik = m_i[:, None] & m_k
    head = start * HV + i_h
    stride_G = HV * K
    p_q = q + start * stride_q + i_hk * stride_qh + o_k[None, :]
    p_k = k + start * stride_k + i_hk * stride_kh + o_k[None, :]
    p_G = G + head * K + o_k[None, :]
    p_residual = p_G
    if RESIDUAL:
        p_residual = G_residual + head * K + o_k[None, :]

    b_q, b_q_rstd = load_rows(p_q, o_i, stride_q, m_ik, eps, L2NORM)  # [BC, BK]
    b_k, b_k_rstd = load_rows(p_k, o_i, stride_k, m_ik, eps, L2NORM)  # [BC, BK]
    if L2NORM:
        m_first = m_i & (i_h % (HV // H) == 0)  # one value head per key head writes
        tl.store(q_rstd + (start + o_i) * H + i_hk, b_q_rstd, mask=m_first)
        tl.store(k_rstd + (start + o_i) * H + i_hk, b_k_rstd, mask=m_first)
    b_beta = tl.load(beta + (start + o_i) * HV + i_h, mask=m_i, other=0.0).to(tl.float32)
    b_beta = write_strength(b_beta, BETA_SIGMOID, NEG_EIGVAL)[:, None]

    o_ref = (i_c * BC) * stride_G
    b_ref = tl.load(p_G + o_ref, mask=m_k, other=0.0)  # [1, BK]
    b_ref_residual = b_ref
    if RESIDUAL:
        b_ref_residual = tl.load(p_residual + o_ref, mask=m_k, other=0.0)
    b_d = load_gate_from(p_G, p_residual, o_i, b_ref, b_ref_residual, stride_G, m_ik, RESIDUAL)
    b_decay = tl.exp2(tl.where(m_ik, b_d, 0.0))
    b_q = operand(b_q * b_decay, PRECISION)
    b_k = operand(b_k * b_decay, PRECISION)
    p_A = (head + o_i[:, None] * HV) * C + o_c[None, :]
    for j in range(i_c + 1 if BOUNDED else i_c):
        o_j = j * BC + o_c
        m_jk = (o_j < count)[:, None] & m_k
        b_kj, _ = load_rows(p_k, o_j, stride_k, m_jk, eps, L2NORM)
        b_d = load_gate_from(p_G, p_residual, o_j, b_ref, b_ref_residual, stride_G, m_jk, RESIDUAL)
        b_kj = operand(b_kj * tl.exp2(tl.where(m_jk, -b_d, 0.0)), PRECISION)
        b_kj = tl.trans(b_kj)  # [BK, BC]
        b_kk = tl.dot(b_k, b_kj, input_precision=PRECISION) * b_beta
        b_qk = tl.dot(b_q, b_kj, input_precision=PRECISION) * scale
        if BOUNDED:
            b_kk = tl.where(o_i[:, None] > o_j[None, :], b_kk, 0.0)
            b_qk = tl.where(o_i[:, None] >= o_j[None, :], b_qk, 0.0)
        tl.store(A_kk + p_A + j * BC, b_kk, mask=m_i[:, None])
        tl.store(A_qk + p_A + j * BC, b_qk, mask=m_i[:, None])
    for j in range(i_c + 1, NC):
        b_zero = tl.zeros([BC, BC], dtype=tl.float32)
        tl.store(A_kk + p_A + j * BC, b_zero, mask=m_i[:, None])
        tl.store(A_qk + p_A + j * BC, b_zero, mask=m_i[:, None])


@triton.jit(do_not_specialize=["T"])
def scores_in_block_kernel(
    # inputs
    q,
    k,
    G,
    G_residual,
    beta,
    # outputs
    A_kk,
    A_qk,
    # sizes
    chunks,
    T,
    scale,
    eps,
    BHV,
    stride_q,
    stride_qh,
    stride_k,
    stride_kh,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    # options
    PACKED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    L2NORM: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
    NEG_EIGVAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The block on the diagonal for any gate, by squares of 8, 4, 2 and 1."""
    NC: tl.constexpr = C // BC
    i_c = tl.program_id(0) % NC
    i_bh = (tl.program_id(0) // NC) % BHV
    i_t = tl.program_id(0) // NC // BHV
    i_b, i_h = i_bh // HV, i_bh % HV
    i_hk = (i_h // (HV // H)).to(tl.int64)  # times a stride between heads, which may be large
    start, count = locate_chunk(i_t, i_b, chunks, T, C, PACKED)
    count -= i_c * BC  # rows of this block
    start += i_c * BC
    if count <= 0:
        return

    o_i = tl.arange(0, BC)
    m_i = o_i < count
    head = start * HV + i_h
    stride_G = HV * K
    b_kk = tl.zeros([BC, BC], dtype=tl.float32)
    b_qk = tl.zeros([BC, BC], dtype=tl.float32)
    b_same = tl.zeros([BC], dtype=tl.float32)  # q_i k_i: no decay on the diagonal of A_qk
    b_q_norm = tl.zeros([BC], dtype=tl.float32)
    b_k_norm = tl.zeros([BC], dtype=tl.float32)
    for i_k in range(tl.cdiv(K, BK)):
        o_k = i_k * BK + tl.arange(0, BK)
        m_k = (o_k < K)[None, :]
        m_ik = m_i[:, None] & m_k
        p_q = q + start * stride_q + i_hk * stride_qh + o_k[None, :]
        p_k = k + start * stride_k + i_hk * stride_kh + o_k[None, :]
        p_G = G + head * K + o_k[None, :]
        p_residual = p_G
        if RESIDUAL:
            p_residual = G_residual + head * K + o_k[None, :]
        b_q, _ = load_rows(p_q, o_i, stride_q, m_ik, eps, False)  # [BC, BK]
        b_k, _ = load_rows(p_k, o_i, stride_k, m_ik, eps, False)  # [BC, BK]
        for level in tl.static_range(4):
            pair, side = o_i >> (4 - level), o_i >> (3 - level)
            # reference: the first row of the lower half of each pair of squares
            o_r = tl.minimum((2 * pair + 1) << (3 - level), count - 1)
            b_r = tl.load(p_G + o_r[:, None] * stride_G, mask=m_k, other=0.0)  # [BC, BK]
            b_r_res = b_r
            if RESIDUAL:
                b_r_res = tl.load(p_residual + o_r[:, None] * stride_G, mask=m_k, other=0.0)
            b_d = load_gate_from(p_G, p_residual, o_i, b_r, b_r_res, stride_G, m_ik, RESIDUAL)
            m_row = (m_i & (side % 2 == 1))[:, None]  # rows decay from the reference, columns to it
            b_decay = tl.exp2(tl.where(m_row, b_d, -b_d))
            # rows of the lower halves, columns of the upper ones
            b_kd = operand(b_k * b_decay, PRECISION)
            b_kj = tl.trans(b_kd)
            m_square = (pair[:, None] == pair[None, :]) & (side[:, None] > side[None, :])
            b_kk += tl.where(m_square, tl.dot(b_kd, b_kj, input_precision=PRECISION), 0.0)
            b_qd = operand(b_q * b_decay, PRECISION)
            b_qk += tl.where(m_square, tl.dot(b_qd, b_kj, input_precision=PRECISION), 0.0)
        b_same += tl.sum(b_q * b_k, axis=1)
        if L2NORM:
            b_q_norm += tl.sum(b_q * b_q, axis=1)
            b_k_norm += tl.sum(b_k * b_k, axis=1)

    b_qk += tl.where(o_i[:, None] == o_i[None, :], b_same[:, None], 0.0)
    if L2NORM:
        b_k_rstd = reciprocal_norm(b_k_norm, eps)
        b_kk *= b_k_rstd[:, None] * b_k_rstd[None, :]
        b_qk *= reciprocal_norm(b_q_norm, eps)[:, None] * b_k_rstd[None, :]
    b_beta = tl.load(beta + (start + o_i) * HV + i_h, mask=m_i, other=0.0).to(tl.float32)
    b_beta = write_strength(b_beta, BETA_SIGMOID, NEG_EIGVAL)[:, None]
    p_A = (head + o_i[:, None] * HV) * C + i_c * BC + o_i[None, :]
    tl.store(A_kk + p_A, b_kk * b_beta, mask=m_i[:, None])
    tl.store(A_qk + p_A, b_qk * scale, mask=m_i[:, None])


@on_device_of_first_argument
def chunk_kda_scaled_dot_kkt_fwd(
    q,
    k,
    G,
    beta,
    scale=None,
    chunk_size=64,
    *,
    G_residual=None,
    bounded=False,
    use_qk_l2norm=False,
    use_beta_sigmoid=False,
    allow_neg_eigval=False,
    cu_seqlens=None,
    layout=None,
):
    """A_kk and A_qk of every chunk.

    Args:
        q, k: [B, T, H, K], one dtype.
        G: cumulated gate from `chunk_local_cumsum`, float32 [B, T, HV, K]; `G_residual` likewise.
        beta: [B, T, HV], or logits with `use_beta_sigmoid` (doubled with `allow_neg_eigval`).
        scale: of q; default K ** -0.5.
        bounded: promises that no gate is below -5; saves products.
        use_qk_l2norm: take the products of x / sqrt(sum x^2 + 1e-6).
        chunk_size, cu_seqlens, layout: as in `chunk_local_cumsum`.

    Returns:
        (A_kk, A_qk, q_rstd, k_rstd). A_kk and A_qk are float32 [B, T, HV, C]: row t holds the
        products of token t with the C tokens of its chunk; entries above the diagonal are 0.
        q_rstd and k_rstd, float32 [B, T, H], are 1 / sqrt(sum x^2 + 1e-6), or None.
    """
    check_sizes(
        q=(q, "B T H K", KERNEL_DTYPES),
        k=(k, "B T H K", (q.dtype,)),
        G=(G, "B T HV K", (torch.float32,)),
        beta=(beta, "B T HV"),
    )
    B, T, H, K = q.shape
    HV = G.shape[2]
    C = chunk_size
    layout = layout or chunk_layout(B, T, C, cu_seqlens)
    q, k, beta = as_rows(q), as_rows(k), beta.contiguous()
    A_kk = torch.empty(B, T, HV, C, dtype=torch.float32, device=q.device)
    A_qk = torch.empty_like(A_kk)
    q_rstd = k_rstd = None
    if use_qk_l2norm:
        q_rstd = torch.empty(B, T, H, dtype=torch.float32, device=q.device)
        k_rstd = torch.empty_like(q_rstd)
    grid = (layout.programs(HV) * (C // BLOCK),)
    inputs = (q, k, G, G_residual, beta, A_kk, A_qk)
    sizes = (layout.chunks, T, K**-0.5 if scale is None else scale, EPS, layout.rows * HV)
    sizes += (*row_strides(q), *row_strides(k), H, HV, K, C, BLOCK, key_tile(K))
    options = dict(
        PACKED=layout.chunks is not None,
        RESIDUAL=G_residual is not None,
        L2NORM=use_qk_l2norm,
        BETA_SIGMOID=use_beta_sigmoid,
        NEG_EIGVAL=allow_neg_eigval,
        PRECISION=dot_precision(q.dtype),
        num_warps=_warps(K, q.dtype),
        num_stages=1,
    )
    if A_kk.numel() > 0:
        scores_before_block_kernel[grid](
            *inputs, q_rstd, k_rstd, *sizes, BOUNDED=bounded, **options
        )
        if not bounded:
            options |= dict(BK=min(key_tile(K), 32), num_warps=1)
            scores_in_block_kernel[grid](*inputs, *sizes[:-1], **options)
    return A_kk, A_qk, q_rstd, k_rstd


def _warps(K, dtype):
    """Twice the warps for rows of more than 128 channels, and for three tf32 products."""
    return 2 * (2 if key_tile(K) > 128 else 1) * (2 if dtype == torch.float32 else 1)
