"""Step 5: the state scan, the one sequential pass.

For each chunk, with S the state before it:

    v' = u - w S                                 what the chunk really writes
    S <- Diag(2^G_last) S + kg^T v'

Columns of S (its V side) do not meet, so each program owns BV of them and walks over the chunks of
one sequence and head. It keeps S transposed, [BV, K] in float32 registers: S is then the left
operand of both products, which tensor cores read from registers, and no accumulator is ever
transposed (Triton in [3.4, 3.7.1) miscompiles such products on Hopper).

Grid: (tiles of V) x sequences x value heads. Reads per token and head, in bf16: 2 K (w) + 2 K (kg)
+ 2 V (u), of which w and kg once per tile of V (from L2). Writes 2 V (v') + 2 K V / C (the state
before each chunk).
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
from .checks import KERNEL_DTYPES, Shapes, check_sizes, check_state
from .sequences import chunk_layout


@triton.jit
def load_values(u, row, m_t, o_t, o_v, m_v, HV: tl.constexpr, V: tl.constexpr):
    """u of the chunk that begins at `row`, transposed: [BV, C]."""
    o_vt = row * V + o_v[:, None] + o_t[None, :] * (HV * V)
    return tl.load(u + o_vt, mask=m_v[:, None] & m_t[None, :], other=0.0)


@triton.jit
def load_last_gate(
    G, G_residual, row, left, o_k, m_k,
    HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """G at the last token [BK] of the chunk that begins at `row`, of which `left` tokens exist."""
    o_last = (row + (tl.minimum(left, C) - 1).to(tl.int64) * HV) * K + o_k
    m_last = m_k & (left > 0)
    b_last = tl.load(G + o_last, mask=m_last, other=0.0)
    if RESIDUAL:
        b_last += tl.load(G_residual + o_last, mask=m_last, other=0.0)
    return b_last


@triton.jit(do_not_specialize=["T"])
def chunk_gated_delta_rule_fwd_h_kda_kernel(
    # inputs
    kg,
    w,
    u,
    G,
    G_residual,
    initial_state,
    # outputs
    h,
    v_new,
    final_state,
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
    USE_INITIAL_STATE: tl.constexpr,
    STORE_FINAL_STATE: tl.constexpr,
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

    b_S = tl.zeros([BV, BK], dtype=tl.float32)  # the state, transposed
    if USE_INITIAL_STATE:
        b_S += tl.load(initial_state + o_state, mask=m_vk, other=0.0)

    p_h = h + (first_chunk * HV + i_h) * (K * V) + o_v[:, None] * K + o_k[None, :]
    row = start * HV + i_h
    # what no product reads from shared memory is not fetched ahead by the compiler: done here
    b_u = load_values(u, row, o_t < length, o_t, o_v, m_v, HV, V)
    b_last = load_last_gate(G, G_residual, row, length, o_k, m_k, HV, K, C, RESIDUAL)
    for i_t in range(tl.cdiv(length, C)):
        left = length - i_t * C
        m_t = o_t < left
        b_operand = b_S.to(h.dtype.element_ty)
        tl.store(p_h, b_operand, mask=m_vk)
        b_operand = operand(b_operand, PRECISION)
        p_h += HV * K * V
        b_v = b_u.to(tl.float32)  # [BV, C]
        b_S *= decay_factor(b_last)[None, :]
        next_row = row + C * HV
        b_u = load_values(u, next_row, o_t < left - C, o_t, o_v, m_v, HV, V)
        b_last = load_last_gate(G, G_residual, next_row, left - C, o_k, m_k, HV, K, C, RESIDUAL)

        o_tk = row * K + o_t * (HV * K)
        p_w = w + o_tk[None, :] + o_k[:, None]
        b_w = tl.load(p_w, mask=m_k[:, None] & m_t[None, :], other=0.0)  # [BK, C]: w transposed
        b_v -= tl.dot(b_operand, b_w.to(b_operand.dtype), input_precision=PRECISION)
        o_vt = row * V + o_v[:, None] + o_t[None, :] * (HV * V)
        tl.store(v_new + o_vt, b_v.to(v_new.dtype.element_ty), mask=m_v[:, None] & m_t[None, :])
        p_kg = kg + o_tk[:, None] + o_k[None, :]
        b_kg = tl.load(p_kg, mask=m_t[:, None] & m_k[None, :], other=0.0)  # [C, BK]
        b_v = operand(b_v.to(b_operand.dtype), PRECISION)
        b_S += tl.dot(b_v, b_kg.to(b_v.dtype), input_precision=PRECISION)
        row = next_row

    if STORE_FINAL_STATE:
        tl.store(final_state + o_state, b_S, mask=m_vk)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the states between chunks: bfloat16 for bfloat16 inputs, else float32.

    A state is not bounded by its inputs, so float16 could overflow.
    """
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


