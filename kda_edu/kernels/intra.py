"""Step 2: the two score matrices of each chunk, with the decay inside the product.

    A_kk[i, j] = beta_i sum_d k_id k_jd 2^(G_id - G_jd)     j <  i, else 0
    A_qk[i, j] = scale  sum_d q_id k_jd 2^(G_id - G_jd)     j <= i, else 0

For a matrix product the decay has to be split between the two operands, and 2^(-G_jd) alone
overflows. So the lower triangle is cut into squares, each with a reference row r between its
columns and its rows:

    2^(G_i - G_j) = 2^(G_i - G_r) 2^(G_r - G_j),    j < r <= i:  both factors are at most 1

The squares come in levels: one of 32 rows and columns, two of 16, four of 8, ... (for a chunk of
64), and a level is one matrix product for the whole chunk, of which only its squares are kept.
That is right for any gate, and no row sees the gate of a later row, so a prefix of the output has
the same bits whatever follows. With gates of at least -5 the blocks of 16 on the diagonal need no
more levels: with their first row as reference the larger factor stays below 2^(15 x 5 / ln 2) =
2^108.

Grid: chunks x value heads. Reads 4 K (q, k in bf16) + 4 K (G) bytes per token and value head,
writes 8 C (both matrices, float32) and, with the norm in the kernel, 8 per token and key head.
"""

import torch
import triton
import triton.language as tl

from ._common import (
    as_rows,
    channel_tile,
    dot_precision,
    locate_chunk,
    on_device_of_first_argument,
    row_strides,
    write_strength,
)
from .l2norm import EPS
from .sequences import chunk_layout

DIAGONAL_BLOCK = 16  # rows that share one reference row where gates are bounded


@triton.jit
def add_level(b_kk, b_qk, b_q, b_k, b_left, b_right, m_level, PRECISION: tl.constexpr):
    """Both products of one level, decayed by b_left on rows and b_right on columns."""
    b_columns = tl.trans(b_k * b_right)  # [BK, C]
    b_kk += tl.where(m_level, tl.dot(b_k * b_left, b_columns, input_precision=PRECISION), 0.0)
    b_qk += tl.where(m_level, tl.dot(b_q * b_left, b_columns, input_precision=PRECISION), 0.0)
    return b_kk, b_qk


@triton.jit
def gate_from_reference(
    b_G, b_residual, p_G, p_residual, o_r, m_r, m_k, stride, RESIDUAL: tl.constexpr
):
    """G minus its reference row o_r[i], [C, BK]; the residual restores what G rounded away."""
    m = m_r[:, None] & m_k[None, :]
    b_d = b_G - tl.load(p_G + o_r[:, None] * stride, mask=m, other=0.0)
    if RESIDUAL:
        b_d += b_residual - tl.load(p_residual + o_r[:, None] * stride, mask=m, other=0.0)
    return b_d


