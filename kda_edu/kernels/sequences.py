"""Where the chunks are: a rectangular batch, or sequences packed along T.

A packed batch gets a table with one row per chunk: its first token and its number of tokens. One
kernel builds it from cu_seqlens, and nothing waits for it: the number of rows is an upper bound,
rows left over have 0 tokens, and their programs return at once. So a CUDA graph can be captured,
and replayed with other lengths of the same total.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ._common import (
    cdiv,
    on_device_of_first_argument,
)
from .checks import check_chunk_size, check_cu_seqlens

TILE = 64  # rows of the table per program, and sequences that it asks at a time


class ChunkLayout(NamedTuple):
    """Chunks of a call.

    chunks: int32 [NT, 2] (first token, number of tokens) of a packed batch, or None.
    offsets: int32 [N + 1], rows of `chunks` before each sequence, or None.
    cu_seqlens: clamped to [0, T] and made non-decreasing, or None.
    rows: B of a rectangular batch, 1 of a packed one.
    NT: number of chunks per row.
    N: number of sequences.
    covers: whether every token is known to lie in a sequence (cu_seqlens was read on the host).
    """

    chunks: torch.Tensor | None
    offsets: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    rows: int
    NT: int
    N: int
    covers: bool

    def programs(self, HV: int) -> int:
        """One program per chunk and value head."""
        return self.rows * self.NT * HV


@on_device_of_first_argument
def chunk_layout(B, T, chunk_size, cu_seqlens=None, cu_seqlens_cpu=None) -> ChunkLayout:
    """The layout of a [B, T] batch, or of one packed by `cu_seqlens` (then B is 1).

    With `cu_seqlens_cpu` the number of chunks is exact; without it, an upper bound.
    """
    check_chunk_size(chunk_size)
    if cu_seqlens is None:
        return ChunkLayout(None, None, None, B, -(-T // chunk_size), B, True)
    N = check_cu_seqlens(cu_seqlens, B, T, cu_seqlens.device, cu_seqlens_cpu)
    covers = cu_seqlens_cpu is not None
    if not covers:
        NT = (T + N * (chunk_size - 1)) // chunk_size
    else:
        lengths = cu_seqlens_cpu.diff()
        NT = int(((lengths + chunk_size - 1) // chunk_size).sum())

    device = cu_seqlens.device
    chunks = torch.empty(NT, 2, dtype=torch.int32, device=device)
    offsets = torch.empty(N + 1, dtype=torch.int32, device=device)
    cu = torch.empty(N + 1, dtype=cu_seqlens.dtype, device=device)
    chunk_table_kernel[(max(1, cdiv(NT, TILE)),)](
        cu_seqlens.contiguous(), chunks, offsets, cu, T, N, NT, C=chunk_size, TILE=TILE
    )
    return ChunkLayout(chunks, offsets, cu, 1, NT, N, covers)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["T", "N", "NT"])
def chunk_table_kernel(
    cu_seqlens, chunks, offsets, cu, T, N, NT, C: tl.constexpr, TILE: tl.constexpr
):
    """TILE rows of the table per program, which asks all sequences, TILE at a time, for its rows.

    Whatever cu_seqlens holds, the borders here lie in [0, T] and never decrease, so rows suffice.
    """
    o_r = tl.program_id(0) * TILE + tl.arange(0, TILE)
    b_first = tl.zeros([TILE], dtype=tl.int32)
    b_count = tl.zeros([TILE], dtype=tl.int32)
    border = tl.load(cu_seqlens) * 0  # of the sequences before: last token, and chunks
    border = border.to(tl.int32)
    rows = border
    for i in range(tl.cdiv(N, TILE)):
        o_n = i * TILE + tl.arange(0, TILE)
        m_n = o_n < N
        b_from = tl.load(cu_seqlens + o_n, mask=m_n, other=0)
        b_from = tl.minimum(tl.maximum(b_from, border), T).to(tl.int32)
        b_from = tl.associative_scan(b_from, 0, larger)
        b_to = tl.load(cu_seqlens + o_n + 1, mask=m_n, other=0)
        b_to = tl.minimum(tl.maximum(b_to, b_from), T).to(tl.int32)
        b_chunks = tl.where(m_n, (b_to - b_from + (C - 1)) // C, 0)
        b_end = rows + tl.cumsum(b_chunks, axis=0)
        b_start = b_end - b_chunks
        m_mine = (b_start[None, :] <= o_r[:, None]) & (o_r[:, None] < b_end[None, :])
        b_token = b_from[None, :] + (o_r[:, None] - b_start[None, :]) * C
        b_first += tl.sum(tl.where(m_mine, b_token, 0), axis=1)
        b_left = tl.minimum(b_to[None, :] - b_token, C)
        b_count += tl.sum(tl.where(m_mine, b_left, 0), axis=1)
        if tl.program_id(0) == 0:
            tl.store(offsets + o_n, b_start, mask=m_n)
            tl.store(cu + o_n, b_from, mask=m_n)
        border = tl.max(tl.where(m_n, b_to, 0), axis=0)
        rows += tl.sum(b_chunks, axis=0)
    tl.store(chunks + 2 * o_r, b_first, mask=o_r < NT)
    tl.store(chunks + 2 * o_r + 1, b_count, mask=o_r < NT)
    if tl.program_id(0) == 0:
        tl.store(offsets + N, rows)
        tl.store(cu + N, border)