@on_device_of_first_argument
def chunk_gated_delta_rule_fwd_h_kda(
    kg,
    w,
    u,
    G,
    chunk_size=64,
    *,
    G_residual=None,
    initial_state=None,
    output_final_state=False,
    state_v_first=False,
    cu_seqlens=None,
    layout=None,
):
    """The state before each chunk, the corrected values, and the final state.

    Args:
        kg, w: [B, T, HV, K]; u: [B, T, HV, V]; from `recompute_w_u_fwd`.
        G, G_residual: from `chunk_local_cumsum`.
        initial_state: float32 [N, HV, K, V] ([N, HV, V, K] with `state_v_first`), or None: zeros.
        cu_seqlens, layout: as in `chunk_local_cumsum`.

    Returns:
        h: the states before each chunk, transposed: [rows, NT, HV, V, K] in `state_dtype`. Rows
            of a packed batch: 1, its chunks one sequence after the other.
        v_new: [B, T, HV, V] in u's dtype.
        final_state: float32, laid out as `initial_state`, or None.
    """
    check_sizes(
        kg=(kg, "B T HV K", KERNEL_DTYPES),
        w=(w, "B T HV K", (kg.dtype,)),
        u=(u, "B T HV V", (kg.dtype,)),
        G=(G, "B T HV K", (torch.float32,)),
    )
    B, T, HV, K = kg.shape
    V, C = u.shape[-1], chunk_size
    layout = layout or chunk_layout(B, T, C, cu_seqlens)
    h = torch.empty(layout.rows, layout.NT, HV, V, K, dtype=state_dtype(kg.dtype), device=kg.device)
    v_new = torch.empty_like(u)
    final_state = None
    if output_final_state:
        sides = (V, K) if state_v_first else (K, V)
        final_state = torch.empty(layout.N, HV, *sides, dtype=torch.float32, device=kg.device)
    if initial_state is not None:
        shapes = Shapes(B, T, HV, HV, K, V, layout.N)
        check_state("initial_state", initial_state, shapes, kg, state_v_first)
        initial_state = initial_state.contiguous()
    tile = state_tile(layout.N * HV, K, V, C, kg.dtype)
    if layout.N > 0:
        chunk_gated_delta_rule_fwd_h_kda_kernel[(layout.N * HV * cdiv(V, tile["BV"]),)](
            kg,
            w,
            u,
            G,
            G_residual,
            initial_state,
            h,
            v_new,
            final_state,
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
            USE_INITIAL_STATE=initial_state is not None,
            STORE_FINAL_STATE=output_final_state,
            STATE_V_FIRST=state_v_first,
            PRECISION=dot_precision(kg.dtype),
            **tile,
        )
    return h, v_new, final_state


def state_tile(chains, K, V, C, dtype) -> dict:
    """Tile of V, warps and pipeline stages, by the number of independent chains (N * HV).

    Few chains: narrow tiles, so that more programs fill the chip. Stages as shared memory allows.
    """
    BK = key_tile(K)
    wide = 64 if chains >= 48 and BK <= 128 else 32
    if dtype == torch.float32:  # three tf32 products hold three copies of each operand
        wide = 16 if BK == 256 else 32
    BV = min(wide, max(16, next_power_of_2(V)))
    num_warps = 8 if dtype == torch.float32 and BK == 256 else 4
    itemsize = 2 if dtype == torch.bfloat16 else 4
    stage = (2 * C * BK + BV * C) * itemsize
    return dict(
        BK=BK, BV=BV, num_warps=num_warps, num_stages=max(1, min(3, tile_budget() // stage))
    )
