"""Backward, step 4: from the cumulated gate to the gate, and to its raw input and parameters.

G[t] = g[first] + ... + g[t], so the gradient of g[t] sums those of G over the rows from t to the
end of the chunk; what acts at the last row reaches them all. With the gate in the kernel:

    g = -rate softplus(y):          dy = -rate sigmoid(y) dg                     dA_log = sum g dg
    g = l sigmoid(rate y):          dy = l s (1 - s) rate dg, s the sigmoid      dA_log = sum y dy

with y = x + dt_bias and rate = exp(A_log); dx = dy, and d dt_bias sums dy over the tokens. The sums
over tokens are made per chunk here and added up afterwards, in a fixed order: no atomics.

Grid: (tiles of K) x chunks x value heads. Reads 4 K (dG) + K / 4 (its parts at the chunk's end)
+ 2 K (gate input), writes 2 K (dg) + 4 K / C (parts of d dt_bias) bytes per token and value head.
"""

import torch
import triton
import triton.language as tl

from ._common import (
    cdiv,
    gate_rate,
    key_tile,
    locate_chunk,
    log_decay,
    on_device_of_first_argument,
)
from .intra import BLOCK


@triton.jit(do_not_specialize=["T"])
def chunk_kda_bwd_gate_kernel(
    # inputs
    dG,
    dG_end,
    x,
    A_log,
    dt_bias,
    # outputs
    dg,
    dA_log,
    d_bias,
    # sizes
    chunks,
    T,
    NT,
    lower_bound,
    BHV,
    HV: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    # options
    PACKED: tl.constexpr,
    USE_GATE: tl.constexpr,
    USE_A_LOG: tl.constexpr,
    USE_BIAS: tl.constexpr,
    USE_LOWER_BOUND: tl.constexpr,
):
    NC: tl.constexpr = C // BC
    i_t, i_bh, i_k = tl.program_id(0) // BHV, tl.program_id(0) % BHV, tl.program_id(1)
    i_b, i_h = i_bh // HV, i_bh % HV
    start, count = locate_chunk(i_t, i_b, chunks, T, C, PACKED)
    part = (i_b.to(tl.int64) * NT + i_t) * HV + i_h  # row of (chunk, head)
    o_t, o_c = tl.arange(0, C), tl.arange(0, NC)
    o_k = i_k * BK + tl.arange(0, BK)
    m_k = o_k < K
    m_tk = (o_t < count)[:, None] & m_k[None, :]
    offsets = (start * HV + i_h) * K + o_t[:, None] * (HV * K) + o_k[None, :]

    b_dg = tl.load(dG + offsets, mask=m_tk, other=0.0)  # [C, BK]
    b_dg = tl.cumsum(b_dg, axis=0, reverse=True)
    p_end = dG_end + (part * NC + o_c[:, None]) * K + o_k[None, :]
    b_end = tl.load(p_end, mask=(o_c * BC < count)[:, None] & m_k[None, :], other=0.0)
    b_dg += tl.sum(b_end, axis=0)[None, :]
    if USE_GATE:
        b_y = tl.load(x + offsets, mask=m_tk, other=0.0).to(tl.float32)
        rate = gate_rate(A_log, i_h)
        if USE_BIAS:
            b_y += tl.load(dt_bias + i_h * K + o_k, mask=m_k, other=0.0).to(tl.float32)[None, :]
        b_g = log_decay(b_y, rate, lower_bound, 1.0, 20.0, USE_LOWER_BOUND)
        # there the decay is 0 in float32: what arrives is round-off, and the gate may be infinite
        b_dg = tl.where(b_g < -88.0, 0.0, b_dg)
        if USE_LOWER_BOUND:
            b_s = tl.sigmoid(rate * b_y)
            b_slope = rate * (b_s * tl.sigmoid(-rate * b_y)) * lower_bound
            b_by_A = b_y * b_slope
        else:
            b_slope = -rate * tl.where(b_y > 20.0, 1.0, tl.sigmoid(b_y))
            b_by_A = b_g
        if USE_A_LOG:
            b_by_A = tl.where(m_tk & (b_dg != 0.0), b_by_A * b_dg, 0.0)
            tl.store(dA_log + part * tl.num_programs(1) + i_k, tl.sum(b_by_A))
        b_dg = tl.where(m_tk & (b_dg != 0.0), b_dg * b_slope, 0.0)
        if USE_BIAS:
            tl.store(d_bias + part * K + o_k, tl.sum(b_dg, axis=0), mask=m_k)
    tl.store(dg + offsets, b_dg.to(dg.dtype.element_ty), mask=m_tk)


@on_device_of_first_argument
def chunk_kda_bwd_gate(
    dG, dG_end, g, chunk_size, layout, *, use_gate=False, A_log=None, dt_bias=None, lower_bound=None
):
    """Gradients of g, A_log and dt_bias.

    Args:
        dG, dG_end: from `chunk_kda_bwd_dqk`.
        g: [B, T, HV, K] as given to the forward: log decays, or the raw input with `use_gate`.
        A_log, dt_bias, lower_bound: of the gate, with `use_gate`.
        chunk_size, layout: of the forward.

    Returns:
        (dg, dA_log, d_dt_bias), each in the dtype and shape of its input; the last two are None
        where there is no such input.
    """
    B, T, HV, K = g.shape
    g = g.contiguous()
    # rows that belong to no sequence have no gradient
    dg = torch.empty_like(g) if layout.covers else torch.zeros_like(g)
    BK = min(key_tile(K), 64)
    tiles = cdiv(K, BK)
    parts = layout.rows * layout.NT
    make = torch.empty if dg.numel() > 0 else torch.zeros
    dA_log = d_bias = None
    if A_log is not None:
        dA_log = make(parts, HV, tiles, dtype=torch.float32, device=g.device)
    if dt_bias is not None:
        d_bias = make(parts, HV * K, dtype=torch.float32, device=g.device)
    if dg.numel() > 0:
        chunk_kda_bwd_gate_kernel[(layout.programs(HV), tiles)](
            dG,
            dG_end,
            g,
            None if A_log is None else A_log.contiguous(),
            None if dt_bias is None else dt_bias.contiguous(),
            dg,
            dA_log,
            d_bias,
            layout.chunks,
            T,
            layout.NT,
            0.0 if lower_bound is None else lower_bound,
            layout.rows * HV,
            HV=HV,
            K=K,
            C=chunk_size,
            BC=BLOCK,
            BK=BK,
            PACKED=layout.chunks is not None,
            USE_GATE=use_gate,
            USE_A_LOG=A_log is not None,
            USE_BIAS=dt_bias is not None,
            USE_LOWER_BOUND=lower_bound is not None,
            num_warps=4,
        )
    if dA_log is not None:
        dA_log = dA_log.sum((0, 2)).reshape(A_log.shape).to(A_log.dtype)
    if d_bias is not None:
        d_bias = d_bias.sum(0).reshape(dt_bias.shape).to(dt_bias.dtype)
    return dg, dA_log, d_bias
