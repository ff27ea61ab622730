"""The backward in two kernels, for what fused.py computes: chunks of 16 tokens, a bounded gate.

    prepare, scan   of fused.py once more, now to leave the state before each chunk, and v'
    reverse scan    with dS the gradient of the state after a chunk, from the last to the first:
                        dv' = A_qk^T do + kr dS                  leaves dS and dv' of each chunk
                        dS <- Diag(2^G_last) dS + qd^T do - w^T dv'
    gradients       all that remains, all chunks of a segment at once, 16 rows of one key head each:
                    q, k and G are loaded and decayed once, and every gradient leaves finished

A chunk's states and their gradients take 64 KB in bfloat16 at K = V = 128, more than all else of
it. So they exist for two segments at a time: one is scanned, on a stream of its own, while the
gradients of the other are made. A segment starts from the state that the forward kept at its
border.

The gradients, with x = scale q or beta k, rows 2^(G + 58) x, columns c = 2^-(G + 58) k, r = beta (v
- 2^G k S) and the gradient dr = A_inv^T dv' of it:

    dA_qk = lower (do v'^T)    dA_kk = -strictly lower (dr v'^T)     of the scores: no inverse in it
    t  =  do S^T 2^-58 + dA_qk c       or   -dr S^T 2^-58 + dA_kk c    dx = 2^(G + 58) t
    z  =  dA_qk^T 2^(G + 58) scale q + dA_kk^T 2^(G + 58) beta k       dc = z
    dG =  rows x t - c z                                               in natural-log units

As in backward_qk.py, what a score adds to dG at its row is the very number that it takes away at
its column: both come from the operands as the tensor cores read them.

Bytes per token and head (bf16, K = V = 128): prepare and scan 3.5 KB less o, and 2 K V / 16 + 2 V
for the states and v'; the reverse scan reads 6 K + 2 V + 32 and writes 2 K V / 16 + 2 V; gradients
reads 4 K V / 16 + 6 K + 8 V and writes 6 K + 2 V + K / 4: 15 KB in all, 8 of them states, of which
the cache holds some.
"""

import torch
import triton
import triton.language as tl

from ._common import (
    as_rows,
    cdiv,
    gate_rate,
    is_nvidia,
    key_tile,
    locate_chunk,
    on_device_of_first_argument,
    operand,
    row_strides,
    write_strength,
)
from .fused import (
    CHUNK,
    SEGMENT_OF_TRAINING,
    SHIFT,
    TO_LOG2,
    TWO_TO_SHIFT,
    fast_exp2,
    fast_reciprocal,
    load_gate_input,
    locate_segment,
    preparation,
    product,
    scan_segment,
    scan_tile,
    segments_of,
    side_stream,
)
from .l2norm import EPS, reciprocal_norm


@triton.jit
def rounded(x, PTX: tl.constexpr):
    """A float32 factor of a product in tf32, as the product reads it."""
    if PTX:
        y = tl.inline_asm_elementwise(
            "cvt.rna.tf32.f32 $0, $1;", "=r,f", [x], dtype=tl.int32, is_pure=True, pack=1
        ).to(tl.float32, bitcast=True)
    else:
        y = operand(x, "tf32")
    return y


@triton.jit
def sigmoid_and_slope(x, PTX: tl.constexpr):
    """(s, s (1 - s)) of s = 1 / (1 + 2^-x), both to a relative 2^-22 at either end."""
    b_e = fast_exp2(-tl.abs(x), PTX)
    b_r = fast_reciprocal(1.0 + b_e, PTX)
    return tl.where(x >= 0, b_r, b_e * b_r), b_e * b_r * b_r


