"""Step 4: what each chunk writes and erases.

    u  = A_inv Diag(beta) v          the values written if the state were empty
    w  = A_inv Diag(beta) 2^G k      what they owe to the incoming state: v' = u - w S
    kg = 2^(G_last - G) k            keys decayed to the end of the chunk
    qg = scale 2^G q                 queries decayed from its start, for the backward only

Grid: chunks x value heads. Reads 2 C (A_inv) + 2 (K + V) + 4 K (G), writes 2 (2 K + V) bytes per
token and head (bf16); with qg 2 K more each way. 16-bit inputs are multiplied in tf32: beta v and
beta 2^G k are never rounded, and u and w once, when they are stored.
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
from .sequences import chunk_layout


@triton.jit(do_not_specialize=["T"])
def recompute_w_u_fwd_kernel(
    # inputs
    k,
    v,
    beta,
    A_inv,
    G,
    G_residual,
    k_rstd,
    q,
    q_rstd,
    # outputs
    w,
    u,
    kg,
    qg,
    # sizes
    chunks,
    T,
    scale,
    BHV,
    stride_q,
    stride_qh,
    stride_k,
    stride_kh,
    stride_v,
    stride_vh,
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
    BETA_SIGMOID: tl.constexpr,
    NEG_EIGVAL: tl.constexpr,
    STORE_QG: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i_t, i_bh = tl.program_id(0) // BHV, tl.program_id(0) % BHV
    i_b, i_h = i_bh // HV, i_bh % HV
    start, count = locate_chunk(i_t, i_b, chunks, T, C, PACKED)
    if count <= 0:
        return
    head = start * HV + i_h  # row of (first token, head) in tensors [B * T, HV, *]
    o_t = tl.arange(0, C)
    m_t = o_t < count

    o_a = head * C + o_t[:, None] * (HV * C) + o_t[None, :]
    b_A = tl.load(A_inv + o_a, mask=m_t[:, None] & m_t[None, :], other=0.0)  # [C, C]
    b_A = b_A.to(tl.float32)
    b_beta = tl.load(beta + (start + o_t) * HV + i_h, mask=m_t, other=0.0).to(tl.float32)
    b_A *= write_strength(b_beta, BETA_SIGMOID, NEG_EIGVAL)[None, :]
    b_A = operand(b_A, PRECISION)

    v += start * stride_v + i_h.to(tl.int64) * stride_vh
    for i_v in range(tl.cdiv(V, BV)):
        o_v = i_v * BV + tl.arange(0, BV)
        m_tv = m_t[:, None] & (o_v < V)[None, :]
        b_v = tl.load(v + o_t[:, None] * stride_v + o_v[None, :], mask=m_tv, other=0.0)  # [C, BV]
        b_u = tl.dot(b_A, b_v.to(tl.float32), input_precision=PRECISION)
        o_u = head * V + o_t[:, None] * (HV * V) + o_v[None, :]
        tl.store(u + o_u, b_u.to(u.dtype.element_ty), mask=m_tv)

    i_hk = (i_h // (HV // H)).to(tl.int64)
    k += start * stride_k + i_hk * stride_kh
    if L2NORM:
        b_rstd = tl.load(k_rstd + (start + o_t) * H + i_hk, mask=m_t, other=0.0)
    for i_k in range(tl.cdiv(K, BK)):
        o_k = i_k * BK + tl.arange(0, BK)
        m_k = o_k < K
        m_tk = m_t[:, None] & m_k[None, :]
        o_tk = head * K + o_t[:, None] * (HV * K) + o_k[None, :]
        o_last = head * K + (count - 1) * (HV * K) + o_k
        b_k = tl.load(k + o_t[:, None] * stride_k + o_k[None, :], mask=m_tk, other=0.0)  # [C, BK]
        b_k = b_k.to(tl.float32)
        if L2NORM:
            b_k *= b_rstd[:, None]
        b_G = tl.load(G + o_tk, mask=m_tk, other=0.0)
        b_to_end = tl.load(G + o_last, mask=m_k, other=0.0)[None, :] - b_G
        if RESIDUAL:
            b_residual = tl.load(G_residual + o_tk, mask=m_tk, other=0.0)
            b_last = tl.load(G_residual + o_last, mask=m_k, other=0.0)
            b_to_end += b_last[None, :] - b_residual
            b_G += b_residual
        b_kg = b_k * tl.exp2(tl.where(m_tk, b_to_end, 0.0))
        tl.store(kg + o_tk, b_kg.to(kg.dtype.element_ty), mask=m_tk)
        b_from_start = tl.exp2(b_G)
        b_kd = operand(b_k * b_from_start, PRECISION)
        b_w = tl.dot(b_A, b_kd, input_precision=PRECISION)
        tl.store(w + o_tk, b_w.to(w.dtype.element_ty), mask=m_tk)
        if STORE_QG:
            p_q = q + start * stride_q + i_hk * stride_qh
            b_q = tl.load(p_q + o_t[:, None] * stride_q + o_k[None, :], mask=m_tk, other=0.0)
            b_q = b_q.to(tl.float32) * scale
            if L2NORM:
                b_q *= tl.load(q_rstd + (start + o_t) * H + i_hk, mask=m_t, other=0.0)[:, None]
            tl.store(qg + o_tk, (b_q * b_from_start).to(qg.dtype.element_ty), mask=m_tk)


@on_device_of_first_argument
def recompute_w_u_fwd(
    k,
    v,
    beta,
    A_inv,
    G,
    *,
    G_residual=None,
    k_rstd=None,
    q=None,
    q_rstd=None,
    scale=None,
    use_beta_sigmoid=False,
    allow_neg_eigval=False,
    cu_seqlens=None,
    layout=None,
):
    """w, u and the keys decayed to the end of their chunk; for the backward the queries too.

    Args:
        k: [B, T, H, K]; v: [B, T, HV, V]; beta: [B, T, HV] (logits with `use_beta_sigmoid`).
        A_inv: from `solve_tril_kda`, [B, T, HV, C].
        G, G_residual: from `chunk_local_cumsum`.
        k_rstd, q_rstd: from `chunk_kda_scaled_dot_kkt_fwd`, multiply k and q.
        q: [B, T, H, K]: also return qg. scale: of q; default K ** -0.5.
        cu_seqlens, layout: as in `chunk_local_cumsum`.

    Returns:
        (w [B, T, HV, K], u [B, T, HV, V], kg [B, T, HV, K]) in k's dtype; with q also
        qg [B, T, HV, K].
    """
    check_sizes(
        k=(k, "B T H K", KERNEL_DTYPES),
        v=(v, "B T HV V", (k.dtype,)),
        beta=(beta, "B T HV"),
        A_inv=(A_inv, "B T HV C"),
        G=(G, "B T HV K", (torch.float32,)),
    )
    B, T, H, K = k.shape
    HV, V = v.shape[2:]
    C = A_inv.shape[-1]
    layout = layout or chunk_layout(B, T, C, cu_seqlens)
    k, v, beta = as_rows(k), as_rows(v), beta.contiguous()
    w = torch.empty(B, T, HV, K, dtype=k.dtype, device=k.device)
    u = torch.empty(B, T, HV, V, dtype=k.dtype, device=k.device)
    kg = torch.empty_like(w)
    qg = None
    if q is not None:
        check_sizes(k=(k, "B T H K"), q=(q, "B T H K", (k.dtype,)))
        q, qg = as_rows(q), torch.empty_like(w)
    if w.numel() > 0:
        recompute_w_u_fwd_kernel[(layout.programs(HV),)](
            k,
            v,
            beta,
            A_inv,
            G,
            G_residual,
            k_rstd,
            q,
            q_rstd,
            w,
            u,
            kg,
            qg,
            layout.chunks,
            T,
            K**-0.5 if scale is None else scale,
            layout.rows * HV,
            *(row_strides(k if q is None else q)),
            *row_strides(k),
            *row_strides(v),
            H=H,
            HV=HV,
            K=K,
            V=V,
            C=C,
            BK=min(key_tile(K), 32),
            BV=min(key_tile(V), 32),
            PACKED=layout.chunks is not None,
            RESIDUAL=G_residual is not None,
            L2NORM=k_rstd is not None,
            BETA_SIGMOID=use_beta_sigmoid,
            NEG_EIGVAL=allow_neg_eigval,
            STORE_QG=q is not None,
            PRECISION=dot_precision(k.dtype),
            num_warps=4,
            num_stages=1,
        )
    return (w, u, kg) if q is None else (w, u, kg, qg)
