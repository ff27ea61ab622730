"""Backward, step 2: through the triangular inverse, and the gradients of the two score matrices.

v' = A_inv r with r = beta (v - 2^G k S), so with dv' from the reverse scan

    dr     = A_inv^T dv'
    dA_kk  = -strictly lower (dr v'^T)          since d(X) = -X dA X, and X r = v'
    dA_qk  =  lower (do v'^T)
    dv     = beta dr,   dbeta = sum_v dr v + ...

The inverse itself is never differentiated: r^T X^T is v'^T, which is at hand.

Grid: chunks x value heads. Reads per token and head, in bf16: 2 C (A_inv) + 8 V (dv', v', do, v).
Writes 2 V (dr) + 2 V (dv) + 8 C (both gradients, float32).
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


@triton.jit(do_not_specialize=["T"])
def chunk_kda_bwd_dA_kernel(
    # inputs
    A_inv,
    v_new,
    do,
    v,
    beta,
    dv_new,
    # outputs
    dr,
    dv,
    dA_kk,
    dA_qk,
    dbeta,
    # sizes
    chunks,
    T,
    BHV,
    stride_v,
    stride_vh,
    HV: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BV: tl.constexpr,
    # options
    PACKED: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
    NEG_EIGVAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i_t, i_bh = tl.program_id(0) // BHV, tl.program_id(0) % BHV
    i_b, i_h = i_bh // HV, i_bh % HV
    start, count = locate_chunk(i_t, i_b, chunks, T, C, PACKED)
    if count <= 0:
        return
    head = start * HV + i_h
    o_t = tl.arange(0, C)
    m_t = o_t < count
    dtype = dv_new.dtype.element_ty

    p_At = A_inv + head * C + o_t[None, :] * (HV * C) + o_t[:, None]
    b_At = tl.load(p_At, mask=m_t[:, None] & m_t[None, :], other=0.0).to(dtype)  # A_inv transposed
    b_beta = tl.load(beta + (start + o_t) * HV + i_h, mask=m_t, other=0.0).to(tl.float32)
    b_beta = write_strength(b_beta, BETA_SIGMOID, NEG_EIGVAL)
    b_dkk = tl.zeros([C, C], dtype=tl.float32)
    b_dqk = tl.zeros([C, C], dtype=tl.float32)
    b_dbeta = tl.zeros([C], dtype=tl.float32)
    v += start * stride_v + i_h.to(tl.int64) * stride_vh
    for i_v in range(tl.cdiv(V, BV)):
        o_v = i_v * BV + tl.arange(0, BV)
        m_tv = m_t[:, None] & (o_v < V)[None, :]
        o_tv = head * V + o_t[:, None] * (HV * V) + o_v[None, :]
        b_dv = tl.load(dv_new + o_tv, mask=m_tv, other=0.0)  # [C, BV]
        b_dv = operand(b_dv, PRECISION)
        b_dr = tl.dot(b_At, b_dv, input_precision=PRECISION)  # [C, BV]
        b_v = tl.load(v + o_t[:, None] * stride_v + o_v[None, :], mask=m_tv, other=0.0)
        b_dbeta += tl.sum(b_dr * b_v.to(tl.float32), axis=1)
        tl.store(dv + o_tv, (b_beta[:, None] * b_dr).to(dv.dtype.element_ty), mask=m_tv)
        b_dr = b_dr.to(dtype)
        tl.store(dr + o_tv, b_dr, mask=m_tv)
        b_dr = operand(b_dr, PRECISION)

        m_vt = (o_v < V)[:, None] & m_t[None, :]
        p_vt = v_new + head * V + o_t[None, :] * (HV * V) + o_v[:, None]
        b_vt = tl.load(p_vt, mask=m_vt, other=0.0).to(dtype)  # [BV, C]: v' transposed
        b_do = tl.load(do + o_tv, mask=m_tv, other=0.0).to(dtype)  # [C, BV]
        b_dkk -= tl.dot(b_dr, b_vt, input_precision=PRECISION)
        b_dqk += tl.dot(b_do, b_vt, input_precision=PRECISION)

    o_a = head * C + o_t[:, None] * (HV * C) + o_t[None, :]
    b_dkk = tl.where(o_t[:, None] > o_t[None, :], b_dkk, 0.0)
    b_dqk = tl.where(o_t[:, None] >= o_t[None, :], b_dqk, 0.0)
    tl.store(dA_kk + o_a, b_dkk, mask=m_t[:, None])
    tl.store(dA_qk + o_a, b_dqk, mask=m_t[:, None])
    tl.store(dbeta + (start + o_t) * HV + i_h, b_dbeta, mask=m_t)


@on_device_of_first_argument
def chunk_kda_bwd_dA(
    A_inv, v_new, do, v, beta, dv_new, layout, *, use_beta_sigmoid=False, allow_neg_eigval=False
):
    """Gradients of A_kk, A_qk, v and r, and v's part of that of beta.

    Args:
        A_inv: from `solve_tril_kda`; v_new: v' of the forward; do: gradient of the output.
        v: values [B, T, HV, V]; beta: [B, T, HV] (logits with `use_beta_sigmoid`).
        dv_new: gradient of v' from `chunk_kda_bwd_dhu`.
        layout: the `ChunkLayout` of the forward.

    Returns:
        (dr = A_inv^T dv' in dv_new's dtype, dv in v's dtype, dA_kk and dA_qk float32
        [B, T, HV, C], dbeta float32 [B, T, HV]); dbeta is sum_v dr v, before the sigmoid.
    """
    check_sizes(
        A_inv=(A_inv, "B T HV C"),
        v_new=(v_new, "B T HV V", KERNEL_DTYPES),
        do=(do, "B T HV V", (v_new.dtype,)),
        v=(v, "B T HV V", (v_new.dtype,)),
        beta=(beta, "B T HV"),
        dv_new=(dv_new, "B T HV V"),
    )
    B, T, HV, V = v.shape
    C = A_inv.shape[-1]
    v, beta = as_rows(v), beta.contiguous()
    # rows that belong to no sequence have no gradient
    make = torch.empty if layout.covers else torch.zeros
    dr = torch.empty_like(dv_new)
    dv = make(B, T, HV, V, dtype=v.dtype, device=v.device)
    dA_kk = torch.empty(B, T, HV, C, dtype=torch.float32, device=v.device)
    dA_qk = torch.empty_like(dA_kk)
    dbeta = torch.empty(B, T, HV, dtype=torch.float32, device=v.device)
    if dv.numel() > 0:
        chunk_kda_bwd_dA_kernel[(layout.programs(HV),)](
            A_inv,
            v_new,
            do.contiguous(),
            v,
            beta,
            dv_new,
            dr,
            dv,
            dA_kk,
            dA_qk,
            dbeta,
            layout.chunks,
            T,
            layout.rows * HV,
            *row_strides(v),
            HV=HV,
            V=V,
            C=C,
            BV=min(key_tile(V), 32 if v.dtype == torch.float32 else 128),
            PACKED=layout.chunks is not None,
            BETA_SIGMOID=use_beta_sigmoid,
            NEG_EIGVAL=allow_neg_eigval,
            PRECISION=dot_precision(v.dtype),
            num_warps=4,
            num_stages=1,
        )
    return dr, dv, dA_kk, dA_qk, dbeta
