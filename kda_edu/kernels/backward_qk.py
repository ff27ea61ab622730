"""Backward, step 3: the gradients of q, k, the cumulated gate and beta.

q and k enter a chunk's formulas in three ways, each with a decay from a row to a reference:

    through the state    qg = scale 2^G q,  2^G k in r,  kg = 2^(G_last - G) k
    as the row i         A_qk[i, j], A_kk[i, j]       times 2^(G_i - G_j)
    as the column j      A_qk[i, j], A_kk[i, j]

A decay 2^(x - y) that multiplies q or k makes the gradient of x (in natural-log units) q dq or
k dk of that term, and that of y its negative: no further product is needed. Terms without a decay
(the diagonal of A_qk, the last row of kg) are left out of it: where every gate is strong they
would be the only large ones, and cancel.

An entry of A adds to dG at its row what it takes away at its column, so a gate that lies before
both must not feel it. What is added and taken away is therefore one number, made of the very
operands of the products, after their rounding: the same reference row on both sides, and q 2^(..),
k 2^(..) and dA as the products read them. Sums over all tokens, such as dA_log, depend on it.

Each program owns 16 rows of a chunk, and goes over the value heads that share its key head, so dq
and dk need no later sum. As in the forward, the reference of 16 rows and the columns before
them is the first of the rows; the 16 x 16 block itself goes in squares of 8, 4, 2, 1, or with
BOUNDED has its first row as the reference.

Grid: blocks of 16 rows x chunks x key heads. Reads per token and value head, in bf16: 4 K (q, k)
+ 4 K (G) + 6 V (do, v', dr) + 8 C (dA) + 4 K V / C (h, its gradient; again per block, from L2),
and q, k, G of the other rows of the chunk from L2. Writes 4 K (dq, dk) + 4 K (dG) + 4 (dbeta).
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
from .intra import BLOCK


@triton.jit
def load_unit_rows(p, p_rstd, o_r, stride, stride_rstd, m_r, m_k, L2NORM: tl.constexpr):
    """Rows [BM, BK] of q or k in float32, normalised if asked for."""
    b_x = tl.load(p + o_r[:, None] * stride, mask=m_r[:, None] & m_k, other=0.0).to(tl.float32)
    if L2NORM:
        b_x *= tl.load(p_rstd + o_r * stride_rstd, mask=m_r, other=0.0)[:, None]
    return b_x


@triton.jit
def load_strength(
    p_beta, o_r, m_r, HV: tl.constexpr, BETA_SIGMOID: tl.constexpr, NEG_EIGVAL: tl.constexpr
):
    """beta of the rows [BM, 1]."""
    b_beta = tl.load(p_beta + o_r * HV, mask=m_r, other=0.0).to(tl.float32)
    return write_strength(b_beta, BETA_SIGMOID, NEG_EIGVAL)[:, None]


@triton.jit
def load_gate_rows(p_G, p_R, o_r, stride, mask, RESIDUAL: tl.constexpr):
    """Rows of G, and of its residual: a difference of two such pairs loses nothing."""
    b_G = tl.load(p_G + o_r[:, None] * stride, mask=mask, other=0.0)  # [rows, BK]
    b_R = tl.zeros(b_G.shape, dtype=tl.float32)
    if RESIDUAL:
        b_R = tl.load(p_R + o_r[:, None] * stride, mask=mask, other=0.0)
    return b_G, b_R


@triton.jit
def decay_between(b_G, b_R, b_G0, b_R0, mask):
    """2^(G - G0), and 1 outside the mask."""
    return tl.exp2(tl.where(mask, (b_G - b_G0) + (b_R - b_R0), 0.0))


@triton.jit
def load_square(p, o_r, o_c, stride_A, mask, PRECISION: tl.constexpr):
    """Entries of dA at rows o_r and columns o_c of the chunk, as operands."""
    b_A = tl.load(p + o_r[:, None] * stride_A + o_c[None, :], mask=mask, other=0.0)
    return operand(b_A, PRECISION)


@triton.jit
def times_state(
    p_x, p_S, o_r, m_r, stride,
    K: tl.constexpr, V: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """x S [BM, BK] of rows x of V channels and a state stored [V, K]."""
    b_y = tl.zeros([BM, BK], dtype=tl.float32)
    o_k = tl.arange(0, BK)
    for i_v in range(tl.cdiv(V, BV)):
        o_v = i_v * BV + tl.arange(0, BV)
        m_vk = (o_v < V)[:, None] & (o_k < K)[None, :]
        m_rv = m_r[:, None] & (o_v < V)[None, :]
        b_S = tl.load(p_S + o_v[:, None] * K + o_k[None, :], mask=m_vk, other=0.0)  # [BV, BK]
        b_x = tl.load(p_x + o_r[:, None] * stride + o_v[None, :], mask=m_rv, other=0.0)  # [BM, BV]
        b_x = operand(b_x.to(b_S.dtype), PRECISION)
        b_y += tl.dot(b_x, operand(b_S, PRECISION), input_precision=PRECISION)
    return b_y


@triton.jit
def states_product(p_h, p_dh, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """sum_v S dS [BK], of the state before the chunk and the gradient of the one after it."""
    b_y = tl.zeros([BK], dtype=tl.float32)
    o_k = tl.arange(0, BK)
    for i_v in range(tl.cdiv(V, BV)):
        o_v = i_v * BV + tl.arange(0, BV)
        o_vk, m_vk = o_v[:, None] * K + o_k[None, :], (o_v < V)[:, None] & (o_k < K)[None, :]
        b_h = tl.load(p_h + o_vk, mask=m_vk, other=0.0).to(tl.float32)  # [BV, BK]
        b_dh = tl.load(p_dh + o_vk, mask=m_vk, other=0.0).to(tl.float32)  # [BV, BK]
        b_y += tl.sum(b_h * b_dh, axis=0)
    return b_y


@triton.jit
def products_of_scores(
    p_Aq, p_Ak, p_q, p_qr, p_k, p_kr, p_G, p_R, p_beta, b_G, b_R, b_dx, b_dy, b_dk, b_dG,
    o_i, m_i, m_k, stride_q, stride_k, stride_G, stride_A, i_c, count, scale,
    H: tl.constexpr, HV: tl.constexpr, NC: tl.constexpr, BM: tl.constexpr, LEVELS: tl.constexpr,
    BOUNDED: tl.constexpr, RESIDUAL: tl.constexpr, L2NORM: tl.constexpr,
    BETA_SIGMOID: tl.constexpr, NEG_EIGVAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds what the entries of A_qk and A_kk beside the diagonal give: sum_k x_i k_j 2^(G_i - G_j),
    x = scale q or beta k. To dx and dy, the gradients of the rows x, to dk and to dG.
    """
    o_c = tl.arange(0, BM)
    m_ik = m_i[:, None] & m_k
    m_ii = m_i[:, None] & m_i[None, :]

    # Entries of the block, in squares of 1, 2, ..., BM / 2 beside its diagonal, each with its first
    # row as the reference: rows decay from it, columns to it. With BOUNDED the squares begin at 16,
    # and nearer entries have the first of their 16 rows as the reference.
    b_Aq = load_square(p_Aq, o_i, o_i, stride_A, m_ii, PRECISION)
    b_Ak = load_square(p_Ak, o_i, o_i, stride_A, m_ii, PRECISION)
    for level in range(3 if BOUNDED else 0, LEVELS):
        near = BOUNDED and level == 3
        half = o_c >> level
        pair = half >> 1
        m_row, m_col = (half % 2 == 1) | near, (half % 2 == 0) | near
        o_ref = (pair << level + 1) + tl.where(near, 0, 1 << level)
        o_ref = tl.minimum(i_c * BM + o_ref, count - 1)
        b_G0, b_R0 = load_gate_rows(p_G, p_R, o_ref, stride_G, m_ik, RESIDUAL)
        b_d = (b_G - b_G0) + (b_R - b_R0)
        b_row = tl.exp2(tl.where(m_row[:, None] & m_ik, b_d, 0.0))
        b_col = tl.exp2(tl.where(m_col[:, None] & m_ik, -b_d, 0.0))
        m_sq = (half[:, None] > half[None, :]) | (near & (o_c[:, None] > o_c[None, :]))
        m_sq = m_sq & (pair[:, None] == pair[None, :])
        b_k = load_unit_rows(p_k, p_kr, o_i, stride_k, H, m_i, m_k, L2NORM)
        b_kc = operand(b_k * b_col, PRECISION)
        b_As = tl.where(m_sq, b_Aq, 0.0)
        b_y = tl.dot(b_As, b_kc, input_precision=PRECISION)
        b_dx += b_y * b_row
        b_x = load_unit_rows(p_q, p_qr, o_i, stride_q, H, m_i, m_k, L2NORM) * scale
        b_x = operand(b_x * b_row, PRECISION)
        b_dG += b_x * b_y
        b_z = tl.dot(tl.trans(b_As), b_x, input_precision=PRECISION)
        b_As = tl.where(m_sq, b_Ak, 0.0)
        b_y = tl.dot(b_As, b_kc, input_precision=PRECISION)
        b_dy += b_y * b_row
        b_x = b_k * load_strength(p_beta, o_i, m_i, HV, BETA_SIGMOID, NEG_EIGVAL)
        b_x = operand(b_x * b_row, PRECISION)
        b_dG += b_x * b_y
        b_z += tl.dot(tl.trans(b_As), b_x, input_precision=PRECISION)
        b_dk += b_z * b_col
        b_dG -= b_kc * b_z

    if NC > 1:
        # columns before the block: the reference is its first row
        b_G0, b_R0 = load_gate_rows(p_G, p_R, o_c * 0 + i_c * BM, stride_G, m_k, RESIDUAL)
        b_y = tl.zeros(b_dx.shape, dtype=tl.float32)
        b_z = tl.zeros(b_dx.shape, dtype=tl.float32)
        for j in range(i_c):
            o_j = j * BM + o_c
            b_Gj, b_Rj = load_gate_rows(p_G, p_R, o_j, stride_G, m_k, RESIDUAL)
            b_kj = load_unit_rows(p_k, p_kr, o_j, stride_k, H, o_j >= 0, m_k, L2NORM)
            b_kj = operand(b_kj * decay_between(b_G0, b_R0, b_Gj, b_Rj, m_k), PRECISION)
            b_A = load_square(p_Aq, o_i, o_j, stride_A, m_i[:, None], PRECISION)
            b_y += tl.dot(b_A, b_kj, input_precision=PRECISION)
            b_A = load_square(p_Ak, o_i, o_j, stride_A, m_i[:, None], PRECISION)
            b_z += tl.dot(b_A, b_kj, input_precision=PRECISION)
        b_row = decay_between(b_G, b_R, b_G0, b_R0, m_ik)
        b_dx += b_y * b_row
        b_dy += b_z * b_row
        b_x = load_unit_rows(p_q, p_qr, o_i, stride_q, H, m_i, m_k, L2NORM) * scale
        b_dG += operand(b_x * b_row, PRECISION) * b_y
        b_x = load_unit_rows(p_k, p_kr, o_i, stride_k, H, m_i, m_k, L2NORM)
        b_x *= load_strength(p_beta, o_i, m_i, HV, BETA_SIGMOID, NEG_EIGVAL)
        b_dG += operand(b_x * b_row, PRECISION) * b_z
        # rows after it: the reference is the first of their block
        for i in range(i_c + 1, tl.cdiv(count, BM)):
            o_r = i * BM + o_c
            m_r = o_r < count
            m_rk = m_r[:, None] & m_k
            b_G0, b_R0 = load_gate_rows(p_G, p_R, o_c * 0 + i * BM, stride_G, m_k, RESIDUAL)
            b_Gr, b_Rr = load_gate_rows(p_G, p_R, o_r, stride_G, m_rk, RESIDUAL)
            b_row = decay_between(b_Gr, b_Rr, b_G0, b_R0, m_rk)
            b_x = load_unit_rows(p_q, p_qr, o_r, stride_q, H, m_r, m_k, L2NORM) * scale
            b_A = load_square(p_Aq, o_r, o_i, stride_A, m_r[:, None], PRECISION)
            b_x = operand(b_x * b_row, PRECISION)
            b_y = tl.dot(tl.trans(b_A), b_x, input_precision=PRECISION)
            b_x = load_unit_rows(p_k, p_kr, o_r, stride_k, H, m_r, m_k, L2NORM)
            b_x *= load_strength(p_beta, o_r, m_r, HV, BETA_SIGMOID, NEG_EIGVAL)
            b_A = load_square(p_Ak, o_r, o_i, stride_A, m_r[:, None], PRECISION)
            b_x = operand(b_x * b_row, PRECISION)
            b_y += tl.dot(tl.trans(b_A), b_x, input_precision=PRECISION)
            b_col = decay_between(b_G0, b_R0, b_G, b_R, m_ik)
            b_dk += b_y * b_col
            b_kc = load_unit_rows(p_k, p_kr, o_i, stride_k, H, m_i, m_k, L2NORM)
            b_dG -= operand(b_kc * b_col, PRECISION) * b_y
    return b_dx, b_dy, b_dk, b_dG


