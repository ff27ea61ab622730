"""Step 6: the output, chunk by chunk in parallel.

    o = (scale 2^G q) S + A_qk v'

with S the state before the chunk. The name is fla's: the same formula serves gated linear
attention.

Grid: (tiles of V) x chunks x value heads. Reads per token and head, in bf16: 2 K (q) + 4 K (G) +
4 C (A_qk) + 2 V (v') + 2 K V / C (states), of which q, G, A_qk once per tile of V (from L2);
writes 2 V.
"""

import torch
import triton
import triton.language as tl

from ._common import (
    as_rows,
    cdiv,
    channel_tile,
    dot_precision,
    key_tile,
    locate_chunk,
    on_device_of_first_argument,
    operand,
    row_strides,
    tile_budget,
)
from .checks import KERNEL_DTYPES, check_sizes
from .sequences import chunk_layout


@triton.jit(do_not_specialize=["T"])
def chunk_gla_fwd_o_gk_kernel(
    # inputs
    q,
    v_new,
    G,
    G_residual,
    A_qk,
    h,
    q_rstd,
    # output
    o,
    # sizes
    chunks,
    T,
    NT,
    scale,
    BHV,
    stride_q,
    stride_qh,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    # options
    PACKED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    L2NORM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v, i_c = tl.program_id(0) % NV, tl.program_id(0) // NV
    i_t, i_bh = i_c // BHV, i_c % BHV
    i_b, i_h = i_bh // HV, i_bh % HV
    start, count = locate_chunk(i_t, i_b, chunks, T, C, PACKED)
    if count <= 0:
        return
    head = start * HV + i_h
    o_t, o_v = tl.arange(0, C), i_v * BV + tl.arange(0, BV)
    m_t, m_v = o_t < count, o_v < V
    q += start * stride_q + (i_h // (HV // H)).to(tl.int64) * stride_qh
    h += ((i_b.to(tl.int64) * NT + i_t) * HV + i_h) * (K * V)

    b_o = tl.zeros([C, BV], dtype=tl.float32)
    for i_k in range(tl.cdiv(K, BK)):
        o_k = i_k * BK + tl.arange(0, BK)
        m_k = o_k < K
        m_tk = m_t[:, None] & m_k[None, :]
        o_tk = head * K + o_t[:, None] * (HV * K) + o_k[None, :]
        b_q = tl.load(q + o_t[:, None] * stride_q + o_k[None, :], mask=m_tk, other=0.0)  # [C, BK]
        b_G = tl.load(G + o_tk, mask=m_tk, other=0.0)
        if RESIDUAL:
            b_G += tl.load(G_residual + o_tk, mask=m_tk, other=0.0)
        b_q = (b_q.to(tl.float32) * tl.exp2(b_G)).to(h.dtype.element_ty)
        b_q = operand(b_q, PRECISION)
        p_h = h + o_v[None, :] * K + o_k[:, None]
        b_h = tl.load(p_h, mask=m_k[:, None] & m_v[None, :], other=0.0)  # [BK, BV]
        b_h = operand(b_h, PRECISION)
        b_o += tl.dot(b_q, b_h, input_precision=PRECISION)
    b_o *= scale
    if L2NORM:
        p_rstd = q_rstd + (start + o_t) * H + i_h // (HV // H)
        b_o *= tl.load(p_rstd, mask=m_t, other=0.0)[:, None]

    o_a = head * C + o_t[:, None] * (HV * C) + o_t[None, :]
    b_A = tl.load(A_qk + o_a, mask=m_t[:, None] & m_t[None, :], other=0.0)  # [C, C]
    o_tv = head * V + o_t[:, None] * (HV * V) + o_v[None, :]
    m_tv = m_t[:, None] & m_v[None, :]
    b_v = tl.load(v_new + o_tv, mask=m_tv, other=0.0)  # [C, BV]
    b_A = operand(b_A, PRECISION)
    b_o += tl.dot(b_A, b_v.to(tl.float32), input_precision=PRECISION)
    tl.store(o + o_tv, b_o.to(o.dtype.element_ty), mask=m_tv)


@on_device_of_first_argument
def chunk_gla_fwd_o_gk(
    q,
    v_new,
    G,
    A_qk,
    h,
    scale=None,
    *,
    G_residual=None,
    q_rstd=None,
    cu_seqlens=None,
    layout=None,
):
    """The output of every chunk.

    Args:
        q: [B, T, H, K]; v_new: [B, T, HV, V] and h: [rows, NT, HV, V, K] from
            `chunk_gated_delta_rule_fwd_h_kda`; A_qk: from `chunk_kda_scaled_dot_kkt_fwd`, which
            holds its own scale.
        scale: of q; default K ** -0.5.
        q_rstd: from `chunk_kda_scaled_dot_kkt_fwd`, multiplies q.
        G, G_residual, cu_seqlens, layout: as in `chunk_local_cumsum`.

    Returns:
        o [B, T, HV, V] in v_new's dtype; 0 at tokens that lie in no sequence.
    """
    check_sizes(
        q=(q, "B T H K", KERNEL_DTYPES),
        v_new=(v_new, "B T HV V", (q.dtype,)),
        G=(G, "B T HV K", (torch.float32,)),
        A_qk=(A_qk, "B T HV C", (torch.float32,)),
        h=(h, "rows NT HV V K"),
    )
    B, T, H, K = q.shape
    HV, V = v_new.shape[2:]
    C = A_qk.shape[-1]
    layout = layout or chunk_layout(B, T, C, cu_seqlens)
    q = as_rows(q)
    # rows that belong to no sequence are zero
    o = torch.empty_like(v_new) if layout.covers else torch.zeros_like(v_new)
    BV = channel_tile(V, q.dtype)
    BK = min(key_tile(K), 32)
    stage = (C * BK + BK * BV) * h.element_size() + C * BK * q.element_size()
    if o.numel() > 0:
        chunk_gla_fwd_o_gk_kernel[(layout.programs(HV) * cdiv(V, BV),)](
            q,
            v_new,
            G,
            G_residual,
            A_qk,
            h,
            q_rstd,
            o,
            layout.chunks,
            T,
            layout.NT,
            K**-0.5 if scale is None else scale,
            layout.rows * HV,
            *row_strides(q),
            H=H,
            HV=HV,
            K=K,
            V=V,
            C=C,
            BK=BK,
            BV=BV,
            PACKED=layout.chunks is not None,
            RESIDUAL=G_residual is not None,
            L2NORM=q_rstd is not None,
            PRECISION=dot_precision(q.dtype),
            num_warps=4,
            num_stages=max(1, min(3, tile_budget() // stage)),
        )
    return o
