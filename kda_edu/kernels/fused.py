"""The forward in two kernels, for inference with a gate bounded below by -5.

    prepare   all that happens within a chunk of 16 tokens, all chunks at once:
                  gate, its cumulated sum G, norms, write strength, both score matrices, the inverse
              and leaves what the scan multiplies, in bfloat16:
                  qd = scale 2^G q,   w = A_inv Diag(beta) 2^G k,   kr = 2^(G_last - G) k,
                  u = A_inv Diag(beta) v,   A_qk
    scan      the one sequential pass, a tile of V per program, the state in registers:
                  v' = u - w S,   o = qd S + A_qk v',   S <- Diag(2^G_last) S + kr^T v'

G, both score matrices in float32, A_inv, v' and the states between chunks, which the six steps pass
on through memory, never reach it.

Sixteen tokens, because then no reference row is needed within a chunk: with gates above -5, G
stays above -16 x 5 / ln 2 = -115.4. A row of the scores is 2^(G + 58) q or 2^(G + 58) k, a column
2^-(G + 58) k, and no factor leaves 2^-58 .. 2^58. Each is computed once; 64 tokens would need it
for every block of rows.

The prepare pass keeps the arithmetic units busy, the scan waits most of its time, one product for
the next. So a long sequence goes in segments: while one segment is scanned, on a stream of its own,
the next is prepared.

Bytes per token and head (bf16, K = V = 128): prepare reads 6 K + 2 V + 2 and writes 6 K + 2 V + 32
+ K / 4, the scan reads that and writes 2 V: 3.5 KB in all, against 9.1 in six steps.
"""

import functools

import torch
import triton
import triton.language as tl

from ._common import (
    RCP_LN2,
    as_rows,
    cdiv,
    gate_rate,
    is_nvidia,
    key_tile,
    locate_chunk,
    on_device_of_first_argument,
    row_strides,
    write_strength,
)
from .forward import is_bounded
from .l2norm import EPS, reciprocal_norm

CHUNK = 16
SEGMENT = 170  # chunks at least that are prepared before their scan begins
TO_LOG2 = tl.constexpr(RCP_LN2)
SHIFT = tl.constexpr(58.0)  # half the range of G: rows and columns stay clear of 2^-126 and 2^128
TWO_TO_SHIFT = tl.constexpr(2.0**58)


@triton.jit
def fast_exp2(x, PTX: tl.constexpr):
    """2^x, tiny results flushed to 0. To keep them costs `tl.exp2` three more instructions."""
    if PTX:
        y = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = tl.exp2(x)
    return y


@triton.jit
def fast_sigmoid(x, PTX: tl.constexpr):
    """1 / (1 + 2^-x), to about 2^-22."""
    y = 1.0 + fast_exp2(-x, PTX)
    if PTX:
        y = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [y], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = 1.0 / y
    return y


@triton.jit
def product(a, b):
    """a b of float32 factors, of which tf32 reads 10 bits. It cuts the others off, which costs less
    than 3 % of the error that rounding the results to bfloat16 makes."""
    return tl.dot(a, b, input_precision="tf32")