@triton.jit(do_not_specialize=["T"])
def chunk_kda_scaled_dot_kkt_fwd_kernel(
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
    i_t, i_bh = tl.program_id(0) // BHV, tl.program_id(0) % BHV
    i_b, i_h = i_bh // HV, i_bh % HV
    i_hk = i_h // (HV // H)
    start, count = locate_chunk(i_t, i_b, chunks, T, C, PACKED)
    if count <= 0:
        return
    o_i = tl.arange(0, C)
    m_i = o_i < count
    head = start * HV + i_h

    b_kk = tl.zeros([C, C], dtype=tl.float32)
    b_qk = tl.zeros([C, C], dtype=tl.float32)
    b_same = tl.zeros([C], dtype=tl.float32)  # q_i k_i: the diagonal of A_qk has no decay
    b_qq = tl.zeros([C], dtype=tl.float32)
    b_kk_same = tl.zeros([C], dtype=tl.float32)
    for i_k in range(tl.cdiv(K, BK)):
        o_k = i_k * BK + tl.arange(0, BK)
        m_k = o_k < K
        m_ik = m_i[:, None] & m_k[None, :]
        p_q = q + start * stride_q + i_hk * stride_qh + o_i[:, None] * stride_q + o_k[None, :]
        p_k = k + start * stride_k + i_hk * stride_kh + o_i[:, None] * stride_k + o_k[None, :]
        b_q = tl.load(p_q, mask=m_ik, other=0.0).to(tl.float32)  # [C, BK]
        b_k = tl.load(p_k, mask=m_ik, other=0.0).to(tl.float32)  # [C, BK]
        p_G = G + head * K + o_k[None, :]
        b_G = tl.load(p_G + o_i[:, None] * (HV * K), mask=m_ik, other=0.0)  # [C, BK]
        p_residual = p_G
        b_residual = b_G
        if RESIDUAL:
            p_residual = G_residual + head * K + o_k[None, :]
            b_residual = tl.load(p_residual + o_i[:, None] * (HV * K), mask=m_ik, other=0.0)

        SIZE: tl.constexpr = C // 2
        for level in tl.static_range(6):
            size: tl.constexpr = SIZE >> level
            if size >= (BC if BOUNDED else 1):
                # squares: rows in the odd blocks of `size`, columns in the even block before
                o_r = o_i // (2 * size) * (2 * size) + size
                b_d = gate_from_reference(
                    b_G, b_residual, p_G, p_residual, o_r, o_r < count, m_k, HV * K, RESIDUAL
                )
                b_decay = tl.exp2(-tl.abs(b_d))
                pair, side = o_i // (2 * size), o_i // size
                m_level = (pair[:, None] == pair[None, :]) & (side[:, None] > side[None, :])
                b_kk, b_qk = add_level(b_kk, b_qk, b_q, b_k, b_decay, b_decay, m_level, PRECISION)
        if BOUNDED:
            o_r = o_i // BC * BC
            b_d = gate_from_reference(
                b_G, b_residual, p_G, p_residual, o_r, m_i, m_k, HV * K, RESIDUAL
            )
            b_d = tl.where(m_ik, b_d, 0.0)
            m_level = (o_r[:, None] == o_r[None, :]) & (o_i[:, None] > o_i[None, :])
            b_kk, b_qk = add_level(
                b_kk, b_qk, b_q, b_k, tl.exp2(b_d), tl.exp2(-b_d), m_level, PRECISION
            )
        b_same += tl.sum(b_q * b_k, axis=1)
        if L2NORM:
            b_qq += tl.sum(b_q * b_q, axis=1)
            b_kk_same += tl.sum(b_k * b_k, axis=1)

    b_qk += tl.where(o_i[:, None] == o_i[None, :], b_same[:, None], 0.0)
    b_beta = tl.load(beta + (start + o_i) * HV + i_h, mask=m_i, other=0.0).to(tl.float32)
    b_beta = write_strength(b_beta, BETA_SIGMOID, NEG_EIGVAL)
    if L2NORM:
        b_q_rstd = tl.rsqrt(b_qq + eps)
        b_k_rstd = tl.rsqrt(b_kk_same + eps)
        b_kk *= b_k_rstd[:, None] * b_k_rstd[None, :]
        b_qk *= b_q_rstd[:, None] * b_k_rstd[None, :]
        m_first = m_i & (i_h % (HV // H) == 0)  # one value head per key head writes
        tl.store(q_rstd + (start + o_i) * H + i_hk, b_q_rstd, mask=m_first)
        tl.store(k_rstd + (start + o_i) * H + i_hk, b_k_rstd, mask=m_first)

    o_a = head * C + o_i[:, None] * (HV * C) + o_i[None, :]
    m_a = m_i[:, None] & (o_i < C)[None, :]
    tl.store(A_kk + o_a, b_kk * b_beta[:, None], mask=m_a)
    tl.store(A_qk + o_a, b_qk * scale, mask=m_a)


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
        bounded: promises that no gate is below -5; saves levels.
        use_qk_l2norm: take the products of x / sqrt(sum x^2 + 1e-6).
        chunk_size, cu_seqlens, layout: as in `chunk_local_cumsum`.

    Returns:
        (A_kk, A_qk, q_rstd, k_rstd). A_kk and A_qk are float32 [B, T, HV, C]: row t holds the
        products of token t with the C tokens of its chunk; entries above the diagonal are 0.
        q_rstd and k_rstd, float32 [B, T, H], are 1 / sqrt(sum x^2 + 1e-6), or None.
    """
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
    if A_kk.numel() > 0:
        chunk_kda_scaled_dot_kkt_fwd_kernel[(layout.programs(HV),)](
            q,
            k,
            G,
            G_residual,
            beta,
            A_kk,
            A_qk,
            q_rstd,
            k_rstd,
            layout.chunks,
            T,
            K**-0.5 if scale is None else scale,
            EPS,
            layout.rows * HV,
            *row_strides(q),
            *row_strides(k),
            H=H,
            HV=HV,
            K=K,
            C=C,
            BC=DIAGONAL_BLOCK,
            BK=channel_tile(K, q.dtype),
            PACKED=layout.chunks is not None,
            BOUNDED=bounded,
            RESIDUAL=G_residual is not None,
            L2NORM=use_qk_l2norm,
            BETA_SIGMOID=use_beta_sigmoid,
            NEG_EIGVAL=allow_neg_eigval,
            PRECISION=dot_precision(q.dtype),
            num_warps=4,
            num_stages=1,
        )
    return A_kk, A_qk, q_rstd, k_rstd