@triton.jit(do_not_specialize=["T", "first", "last"])
def reverse_scan_kernel(
    # inputs
    qd, kr, w, A_qk, decay, do, d_final_state, d_state_in,
    # outputs
    dh, dv_new, d_initial_state, d_state_out,
    # sizes
    cu_seqlens, chunk_offsets, first, last, T, NT,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
    # options
    PACKED: tl.constexpr, STATE_V_FIRST: tl.constexpr,
):  # fmt: skip
    """One segment, from its end. d_state_in, d_state_out: of sequences that cross its borders."""
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v, i_nh = tl.program_id(0) % NV, tl.program_id(0) // NV
    i_n, i_h = (i_nh // HV).to(tl.int64), i_nh % HV
    start, length, part, chunks, begins, ends = locate_segment(
        i_n, cu_seqlens, chunk_offsets, first, last, T, NT, C, PACKED
    )
    if (chunks == 0) & ((begins & ends) == 0):  # the sequence lies elsewhere
        return
    o_k, o_v, o_t = tl.arange(0, BK), i_v * BV + tl.arange(0, BV), tl.arange(0, C)
    m_k, m_v = o_k < K, o_v < V
    m_vk = m_v[:, None] & m_k[None, :]
    if STATE_V_FIRST:
        o_state = (i_n * HV + i_h) * (K * V) + o_v[:, None] * K + o_k[None, :]
    else:
        o_state = (i_n * HV + i_h) * (K * V) + o_v[:, None] + o_k[None, :] * V
    i_row = i_n * 0 if PACKED else i_n
    o_border = (i_row * HV + i_h) * (K * V) + o_v[:, None] * K + o_k[None, :]

    b_dS = tl.zeros([BV, BK], dtype=tl.float32)  # the gradient of the state, transposed
    if d_final_state is not None:
        b_dS += tl.load(d_final_state + o_state, mask=m_vk & ends, other=0.0)
    if d_state_in is not None:
        b_dS += tl.load(d_state_in + o_border, mask=m_vk & (ends == 0), other=0.0)
    row = (start + (chunks - 1).to(tl.int64) * C) * HV + i_h
    o_tk = row * K + o_t[:, None] * (HV * K) + o_k[None, :]
    p_kr = kr + row * K + o_k[:, None] + o_t[None, :] * (HV * K)  # transposed
    p_qd, p_w = qd + o_tk, w + o_tk
    p_A = A_qk + row * C + o_t[:, None] * (HV * C) + o_t[None, :]
    o_vt = row * V + o_v[:, None] + o_t[None, :] * (HV * V)
    p_do, p_dv = do + o_vt, dv_new + o_vt
    p_decay = decay + ((part + chunks - 1) * HV + i_h) * K + o_k
    part += chunks - 1  # among the rows of the segment alone
    part -= first if PACKED else first + i_n * (NT - (last - first))
    p_dh = dh + (part * HV + i_h) * (K * V) + o_v[:, None] * K + o_k[None, :]
    # as in the scan, the next chunk's are fetched by hand
    left = length - (chunks - 1) * C  # tokens of the chunk
    some = chunks > 0
    b_do = tl.load(p_do, mask=m_v[:, None] & ((o_t < left) & some)[None, :], other=0.0)
    b_decay = tl.load(p_decay, mask=m_k & some, other=0.0)
    for i in range(chunks):
        m_t = o_t < left
        left = C  # of every chunk before the last
        m_tk = m_t[:, None] & m_k[None, :]
        b_dS16 = b_dS.to(dh.dtype.element_ty)
        tl.store(p_dh, b_dS16, mask=m_vk)
        b_dS *= b_decay[None, :]
        b_here = b_do
        p_do -= C * HV * V
        p_decay -= HV * K
        some = i + 1 < chunks
        b_do = tl.load(p_do, mask=m_v[:, None] & some, other=0.0)
        b_decay = tl.load(p_decay, mask=m_k & some, other=0.0)

        b_A = tl.load(p_A, mask=m_t[:, None] & m_t[None, :], other=0.0)
        b_dv = tl.dot(b_here, b_A)  # [BV, C]
        b_dv += tl.dot(b_dS16, tl.load(p_kr, mask=m_k[:, None] & m_t[None, :], other=0.0))
        b_dS += tl.dot(b_here, tl.load(p_qd, mask=m_tk, other=0.0))
        b_dv = b_dv.to(dh.dtype.element_ty)
        tl.store(p_dv, b_dv, mask=m_v[:, None] & m_t[None, :])
        b_dS -= tl.dot(b_dv, tl.load(p_w, mask=m_tk, other=0.0))
        p_dh -= HV * K * V
        p_dv -= C * HV * V
        p_kr -= C * HV * K
        p_qd -= C * HV * K
        p_w -= C * HV * K
        p_A -= C * HV * C

    if d_initial_state is not None:
        tl.store(d_initial_state + o_state, b_dS, mask=m_vk & begins)
    if d_state_out is not None:
        tl.store(d_state_out + o_border, b_dS, mask=m_vk & (begins == 0))


@triton.jit
def products_with_states(
    p_do, p_dv, p_new, p_h, p_dh, o_t, m_t, stride,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """do S^T, dv' S^T, v' dS^T [C, BK] and sum_v S dS [BK], with states stored [V, K]."""
    o_k = tl.arange(0, BK)
    b_do_S = tl.zeros([C, BK], dtype=tl.float32)
    b_dv_S = tl.zeros([C, BK], dtype=tl.float32)
    b_new_dS = tl.zeros([C, BK], dtype=tl.float32)
    b_S_dS = tl.zeros([BV, BK], dtype=tl.float32)
    for i_v in range((V + BV - 1) // BV):
        o_v = i_v * BV + tl.arange(0, BV)
        m_tv = m_t[:, None] & (o_v < V)[None, :]
        m_vk = (o_v < V)[:, None] & (o_k < K)[None, :]
        o_tv, o_vk = o_t[:, None] * stride + o_v[None, :], o_v[:, None] * K + o_k[None, :]
        b_S = tl.load(p_h + o_vk, mask=m_vk, other=0.0)  # [BV, BK]
        b_dS = tl.load(p_dh + o_vk, mask=m_vk, other=0.0)  # [BV, BK]
        b_do_S += tl.dot(tl.load(p_do + o_tv, mask=m_tv, other=0.0), b_S)
        b_dv_S += tl.dot(tl.load(p_dv + o_tv, mask=m_tv, other=0.0), b_S)
        b_new_dS += tl.dot(tl.load(p_new + o_tv, mask=m_tv, other=0.0), b_dS)
        b_S_dS += b_S.to(tl.float32) * b_dS.to(tl.float32)
    return b_do_S, b_dv_S, b_new_dS, tl.sum(b_S_dS, axis=0)


@triton.jit(do_not_specialize=["T", "first", "last"])
def gradient_kernel(
    # inputs; dv comes with the gradient of v' in it
    q, k, v, g, beta, A_log, dt_bias, do, A_inv, v_new, h, dh, dv,
    # outputs
    dq, dk, dg, dbeta, dA_log, d_bias,
    # sizes
    chunks, first, last, T, NT, scale, eps, lower_bound, BH,
    stride_q, stride_qh, stride_k, stride_kh, stride_v, stride_vh, stride_g, stride_gh,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, TILE_V: tl.constexpr,
    # options
    PACKED: tl.constexpr, L2NORM: tl.constexpr, BETA_SIGMOID: tl.constexpr,
    NEG_EIGVAL: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = HV // H
    i_t, i_bh = first + tl.program_id(0) // BH, tl.program_id(0) % BH
    i_b, i_hk = i_bh // H, (i_bh % H).to(tl.int64)
    start, count = locate_chunk(i_t, i_b, chunks, T, C, PACKED)
    if count <= 0:
        return
    o_t, o_k, o_v = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    m_t, m_k = o_t < count, o_k < K
    m_tk, m_tv = m_t[:, None] & m_k[None, :], m_t[:, None] & (o_v < V)[None, :]
    p_q = q + start * stride_q + i_hk * stride_qh + o_t[:, None] * stride_q + o_k[None, :]
    p_k = k + start * stride_k + i_hk * stride_kh + o_t[:, None] * stride_k + o_k[None, :]
    b_q = tl.load(p_q, mask=m_tk, other=0.0).to(tl.float32)  # [C, BK]
    b_k = tl.load(p_k, mask=m_tk, other=0.0).to(tl.float32)  # [C, BK]
    if L2NORM:
        b_rq = reciprocal_norm(tl.sum(b_q * b_q, axis=1), eps)[:, None]
        b_rk = reciprocal_norm(tl.sum(b_k * b_k, axis=1), eps)[:, None]
        b_q *= b_rq
        b_k *= b_rk
    b_dq = tl.zeros([C, BK], dtype=tl.float32)  # of scale q
    b_dk = tl.zeros([C, BK], dtype=tl.float32)

    for i_g in range(GROUP):
        i_h = i_hk * GROUP + i_g
        part = (i_b.to(tl.int64) * NT + i_t) * HV + i_h  # of (chunk, head)
        local = (i_b.to(tl.int64) * (last - first) + i_t - first) * HV + i_h  # in the segment
        values = (start * HV + i_h) * V
        b_do_S, b_dv_S, b_new_dS, b_S_dS = products_with_states(
            do + values, dv + values, v_new + values, h + local * (K * V), dh + local * (K * V),
            o_t, m_t, HV * V, K, V, C, BK, TILE_V,
        )  # fmt: skip
        rate = gate_rate(A_log, i_h)
        b_y = load_gate_input(g, dt_bias, start, i_h, o_t, o_k, m_k, m_tk, stride_g, stride_gh, K)
        b_s, b_slope = sigmoid_and_slope(b_y * (rate * TO_LOG2), PTX)
        b_g = tl.where(m_tk, b_s * (lower_bound * TO_LOG2), 0.0)
        b_G = tl.cumsum(b_g, axis=0) + SHIFT
        b_last = fast_exp2(tl.sum(b_g, axis=0), PTX)  # [BK]
        b_down, b_up = fast_exp2(b_G, PTX), fast_exp2(-b_G, PTX)
        b_logit = tl.load(beta + (start + o_t) * HV + i_h, mask=m_t, other=0.0).to(tl.float32)
        b_beta = write_strength(b_logit, BETA_SIGMOID, NEG_EIGVAL)

        # rows of q, rows and columns of k; the inverse, transposed; what r and v get
        b_xq = rounded(b_q * b_down * scale, PTX)
        b_xk = rounded(b_k * b_down * b_beta[:, None], PTX)
        b_c = rounded(b_k * b_up, PTX)
        o_X = (start * HV + i_h) * C + o_t[:, None] + o_t[None, :] * (HV * C)  # transposed
        b_X = tl.load(A_inv + o_X, mask=m_t[:, None] & m_t[None, :], other=0.0)
        o_rows = values + o_t[:, None] * (HV * V) + o_v[None, :]
        b_dr = tl.load(dv + o_rows, mask=m_tv, other=0.0)  # dv', [C, BV]
        b_dr = product(b_X, b_dr.to(tl.float32))
        p_v = v + start * stride_v + i_h.to(tl.int64) * stride_vh
        b_v = tl.load(p_v + o_t[:, None] * stride_v + o_v[None, :], mask=m_tv, other=0.0)
        b_dbeta = tl.sum(b_dr * b_v.to(tl.float32), axis=1)
        tl.debug_barrier()  # dv' has been read by all
        tl.store(dv + o_rows, (b_beta[:, None] * b_dr).to(dv.dtype.element_ty), mask=m_tv)

        # gradients of the scores, then of their rows and columns
        b_new = tl.trans(tl.load(v_new + o_rows, mask=m_tv, other=0.0))
        b_Aq = tl.dot(tl.load(do + o_rows, mask=m_tv, other=0.0), b_new)
        b_Aq = rounded(tl.where(o_t[:, None] >= o_t[None, :], b_Aq, 0.0), PTX)
        b_Ak = -tl.dot(b_dr.to(v_new.dtype.element_ty), b_new)
        b_Ak = rounded(tl.where(o_t[:, None] > o_t[None, :], b_Ak, 0.0), PTX)
        b_tq = b_do_S / TWO_TO_SHIFT + product(b_Aq, b_c)
        b_tk = product(b_Ak, b_c) - product(b_X, b_dv_S) / TWO_TO_SHIFT
        b_z = product(tl.trans(b_Aq), b_xq) + product(tl.trans(b_Ak), b_xk)
        b_dG = b_xq * b_tq + b_xk * b_tk - b_c * b_z
        b_tk *= b_down
        b_dbeta += tl.sum(b_k * b_tk, axis=1)
        b_dk += b_beta[:, None] * b_tk + b_up * b_z
        b_dq += b_down * b_tq

        # k in the next state. At the last row acts what decays to it; not that row, and the state
        b_new_dS *= b_up * (b_last * TWO_TO_SHIFT)[None, :]
        b_dk += b_new_dS
        b_to_end = tl.where((o_t < count - 1)[:, None], b_k * b_new_dS, 0.0)
        b_dG = tl.cumsum(b_dG - b_to_end, axis=0, reverse=True)
        b_dG += (tl.sum(b_to_end, axis=0) + b_last * b_S_dS)[None, :]
        b_dG = tl.where(m_tk, b_dG * b_slope * (rate * lower_bound), 0.0)
        o_g = (start * HV + i_h) * K + o_t[:, None] * (HV * K) + o_k[None, :]
        tl.store(dg + o_g, b_dG.to(dg.dtype.element_ty), mask=m_tk)
        if d_bias is not None:
            tl.store(d_bias + part * K + o_k, tl.sum(b_dG, axis=0), mask=m_k)
        if dA_log is not None:
            tl.store(dA_log + part, tl.sum(tl.sum(b_dG * b_y, axis=0), axis=0))
        if BETA_SIGMOID:
            b_dbeta *= tl.sigmoid(b_logit) * tl.sigmoid(-b_logit)
            if NEG_EIGVAL:
                b_dbeta *= 2.0
        p_dbeta = dbeta + (start + o_t) * HV + i_h
        tl.store(p_dbeta, b_dbeta.to(dbeta.dtype.element_ty), mask=m_t)

    b_dq *= scale
    if L2NORM:
        b_dq = b_rq * (b_dq - b_q * tl.sum(b_q * b_dq, axis=1)[:, None])
        b_dk = b_rk * (b_dk - b_k * tl.sum(b_k * b_dk, axis=1)[:, None])
    o_out = (start * H + i_hk) * K + o_t[:, None] * (H * K) + o_k[None, :]
    tl.store(dq + o_out, b_dq.to(dq.dtype.element_ty), mask=m_tk)
    tl.store(dk + o_out, b_dk.to(dk.dtype.element_ty), mask=m_tk)


@on_device_of_first_argument
def fused_chunk_kda_bwd(
    q, k, v, g, beta, A_log, dt_bias, initial_state, do, d_final_state, made, borders, *,
    scale, lower_bound, layout, use_qk_l2norm=False, use_beta_sigmoid=False,
    allow_neg_eigval=False, state_v_first=False,
):  # fmt: skip
    """Gradients of every input of `fused_chunk_kda_fwd`.

    Args:
        q ... initial_state: as given to the forward. do: gradient of the output [B, T, HV, V];
        d_final_state: of the final state, or None. made: the `Prepared` of the forward, or None: it
        is made anew. borders: of the forward with `keep_borders`.

    Returns:
        (dq, dk, dv, dg, dbeta, dA_log, d_dt_bias, d_initial_state), each in its input's dtype,
        None where there is no such input.
    """
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    stored, prepare = made, None
    if made is None:
        made, prepare = preparation(
            q, k, v, g, beta, A_log, dt_bias, scale=scale, lower_bound=lower_bound, layout=layout,
            use_qk_l2norm=use_qk_l2norm, use_beta_sigmoid=use_beta_sigmoid,
            allow_neg_eigval=allow_neg_eigval, with_inverse=True,
        )  # fmt: skip
    q, k, v, g = as_rows(q), as_rows(k), as_rows(v), as_rows(g)
    beta, do = beta.contiguous(), do.contiguous()
    small = [None if x is None else x.contiguous() for x in (A_log, dt_bias)]
    initial_state, d_final_state = (
        None if x is None else x.contiguous() for x in (initial_state, d_final_state)
    )
    # rows that belong to no sequence have no gradient
    make = torch.empty if layout.covers else torch.zeros
    dq, dk, dv, dg, dbeta = (
        make(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v, g, beta)
    )
    wide = dict(dtype=torch.float32, device=q.device)
    parts = (layout.rows * layout.NT, HV)
    make = torch.empty if layout.chunks is None else torch.zeros  # rows left over write nothing
    dA_log = None if A_log is None else make(parts, **wide)
    d_bias = None if dt_bias is None else make(*parts, K, **wide)
    d_initial_state = None if initial_state is None else torch.empty_like(initial_state)
    segments = segments_of(layout.NT, SEGMENT_OF_TRAINING)
    longest = max(last - first for first, last in segments)
    rooms = min(2, len(segments))
    states = torch.empty(rooms, 2, layout.rows * longest, HV, V, K, dtype=q.dtype, device=q.device)
    v_new = made.u if stored is None else torch.empty_like(made.u)
    d_borders = [None, None]  # in turn, as in the forward
    if len(segments) > 1:
        d_borders = torch.empty(2, layout.rows, HV, V, K, **wide)
    packed = dict(PACKED=layout.chunks is not None)
    sizes = dict(HV=HV, K=K, V=V, C=CHUNK, BK=key_tile(K), **packed)
    tile = reverse_tile(V)
    strides = (*row_strides(q), *row_strides(k), *row_strides(v), *row_strides(g))

    def scans(i):
        (first, last), (h, dh) = segments[i], states[i % rooms]
        scan_segment(
            made, first, last, layout, initial_state, borders[i - 1] if i > 0 else None,
            h=h, v_new=v_new, state_v_first=state_v_first,
        )  # fmt: skip
        reverse_scan_kernel[(layout.N * HV * cdiv(V, tile["BV"]),)](
            made.qd, made.kr, made.w, made.A_qk, made.decay, do, d_final_state,
            d_borders[i % 2], dh, dv, d_initial_state, d_borders[1 - i % 2],
            layout.cu_seqlens, layout.offsets, first, last, T, layout.NT,
            STATE_V_FIRST=state_v_first, **sizes, **tile,
        )  # fmt: skip

    def gradients(i):
        (first, last), (h, dh) = segments[i], states[i % rooms]
        gradient_kernel[((last - first) * layout.rows * H,)](
            q, k, v, g, beta, *small, do, made.A_inv, v_new, h, dh, dv,
            dq, dk, dg, dbeta, dA_log, d_bias, layout.chunks,
            first, last, T, layout.NT, scale, EPS, lower_bound, layout.rows * H, *strides,
            H=H, BV=key_tile(V), L2NORM=use_qk_l2norm, BETA_SIGMOID=use_beta_sigmoid,
            NEG_EIGVAL=allow_neg_eigval, PTX=is_nvidia(), **sizes, **gradient_tile(V),
        )  # fmt: skip

    if layout.N * HV * V > 0:
        run_backwards(segments, prepare, scans, gradients, q.device)
    if dA_log is not None:
        dA_log = dA_log.sum(0).reshape(A_log.shape).to(A_log.dtype)
    if d_bias is not None:
        d_bias = d_bias.sum(0).reshape(dt_bias.shape).to(dt_bias.dtype)
    return dq, dk, dv, dg, dbeta, dA_log, d_bias, d_initial_state


def run_backwards(segments, prepare, scans, gradients, device):
    """From the last segment to the first: prepare, unless that is done, scans, gradients.

    The scans run on a stream of their own, beside the gradients of the segment after and the
    preparation of the one before. There is room for the states of two: a segment's scans begin when
    the gradients two segments later are done.
    """
    prepare = prepare or (lambda first, last: None)
    order = range(len(segments) - 1, -1, -1)
    if len(segments) == 1 or device.type != "cuda":
        for i in order:
            prepare(*segments[i])
            scans(i)
            gradients(i)
        return
    main, side = torch.cuda.current_stream(device), side_stream(device)
    scanned = None  # the segment after
    prepare(*segments[-1])
    for i in order:
        side.wait_stream(main)
        with torch.cuda.stream(side):
            scans(i)
            event = side.record_event()
        if i > 0:
            prepare(*segments[i - 1])
        if scanned is not None:
            main.wait_event(scanned)
            gradients(i + 1)
        scanned = event
    main.wait_event(scanned)
    gradients(0)


def reverse_tile(V) -> dict:
    """Tile of V, warps and pipeline stages of the reverse scan."""
    return scan_tile(V)


def gradient_tile(V) -> dict:
    """Columns of V that meet the states at a time, and warps."""
    return dict(TILE_V=min(32, key_tile(V)), num_warps=4, num_stages=2)