@triton.jit(do_not_specialize=["T"])
def chunk_kda_bwd_dqk_kernel(
    # inputs
    q,
    k,
    G,
    G_residual,
    beta,
    do,
    dr,
    v_new,
    h,
    dh,
    dA_qk,
    dA_kk,
    dbeta_v,
    q_rstd,
    k_rstd,
    # outputs
    dq,
    dk,
    dG,
    dG_end,
    dbeta,
    # sizes
    chunks,
    T,
    NT,
    scale,
    BH,
    stride_q,
    stride_qh,
    stride_k,
    stride_kh,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    LEVELS: tl.constexpr,
    # options
    PACKED: tl.constexpr,
    BOUNDED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    L2NORM: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
    NEG_EIGVAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    NC: tl.constexpr = C // BM
    GROUP: tl.constexpr = HV // H
    i_c = tl.program_id(0) % NC
    i_bh = (tl.program_id(0) // NC) % BH
    i_t = tl.program_id(0) // NC // BH
    i_b, i_hk = i_bh // H, (i_bh % H).to(tl.int64)
    start, count = locate_chunk(i_t, i_b, chunks, T, C, PACKED)
    if i_c * BM >= count:
        return

    o_c, o_k = tl.arange(0, BM), tl.arange(0, BK)
    o_i = i_c * BM + o_c  # rows of this program, within the chunk
    m_i, m_k = o_i < count, (o_k < K)[None, :]
    m_ik = m_i[:, None] & m_k
    p_q = q + start * stride_q + i_hk * stride_qh + o_k[None, :]
    p_k = k + start * stride_k + i_hk * stride_kh + o_k[None, :]
    p_qr, p_kr = q, k
    if L2NORM:
        p_qr, p_kr = q_rstd + start * H + i_hk, k_rstd + start * H + i_hk
    b_dq = tl.zeros([BM, BK], dtype=tl.float32)  # of scale q
    b_dk = tl.zeros([BM, BK], dtype=tl.float32)

    for i_g in range(GROUP):
        i_h = i_hk * GROUP + i_g
        head = start * HV + i_h
        part = (i_b.to(tl.int64) * NT + i_t) * HV + i_h
        stride_G, stride_A = HV * K, HV * C
        p_G = G + head * K + o_k[None, :]
        p_R = p_G
        if RESIDUAL:
            p_R = G_residual + head * K + o_k[None, :]
        p_dqk, p_dkk = dA_qk + head * C, dA_kk + head * C
        p_beta = beta + start * HV + i_h
        b_G, b_R = load_gate_rows(p_G, p_R, o_i, stride_G, m_ik, RESIDUAL)  # [BM, BK]
        b_end, b_end_R = load_gate_rows(p_G, p_R, o_c * 0 + count - 1, stride_G, m_k, RESIDUAL)

        # k in the next state. At the last row of the chunk acts what decays to it; not that row
        b_y = times_state(
            v_new + head * V, dh + part * (K * V), o_i, m_i, HV * V, K, V, BM, BK, BV, PRECISION
        )
        b_y *= decay_between(b_end, b_end_R, b_G, b_R, m_ik)
        b_dk += b_y
        b_k = load_unit_rows(p_k, p_kr, o_i, stride_k, H, m_i, m_k, L2NORM)
        b_dG = tl.where((o_i < count - 1)[:, None], -b_k * b_y, 0.0)
        b_to_end = -tl.sum(b_dG, axis=0)  # [BK]
        if i_c == 0:  # and the state
            b_whole = tl.exp2(tl.where(o_c[:, None] == 0, b_end + b_end_R, -float("inf")))
            b_ss = states_product(h + part * (K * V), dh + part * (K * V), K, V, BK, BV)
            b_to_end += b_ss * tl.sum(b_whole, axis=0)
        tl.store(dG_end + (part * NC + i_c) * K + o_k, b_to_end, mask=o_k < K)

        # q from the state; k as a row: in r, through the state; then both in the scores
        b_raw = tl.load(p_beta + o_i * HV, mask=m_i, other=0.0).to(tl.float32)  # [BM]
        b_beta = write_strength(b_raw, BETA_SIGMOID, NEG_EIGVAL)[:, None]
        b_row_k = times_state(
            dr + head * V, h + part * (K * V), o_i, m_i, HV * V, K, V, BM, BK, BV, PRECISION
        )
        b_row_k *= -tl.exp2(b_G + b_R)
        b_dG += b_k * b_beta * b_row_k
        b_row_q = times_state(
            do + head * V, h + part * (K * V), o_i, m_i, HV * V, K, V, BM, BK, BV, PRECISION
        )
        b_row_q *= tl.exp2(b_G + b_R)
        b_q = load_unit_rows(p_q, p_qr, o_i, stride_q, H, m_i, m_k, L2NORM)
        b_dG += scale * b_q * b_row_q
        b_row_q, b_row_k, b_dk, b_dG = products_of_scores(
            p_dqk, p_dkk, p_q, p_qr, p_k, p_kr, p_G, p_R, p_beta, b_G, b_R,
            b_row_q, b_row_k, b_dk, b_dG, o_i, m_i, m_k,
            stride_q, stride_k, stride_G, stride_A, i_c, count, scale, H, HV, NC, BM, LEVELS,
            BOUNDED, RESIDUAL, L2NORM, BETA_SIGMOID, NEG_EIGVAL, PRECISION,
        )  # fmt: skip
        tl.store(dG + head * K + o_i[:, None] * stride_G + o_k[None, :], b_dG, mask=m_ik)
        b_k = load_unit_rows(p_k, p_kr, o_i, stride_k, H, m_i, m_k, L2NORM)
        b_db = tl.load(dbeta_v + (start + o_i) * HV + i_h, mask=m_i, other=0.0)
        b_db += tl.sum(b_k * b_row_k, axis=1)
        if BETA_SIGMOID:
            b_db *= tl.sigmoid(b_raw) * tl.sigmoid(-b_raw)
            if NEG_EIGVAL:
                b_db *= 2.0
        tl.store(dbeta + (start + o_i) * HV + i_h, b_db.to(dbeta.dtype.element_ty), mask=m_i)
        # the diagonal of A_qk has no decay
        b_q = load_unit_rows(p_q, p_qr, o_i, stride_q, H, m_i, m_k, L2NORM)
        b_same = tl.load(p_dqk + o_i * (stride_A + 1), mask=m_i, other=0.0)[:, None]
        b_dq += b_row_q + b_same * b_k
        b_dk += b_row_k * b_beta + b_same * (scale * b_q)

    b_dq *= scale
    if L2NORM:
        b_q = load_unit_rows(p_q, p_qr, o_i, stride_q, H, m_i, m_k, L2NORM)
        b_rstd = tl.load(p_qr + o_i * H, mask=m_i, other=0.0)[:, None]
        b_dq = b_rstd * (b_dq - b_q * tl.sum(b_q * b_dq, axis=1)[:, None])
        b_k = load_unit_rows(p_k, p_kr, o_i, stride_k, H, m_i, m_k, L2NORM)
        b_rstd = tl.load(p_kr + o_i * H, mask=m_i, other=0.0)[:, None]
        b_dk = b_rstd * (b_dk - b_k * tl.sum(b_k * b_dk, axis=1)[:, None])
    o_out = (start * H + i_hk) * K + o_i[:, None] * (H * K) + o_k[None, :]
    tl.store(dq + o_out, b_dq.to(dq.dtype.element_ty), mask=m_ik)
    tl.store(dk + o_out, b_dk.to(dk.dtype.element_ty), mask=m_ik)


@on_device_of_first_argument
def chunk_kda_bwd_dqk(
    q,
    k,
    G,
    beta,
    do,
    dr,
    v_new,
    h,
    dh,
    dA_qk,
    dA_kk,
    dbeta_v,
    layout,
    scale,
    *,
    G_residual=None,
    q_rstd=None,
    k_rstd=None,
    bounded=False,
    use_beta_sigmoid=False,
    allow_neg_eigval=False,
):
    """Gradients of q, k and beta, and of the cumulated gate within its chunk.

    Args:
        q, k, beta, G, G_residual, scale, bounded, use_beta_sigmoid, allow_neg_eigval: as in
            `chunk_kda_scaled_dot_kkt_fwd`, and q_rstd, k_rstd from it (None: no norm).
        do: gradient of the output; v_new, h: of the forward; dh: from `chunk_kda_bwd_dhu`.
        dr, dA_qk, dA_kk, dbeta_v: from `chunk_kda_bwd_dA`.
        layout: the `ChunkLayout` of the forward.

    Returns:
        dq, dk: [B, T, H, K] in q's dtype, through the norm.
        dG: float32 [B, T, HV, K], gradient of the natural-log cumulated gate of each row, without
            what acts at the end of the chunk.
        dG_end: float32 [rows, NT, HV, C / 16, K]: what acts at the last row, in parts to sum.
        dbeta: [B, T, HV] in beta's dtype, through the sigmoid.
    """
    sizes = check_sizes(
        q=(q, "B T H K", KERNEL_DTYPES),
        k=(k, "B T H K", (q.dtype,)),
        G=(G, "B T HV K", (torch.float32,)),
        beta=(beta, "B T HV"),
        do=(do, "B T HV V", (q.dtype,)),
        dr=(dr, "B T HV V", (h.dtype,)),
        v_new=(v_new, "B T HV V", (q.dtype,)),
        dA_qk=(dA_qk, "B T HV C", (torch.float32,)),
        dA_kk=(dA_kk, "B T HV C", (torch.float32,)),
        dbeta_v=(dbeta_v, "B T HV", (torch.float32,)),
    )
    B, T, H, K, HV, V, C = (sizes[letter] for letter in ("B", "T", "H", "K", "HV", "V", "C"))
    q, k, beta, do = as_rows(q), as_rows(k), beta.contiguous(), do.contiguous()
    # rows that belong to no sequence have no gradient
    make = torch.empty if layout.covers else torch.zeros
    dq = make(B, T, H, K, dtype=q.dtype, device=q.device)
    dk = torch.empty_like(dq) if layout.covers else torch.zeros_like(dq)
    dbeta = make(B, T, HV, dtype=beta.dtype, device=q.device)
    dG = torch.empty(B, T, HV, K, dtype=torch.float32, device=q.device)
    BK = key_tile(K)
    tile = gradient_tile(K, V, q.dtype)
    parts = (layout.rows, layout.NT, HV, C // BLOCK, K)
    dG_end = torch.empty(parts, dtype=torch.float32, device=q.device)
    if dG.numel() > 0:
        chunk_kda_bwd_dqk_kernel[(layout.programs(H) * (C // BLOCK),)](
            q,
            k,
            G,
            G_residual,
            beta,
            do,
            dr,
            v_new,
            h,
            dh,
            dA_qk,
            dA_kk,
            dbeta_v,
            q_rstd,
            k_rstd,
            dq,
            dk,
            dG,
            dG_end,
            dbeta,
            layout.chunks,
            T,
            layout.NT,
            scale,
            layout.rows * H,
            *row_strides(q),
            *row_strides(k),
            H=H,
            HV=HV,
            K=K,
            V=V,
            C=C,
            BM=BLOCK,
            BK=BK,
            LEVELS=BLOCK.bit_length() - 1,
            PACKED=layout.chunks is not None,
            BOUNDED=bounded,
            RESIDUAL=G_residual is not None,
            L2NORM=q_rstd is not None,
            BETA_SIGMOID=use_beta_sigmoid,
            NEG_EIGVAL=allow_neg_eigval,
            PRECISION=dot_precision(q.dtype),
            **tile,
            num_stages=1,
        )
    return dq, dk, dG, dG_end, dbeta


def gradient_tile(K, V, dtype) -> dict:
    """Columns of V that a program visits in turn, and its warps.

    Four warps hold a row of 128 channels with a few spills, and were 1.4 to 1.6 times as fast on an
    H200 as eight, which hold it with none: a product of 16 rows leaves eight warps little to do.
    """
    BK = key_tile(K)
    if dtype == torch.float32:
        return dict(BV=min(key_tile(V), 32 if BK <= 128 else 16), num_warps=8 if BK > 64 else 4)
    return dict(BV=min(key_tile(V), 64), num_warps=8 if BK > 128 else 4)
