"""The recurrence of Kimi Delta Attention, fused: one token after the other, the state in registers.

    S <- Diag(exp g) S;   d = beta (v - S^T k);   S <- S + k d^T;   o = S^T (scale q)

The columns of S never mix, so each program owns BV of them, for one sequence and one value head.

Grid: tiles of V x value heads x sequences, in one axis. Per token and value head, in 16 bits with
a float32 gate: reads 2 K (q) + 2 K (k) + 4 K (g) + 2 V (v) + 2 (beta) bytes, writes 2 V (o); q, k
and g are read again by each tile of V, mostly from cache. Per call and value head: reads and writes
the state, 4 K V bytes each way. At T = 1 (decode) that is nearly all there is.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._common import (
    RCP_LN2,
    as_rows,
    autocast,
    cdiv,
    decay_factor,
    gate_rate,
    log_decay,
    next_power_of_2,
    on_device_of_first_argument,
    row_strides,
    write_strength,
)
from .autograd import NAMESPACE, chunk_kda_bwd_op, chunk_kda_op, only_of_tensors
from .checks import Shapes, check_flags, check_kda
from .gate import SOFTPLUS_BETA, SOFTPLUS_THRESHOLD
from .l2norm import EPS, reciprocal_norm

NORM_EPS = tl.constexpr(EPS)
TO_LOG2 = tl.constexpr(RCP_LN2)
GATE_BETA = tl.constexpr(SOFTPLUS_BETA)
GATE_THRESHOLD = tl.constexpr(SOFTPLUS_THRESHOLD)


@triton.jit
def sequence_bounds(cu_seqlens, i_n, T):
    """First token and end of sequence i_n, int64, within [0, T] whatever cu_seqlens holds."""
    if cu_seqlens is None:
        start = i_n.to(tl.int64) * T
        end = start + T
    else:
        start = tl.load(cu_seqlens + i_n).to(tl.int64)
        end = tl.load(cu_seqlens + i_n + 1).to(tl.int64)
        start = tl.minimum(tl.maximum(start, 0), T)
        end = tl.minimum(tl.maximum(end, start), T)
    return start, end


@triton.jit
def store_zero_rows(p_o, start, end, stride, mask):
    """Zeros at p_o + t * stride for t in [start, end)."""
    for t in range(start, end):
        tl.store(p_o + t * stride, tl.zeros(mask.shape, p_o.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "N", "slots"])
def fused_recurrent_kda_kernel(
    # inputs
    q,
    k,
    v,
    g,
    beta,
    A_log,
    dt_bias,
    initial_state,
    # outputs
    o,
    final_state,
    # which state, which tokens
    slot_indices,
    cu_seqlens,
    # sizes
    T,
    N,
    slots,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    g_token,
    g_head,
    beta_token,
    beta_head,
    state_stride,
    scale,
    lower_bound,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    # options
    STATE_V_FIRST: tl.constexpr,
    USE_QK_L2NORM: tl.constexpr,
    USE_GATE: tl.constexpr,
    USE_LOWER_BOUND: tl.constexpr,
    USE_BETA_SIGMOID: tl.constexpr,
    ALLOW_NEG_EIGVAL: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    tiles: tl.constexpr = (V + BV - 1) // BV
    i_v, i_nh = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    i_n, i_hv = i_nh // HV, i_nh % HV
    i_hv = i_hv.to(tl.int64)  # times a stride between heads, which may be large
    i_h = i_hv // (HV // H)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_k = o_k < K
    m_v = o_v < V
    m_S = m_k[:, None] & m_v[None, :]
    start, end = sequence_bounds(cu_seqlens, i_n, T)
    p_o = o + i_hv * V + o_v
    if cu_seqlens is not None:
        if i_n == N - 1:  # rows that belong to no sequence
            store_zero_rows(p_o, end, T, HV * V, m_v)

    i_s = i_n.to(tl.int64)
    if slot_indices is not None:
        i_s = tl.load(slot_indices + i_n).to(tl.int64)
        if (i_s < 0) | (i_s >= slots):  # padding: no state is touched
            store_zero_rows(p_o, start, end, HV * V, m_v)
            return
    if STATE_V_FIRST:
        o_S = i_s * state_stride + i_hv * (K * V) + o_v[None, :] * K + o_k[:, None]
    else:
        o_S = i_s * state_stride + i_hv * (K * V) + o_k[:, None] * V + o_v[None, :]
    b_S = tl.zeros([BK, BV], dtype=tl.float32)
    if initial_state is not None:
        b_S += tl.load(initial_state + o_S, mask=m_S, other=0.0)

    if USE_GATE:
        rate = gate_rate(A_log, i_hv)
        b_bias = tl.zeros([BK], dtype=tl.float32)
        if dt_bias is not None:
            b_bias += tl.load(dt_bias + i_hv * K + o_k, mask=m_k, other=0.0).to(tl.float32)

    p_q = q + start * q_token + i_h * q_head + o_k
    p_k = k + start * k_token + i_h * k_head + o_k
    p_v = v + start * v_token + i_hv * v_head + o_v
    p_g = g + start * g_token + i_hv * g_head + o_k
    p_beta = beta + start * beta_token + i_hv * beta_head
    p_o += start * (HV * V)
    for _ in range(start, end):
        b_q = tl.load(p_q, mask=m_k, other=0.0).to(tl.float32)  # [BK]
        b_k = tl.load(p_k, mask=m_k, other=0.0).to(tl.float32)  # [BK]
        b_v = tl.load(p_v, mask=m_v, other=0.0).to(tl.float32)  # [BV]
        b_g = tl.load(p_g, mask=m_k, other=0.0).to(tl.float32)  # [BK]
        b_beta = tl.load(p_beta).to(tl.float32)
        b_beta = write_strength(b_beta, USE_BETA_SIGMOID, ALLOW_NEG_EIGVAL)
        if USE_QK_L2NORM:
            b_q *= reciprocal_norm(tl.sum(b_q * b_q, axis=0), NORM_EPS)
            b_k *= reciprocal_norm(tl.sum(b_k * b_k, axis=0), NORM_EPS)
        if USE_GATE:
            b_g = log_decay(
                b_g + b_bias, rate, lower_bound, GATE_BETA, GATE_THRESHOLD, USE_LOWER_BOUND
            )

        b_S *= decay_factor(b_g * TO_LOG2)[:, None]  # decay
        b_d = b_beta * (b_v - tl.sum(b_S * b_k[:, None], axis=0))  # [BV] what is missing
        b_S += b_k[:, None] * b_d[None, :]  # write
        b_o = tl.sum(b_S * (b_q * scale)[:, None], axis=0)  # [BV] read
        tl.store(p_o, b_o.to(o.dtype.element_ty), mask=m_v)

        p_q += q_token
        p_k += k_token
        p_v += v_token
        p_g += g_token
        p_beta += beta_token
        p_o += HV * V

    if final_state is not None:
        tl.store(final_state + o_S, b_S, mask=m_S)


def fused_recurrent_kda(
    q,
    k,
    v,
    g,
    beta,
    A_log=None,
    dt_bias=None,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    lower_bound=None,
    state_v_first=False,
    cu_seqlens=None,
):
    """Kimi Delta Attention one token at a time, in one kernel. For decoding and short prompts.

    Args:
        q, k: queries and keys [B, T, H, K]; float32, float16 or bfloat16; K <= 256.
        v: values [B, T, HV, V], same dtype. HV is a multiple of H; value head h reads
            query/key head h // (HV / H).
        g: natural log of the decay [B, T, HV, K], <= 0, any floating dtype; or the raw gate input
            if `use_gate_in_kernel`, see `kda_gate_fwd`.
        beta: write strength [B, T, HV], any floating dtype; or its logit if
            `use_beta_sigmoid_in_kernel`.
        A_log, dt_bias: gate parameters, HV and HV * K numbers, with `use_gate_in_kernel`.
        scale: multiplies q. Default K ** -0.5.
        initial_state: float32 [N, HV, K, V]. Default zeros. Not modified.
        output_final_state: also return the state after the last token.
        use_qk_l2norm_in_kernel: normalise q and k, as `l2norm_fwd` does, without rounding.
        allow_neg_eigval: beta = 2 sigmoid(logit).
        lower_bound: selects the lower-bound gate, with `use_gate_in_kernel`.
        state_v_first: states are [N, HV, V, K].
        cu_seqlens: int32 or int64 [N + 1], sequences packed along T; needs B = 1. Starts at 0,
            never decreases, ends at T: checked on a CPU, promised on a GPU (where rows after the
            last sequence become zeros, and no value reads or writes out of bounds).

    Under `torch.autocast` q, k and v are cast to its dtype; all else keeps its own.

    Returns:
        (o [B, T, HV, V] in the dtype of v, final state float32 or None). Differentiable as
        `chunk_kda` is, whose backward serves here too.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came.

    Source: Kimi Linear (arXiv 2510.26692), eq. 1; arguments as in flash-linear-attention.
    """
    q, k, v = autocast(q, k, v)
    options = dict(
        A_log=A_log,
        dt_bias=dt_bias,
        scale=scale,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        lower_bound=lower_bound,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
    )
    check_flags(
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel
    )
    check_kda(q, k, v, g, beta, initial_state=initial_state, **options)
    inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    differentiable = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in inputs
    )
    forward = fused_recurrent_kda_fwd
    if differentiable or torch.compiler.is_compiling():
        forward = fused_recurrent_kda_op
    o, final_state = forward(
        *inputs,
        cu_seqlens,
        q.shape[-1] ** -0.5 if scale is None else float(scale),
        output_final_state,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        None if lower_bound is None else float(lower_bound),
        state_v_first,
    )
    return o, final_state if output_final_state else None


def _tile_width(heads, BK, V):
    """Columns of the state per program, for `heads` = sequences x value heads.

    Few heads: narrow tiles, so that every multiprocessor gets programs. Many: wider ones, which
    read longer pieces of each row of the state. One warp holds a tile, at most 64 registers per
    thread, so no sum crosses warps. Nothing is timed: the choice, and with it the order of every
    sum, depends on the shapes alone.
    """
    BV = 8 if heads * V < 2**15 else min(16, 2048 // BK)
    return min(BV, next_power_of_2(V))


@on_device_of_first_argument
def launch_recurrent(
    tokens,
    o,
    shapes,
    *,
    A_log,
    dt_bias,
    scale,
    initial_state,
    final_state,
    slot_indices=None,
    use_qk_l2norm_in_kernel,
    use_gate_in_kernel,
    use_beta_sigmoid_in_kernel,
    allow_neg_eigval,
    lower_bound,
    state_v_first,
    cu_seqlens,
):
    _, T, H, HV, K, V, N = shapes
    q, k, v, g, beta = tokens
    q, k, v, g, beta = (as_rows(x) for x in (q, k, v, g, beta[..., None]))
    strides = [stride for x in (q, k, v, g, beta) for stride in row_strides(x)]
    state = final_state if initial_state is None else initial_state
    BK = next_power_of_2(K)
    BV = _tile_width(N * HV, BK, V)
    programs = cdiv(V, BV) * HV * N
    if programs == 0:
        return
    fused_recurrent_kda_kernel[(programs,)](
        q,
        k,
        v,
        g,
        beta,
        None if A_log is None else A_log.contiguous(),
        None if dt_bias is None else dt_bias.contiguous(),
        initial_state,
        o,
        final_state,
        slot_indices,
        None if cu_seqlens is None else cu_seqlens.contiguous(),
        T,
        N,
        0 if slot_indices is None else state.shape[0],
        *strides,
        HV * K * V if state is None or state.shape[0] < 2 else state.stride(0),
        K**-0.5 if scale is None else float(scale),
        0.0 if lower_bound is None else float(lower_bound),
        H=H,
        HV=HV,
        K=K,
        V=V,
        STATE_V_FIRST=state_v_first,
        USE_QK_L2NORM=use_qk_l2norm_in_kernel,
        USE_GATE=use_gate_in_kernel,
        USE_LOWER_BOUND=lower_bound is not None,
        USE_BETA_SIGMOID=use_beta_sigmoid_in_kernel,
        ALLOW_NEG_EIGVAL=allow_neg_eigval,
        BK=BK,
        BV=BV,
        num_warps=1,
    )


def fused_recurrent_kda_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    output_final_state: bool,
    use_qk_l2norm: bool,
    use_gate: bool,
    use_beta_sigmoid: bool,
    allow_neg_eigval: bool,
    lower_bound: float | None,
    state_v_first: bool,
) -> tuple[Tensor, Tensor]:
    """(o, final state) from arguments that are already checked; an absent state is empty."""
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    N = B if cu_seqlens is None else cu_seqlens.numel() - 1
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    final_state = None
    if output_final_state:
        sides = (V, K) if state_v_first else (K, V)
        final_state = torch.empty(N, HV, *sides, dtype=torch.float32, device=v.device)
    launch_recurrent(
        (q, k, v, g, beta),
        o,
        Shapes(B, T, H, HV, K, V, N),
        A_log=A_log,
        dt_bias=dt_bias,
        scale=scale,
        initial_state=None if initial_state is None else initial_state.contiguous(),
        final_state=final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm,
        use_gate_in_kernel=use_gate,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid,
        allow_neg_eigval=allow_neg_eigval,
        lower_bound=lower_bound,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
    )
    return o, v.new_empty(0) if final_state is None else final_state


fused_recurrent_kda_op = torch.library.custom_op(
    f"{NAMESPACE}::fused_recurrent_kda", fused_recurrent_kda_fwd, mutates_args=()
)


@fused_recurrent_kda_op.register_fake
def _(q, k, v, *arguments):
    cu_seqlens, output_final_state, state_v_first = arguments[5], arguments[7], arguments[-1]
    final_state = v.new_empty(0)
    if output_final_state:
        N = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        K, V = q.shape[-1], v.shape[-1]
        sides = (V, K) if state_v_first else (K, V)
        final_state = v.new_empty(N, v.shape[2], *sides, dtype=torch.float32)
    return v.new_empty(v.shape), final_state


def _keep(ctx, inputs, output):
    ctx.options = inputs[9:]
    ctx.save_for_backward(*inputs[:9])
    ctx.set_materialize_grads(False)


def _differentiate(ctx, do, d_final_state):
    """The same function chunk by chunk, whose backward is parallel: nothing here was kept."""
    tensors, (scale, _, l2norm, *options) = ctx.saved_tensors, ctx.options
    options = (*options, 16 if tensors[0].shape[1] <= 16 else 64)
    with torch.no_grad():
        made = chunk_kda_op(*tensors, None, scale, False, l2norm, *options, False)
    gradients = chunk_kda_bwd_op(*tensors, None, do, d_final_state, made[2:], scale, *options)
    return only_of_tensors(tensors[:8], gradients) + (None,) * 9


fused_recurrent_kda_op.register_autograd(_differentiate, setup_context=_keep)
