"""The last tokens before a piece, for operations that look a few tokens back."""

import torch
import torch.distributed as dist

from ..kernels.checks import check_integer, check_tensor
from .agreement import gather_lengths
from .collectives import all_to_all, as_group
from .pieces import check_lengths, find_piece


def tokens_before(x, count, group=None, *, cu_seqlens=None, lengths=None):
    """The `count` tokens before this rank's piece, [B, count, ...]; differentiable.

    A causal convolution of width W reads `count` = W - 1 tokens before each token. Put these in
    front of the piece, and drop the first `count` results. Tokens that do not exist, or belong to
    another sequence, are zeros, which is how such a convolution begins.

    Only these tokens are sent, each to the rank that needs it, from as many ranks as hold them: a
    rank may have fewer tokens than `count`, or none.

    Args:
        x: [B, T_r, ...], this rank's piece; T_r may differ between ranks.
        count: how many tokens, >= 0, the same on every rank.
        group: a ProcessGroup, a 1-D DeviceMesh, or None for the default group.
        cu_seqlens: int32 or int64 [N + 1] of the whole packed batch, the same on every rank; B is
            then 1. It is read on the host.
        lengths: tokens on each rank. Asked of the others (one small collective) if None.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came.
    """
    check_tensor("x", x)
    check_integer("count", count)
    if x.ndim < 2 or count < 0:
        raise ValueError(
            f"x, count: expected x [B, T, ...] and count >= 0, got {tuple(x.shape)} and {count}"
        )
    group = as_group(group)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    lengths = gather_lengths(x, group) if lengths is None else list(lengths)
    check_lengths(lengths, ranks, rank, x.shape[1])
    cu = None if cu_seqlens is None else cu_seqlens.tolist()
    wanted = [_wanted(r, lengths, count, cu) for r in range(ranks)]

    first, end = sum(lengths[:rank]), sum(lengths[: rank + 1])
    parts = [_overlap(span, (first, end)) for span in wanted]  # what each rank gets from here
    borders = [(sum(lengths[:r]), sum(lengths[: r + 1])) for r in range(ranks)]
    receive = [e - b for b, e in (_overlap(wanted[rank], border) for border in borders)]

    outgoing = torch.cat([x[:, b - first : e - first] for b, e in parts], dim=1)
    sizes = receive, [e - b for b, e in parts]
    arrived = _Swap.apply(outgoing.transpose(0, 1), *sizes, group).transpose(0, 1)
    missing = x.new_zeros(x.shape[0], count - sum(receive), *x.shape[2:])
    return torch.cat([missing, arrived], dim=1)


def convolution_state(x, count, group=None, *, cu_seqlens=None, lengths=None):
    """What a short convolution over x has seen before this piece; arguments as `tokens_before`.

    Returns:
        (state, cu_seqlens): state [N_r, count, ...] for the N_r sequences with a part on this rank
        (B if nothing is packed), zeros for those that begin here; and where these sequences begin
        within the piece, int32 [N_r + 1], or None if nothing is packed.
    """
    before = tokens_before(x, count, group, cu_seqlens=cu_seqlens, lengths=lengths)
    if cu_seqlens is None:
        return before, None
    group = as_group(group)
    lengths = gather_lengths(x, group) if lengths is None else list(lengths)
    piece = find_piece(dist.get_rank(group), lengths, cu_seqlens=cu_seqlens.tolist())
    parts = piece.last - piece.first
    begun = x.new_zeros(max(parts - 1, 0), *before.shape[1:])
    state = torch.cat([before[: min(parts, 1)], begun])
    return state, torch.tensor(piece.cu_seqlens, dtype=torch.int32).to(x.device)


def _wanted(rank, lengths, count, cu):
    """First and end position of the tokens that this rank needs from others."""
    piece = find_piece(rank, lengths, cu_seqlens=cu)
    if not piece.enters:
        return piece.start, piece.start
    begin = 0 if cu is None else cu[piece.first]
    return max(begin, piece.start - count), piece.start


def _overlap(a, b):
    begin = min(max(a[0], b[0]), b[1])
    return begin, max(begin, min(a[1], b[1]))


class _Swap(torch.autograd.Function):
    """all_to_all of rows; the gradients go back the way the rows came."""

    @staticmethod
    def forward(ctx, x, receive, send, group):
        ctx.way = send, receive, group
        return all_to_all(x, receive, send, group, "tokens before")

    @staticmethod
    def backward(ctx, gradient):
        back = all_to_all(gradient, *ctx.way, "gradients of tokens before")
        return back, None, None, None
