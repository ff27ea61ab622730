"""Step 2: the two score matrices of each chunk, with the decay inside the product.

    A_kk[i, j] = beta_i sum_d k_id k_jd 2^(G_id - G_jd)     j <  i, else 0
    A_qk[i, j] = scale  sum_d q_id k_jd 2^(G_id - G_jd)     j <= i, else 0

The decay sits inside the sum over channels, so it has to be split between the two operands of a
matrix product, and 2^(-G_jd) alone overflows. Each program owns 16 rows and refers both factors to
the first of them: row i gets 2^(G_i - G_first) <= 1, an earlier column 2^(G_first - G_j) <= 1.
Columns among the 16 rows themselves get a factor >= 1, at most 2^(15 x decay per token). Where
that stays below 2^100 (gates above -4.6, or a bounded gate) they take part in the same product;
elsewhere they are summed column by column from exact differences, which is right for any gate.
The first row is the reference, not a middle one: then no row sees a gate of a later row, and a
prefix of the output has the same bits whatever follows.

Grid: (16-row blocks) x chunks x value heads. Reads q, k, G of its rows and k, G of the rows before
them in the chunk (from L2 but for the first time): 4 K (bf16 q, k) + 4 K (G) bytes per token and
value head. Writes 4 C (A_kk, float32) + 2 C (A_qk, bf16).
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
    row_strides,
    write_strength,
)
from .sequences import chunk_layout

SUB_CHUNK = 16  # rows per program: the smallest side of tl.dot
MAX_EXPONENT = tl.constexpr(100.0)  # leaves 2^27 for the values before float32 overflows


@triton.jit
def gate_difference(G, G_residual, offsets, mask, b_ref, b_ref_residual, RESIDUAL: tl.constexpr):
    """A tile of G minus a reference row, without cancellation where a residual exists."""
    difference = tl.load(G + offsets, mask=mask, other=0.0) - b_ref[None, :]
    if RESIDUAL:
        residual = tl.load(G_residual + offsets, mask=mask, other=0.0)
        difference += residual - b_ref_residual[None, :]
    return difference


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
    # sizes
    chunks,
    T,
    scale,
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
    BETA_SIGMOID: tl.constexpr,
    NEG_EIGVAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    NC: tl.constexpr = C // BC
    i_c = tl.program_id(0) % NC
    i_bh = (tl.program_id(0) // NC) % BHV
    i_t = tl.program_id(0) // NC // BHV
    i_b, i_h = i_bh // HV, i_bh % HV
    start, count = locate_chunk(i_t, i_b, chunks, T, C, PACKED)
    row = i_c * BC  # first row of this block within the chunk
    if row >= count:
        return

    o_i = row + tl.arange(0, BC)
    o_j = tl.arange(0, C)
    m_i, m_j = o_i < count, o_j < count
    q += start * stride_q + (i_h // (HV // H)) * stride_qh
    k += start * stride_k + (i_h // (HV // H)) * stride_kh
    G += (start * HV + i_h) * K
    if RESIDUAL:
        G_residual += (start * HV + i_h) * K

    b_kk = tl.zeros([BC, C], dtype=tl.float32)
    b_qk = tl.zeros([BC, C], dtype=tl.float32)
    for i_k in range(tl.cdiv(K, BK)):
        o_k = i_k * BK + tl.arange(0, BK)
        m_k = o_k < K
        m_ik = m_i[:, None] & m_k[None, :]
        o_ref = row * (HV * K) + o_k
        b_ref = tl.load(G + o_ref, mask=m_k, other=0.0)  # [BK]
        b_ref_residual = b_ref
        if RESIDUAL:
            b_ref_residual = tl.load(G_residual + o_ref, mask=m_k, other=0.0)

        # rows: q, k times 2^(G_i - G_first) <= 1
        o_ik = o_i[:, None] * (HV * K) + o_k[None, :]
        b_d = gate_difference(G, G_residual, o_ik, m_ik, b_ref, b_ref_residual, RESIDUAL)
        b_d = tl.where(m_ik, b_d, 0.0)  # [BC, BK], <= 0
        p_q = q + o_i[:, None] * stride_q + o_k[None, :]
        p_k = k + o_i[:, None] * stride_k + o_k[None, :]
        b_q = tl.load(p_q, mask=m_ik, other=0.0).to(tl.float32)  # [BC, BK]
        b_k = tl.load(p_k, mask=m_ik, other=0.0).to(tl.float32)  # [BC, BK]
        b_decay = tl.exp2(b_d)

        # columns before the block, and the block itself where its factors stay in range
        first_column_out = row + BC
        if not BOUNDED:
            if tl.min(b_d) < -MAX_EXPONENT:
                first_column_out = row
        m_jk = (m_j & (o_j < first_column_out))[:, None] & m_k[None, :]
        o_jk = o_j[:, None] * (HV * K) + o_k[None, :]
        b_dj = gate_difference(G, G_residual, o_jk, m_jk, b_ref, b_ref_residual, RESIDUAL)
        b_dj = tl.exp2(tl.where(m_jk, -b_dj, 0.0))
        p_kj = k + o_j[:, None] * stride_k + o_k[None, :]
        b_kj = tl.load(p_kj, mask=m_jk, other=0.0).to(tl.float32) * b_dj  # [C, BK]
        b_kjt = tl.trans(b_kj)
        b_kk += tl.dot(b_k * b_decay, b_kjt, input_precision=PRECISION)
        b_qk += tl.dot(b_q * b_decay, b_kjt, input_precision=PRECISION)

        if not BOUNDED:
            if first_column_out == row:
                for j in range(row, tl.minimum(row + BC, count)):
                    o_jk1 = j * (HV * K) + o_k
                    b_gj = tl.load(G + o_jk1, mask=m_k, other=0.0)  # [BK]
                    b_gj_residual = b_gj
                    if RESIDUAL:
                        b_gj_residual = tl.load(G_residual + o_jk1, mask=m_k, other=0.0)
                    b_d = gate_difference(G, G_residual, o_ik, m_ik, b_gj, b_gj_residual, RESIDUAL)
                    b_d = tl.where((o_i >= j)[:, None] & m_ik, b_d, -float("inf"))
                    b_kj1 = tl.load(k + j * stride_k + o_k, mask=m_k, other=0.0).to(tl.float32)
                    b_kj1 = b_kj1[None, :] * tl.exp2(b_d)  # [BC, BK]
                    m_column = (o_j == j)[None, :]
                    b_kk += tl.where(m_column, tl.sum(b_k * b_kj1, axis=1)[:, None], 0.0)
                    b_qk += tl.where(m_column, tl.sum(b_q * b_kj1, axis=1)[:, None], 0.0)

    p_beta = beta + (start + o_i) * HV + i_h
    b_beta = tl.load(p_beta, mask=m_i, other=0.0).to(tl.float32)
    b_beta = write_strength(b_beta, BETA_SIGMOID, NEG_EIGVAL)
    b_kk = tl.where(o_i[:, None] > o_j[None, :], b_kk * b_beta[:, None], 0.0)
    b_qk = tl.where(o_i[:, None] >= o_j[None, :], b_qk * scale, 0.0)

    o_a = (start * HV + i_h) * C + o_i[:, None] * (HV * C) + o_j[None, :]
    m_a = m_i[:, None] & (o_j < C)[None, :]
    tl.store(A_kk + o_a, b_kk, mask=m_a)
    tl.store(A_qk + o_a, b_qk.to(A_qk.dtype.element_ty), mask=m_a)


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
        bounded: promises that no gate is below -5, so that every factor stays in range.
        chunk_size, cu_seqlens, layout: as in `chunk_local_cumsum`.

    Returns:
        (A_kk float32 [B, T, HV, C], A_qk [B, T, HV, C] in q's dtype): row t holds the products of
        token t with the C tokens of its chunk. Entries above the diagonal are 0.
    """
    B, T, H, K = q.shape
    HV = G.shape[2]
    C = chunk_size
    layout = layout or chunk_layout(B, T, C, cu_seqlens)
    q, k, beta = as_rows(q), as_rows(k), beta.contiguous()
    A_kk = torch.empty(B, T, HV, C, dtype=torch.float32, device=q.device)
    A_qk = torch.empty(B, T, HV, C, dtype=q.dtype, device=q.device)
    if A_kk.numel() > 0:
        chunk_kda_scaled_dot_kkt_fwd_kernel[(layout.programs(HV) * (C // SUB_CHUNK),)](
            q,
            k,
            G,
            G_residual,
            beta,
            A_kk,
            A_qk,
            layout.chunks,
            T,
            K**-0.5 if scale is None else scale,
            layout.rows * HV,
            *row_strides(q),
            *row_strides(k),
            H=H,
            HV=HV,
            K=K,
            C=C,
            BC=SUB_CHUNK,
            BK=min(key_tile(K), 64 if q.dtype == torch.float32 else 128),
            PACKED=layout.chunks is not None,
            BOUNDED=bounded,
            RESIDUAL=G_residual is not None,
            BETA_SIGMOID=use_beta_sigmoid,
            NEG_EIGVAL=allow_neg_eigval,
            PRECISION=dot_precision(q.dtype),
            num_warps=4,
            num_stages=1,
        )
    return A_kk, A_qk
