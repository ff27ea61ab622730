"""Which tokens and which sequences lie on a rank. Arithmetic only, nothing is sent here."""

from bisect import bisect_right
from itertools import accumulate
from typing import NamedTuple

import torch.distributed as dist

from ..kernels.checks import check_cu_values, check_integer, check_tensor
from .collectives import as_group


class Piece(NamedTuple):
    """The part of a batch that lies on one rank.

    start, stop: its tokens, as positions in the whole batch.
    first, last: the sequences with a part here are first, ..., last - 1.
    cu_seqlens: where they begin within the piece, [last - first + 1], or None if nothing is packed.
    enters: whether the first of them (all of them if nothing is packed) began on an earlier rank.
    leaves: whether the last of them (all of them if nothing is packed) goes on on a later rank.
    since, until: the ranks on which a sequence that enters began, and one that leaves will end.
    total: the number of sequences on all ranks.
    any_crosses: whether any sequence crosses any border between ranks.
    """

    start: int
    stop: int
    first: int
    last: int
    cu_seqlens: list[int] | None
    enters: bool
    leaves: bool
    since: int
    until: int
    total: int
    any_crosses: bool

    @property
    def entering(self) -> slice:
        """Tokens of the piece that continue a sequence from the left."""
        if not self.enters or self.cu_seqlens is None:
            return slice(0, (self.stop - self.start) * self.enters)
        return slice(0, self.cu_seqlens[1])

    @property
    def leaving(self) -> slice:
        """Tokens of the piece whose sequence goes on to the right."""
        tokens = self.stop - self.start
        if not self.leaves or self.cu_seqlens is None:
            return slice(tokens * (not self.leaves), tokens)
        return slice(self.cu_seqlens[-2], tokens)

    @property
    def ended(self) -> int:
        """How many of the piece's sequences end here: all but those that leave."""
        if not self.leaves:
            return self.last - self.first
        return 0 if self.cu_seqlens is None else self.last - self.first - 1

    @property
    def ending(self) -> slice:
        """Those sequences, among all of the batch."""
        return slice(self.first, self.first + self.ended)

    @property
    def passes_through(self) -> bool:
        """Whether one and the same sequence comes from the left and goes on to the right."""
        alone = self.cu_seqlens is None or len(self.cu_seqlens) == 2
        return self.enters and self.leaves and alone


def find_piece(rank, lengths, batch=1, cu_seqlens=None) -> Piece:
    """The piece of `rank` when the ranks hold `lengths` tokens, in order.

    lengths: tokens on each rank, >= 0.
    batch: number of sequences side by side, all split at the same tokens, without `cu_seqlens`.
    cu_seqlens: a list [N + 1] of the whole packed batch: 0, never decreasing, sum(lengths).

    An empty packed sequence lies on the rank of the token after it, or on the last rank.
    """
    stops = list(accumulate(lengths))
    start, stop, last_rank = stops[rank] - lengths[rank], stops[rank], len(lengths) - 1
    if cu_seqlens is None:
        sides = dict(enters=rank > 0, leaves=rank < last_rank)
        crosses = dict(since=0, until=last_rank, total=batch, any_crosses=last_rank > 0)
        return Piece(start, stop, 0, batch, None, **sides, **crosses)

    check_cu_values("cu_seqlens", cu_seqlens, stops[-1])
    spans = list(zip(cu_seqlens, cu_seqlens[1:], strict=False))

    def rank_of(token):
        return min(bisect_right(stops, token), last_rank)

    def here(begin, end):
        if begin == end:
            return rank_of(begin) == rank
        return begin < stop and end > start

    mine = [n for n, span in enumerate(spans) if here(*span)]
    first, last = (mine[0], mine[-1] + 1) if mine else (0, 0)
    begin, end = (spans[first][0], spans[last - 1][1]) if mine else (start, stop)
    return Piece(
        start,
        stop,
        first,
        last,
        [min(max(c, start), stop) - start for c in cu_seqlens[first : last + 1]],
        enters=begin < start,
        leaves=end > stop,
        since=rank_of(begin),
        until=rank_of(end - 1),
        total=len(spans),
        any_crosses=any(b < border < e for b, e in spans for border in stops),
    )


def split_lengths(tokens, ranks) -> list[int]:
    """Tokens on each rank when `tokens` are split as evenly as can be: the first get one more."""
    check_integer("tokens", tokens)
    check_integer("ranks", ranks)
    if tokens < 0 or ranks < 1:
        raise ValueError(
            f"expected tokens >= 0 and ranks >= 1, got tokens = {tokens}, ranks = {ranks}"
        )
    return [tokens // ranks + (rank < tokens % ranks) for rank in range(ranks)]


def split_sequence(x, group=None, *, dim=1, lengths=None):
    """This rank's piece of `x`, which every rank holds whole: a view, cut along `dim`.

    group: a ProcessGroup, a 1-D DeviceMesh, or None for the default group.
    lengths: tokens on each rank; default `split_lengths`. Any numbers >= 0 that add up will do.

    Raises ValueError where `lengths` do not fit the group or the tensor.
    """
    check_tensor("x", x)
    group = as_group(group)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    lengths = split_lengths(x.shape[dim], ranks) if lengths is None else list(lengths)
    check_lengths(lengths, ranks)
    if sum(lengths) != x.shape[dim]:
        raise ValueError(
            f"lengths: expected numbers that add up to {x.shape[dim]} tokens, got {list(lengths)}"
        )
    return x.narrow(dim, sum(lengths[:rank]), lengths[rank])


def check_lengths(lengths, ranks, rank=None, tokens=None):
    """One number >= 0 for each rank; for `rank` the number of its tokens."""
    if len(lengths) != ranks or any(type(n) is not int or n < 0 for n in lengths):
        raise ValueError(
            f"lengths: expected {ranks} integers >= 0, one for each rank, got {list(lengths)}"
        )
    if rank is not None and lengths[rank] != tokens:
        raise ValueError(
            f"lengths: expected {tokens} for rank {rank}, as in its tensors, got {lengths[rank]}"
        )
