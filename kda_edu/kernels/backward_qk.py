"""Backward, step 3: the gradients of q, k, the cumulated gate and beta.

q and k enter a chunk's formulas in three ways, each with a decay from a row to a reference:

    through the state    qg = scale 2^G q,  2^G k in r,  kg = 2^(G_last - G) k
    as the row i         A_qk[i, j], A_kk[i, j]       times 2^(G_i - G_j)
    as the column j      A_qk[i, j], A_kk[i, j]

A decay 2^(x - y) that multiplies q or k makes the gradient of x (in natural-log units) q dq or
k dk of that term, and that of y its negative: no further product is needed. Terms without a decay
(the diagonal of A_qk, the last row of kg) are left out of it: where every gate is strong they
would be the only large ones, and cancel.

Each program owns 16 rows of a chunk, and goes over the value heads that share its key head, so dq
and dk need no later sum. As in the forward, columns before the 16 rows use their first row as the
reference, rows after them the first row that follows, and the 16 x 16 block itself squares of
8, 4, 2, 1, or with BOUNDED its first row.

Grid: blocks of 16 rows x chunks x key heads. Reads per token and value head, in bf16: 4 K (q, k)
+ 4 K (G) + 6 V (do, v', dr) + 8 C (dA) + 4 K V / C (h and its gradient; once per block, from L2),
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
    row_strides,
    write_strength,
)
from .checks import KERNEL_DTYPES, check_sizes
from .intra import BLOCK


@triton.jit
def load_unit_rows(p, p_rstd, o_r, stride, stride_rstd, m_r, m_k, L2NORM: tl.constexpr):
    """Rows [BC, BK] of q or k in float32, normalised if asked for."""
    b_x = tl.load(p + o_r[:, None] * stride, mask=m_r[:, None] & m_k, other=0.0).to(tl.float32)
    if L2NORM:
        b_x *= tl.load(p_rstd + o_r * stride_rstd, mask=m_r, other=0.0)[:, None]
    return b_x


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
def load_square(p, o_r, o_c, stride_r, stride_c, mask):
    """A 16 x 16 block of dA, or of its transpose, by the strides of its rows and columns."""
    return tl.load(p + o_r[:, None] * stride_r + o_c[None, :] * stride_c, mask=mask, other=0.0)


@triton.jit
def through_the_state(
    p_do, p_dr, p_v, p_h, p_dh, o_r, m_r, m_k, stride,
    K: tl.constexpr, V: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """do S, dr S and v' dS [BC, BK], and sum_v S dS [BK].

    S is the state before the chunk, dS the gradient of the one after it, both stored [V, K].
    """
    b_qs = tl.zeros([BC, BK], dtype=tl.float32)
    b_rs = tl.zeros([BC, BK], dtype=tl.float32)
    b_ks = tl.zeros([BC, BK], dtype=tl.float32)
    b_ss = tl.zeros([BK], dtype=tl.float32)
    o_k = tl.arange(0, BK)
    dtype = p_h.dtype.element_ty
    for i_v in range(tl.cdiv(V, BV)):
        o_v = i_v * BV + tl.arange(0, BV)
        m_rv = m_r[:, None] & (o_v < V)[None, :]
        m_vk = (o_v < V)[:, None] & m_k
        o_rv = o_r[:, None] * stride + o_v[None, :]
        o_vk = o_v[:, None] * K + o_k[None, :]
        b_h = tl.load(p_h + o_vk, mask=m_vk, other=0.0)  # [BV, BK]
        b_dh = tl.load(p_dh + o_vk, mask=m_vk, other=0.0)  # [BV, BK]
        b_do = tl.load(p_do + o_rv, mask=m_rv, other=0.0).to(dtype)  # [BC, BV]
        b_dr = tl.load(p_dr + o_rv, mask=m_rv, other=0.0).to(dtype)  # [BC, BV]
        b_v = tl.load(p_v + o_rv, mask=m_rv, other=0.0).to(dtype)  # [BC, BV]
        b_qs += tl.dot(b_do, b_h, input_precision=PRECISION)
        b_rs += tl.dot(b_dr, b_h, input_precision=PRECISION)
        b_ks += tl.dot(b_v, b_dh, input_precision=PRECISION)
        b_ss += tl.sum(b_h.to(tl.float32) * b_dh.to(tl.float32), axis=0)
    return b_qs, b_rs, b_ks, b_ss


@triton.jit
def columns_before(
    p_k, p_kr, p_G, p_R, p_dqk, p_dkk, b_G, b_R, o_i, m_i, m_k, stride_k, stride_G, stride_A, i_c,
    H: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
    RESIDUAL: tl.constexpr, L2NORM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """sum_j dA[i, j] k_j 2^(G_i - G_j) over the columns before the block, of A_qk and A_kk.

    The reference is the first row of the block.
    """
    o_c = tl.arange(0, BC)
    b_G0, b_R0 = load_gate_rows(p_G, p_R, o_c * 0 + i_c * BC, stride_G, m_k, RESIDUAL)
    b_qk = tl.zeros([BC, BK], dtype=tl.float32)
    b_kk = tl.zeros([BC, BK], dtype=tl.float32)
    for j in range(i_c):
        o_j = j * BC + o_c
        b_kj = load_unit_rows(p_k, p_kr, o_j, stride_k, H, o_j >= 0, m_k, L2NORM)
        b_Gj, b_Rj = load_gate_rows(p_G, p_R, o_j, stride_G, m_k, RESIDUAL)
        b_kj *= decay_between(b_G0, b_R0, b_Gj, b_Rj, m_k)
        b_A = load_square(p_dqk, o_i, o_j, stride_A, 1, m_i[:, None])
        b_qk += tl.dot(b_A, b_kj, input_precision=PRECISION)
        b_A = load_square(p_dkk, o_i, o_j, stride_A, 1, m_i[:, None])
        b_kk += tl.dot(b_A, b_kj, input_precision=PRECISION)
    b_decay = decay_between(b_G, b_R, b_G0, b_R0, m_i[:, None] & m_k)
    return b_qk * b_decay, b_kk * b_decay


@triton.jit
def rows_after(
    p_q, p_k, p_qr, p_kr, p_G, p_R, p_beta, p_dqk, p_dkk, b_G, b_R, o_i, m_i, m_k,
    stride_q, stride_k, stride_G, stride_A, i_c, count, scale,
    H: tl.constexpr, HV: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
    RESIDUAL: tl.constexpr, L2NORM: tl.constexpr,
    BETA_SIGMOID: tl.constexpr, NEG_EIGVAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """sum_r (dA_qk[r, i] scale q_r + dA_kk[r, i] beta_r k_r) 2^(G_r - G_i) over the rows r after
    the block. The reference is the first of them.
    """
    o_c = tl.arange(0, BC)
    o_next = o_c * 0 + tl.minimum(i_c * BC + BC, count - 1)
    b_G0, b_R0 = load_gate_rows(p_G, p_R, o_next, stride_G, m_k, RESIDUAL)
    b_sum = tl.zeros([BC, BK], dtype=tl.float32)
    for i in range(i_c + 1, tl.cdiv(count, BC)):
        o_r = i * BC + o_c
        m_r = o_r < count
        m_ir = m_i[:, None] & m_r[None, :]
        b_Gr, b_Rr = load_gate_rows(p_G, p_R, o_r, stride_G, m_r[:, None] & m_k, RESIDUAL)
        b_decay = decay_between(b_Gr, b_Rr, b_G0, b_R0, m_r[:, None] & m_k)
        b_x = load_unit_rows(p_q, p_qr, o_r, stride_q, H, m_r, m_k, L2NORM) * (scale * b_decay)
        b_A = load_square(p_dqk, o_i, o_r, 1, stride_A, m_ir)
        b_sum += tl.dot(b_A, b_x, input_precision=PRECISION)
        b_beta = tl.load(p_beta + o_r * HV, mask=m_r, other=0.0).to(tl.float32)
        b_beta = write_strength(b_beta, BETA_SIGMOID, NEG_EIGVAL)[:, None]
        b_x = load_unit_rows(p_k, p_kr, o_r, stride_k, H, m_r, m_k, L2NORM) * (b_beta * b_decay)
        b_A = load_square(p_dkk, o_i, o_r, 1, stride_A, m_ir)
        b_sum += tl.dot(b_A, b_x, input_precision=PRECISION)
    return b_sum * decay_between(b_G0, b_R0, b_G, b_R, m_i[:, None] & m_k)


@triton.jit
def one_square(
    p_dqk, p_dkk, o_i, stride_A, m_sq, b_q, b_k, b_kb, b_row, b_col, PRECISION: tl.constexpr
):
    """Products of the entries of the diagonal block in m_sq, with factors of rows and columns.

    Returns the gradients of q (scaled) and k (without beta) as rows, and of k as a column.
    """
    m_tr = tl.trans(m_sq)
    b_x = b_k * b_col
    b_A = load_square(p_dqk, o_i, o_i, stride_A, 1, m_sq)
    b_qk = tl.dot(b_A, b_x, input_precision=PRECISION) * b_row
    b_A = load_square(p_dkk, o_i, o_i, stride_A, 1, m_sq)
    b_kk = tl.dot(b_A, b_x, input_precision=PRECISION) * b_row
    b_A = load_square(p_dqk, o_i, o_i, 1, stride_A, m_tr)
    b_sum = tl.dot(b_A, b_q * b_row, input_precision=PRECISION)
    b_A = load_square(p_dkk, o_i, o_i, 1, stride_A, m_tr)
    b_sum += tl.dot(b_A, b_kb * b_row, input_precision=PRECISION)
    return b_qk, b_kk, b_sum * b_col


@triton.jit
def within_block(
    p_G, p_R, p_dqk, p_dkk, b_q, b_k, b_kb, b_G, b_R, o_i, m_i, m_k, stride_G, stride_A, i_c, count,
    BC: tl.constexpr, BOUNDED: tl.constexpr, RESIDUAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The block on the diagonal, its diagonal apart: as `one_square` returns it."""
    o_c = tl.arange(0, BC)
    m_ik = m_i[:, None] & m_k
    m_ii = m_i[:, None] & m_i[None, :]
    if BOUNDED:
        b_G0, b_R0 = load_gate_rows(p_G, p_R, o_c * 0 + i_c * BC, stride_G, m_k, RESIDUAL)
        b_row = decay_between(b_G, b_R, b_G0, b_R0, m_ik)
        b_col = decay_between(b_G0, b_R0, b_G, b_R, m_ik)
        m_sq = m_ii & (o_c[:, None] > o_c[None, :])
        b_qk, b_kk, b_sum = one_square(
            p_dqk, p_dkk, o_i, stride_A, m_sq, b_q, b_k, b_kb, b_row, b_col, PRECISION
        )
    else:
        b_qk = tl.zeros(b_k.shape, dtype=tl.float32)
        b_kk = tl.zeros(b_k.shape, dtype=tl.float32)
        b_sum = tl.zeros(b_k.shape, dtype=tl.float32)
        for level in tl.static_range(4):
            pair, side = o_c >> (4 - level), o_c >> (3 - level)
            # reference: the first row of the lower half of each pair of squares
            o_ref = tl.minimum(i_c * BC + ((2 * pair + 1) << (3 - level)), count - 1)
            b_G0, b_R0 = load_gate_rows(p_G, p_R, o_ref, stride_G, m_k, RESIDUAL)
            b_d = (b_G - b_G0) + (b_R - b_R0)
            m_row = (side % 2 == 1)[:, None]  # rows decay from the reference, columns to it
            b_decay = tl.exp2(tl.where(m_ik, tl.where(m_row, b_d, -b_d), 0.0))
            m_sq = m_ii & (pair[:, None] == pair[None, :]) & (side[:, None] > side[None, :])
            b_x, b_y, b_z = one_square(
                p_dqk, p_dkk, o_i, stride_A, m_sq, b_q, b_k, b_kb, b_decay, b_decay, PRECISION
            )
            b_qk += b_x
            b_kk += b_y
            b_sum += b_z
    return b_qk, b_kk, b_sum


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
    BC: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    # options
    PACKED: tl.constexpr,
    BOUNDED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    L2NORM: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
    NEG_EIGVAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    NC: tl.constexpr = C // BC
    GROUP: tl.constexpr = HV // H
    i_c = tl.program_id(0) % NC
    i_bh = (tl.program_id(0) // NC) % BH
    i_t = tl.program_id(0) // NC // BH
    i_b, i_hk = i_bh // H, (i_bh % H).to(tl.int64)
    start, count = locate_chunk(i_t, i_b, chunks, T, C, PACKED)
    if i_c * BC >= count:
        return

    o_c, o_k = tl.arange(0, BC), tl.arange(0, BK)
    o_i = i_c * BC + o_c  # rows of this program, within the chunk
    m_i, m_k = o_i < count, (o_k < K)[None, :]
    m_ik = m_i[:, None] & m_k
    p_q = q + start * stride_q + i_hk * stride_qh + o_k[None, :]
    p_k = k + start * stride_k + i_hk * stride_kh + o_k[None, :]
    p_qr, p_kr = q, k
    if L2NORM:
        p_qr, p_kr = q_rstd + start * H + i_hk, k_rstd + start * H + i_hk
    b_q = load_unit_rows(p_q, p_qr, o_i, stride_q, H, m_i, m_k, L2NORM)  # [BC, BK]
    b_k = load_unit_rows(p_k, p_kr, o_i, stride_k, H, m_i, m_k, L2NORM)  # [BC, BK]
    b_dq = tl.zeros([BC, BK], dtype=tl.float32)  # of scale q
    b_dk = tl.zeros([BC, BK], dtype=tl.float32)

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
        b_raw = tl.load(p_beta + o_i * HV, mask=m_i, other=0.0).to(tl.float32)  # [BC]
        b_beta = write_strength(b_raw, BETA_SIGMOID, NEG_EIGVAL)
        b_G, b_R = load_gate_rows(p_G, p_R, o_i, stride_G, m_ik, RESIDUAL)  # [BC, BK]
        b_end, b_end_R = load_gate_rows(p_G, p_R, o_c * 0 + count - 1, stride_G, m_k, RESIDUAL)

        # b_row_*: gradients of terms that decay to their row; b_col: from their row to a later one
        b_row_q, b_row_k, b_col, b_ss = through_the_state(
            do + head * V, dr + head * V, v_new + head * V, h + part * (K * V), dh + part * (K * V),
            o_i, m_i, m_k, HV * V, K, V, BC, BK, BV, PRECISION,
        )  # fmt: skip
        b_decay = tl.exp2(b_G + b_R)  # from the start of the chunk
        b_row_q *= b_decay
        b_row_k *= -b_decay
        b_col *= decay_between(b_end, b_end_R, b_G, b_R, m_ik)
        b_dk += b_col
        # at the last row acts what decays to it; the last row itself does not
        b_col = tl.where((o_i < count - 1)[:, None], b_col, 0.0)
        b_to_end = tl.sum(b_k * b_col, axis=0)  # [BK]
        if i_c == 0:  # and the state
            b_whole = tl.exp2(tl.where(o_c[:, None] == 0, b_end + b_end_R, -float("inf")))
            b_to_end += b_ss * tl.sum(b_whole, axis=0)
        tl.store(dG_end + (part * NC + i_c) * K + o_k, b_to_end, mask=o_k < K)

        b_x, b_y = columns_before(
            p_k, p_kr, p_G, p_R, p_dqk, p_dkk, b_G, b_R, o_i, m_i, m_k,
            stride_k, stride_G, stride_A, i_c, H, BC, BK, RESIDUAL, L2NORM, PRECISION,
        )  # fmt: skip
        b_row_q += b_x
        b_row_k += b_y
        b_z = rows_after(
            p_q, p_k, p_qr, p_kr, p_G, p_R, p_beta, p_dqk, p_dkk, b_G, b_R, o_i, m_i, m_k,
            stride_q, stride_k, stride_G, stride_A, i_c, count, scale,
            H, HV, BC, BK, RESIDUAL, L2NORM, BETA_SIGMOID, NEG_EIGVAL, PRECISION,
        )  # fmt: skip
        b_col += b_z
        b_dk += b_z
        b_x, b_y, b_z = within_block(
            p_G, p_R, p_dqk, p_dkk, b_q * scale, b_k, b_k * b_beta[:, None], b_G, b_R,
            o_i, m_i, m_k, stride_G, stride_A, i_c, count, BC, BOUNDED, RESIDUAL, PRECISION,
        )  # fmt: skip
        b_row_q += b_x
        b_row_k += b_y
        b_col += b_z
        b_dk += b_z

        b_db = tl.load(dbeta_v + (start + o_i) * HV + i_h, mask=m_i, other=0.0)
        b_db += tl.sum(b_k * b_row_k, axis=1)
        if BETA_SIGMOID:
            b_db *= tl.sigmoid(b_raw) * tl.sigmoid(-b_raw)
            if NEG_EIGVAL:
                b_db *= 2.0
        tl.store(dbeta + (start + o_i) * HV + i_h, b_db.to(dbeta.dtype.element_ty), mask=m_i)

        b_row_k *= b_beta[:, None]
        b_dG = scale * b_q * b_row_q + b_k * (b_row_k - b_col)
        tl.store(dG + head * K + o_i[:, None] * stride_G + o_k[None, :], b_dG, mask=m_ik)
        # the diagonal of A_qk has no decay
        b_same = tl.load(p_dqk + o_i * (stride_A + 1), mask=m_i, other=0.0)[:, None]
        b_dq += b_row_q + b_same * b_k
        b_dk += b_row_k + b_same * (scale * b_q)

    b_dq *= scale
    if L2NORM:
        b_rstd = tl.load(p_qr + o_i * H, mask=m_i, other=0.0)[:, None]
        b_dq = b_rstd * (b_dq - b_q * tl.sum(b_q * b_dq, axis=1)[:, None])
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
    parts = (layout.rows, layout.NT, HV, C // BLOCK, K)
    dG_end = torch.empty(parts, dtype=torch.float32, device=q.device)
    if dG.numel() > 0:
        BK = key_tile(K)
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
            BC=BLOCK,
            BK=BK,
            BV=min(key_tile(V), 32 if BK <= 128 else 16),
            PACKED=layout.chunks is not None,
            BOUNDED=bounded,
            RESIDUAL=G_residual is not None,
            L2NORM=q_rstd is not None,
            BETA_SIGMOID=use_beta_sigmoid,
            NEG_EIGVAL=allow_neg_eigval,
            PRECISION=dot_precision(q.dtype),
            num_warps=8 if BK > 64 else 4,
            num_stages=1,
        )
    return dq, dk, dG, dG_end, dbeta
