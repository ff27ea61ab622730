"""Backward, step 1: the reverse state scan, the one sequential pass of the backward.

For each chunk, from the last to the first, with dS the gradient of the state after it:

    dv' = A_qk^T do + kg dS                                     gradient of what the chunk wrote
    dS <- Diag(2^G_last) dS + qg^T do - w^T dv'                 gradient of the state before it

with qg = scale 2^G q. As in the forward scan, columns (the V side) do not meet and dS is kept
transposed, [BV, K] in float32 registers, so that no accumulator is ever transposed.

Grid: (tiles of V) x sequences x value heads. Reads per token and head, in bf16: 6 K (qg, kg, w)
+ 2 V (do) + 4 C (A_qk), of which all but do once per tile of V (from L2). Writes 2 V (dv') +
2 K V / C (the gradient of the state after each chunk).
"""

import torch
import triton
import triton.language as tl

from ._common import (
    cdiv,
    decay_factor,
    dot_precision,
    key_tile,
    next_power_of_2,
    on_device_of_first_argument,
    operand,
    tile_budget,
)
from .checks import KERNEL_DTYPES, check_sizes
from .state import load_last_gate, state_dtype


@triton.jit(do_not_specialize=["T"])
def chunk_kda_bwd_dhu_kernel(
    # inputs
    qg,
    kg,
    w,
    do,
    A_qk,
    G,
    G_residual,
    d_final_state,
    # outputs
    dh,
    dv,
    d_initial_state,
    # sizes
    cu_seqlens,
    chunk_offsets,
    T,
    NT,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    # options
    PACKED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    USE_FINAL: tl.constexpr,
    STORE_INITIAL: tl.constexpr,
    STATE_V_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v, i_nh = tl.program_id(0) % NV, tl.program_id(0) // NV
    i_n, i_h = (i_nh // HV).to(tl.int64), i_nh % HV
    if PACKED:
        start = tl.load(cu_seqlens + i_n).to(tl.int64)
        length = (tl.load(cu_seqlens + i_n + 1).to(tl.int64) - start).to(tl.int32)
        first_chunk = tl.load(chunk_offsets + i_n).to(tl.int64)
    else:
        start = i_n * T
        length = T
        first_chunk = i_n * NT

    o_k, o_v, o_t = tl.arange(0, BK), i_v * BV + tl.arange(0, BV), tl.arange(0, C)
    m_k, m_v = o_k < K, o_v < V
    m_vk = m_v[:, None] & m_k[None, :]
    if STATE_V_FIRST:
        o_state = (i_n * HV + i_h) * (K * V) + o_v[:, None] * K + o_k[None, :]
    else:
        o_state = (i_n * HV + i_h) * (K * V) + o_v[:, None] + o_k[None, :] * V

    b_dS = tl.zeros([BV, BK], dtype=tl.float32)  # the gradient of the state, transposed
    if USE_FINAL:
        b_dS += tl.load(d_final_state + o_state, mask=m_vk, other=0.0)

    chunks = tl.cdiv(length, C)
    row = (start + (chunks - 1) * C) * HV + i_h
    p_dh = dh + ((first_chunk + chunks - 1) * HV + i_h) * (K * V) + o_v[:, None] * K + o_k[None, :]
    # no product reads it from shared memory, so the compiler does not fetch it ahead: done here
    left = tl.where(chunks > 0, length - (chunks - 1) * C, 0)
    b_last = load_last_gate(G, G_residual, row, left, o_k, m_k, HV, K, C, RESIDUAL)
    for i in range(chunks):
        count = tl.minimum(length - (chunks - 1 - i) * C, C)
        m_t = o_t < count
        b_operand = b_dS.to(dh.dtype.element_ty)
        tl.store(p_dh, b_operand, mask=m_vk)
        b_operand = operand(b_operand, PRECISION)
        p_dh -= HV * K * V
        b_dS *= decay_factor(b_last)[None, :]
        left = tl.where(i + 1 < chunks, C, 0)  # every chunk before the last is full
        b_last = load_last_gate(G, G_residual, row - C * HV, left, o_k, m_k, HV, K, C, RESIDUAL)

        o_tk = row * K + o_t[:, None] * (HV * K) + o_k[None, :]
        m_tk = m_t[:, None] & m_k[None, :]
        o_vt = row * V + o_v[:, None] + o_t[None, :] * (HV * V)
        m_vt = m_v[:, None] & m_t[None, :]
        b_do = tl.load(do + o_vt, mask=m_vt, other=0.0)  # [BV, C]: do transposed
        o_a = row * C + o_t[:, None] * (HV * C) + o_t[None, :]
        b_A = tl.load(A_qk + o_a, mask=m_t[:, None] & m_t[None, :], other=0.0)  # [C, C]
        b_A = operand(b_A, PRECISION)
        b_dv = tl.dot(b_do.to(tl.float32), b_A, input_precision=PRECISION)  # [BV, C]
        p_kg = kg + row * K + o_t[None, :] * (HV * K) + o_k[:, None]
        b_kg = tl.load(p_kg, mask=m_k[:, None] & m_t[None, :], other=0.0)  # [BK, C]: kg transposed
        b_dv += tl.dot(b_operand, b_kg.to(b_operand.dtype), input_precision=PRECISION)
        b_dv = b_dv.to(b_operand.dtype)
        tl.store(dv + o_vt, b_dv, mask=m_vt)
        b_dv = operand(b_dv, PRECISION)

        b_qg = tl.load(qg + o_tk, mask=m_tk, other=0.0).to(b_operand.dtype)  # [C, BK]
        b_dS += tl.dot(b_do.to(b_operand.dtype), b_qg, input_precision=PRECISION)
        b_w = tl.load(w + o_tk, mask=m_tk, other=0.0).to(b_operand.dtype)  # [C, BK]
        b_dS -= tl.dot(b_dv, b_w, input_precision=PRECISION)
        row -= C * HV

    if STORE_INITIAL:
        tl.store(d_initial_state + o_state, b_dS, mask=m_vk)


@on_device_of_first_argument
def chunk_kda_bwd_dhu(
    qg,
    kg,
    w,
    do,
    A_qk,
    G,
    layout,
    *,
    G_residual=None,
    d_final_state=None,
    output_d_initial_state=False,
    state_v_first=False,
):
    """Gradients of the states between chunks and of what each chunk wrote.

    Args:
        qg, kg, w: [B, T, HV, K], from `recompute_w_u_fwd`.
        do: gradient of the output [B, T, HV, V].
        A_qk: from `chunk_kda_scaled_dot_kkt_fwd`, [B, T, HV, C].
        G, G_residual: from `chunk_local_cumsum`; layout: the `ChunkLayout` of the forward.
        d_final_state: float32 [N, HV, K, V] ([N, HV, V, K] with `state_v_first`), or None: zeros.
        output_d_initial_state: also return the gradient of the initial state.

    Returns:
        dh: gradients of the state after each chunk, transposed: [rows, NT, HV, V, K] in
            `state_dtype`, as h of the forward.
        dv: gradient of v' [B, T, HV, V] in `state_dtype`: a gradient is not bounded by its
            inputs, so float16 could overflow.
        d_initial_state: float32, laid out as `d_final_state`, or None.
    """
    check_sizes(
        qg=(qg, "B T HV K", KERNEL_DTYPES),
        kg=(kg, "B T HV K", (qg.dtype,)),
        w=(w, "B T HV K", (qg.dtype,)),
        do=(do, "B T HV V", (qg.dtype,)),
        A_qk=(A_qk, "B T HV C", (torch.float32,)),
        G=(G, "B T HV K", (torch.float32,)),
    )
    B, T, HV, K = qg.shape
    V, C = do.shape[-1], A_qk.shape[-1]
    wide = dict(dtype=state_dtype(qg.dtype), device=qg.device)
    dh = torch.empty(layout.rows, layout.NT, HV, V, K, **wide)
    dv = torch.empty(B, T, HV, V, **wide)
    d_initial_state = None
    if output_d_initial_state:
        sides = (V, K) if state_v_first else (K, V)
        d_initial_state = torch.empty(layout.N, HV, *sides, dtype=torch.float32, device=qg.device)
    tile = reverse_tile(layout.N * HV, K, V, C, qg.dtype)
    if layout.N > 0:
        chunk_kda_bwd_dhu_kernel[(layout.N * HV * cdiv(V, tile["BV"]),)](
            qg,
            kg,
            w,
            do.contiguous(),
            A_qk,
            G,
            G_residual,
            None if d_final_state is None else d_final_state.contiguous(),
            dh,
            dv,
            d_initial_state,
            layout.cu_seqlens,
            layout.offsets,
            T,
            layout.NT,
            HV=HV,
            K=K,
            V=V,
            C=C,
            PACKED=layout.chunks is not None,
            RESIDUAL=G_residual is not None,
            USE_FINAL=d_final_state is not None,
            STORE_INITIAL=output_d_initial_state,
            STATE_V_FIRST=state_v_first,
            PRECISION=dot_precision(qg.dtype),
            **tile,
        )
    return dh, dv, d_initial_state


def reverse_tile(chains, K, V, C, dtype) -> dict:
    """Tile of V, warps and pipeline stages, by the number of independent chains (N * HV).

    As `state_tile` of the forward scan; one operand more per chunk, so fewer stages.
    """
    BK = key_tile(K)
    wide = 64 if chains >= 48 and BK <= 128 else 32
    if dtype == torch.float32:  # three tf32 products hold three copies of each operand
        wide = 16 if BK == 256 else 32
    BV = min(wide, max(16, next_power_of_2(V)))
    num_warps = 8 if BK >= 128 else 4
    itemsize = 2 if dtype == torch.bfloat16 else 4
    stage = (3 * C * BK + BV * C) * itemsize + 4 * C * C
    return dict(
        BK=BK, BV=BV, num_warps=num_warps, num_stages=max(1, min(2, tile_budget() // stage))
    )
