"""Calls of `context_parallel_kda` on some ranks beside the serial call on the whole sequence."""

from typing import NamedTuple

import torch
import torch.distributed as dist

from kda_edu import reference
from kda_edu.distributed import context_parallel_kda, count_bytes, split_sequence
from kda_edu.teach.check import rms_error
from kda_edu.teach.inputs import make_inputs

TOKENS = ("q", "k", "v", "g", "beta")
RANKS = {2: (1, 3), 3: (0, 2, 3), 4: (0, 1, 2, 3)}  # a rank's place in its group is not its number
KERNELS = ("kernels, batch", "kernels, packed")


class Case(NamedTuple):
    """One comparison: on how many ranks, how the tokens are split, and what is called."""

    ranks: int
    lengths: list
    inputs: dict = {}
    options: dict = {}
    final_state: bool = True
    dtype: torch.dtype = torch.float64
    check_ranks: bool = True
    know_lengths: bool = False


RAW = dict(
    use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True
)  # fmt: skip
CASES = {
    "2 ranks": Case(2, [24, 23]),
    "3 ranks": Case(3, [16, 16, 15]),
    "4 ranks": Case(4, [12, 12, 12, 11]),
    "uneven": Case(4, [1, 30, 2, 14]),
    "empty first": Case(3, [0, 20, 27]),
    "empty in the middle": Case(4, [20, 0, 0, 27]),
    "empty last": Case(3, [20, 27, 0]),
    "fewer tokens than ranks": Case(4, [1, 1, 0, 0]),
    "no token": Case(2, [0, 0]),
    "no states": Case(3, [16, 16, 15], dict(initial_state=False), final_state=False),
    "longer than a chunk": Case(2, [70, 75], dict(B=1), dict(chunk_size=32)),
    "other options": Case(3, [11, 20, 16], {}, dict(scale=0.3, state_v_first=True)),
    "mixed gates": Case(4, [12, 12, 12, 11], dict(gate="mixed")),
    "reset": Case(3, [16, 22, 9], dict(gate="reset")),
    "softplus gate": Case(3, [16, 16, 15], {}, RAW),
    "lower-bound gate": Case(4, [12, 0, 24, 11], {}, {**RAW, "lower_bound": -5.0}),
    "negative eigenvalues": Case(2, [24, 23], {}, {**RAW, "allow_neg_eigval": True}),
    "packed": Case(3, [16, 16, 15], dict(cu_seqlens=[0, 5, 21, 40, 47])),
    "packed, over four ranks": Case(4, [12, 12, 12, 11], dict(cu_seqlens=[0, 3, 45, 47])),
    "packed, ends at borders": Case(4, [12, 12, 12, 11], dict(cu_seqlens=[0, 12, 36, 40, 47])),
    "packed, no border crossed": Case(3, [12, 24, 11], dict(cu_seqlens=[0, 6, 12, 36, 36, 47])),
    "packed, empty sequences": Case(
        4, [12, 0, 24, 11], dict(cu_seqlens=[0, 0, 12, 12, 30, 30, 47, 47])
    ),
    "packed, empty rank inside": Case(4, [12, 0, 24, 11], dict(cu_seqlens=[0, 5, 40, 47])),
    "packed, from the faults": Case(2, [64, 64], dict(cu_seqlens=[0, 37, 88, 128])),
    "packed, no states": Case(
        3, [16, 16, 15], dict(cu_seqlens=[0, 5, 40, 47], initial_state=False), final_state=False
    ),
    "packed, softplus gate": Case(3, [16, 16, 15], dict(cu_seqlens=[0, 5, 40, 47]), RAW),
    "packed, unchecked": Case(3, [9, 31, 7], dict(cu_seqlens=[0, 5, 45, 47]), check_ranks=False),
    "unchecked": Case(4, [9, 20, 7, 11], check_ranks=False),
    "lengths known": Case(3, [9, 31, 7], dict(cu_seqlens=[0, 5, 45, 47]), know_lengths=True),
    "kernels, batch": Case(
        4, [17, 5, 0, 18], dict(B=1), {**RAW, "chunk_size": 16}, dtype=torch.float32
    ),
    "kernels, packed": Case(
        4, [10, 9, 12, 9], dict(cu_seqlens=[0, 4, 33, 40]), dict(chunk_size=16), dtype=torch.float32
    ),
}


