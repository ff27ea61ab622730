"""Where the chunks are: a rectangular batch, or sequences packed along T.

A packed batch gets a table with one row per chunk: its first token and its number of tokens. It is
built on the device from cu_seqlens, without waiting for it: the number of rows is an upper bound,
rows left over have 0 tokens, and their programs return at once. So a CUDA graph can be captured,
and replayed with other lengths of the same total.
"""

from typing import NamedTuple

import torch

from .checks import check_chunk_size, check_cu_seqlens


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

    # values are not read here: whatever they are, chunks stay within T and within the table
    cu = cu_seqlens.clamp(0, T).cummax(0).values
    counts = (cu.diff() + (chunk_size - 1)) // chunk_size
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    row = torch.arange(NT, device=cu.device)
    sequence = torch.searchsorted(offsets[1:], row, right=True)  # empty sequences have no row
    exists = sequence < N
    sequence = sequence.clamp(max=max(N - 1, 0))
    first = cu[sequence] + (row - offsets[sequence]) * chunk_size
    count = (cu[sequence + 1] - first).clamp(0, chunk_size)
    chunks = torch.stack([first, torch.where(exists, count, 0)], dim=1)
    return ChunkLayout(chunks.int(), offsets.int(), cu, 1, NT, N, covers)