@triton.jit
def invert_unit_lower(b_N, C: tl.constexpr):
    """(I + N)^-1 for a strictly lower N [C, C], C = 16, by doubling the inverted blocks.

    [P 0; M Q]^-1 = [P^-1 0; -Q^-1 M P^-1 Q^-1], for all pairs of blocks at once: X - X M X. As
    stable as substitution, unlike the powers of N: X never holds more than inverses of blocks.
    """
    o = tl.arange(0, C)
    b_X = tl.where(o[:, None] == o[None, :], 1.0, 0.0)
    for level in tl.static_range(4):  # blocks of side 1, 2, 4, 8 are inverted already
        i, j = o[:, None] >> level, o[None, :] >> level
        b_M = tl.where((i // 2 == j // 2) & (i > j), b_N, 0.0)
        if level == 0:  # X is the identity
            b_X -= b_M
        else:
            b_X -= product(b_X, product(b_M, b_X))
    return b_X


@triton.jit(do_not_specialize=["T", "first"])
def prepare_kernel(
    # inputs
    q, k, v, g, beta, A_log, dt_bias,
    # outputs
    qd, kr, w, u, A_qk, decay,
    # sizes
    chunks, first, T, NT, scale, eps, lower_bound, BHV,
    stride_q, stride_qh, stride_k, stride_kh, stride_v, stride_vh, stride_g, stride_gh,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
    # options
    PACKED: tl.constexpr, L2NORM: tl.constexpr, BETA_SIGMOID: tl.constexpr,
    NEG_EIGVAL: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    i_t, i_bh = first + tl.program_id(0) // BHV, tl.program_id(0) % BHV
    i_b, i_h = i_bh // HV, i_bh % HV
    i_hk = (i_h // (HV // H)).to(tl.int64)  # times a stride between heads, which may be large
    start, count = locate_chunk(i_t, i_b, chunks, T, C, PACKED)
    if count <= 0:
        return
    o_t, o_k, o_v = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    m_t, m_k = o_t < count, o_k < K
    m_tk, m_tv = m_t[:, None] & m_k[None, :], m_t[:, None] & (o_v < V)[None, :]
    part = (i_b.to(tl.int64) * NT + i_t) * HV + i_h  # of (chunk, head)

    p_g = g + start * stride_g + i_h.to(tl.int64) * stride_gh
    b_g = tl.load(p_g + o_t[:, None] * stride_g + o_k[None, :], mask=m_tk, other=0.0)
    b_g = b_g.to(tl.float32)
    if dt_bias is not None:
        b_g += tl.load(dt_bias + i_h * K + o_k, mask=m_k, other=0.0).to(tl.float32)[None, :]
    b_g = fast_sigmoid(b_g * (gate_rate(A_log, i_h) * TO_LOG2), PTX) * (lower_bound * TO_LOG2)
    b_g = tl.where(m_tk, b_g, 0.0)
    b_G = tl.cumsum(b_g, axis=0) + SHIFT
    b_last = fast_exp2(tl.sum(b_g, axis=0), PTX)  # [BK]
    tl.store(decay + part * K + o_k, b_last, mask=m_k)

    p_q = q + start * stride_q + i_hk * stride_qh + o_t[:, None] * stride_q + o_k[None, :]
    p_k = k + start * stride_k + i_hk * stride_kh + o_t[:, None] * stride_k + o_k[None, :]
    b_q = tl.load(p_q, mask=m_tk, other=0.0).to(tl.float32)  # [C, BK]
    b_k = tl.load(p_k, mask=m_tk, other=0.0).to(tl.float32)  # [C, BK]
    b_rate = tl.full([C], scale, tl.float32)
    if L2NORM:
        b_rate *= reciprocal_norm(tl.sum(b_q * b_q, axis=1), eps)
        b_k *= reciprocal_norm(tl.sum(b_k * b_k, axis=1), eps)[:, None]
    b_down = fast_exp2(b_G, PTX)
    b_q *= b_down * b_rate[:, None]
    b_kd = b_k * b_down
    b_kc = b_k * fast_exp2(-b_G, PTX)
    o_out = (start * HV + i_h) * K + o_t[:, None] * (HV * K) + o_k[None, :]
    tl.store(qd + o_out, (b_q / TWO_TO_SHIFT).to(qd.dtype.element_ty), mask=m_tk)
    b_kr = b_kc * (b_last * TWO_TO_SHIFT)[None, :]
    tl.store(kr + o_out, b_kr.to(kr.dtype.element_ty), mask=m_tk)

    b_col = tl.trans(b_kc)
    b_kk, b_qk = product(b_kd, b_col), product(b_q, b_col)
    b_qk = tl.where(o_t[:, None] >= o_t[None, :], b_qk, 0.0)
    o_a = (start * HV + i_h) * C + o_t[:, None] * (HV * C) + o_t[None, :]
    tl.store(A_qk + o_a, b_qk.to(A_qk.dtype.element_ty), mask=m_t[:, None])

    b_beta = tl.load(beta + (start + o_t) * HV + i_h, mask=m_t, other=0.0).to(tl.float32)
    b_beta = write_strength(b_beta, BETA_SIGMOID, NEG_EIGVAL)
    b_kk = tl.where(o_t[:, None] > o_t[None, :], b_kk * b_beta[:, None], 0.0)
    b_X = invert_unit_lower(b_kk, C) * b_beta[None, :]
    b_w = product(b_X / TWO_TO_SHIFT, b_kd)
    tl.store(w + o_out, b_w.to(w.dtype.element_ty), mask=m_tk)
    p_v = v + start * stride_v + i_h.to(tl.int64) * stride_vh
    b_v = tl.load(p_v + o_t[:, None] * stride_v + o_v[None, :], mask=m_tv, other=0.0)
    b_u = product(b_X, b_v.to(tl.float32))
    o_u = (start * HV + i_h) * V + o_t[:, None] * (HV * V) + o_v[None, :]
    tl.store(u + o_u, b_u.to(u.dtype.element_ty), mask=m_tv)


@triton.jit(do_not_specialize=["T", "first", "last"])
def scan_kernel(
    # inputs
    qd, kr, w, u, A_qk, decay, initial_state,
    # outputs
    o, final_state,
    # sizes
    cu_seqlens, chunk_offsets, first, last, T, NT,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
    # options
    PACKED: tl.constexpr, STATE_V_FIRST: tl.constexpr,
):  # fmt: skip
    """Chunks `first` to `last` of each sequence, the last excluded."""
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v, i_nh = tl.program_id(0) % NV, tl.program_id(0) // NV
    i_n, i_h = (i_nh // HV).to(tl.int64), i_nh % HV
    if PACKED:
        start = tl.load(cu_seqlens + i_n).to(tl.int64)
        length = (tl.load(cu_seqlens + i_n + 1).to(tl.int64) - start).to(tl.int32)
        part = tl.load(chunk_offsets + i_n).to(tl.int64)
    else:
        start = i_n * T + first * C
        length = T - first * C
        part = i_n * NT + first
    o_k, o_v, o_t = tl.arange(0, BK), i_v * BV + tl.arange(0, BV), tl.arange(0, C)
    m_k, m_v = o_k < K, o_v < V
    m_vk = m_v[:, None] & m_k[None, :]
    if STATE_V_FIRST:
        o_state = (i_n * HV + i_h) * (K * V) + o_v[:, None] * K + o_k[None, :]
    else:
        o_state = (i_n * HV + i_h) * (K * V) + o_v[:, None] + o_k[None, :] * V

    b_S = tl.zeros([BV, BK], dtype=tl.float32)  # the state, transposed
    if initial_state is not None:
        b_S += tl.load(initial_state + o_state, mask=m_vk, other=0.0)
    row = start * HV + i_h
    p_w = w + row * K + o_k[:, None] + o_t[None, :] * (HV * K)  # transposed
    p_qd = qd + row * K + o_k[:, None] + o_t[None, :] * (HV * K)  # transposed
    p_kr = kr + row * K + o_t[:, None] * (HV * K) + o_k[None, :]
    p_A = A_qk + row * C + o_t[:, None] + o_t[None, :] * (HV * C)  # transposed
    o_vt = row * V + o_v[:, None] + o_t[None, :] * (HV * V)
    p_u, p_o = u + o_vt, o + o_vt
    p_decay = decay + (part * HV + i_h) * K + o_k
    # what no product reads from shared memory is not fetched ahead by the compiler: done here
    b_u = tl.load(p_u, mask=m_v[:, None] & (o_t < length)[None, :], other=0.0)
    b_decay = tl.load(p_decay, mask=m_k & (length > 0), other=0.0)
    for i_t in range(tl.minimum(tl.cdiv(length, C), last - first)):
        left = length - i_t * C
        m_t = o_t < left
        m_kt = m_k[:, None] & m_t[None, :]
        b_S16 = b_S.to(qd.dtype.element_ty)
        b_S *= b_decay[None, :]
        b_v = b_u.to(tl.float32)
        p_u += C * HV * V
        p_decay += HV * K
        b_u = tl.load(p_u, mask=m_v[:, None] & (o_t < left - C)[None, :], other=0.0)
        b_decay = tl.load(p_decay, mask=m_k & (left > C), other=0.0)

        b_v -= tl.dot(b_S16, tl.load(p_w, mask=m_kt, other=0.0))
        b_v = b_v.to(qd.dtype.element_ty)  # v', [BV, C]
        b_o = tl.dot(b_S16, tl.load(p_qd, mask=m_kt, other=0.0))
        b_A = tl.load(p_A, mask=m_t[:, None] & m_t[None, :], other=0.0)
        b_o += tl.dot(b_v, b_A)
        tl.store(p_o, b_o.to(o.dtype.element_ty), mask=m_v[:, None] & m_t[None, :])
        b_S += tl.dot(b_v, tl.load(p_kr, mask=m_t[:, None] & m_k[None, :], other=0.0))
        p_w += C * HV * K
        p_qd += C * HV * K
        p_kr += C * HV * K
        p_A += C * HV * C
        p_o += C * HV * V

    if final_state is not None:
        tl.store(final_state + o_state, b_S, mask=m_vk)


@on_device_of_first_argument
def fused_chunk_kda_fwd(
    q, k, v, g, beta, A_log=None, dt_bias=None, initial_state=None, *, scale, lower_bound, layout,
    output_final_state=False, use_qk_l2norm=False, use_beta_sigmoid=False, allow_neg_eigval=False,
    state_v_first=False,
):  # fmt: skip
    """The two kernels, on what `serves` accepts. Arguments as in `chunk_kda`, already checked.

    layout: the `ChunkLayout` of the call, in chunks of `CHUNK` tokens.

    Returns:
        (o, final_state or None).
    """
    B, T, H, K = q.shape
    HV, V, C = v.shape[2], v.shape[3], CHUNK
    q, k, v, g, beta = as_rows(q), as_rows(k), as_rows(v), as_rows(g), beta.contiguous()
    A_log, dt_bias, initial_state = (
        None if x is None else x.contiguous() for x in (A_log, dt_bias, initial_state)
    )
    qd, kr, w = torch.empty(3, B, T, HV, K, dtype=q.dtype, device=q.device)
    u = torch.empty(B, T, HV, V, dtype=q.dtype, device=q.device)
    A_qk = torch.empty(B, T, HV, C, dtype=q.dtype, device=q.device)
    decay = torch.empty(layout.rows * layout.NT, HV, K, dtype=torch.float32, device=q.device)
    # rows that belong to no sequence are zero
    o = torch.empty_like(u) if layout.covers else torch.zeros_like(u)
    borders = segment_borders(layout)
    state = None
    if output_final_state or len(borders) > 2:
        sides = (V, K) if state_v_first else (K, V)
        state = torch.empty(layout.N, HV, *sides, dtype=torch.float32, device=q.device)
    sizes = dict(HV=HV, K=K, V=V, C=C, BK=key_tile(K), PACKED=layout.chunks is not None)
    strides = (*row_strides(q), *row_strides(k), *row_strides(v), *row_strides(g))
    ptx = is_nvidia()
    tile = scan_tile(V)

    def prepare(first, last):
        prepare_kernel[((last - first) * layout.rows * HV,)](
            q, k, v, g, beta, A_log, dt_bias, qd, kr, w, u, A_qk, decay,
            layout.chunks, first, T, layout.NT, scale, EPS, lower_bound, layout.rows * HV,
            *strides, H=H, BV=key_tile(V), **sizes,
            L2NORM=use_qk_l2norm, BETA_SIGMOID=use_beta_sigmoid, NEG_EIGVAL=allow_neg_eigval,
            PTX=ptx, num_warps=2, num_stages=1, **(dict(maxnreg=128) if ptx else {}),
        )  # fmt: skip

    def scan(first, last):
        scan_kernel[(layout.N * HV * cdiv(V, tile["BV"]),)](
            qd, kr, w, u, A_qk, decay, initial_state if first == 0 else state, o, state,
            layout.cu_seqlens, layout.offsets, first, last, T, layout.NT,
            **sizes, STATE_V_FIRST=state_v_first, **tile,
        )  # fmt: skip

    if layout.N * HV * V > 0:
        run_overlapped(prepare, scan, borders, q.device)
    return o, state if output_final_state else None


def serves(q, v, use_gate, lower_bound) -> bool:
    """Whether the two kernels compute this call; the six steps compute any."""
    narrow = max(q.shape[-1], v.shape[-1]) <= 128  # a row of channels fits the registers
    return is_bounded(use_gate, lower_bound) and q.dtype == torch.bfloat16 and narrow


def segment_borders(layout) -> list[int]:
    """Chunks at which a batch is cut. Packed sequences are not: a cut would go across them."""
    pieces = 1
    if layout.chunks is None:
        pieces = min(8, max(1, layout.NT // SEGMENT))
    return [layout.NT * i // pieces for i in range(pieces + 1)]


def run_overlapped(prepare, scan, borders, device):
    """prepare(first, last), then scan(first, last), for each segment between two borders.

    With several segments the scans run on a stream of their own, beside the next segment's prepare.
    """
    segments = list(zip(borders[:-1], borders[1:], strict=True))
    if len(segments) == 1 or device.type != "cuda":
        for segment in segments:
            prepare(*segment)
            scan(*segment)
        return
    main, side = torch.cuda.current_stream(device), side_stream(device)
    for segment in segments:
        prepare(*segment)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            scan(*segment)
    main.wait_stream(side)  # so what was allocated on main may be freed there


@functools.cache
def side_stream(device):
    return torch.cuda.Stream(device, priority=-1)


def scan_tile(V) -> dict:
    """Tile of V, warps and pipeline stages of the scan: a warp for each 16 columns of the state."""
    BV = min(64, key_tile(V))
    return dict(BV=BV, num_warps=BV // 16, num_stages=3)
