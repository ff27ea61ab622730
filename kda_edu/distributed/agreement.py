"""Ranks that disagree would hang, or compute nonsense. One small collective finds out first."""

import torch
import torch.distributed as dist

from ..kernels.checks import (
    KERNEL_DTYPES,
    MAX_KEY_DIM,
    REFERENCE_DTYPES,
    check_flags,
    check_kda,
    check_state,
    check_tensor,
)
from .collectives import all_gather
from .pieces import check_lengths

KERNELS_ONLY = ("safe_gate", "disable_recompute")
OPTIONS = (
    "A_log",
    "dt_bias",
    "scale",
    "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval",
    "lower_bound",
    "chunk_size",
    *KERNELS_ONLY,
)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

# What has to be the same on every rank: (argument, what about it).
FACTS = (
    ("q", "batch size B"),
    ("q", "number of heads H"),
    ("q", "key dimension K"),
    ("q", "dtype"),
    ("v", "number of value heads HV"),
    ("v", "value dimension V"),
    ("initial_state", "number of sequences (-1: None)"),
    ("output_final_state", "flag"),
    ("cu_seqlens", "values"),
    ("A_log, dt_bias", "presence"),
    ("requires_grad", "flag"),
    ("lengths", "values"),
    *((name, "value") for name in OPTIONS[2:]),
)


def agree_on_lengths(tokens, options, sequences, exact, lengths, check_ranks, group) -> list[int]:
    """Check the arguments of this rank and, unless told not to, against the others.

    tokens: (q, k, v, g, beta). options, sequences: the other arguments, by name. exact: whether the
    reference runs, which takes float64 and any key dimension.

    Returns the number of tokens on each rank. Where nothing is packed and ranks are not compared,
    nobody needs the others' and they are taken to be equal.
    """
    rank, ranks, q = dist.get_rank(group), dist.get_world_size(group), tokens[0]
    refusal, mine = None, [0] * len(FACTS)
    try:
        mine = _facts(tokens, options, sequences, lengths, exact)
        if lengths is not None:
            check_lengths(lengths, ranks, rank, q.shape[1])
    except (ValueError, TypeError) as error:
        refusal = error
    if check_ranks and isinstance(q, torch.Tensor):
        count = q.shape[1] if q.ndim > 1 else 0
        numbers = torch.tensor([refusal is not None, count, *mine], device=q.device)
        everyone = all_gather(numbers, group, "descriptions").tolist()
        if refusal is None:
            return _compare(everyone)
    if refusal is not None:
        raise refusal
    if lengths is not None:
        return list(lengths)
    packed = sequences["cu_seqlens"] is not None
    return gather_lengths(q, group) if packed else [q.shape[1]] * ranks


def gather_lengths(x, group) -> list[int]:
    """How many tokens each rank holds; waits for the answer."""
    mine = torch.tensor([x.shape[1]], device=x.device)
    return all_gather(mine, group, "lengths").flatten().tolist()


def _facts(tokens, options, sequences, lengths, exact):
    """The numbers of FACTS for this rank, whose arguments are checked on the way."""
    unknown = [name for name in options if name not in OPTIONS]
    if unknown:
        raise TypeError(f"options: expected some of {', '.join(OPTIONS)}, got {unknown[0]}")
    q, state, cu = tokens[0], sequences["initial_state"], sequences["cu_seqlens"]
    not_checked_there = ("use_qk_l2norm_in_kernel", "disable_recompute", "chunk_size")
    checked = {name: x for name, x in options.items() if name not in not_checked_there}
    if not exact and "chunk_size" in options:
        checked["chunk_size"] = options["chunk_size"]
    shapes = check_kda(
        *tokens,
        **checked,
        state_v_first=sequences["state_v_first"],
        dtypes=REFERENCE_DTYPES if exact else KERNEL_DTYPES,
        max_key_dim=None if exact else MAX_KEY_DIM,
    )
    check_flags(
        output_final_state=sequences["output_final_state"],
        use_qk_l2norm_in_kernel=options.get("use_qk_l2norm_in_kernel", False),
    )
    if cu is not None:
        check_tensor("cu_seqlens", cu, dtypes=(torch.int32, torch.int64))
        if shapes.B != 1 or cu.ndim != 1 or cu.numel() < 1:
            raise ValueError(
                f"cu_seqlens: expected shape (N + 1,) and B = 1, got {tuple(cu.shape)} "
                f"and B = {shapes.B}"
            )
        shapes = shapes._replace(N=cu.numel() - 1)
    if state is not None:
        check_state("initial_state", state, shapes, q, sequences["state_v_first"])
    parameters = [options.get(name) for name in ("A_log", "dt_bias")]
    gradients = [x is not None and x.requires_grad for x in (*tokens, *parameters, state)]
    return [
        shapes.B,
        shapes.H,
        shapes.K,
        DTYPES.index(q.dtype),
        shapes.HV,
        shapes.V,
        -1 if state is None else shapes.N,
        sequences["output_final_state"],
        -1 if cu is None else hash(tuple(cu.tolist())),
        sum(2**place * (x is not None) for place, x in enumerate(parameters)),
        torch.is_grad_enabled() and any(gradients),
        -1 if lengths is None else hash(tuple(lengths)),
        *(_as_integer(options.get(name)) for name in OPTIONS[2:]),
    ]


def _as_integer(option):
    """An integer that is the same on every rank for the same number; -1 for None."""
    return -1 if option is None else hash(option)


def _compare(everyone):
    """Raise where ranks differ; else the tokens of each. A row is (refused, tokens, *facts)."""
    for rank, (refused, *_) in enumerate(everyone):
        if refused:
            raise ValueError(f"rank {rank} has refused its arguments; its own message says why")
    for place, (argument, what) in enumerate(FACTS, start=2):
        for rank, row in enumerate(everyone):
            mine, first = row[place], everyone[0][place]
            if mine == first:
                continue
            came = f"got {first} on rank 0 and {mine} on rank {rank}"
            if what == "dtype":
                came = f"got {DTYPES[first]} on rank 0 and {DTYPES[mine]} on rank {rank}"
            elif what in ("value", "values"):  # of which only a digest was sent
                came = f"got others on rank {rank} than on rank 0"
            raise ValueError(f"{argument}: expected the same {what} on every rank, {came}")
    return [row[1] for row in everyone]
