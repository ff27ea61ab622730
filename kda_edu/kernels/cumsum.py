"""Step 1: the cumulated gate of each chunk, in log2 units.

G[t] = (g[first token of the chunk] + ... + g[t]) / ln 2, so that later kernels take exp2(G).

Grid: (tiles of K) x chunks x value heads. Reads g once, writes G once in float32:
2 K (bf16 gate) + 4 K bytes per token and value head; 4 K more where the residual is asked for.
"""

import torch
import triton
import triton.language as tl

from ._autotune import autotune
from ._common import (
    RCP_LN2,
    cdiv,
    gate_rate,
    locate_chunk,
    log_decay,
    on_device_of_first_argument,
)
from .checks import check_gate_parameters, check_lower_bound, check_sizes
from .sequences import chunk_layout

# A step below 2^-160 is a reset: the factor is 0 in float32, and -inf would make later
# differences NaN. 64 such steps stay below 2^14, where float32 holds multiples of 2^-10 exactly.
TO_LOG2 = tl.constexpr(RCP_LN2)
MIN_LOG2_DECAY = tl.constexpr(-160.0)
GRID_STEPS = tl.constexpr(1024.0)


@autotune(
    configs=[
        triton.Config({"BK": BK}, num_warps=num_warps) for BK, num_warps in ((32, 2), (64, 4))
    ],
    key=["HV", "K", "C", "USE_GATE", "RESIDUAL"],
)
@triton.jit(do_not_specialize=["T"])
def chunk_local_cumsum_kernel(
    # inputs
    g,
    A_log,
    dt_bias,
    # outputs
    G,
    G_residual,
    # sizes
    chunks,
    T,
    lower_bound,
    BHV,
    HV: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    # options
    PACKED: tl.constexpr,
    USE_GATE: tl.constexpr,
    USE_BIAS: tl.constexpr,
    USE_LOWER_BOUND: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BK: tl.constexpr,
):
    i_t, i_bh, i_k = tl.program_id(0) // BHV, tl.program_id(0) % BHV, tl.program_id(1)
    i_b, i_h = i_bh // HV, i_bh % HV
    start, count = locate_chunk(i_t, i_b, chunks, T, C, PACKED)

    o_t = tl.arange(0, C)
    o_k = i_k * BK + tl.arange(0, BK)
    m_k = o_k < K
    m_tk = (o_t < count)[:, None] & m_k[None, :]
    offsets = (start * HV + i_h) * K + o_t[:, None] * (HV * K) + o_k[None, :]

    b_g = tl.load(g + offsets, mask=m_tk, other=0.0).to(tl.float32)  # [C, BK]
    if USE_GATE:
        rate = gate_rate(A_log, i_h)
        if USE_BIAS:
            b_g += tl.load(dt_bias + i_h * K + o_k, mask=m_k, other=0.0).to(tl.float32)[None, :]
        b_g = log_decay(b_g, rate, lower_bound, 1.0, 20.0, USE_LOWER_BOUND)
        b_g = tl.where(m_tk, b_g, 0.0)
    b_g *= TO_LOG2
    b_g = tl.where(b_g < MIN_LOG2_DECAY, MIN_LOG2_DECAY, b_g)  # keeps NaN, unlike tl.maximum

    if RESIDUAL:
        # The part of g on a grid of 2^-10 sums exactly; the rest stays below 2^-5 and sums to
        # 2^-30. A difference of two rows then has no cancellation, however large both are.
        b_grid = tl.floor(b_g * GRID_STEPS + 0.5) / GRID_STEPS
        tl.store(G_residual + offsets, tl.cumsum(b_g - b_grid, axis=0), mask=m_tk)
        b_g = b_grid
    tl.store(G + offsets, tl.cumsum(b_g, axis=0), mask=m_tk)


@on_device_of_first_argument
def chunk_local_cumsum(g, chunk_size=64, *, cu_seqlens=None, layout=None, residual=False):
    """Cumulated log decay within each chunk, in log2 units.

    Args:
        g: natural log of the decay [B, T, HV, K], <= 0, any floating dtype.
        chunk_size: 16, 32 or 64.
        cu_seqlens: [N + 1] for sequences packed along T; chunks never span two sequences.
        layout: the `ChunkLayout` of a call that already made one.
        residual: also return what float32 cannot hold in one sum. Needed where gates are
            unbounded and inputs float32: G then lies on a grid of 2^-10 and G + residual is the
            cumulated gate to 2^-30.

    Returns:
        G float32 [B, T, HV, K]; or (G, residual).
    """
    return _launch(g, chunk_size, cu_seqlens, layout, residual)


@on_device_of_first_argument
def kda_gate_chunk_cumsum(
    g,
    A_log=None,
    dt_bias=None,
    lower_bound=None,
    chunk_size=64,
    *,
    cu_seqlens=None,
    layout=None,
    residual=False,
):
    """`chunk_local_cumsum` of the gate computed from its raw input g [B, T, HV, K].

    The gate itself is that of `kda_gate_fwd`; it is never written to memory.
    """
    gate = dict(A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound)
    return _launch(g, chunk_size, cu_seqlens, layout, residual, gate)


def _launch(g, chunk_size, cu_seqlens, layout, residual, gate=None):
    check_sizes(g=(g, "B T HV K"))
    B, T, HV, K = g.shape
    if gate is not None:
        if gate["lower_bound"] is not None:
            check_lower_bound(gate["lower_bound"])
        check_gate_parameters(HV, K, g.device, **gate)
    layout = layout or chunk_layout(B, T, chunk_size, cu_seqlens)
    g = g.contiguous()
    G = torch.empty(g.shape, dtype=torch.float32, device=g.device)
    G_residual = torch.empty_like(G) if residual else None
    gate_arguments = gate or dict(A_log=None, dt_bias=None, lower_bound=None)
    A_log, dt_bias = (
        None if x is None else x.contiguous()
        for x in (gate_arguments["A_log"], gate_arguments["dt_bias"])
    )

    def grid(meta):
        return layout.programs(HV), cdiv(K, meta["BK"])

    if G.numel() > 0:
        chunk_local_cumsum_kernel[grid](
            g,
            A_log,
            dt_bias,
            G,
            G_residual,
            layout.chunks,
            T,
            gate_arguments["lower_bound"],
            BHV=layout.rows * HV,
            HV=HV,
            K=K,
            C=chunk_size,
            PACKED=layout.chunks is not None,
            USE_GATE=gate is not None,
            USE_BIAS=dt_bias is not None,
            USE_LOWER_BOUND=gate_arguments["lower_bound"] is not None,
            RESIDUAL=residual,
        )
    return (G, G_residual) if residual else G
