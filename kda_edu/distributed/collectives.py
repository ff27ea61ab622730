"""The four collectives of this package. Each counts its bytes and, if it fails, says where."""

import contextlib

import torch.distributed as dist

_open_counts = []


class BytesSent(dict):
    """Bytes that this rank has sent to others, by what was sent: {"maps": 4096, ...}.

    Counted at the call, from the sizes of the tensors: a collective's library may send less (a
    multicast) or, with headers, a little more.
    """

    @property
    def total(self) -> int:
        return sum(self.values())


@contextlib.contextmanager
def count_bytes():
    """`with count_bytes() as sent:` fills `sent`, a `BytesSent`, in forward and backward."""
    sent = BytesSent()
    _open_counts.append(sent)
    try:
        yield sent
    finally:
        _open_counts[:] = [other for other in _open_counts if other is not sent]


def as_group(group):
    """The ProcessGroup of a 1-D DeviceMesh; a ProcessGroup as it is; the default group for None."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "group: expected an initialised torch.distributed; call init_process_group first"
        )
    if group is None:
        return dist.group.WORLD
    if isinstance(group, dist.ProcessGroup):
        return group
    if isinstance(group, dist.DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group: expected a DeviceMesh with one dimension, got {group.ndim}; "
                'take one of them, as in mesh["cp"]'
            )
        return group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group: this process is no member of it")
    raise TypeError(f"group: expected a ProcessGroup or DeviceMesh, got {type(group).__name__}")


def all_gather(x, group, what):
    """`x` of every rank, [R, *x.shape]. A rank sends its own to R - 1 others."""
    ranks = dist.get_world_size(group)
    everyone = x.new_empty(ranks, *x.shape)
    if x.numel() == 0:
        return everyone
    # torch 2.13 gave the function another name, and warns of the old one
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    with _named(what, group):
        gather(everyone.view(-1), x.contiguous().view(-1), group=group)
    _count(what, (ranks - 1) * _bytes(x))
    return everyone


def sum_over_ranks(x, group, what):
    """The sum of `x` over all ranks. A ring sends 2 (R - 1) / R of it from each rank."""
    ranks, total = dist.get_world_size(group), x.clone()
    if x.numel() == 0:
        return total
    with _named(what, group):
        dist.all_reduce(total, group=group)
    _count(what, 2 * (ranks - 1) * _bytes(x) // ranks)
    return total


def all_to_all(x, receive, send, group, what):
    """Rows of `x` to the other ranks: `send[r]` rows to rank r, `receive[r]` rows from it."""
    arrived = x.new_empty(sum(receive), *x.shape[1:])
    with _named(what, group):
        dist.all_to_all_single(arrived, x.contiguous(), list(receive), list(send), group=group)
    others = sum(send) - send[dist.get_rank(group)]
    _count(what, others * _bytes(x) // max(len(x), 1))
    return arrived


@contextlib.contextmanager
def _named(what, group):
    """An error of the transport, with the rank, what was being sent, and where to look."""
    try:
        yield
    except RuntimeError as error:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise RuntimeError(
            f"rank {rank} of {ranks}: exchanging {what} failed. Another rank has ended, or did "
            f"not come within the timeout of the group; look for the first error among the other "
            f"ranks. The transport says: {reason}"
        ) from error


def _bytes(x):
    return x.numel() * x.element_size()


def _count(what, number):
    for sent in _open_counts:
        sent[what] = sent.get(what, 0) + number