def case_inputs(case):
    """The whole batch, and the gate's parameters, which differ from head to head."""
    sizes = dict(B=2, T=sum(case.lengths), H=2, HV=4, K=6, V=5, seed=len(case.lengths))
    x = make_inputs(**sizes | case.inputs, dtype=case.dtype)
    HV, K = x.g.shape[2:]
    parameters = {}
    if case.options.get("use_gate_in_kernel"):
        bias = torch.linspace(-1, 1, HV * K, dtype=x.g.dtype)
        parameters = dict(A_log=torch.linspace(-2, 1, HV, dtype=x.g.dtype), dt_bias=bias)
    if case.options.get("state_v_first") and x.initial_state is not None:
        x = x._replace(initial_state=x.initial_state.mT.contiguous())
    return x, parameters


def weights(x, shape, seed):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw, dtype=torch.float64).to(x)


def leaves(x, parameters):
    """Everything that a gradient is asked for, by name."""
    tensors = dict(zip(TOKENS, x[:5], strict=True), initial_state=x.initial_state, **parameters)
    fresh = {n: t.detach().clone().requires_grad_() for n, t in tensors.items() if t is not None}
    return {"initial_state": None, **fresh}


def serial(case):
    """Outputs and gradients of the oracle on the whole batch, in float64."""
    x, parameters = case_inputs(case)
    given = leaves(x.double(), {n: t.double() for n, t in parameters.items()})
    options = dict(case.options, cu_seqlens=x.cu_seqlens, output_final_state=case.final_state)
    o, S = reference.chunk_kda(**given, **options)
    loss = (o * weights(o, o.shape, 1)).sum()
    if S is not None:
        loss = loss + (S * weights(S, S.shape, 2)).sum()
    loss.backward()
    return o.detach(), None if S is None else S.detach(), gradients(given)


def gradients(given):
    """Of all leaves; a leaf that no output depends on has a gradient of zeros."""
    wanted = {n: t for n, t in given.items() if t is not None}
    return {n: torch.zeros_like(t) if t.grad is None else t.grad for n, t in wanted.items()}


def parallel(case, group, device="cpu"):
    """The same on the ranks of a group: everything put together again, and the bytes sent."""
    x, parameters = case_inputs(case)
    x = x.to(torch.device(device))
    parameters = {name: t.to(device) for name, t in parameters.items()}
    given = leaves(x, parameters)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    pieces = {n: split_sequence(given[n], group, lengths=case.lengths) for n in TOKENS}
    with count_bytes() as sent:
        o, S = context_parallel_kda(
            **{**given, **pieces},
            **case.options,
            group=group,
            cu_seqlens=x.cu_seqlens,
            output_final_state=case.final_state,
            check_ranks=case.check_ranks,
            lengths=case.lengths if case.know_lengths else None,
        )
        whole = (*x.v.shape[:3], o.shape[3])
        mine = split_sequence(weights(o, whole, 1), group, lengths=case.lengths)
        loss = (o * mine).sum()
        if S is not None:
            share = weights(S, S.shape, 2 if rank == 0 else 3)
            loss = loss + (S * (share if rank else share - others(S, ranks))).sum()
        loss.backward()
    pad = torch.zeros(whole, dtype=o.dtype, device=device)
    split_sequence(pad, group, lengths=case.lengths).copy_(o.detach())
    summed = {"o": pad, **{n: t.clone() for n, t in gradients(given).items()}}
    for total in summed.values():
        dist.all_reduce(total, group=group)
    summed = {name: total.cpu() for name, total in summed.items()}
    return summed.pop("o"), None if S is None else S.detach().cpu(), summed, dict(sent)


def others(S, ranks):
    """What the other ranks' losses put on the final state, taken off rank 0's: the losses differ
    from rank to rank, and add up to the serial one."""
    return (ranks - 1) * weights(S, S.shape, 3)


def errors(case, group, device="cpu"):
    """{what: error against the serial call}, and the bytes that this rank has sent."""
    o, S, grads = serial(case)
    got_o, got_S, got_grads, sent = parallel(case, group, device)
    pairs = {"o": (got_o, o), **{f"d {n}": (got_grads[n], grads[n]) for n in grads}}
    if S is not None:
        pairs["final state"] = got_S, S
    assert set(grads) == set(got_grads)
    return {n: rms_error(a, b) for n, (a, b) in pairs.items()}, sent
