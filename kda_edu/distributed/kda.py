"""`context_parallel_kda`: one sequence, its tokens split over the ranks of a group.

A piece of a sequence does two things with the state S that it begins with:

    state after the piece = M S + X         M [K, K], X [K, V]
    outputs of the piece  = P S + o_0       P [T, K]

Forward: every rank computes (M, X), one collective gathers them, each rank folds those before it
into its own S, and runs its piece with it. Backward: the gradient of S is M^T (gradient of the
state after the piece) + P^T (gradient of the outputs). Only the first term waits for others, so
the ranks gather one matrix [K, V] each and fold from the right. The rest is the ordinary backward
of the piece.

The composition is that of scans (Blelloch 1990), with one map per rank instead of one per token.
"""

import functools
from typing import NamedTuple

import torch
import torch.distributed as dist

from .. import kernels, reference
from .agreement import KERNELS_ONLY, agree_on_lengths
from .collectives import all_gather, as_group, sum_over_ranks
from .pieces import find_piece


def context_parallel_kda(
    q,
    k,
    v,
    g,
    beta,
    *,
    group=None,
    initial_state=None,
    output_final_state=False,
    state_v_first=False,
    cu_seqlens=None,
    cu_seqlens_cpu=None,
    lengths=None,
    check_ranks=True,
    backend="auto",
    **options,
):
    """`chunk_kda` of sequences whose tokens lie on several ranks, in the order of the ranks.

    Runs the kernels on CUDA, and on a CPU in Triton's interpreter; elsewhere, and in float64, the
    reference.

    Args:
        q, k, v, g, beta: this rank's piece, [B, T_r, ...] as in `chunk_kda`. T_r may differ between
            ranks and may be 0.
        group: a ProcessGroup, a 1-D DeviceMesh, or None for the default group.
        initial_state: [N, HV, K, V], the same on every rank: one for each sequence of the whole
            batch. A rank reads those of the sequences that begin on it.
        output_final_state: also return the states after the last tokens.
        state_v_first: states are [N, HV, V, K].
        cu_seqlens: int32 or int64 [N + 1] of the whole packed batch, the same on every rank, ending
            at the sum of all T_r; B is then 1. It is read on the host, from `cu_seqlens_cpu`, a
            copy on the CPU, if given; else, from a GPU, the host waits for it.
        lengths: T_r of every rank, if known. Unless `check_ranks` tells them, packed batches ask.
        check_ranks: first compare shapes, dtypes and options between ranks, with one small
            collective for which the host waits. Without it, ranks that differ hang or are wrong.
        backend: "kernels", "reference", or "auto": as said above.
        options: of `chunk_kda`: scale, use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log, dt_bias,
            lower_bound, safe_gate, use_beta_sigmoid_in_kernel, allow_neg_eigval, chunk_size,
            disable_recompute. The same on every rank.

    Returns:
        (o, final_state): o [B, T_r, HV, V] of this rank's tokens; final_state [N, HV, K, V] of
        all sequences, the same on every rank, or None unless asked for.

    Backward: each rank calls it, on a loss that contains an output of this call; a rank without
    tokens too. Gradients are those of the sum of all ranks' losses. For q, k, v, g and beta they
    are complete. For A_log, dt_bias and initial_state they are this rank's share: add them over the
    group, as data parallelism does for all parameters (DDP and FSDP divide by the number of ranks).
    Kept for the pass: P of the sequence that enters, like g in size, and the M of later ranks.

    Sent by each of R ranks, for B sequences (1 if packed), in numbers of the state's dtype:
    (R - 1) B HV K (K + V) in forward and (R - 1) B HV K V in backward. Nothing if no sequence
    crosses a border. A final state adds one sum over ranks to each.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came.
        RuntimeError: another rank has ended or is late; the message says what was being exchanged.
    """
    group = as_group(group)
    local, (q, k, v) = _local_function(q, k, v, backend)
    tokens = q, k, v, g, beta
    cu_seqlens = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    sequences = dict(
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
    )
    exact = local is reference.chunk_kda
    lengths = agree_on_lengths(tokens, options, sequences, exact, lengths, check_ranks, group)
    cu = None if cu_seqlens is None else cu_seqlens.tolist()
    piece = find_piece(dist.get_rank(group), lengths, q.shape[0], cu)

    if exact:
        options = {name: x for name, x in options.items() if name not in KERNELS_ONLY}
    call = functools.partial(local, **options, output_final_state=True)
    states = initial_state.mT if state_v_first and initial_state is not None else initial_state
    inputs = [*tokens, options.get("A_log"), options.get("dt_bias"), states]
    inputs = [x for x in inputs if x is not None]
    wants_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    border = _gather_maps(call, piece, tokens, states, wants_gradient, group)
    o, ends = _run_piece(call, piece, tokens, states, border.state)
    o, final_state = _Exchange.apply(
        piece, group, output_final_state, o, ends, border.P, border.M, border.M_later, *inputs
    )
    if final_state is not None and state_v_first:
        final_state = final_state.mT.contiguous()
    return o, final_state


class Response(NamedTuple):
    """What tokens do with the state S before them: S -> M S + X, and outputs P S + o_0.

    P [C, T, HV, K] in the dtype of v, M [C, HV, K, K], X [C, HV, K, V], for C sequences.
    """

    P: torch.Tensor
    M: torch.Tensor
    X: torch.Tensor


def response(call, q, k, v, g, beta) -> Response:
    """The response of tokens [C, T, ...]; `call` is `chunk_kda` with its options.

    The columns of a state never meet. So one call with values [v, 0] of width V + K and the initial
    state [0, I] has X in the first columns, and in the others what becomes of each unit vector.
    """
    (C, _, HV, V), K = v.shape, q.shape[3]
    wide_v = torch.cat([v, v.new_zeros(*v.shape[:3], K)], dim=-1)
    identity = torch.eye(K, dtype=_state_dtype(q), device=q.device).expand(C, HV, K, K)
    state = torch.cat([identity.new_zeros(C, HV, K, V), identity], dim=-1)
    o, state = call(q, k, wide_v, g, beta, initial_state=state)
    return Response(o[..., V:], state[..., V:], state[..., :V])


def fold(maps, state):
    """Send a state [C, HV, K, V] through maps [R, C, HV, K, K + V], in order; each is [M, X]."""
    K = state.shape[-2]
    with torch.autocast(state.device.type, enabled=False):  # a state keeps its dtype
        for M_X in maps:
            state = M_X[..., :K] @ state + M_X[..., K:]
    return state


class _Border(NamedTuple):
    """What a piece knows of the others: the state S before it, or None where nothing enters.

    For backward: P and M of its own entering tokens, and the M of all later ranks.
    """

    state: torch.Tensor | None = None
    P: torch.Tensor | None = None
    M: torch.Tensor | None = None
    M_later: torch.Tensor | None = None


@torch.no_grad()
def _gather_maps(call, piece, tokens, states, wants_gradient, group) -> _Border:
    """One map per rank, for the sequence that leaves it to the right.

    A sequence that begins on the rank leaves with a state that is known: M = 0 then. The fold
    starts there, so that no number of another sequence takes part, be it infinite.
    """
    if not piece.any_crosses:
        return _Border()
    entering, leaving = ([x[:, part] for x in tokens] for part in (piece.entering, piece.leaving))
    P = M = None
    shape = _state_shape(piece, *tokens)
    M_out = X_out = torch.zeros(shape, dtype=_state_dtype(tokens[0]), device=tokens[0].device)
    M_out = M_out.new_zeros(*shape[:-1], shape[-2])
    if piece.passes_through or (piece.enters and wants_gradient):
        P, M, X = response(call, *entering)
    if piece.passes_through:
        M_out, X_out = M, X
    elif piece.leaves:
        begun = None if states is None else states[piece.last - len(X_out) : piece.last]
        X_out = call(*leaving, initial_state=begun)[1]

    maps = all_gather(torch.cat([M_out, X_out], dim=-1), group, "maps")
    rank, K = dist.get_rank(group), shape[-2]
    state = M_later = None
    if piece.enters:
        state = fold(maps[piece.since : rank], torch.zeros_like(X_out))
    if piece.leaves and wants_gradient:
        M_later = maps[rank + 1 : piece.until + 1, ..., :K].clone()
    return _Border(state, P, M, M_later)


def _run_piece(call, piece, tokens, states, entering_state):
    """Outputs of the piece, and the state at the end of each sequence's part of it."""
    initial_state = None if states is None else states[piece.first : piece.last]
    if entering_state is not None:
        if initial_state is None:
            rows = piece.last - piece.first
            initial_state = entering_state.new_zeros(rows, *entering_state.shape[1:])
        initial_state = torch.cat([entering_state, initial_state[len(entering_state) :]])
    packing = {}
    if piece.cu_seqlens is not None:
        cu = torch.tensor(piece.cu_seqlens, dtype=torch.int32)
        packing["cu_seqlens"] = cu.to(tokens[0].device)
        if call.func is not reference.chunk_kda:
            packing["cu_seqlens_cpu"] = cu
    return call(*tokens, initial_state=initial_state, **packing)


class _Exchange(torch.autograd.Function):
    """Outputs and end states of the piece as they are, final states added up over the ranks.

    Its backward runs before that of the piece. It gathers what the others' outputs say about the
    states, and hands the piece the gradient of the state that has left to the right. It gets the
    inputs too, and adds nothing to their gradients: so it is in the graph on every rank, and where
    there are no tokens, the gradients are zeros, which data parallelism waits for.
    """

    @staticmethod
    def forward(ctx, piece, group, wants_final, o, ends, P, M, M_later, *inputs):
        ctx.piece, ctx.group, ctx.wants_final = piece, group, wants_final
        ctx.adds = [torch.zeros_like(x) if o.shape[1] == 0 else None for x in inputs]
        ctx.ends = ends.shape, ends.dtype, ends.device
        ctx.save_for_backward(P, M, M_later)
        final_state = None
        if wants_final:
            final_state = ends.new_zeros(piece.total, *ends.shape[1:])
            final_state[piece.ending] = ends[: piece.ended]
            final_state = sum_over_ranks(final_state, group, "final states")
        return o.view_as(o), final_state

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_o, d_final):
        piece, (P, M, M_later) = ctx.piece, ctx.saved_tensors
        shape, dtype, device = ctx.ends
        d_ends = torch.zeros(shape, dtype=dtype, device=device)
        if ctx.wants_final:
            d_final = sum_over_ranks(d_final, ctx.group, "gradients of final states")
            d_ends[: piece.ended] = d_final[piece.ending]
        if piece.any_crosses:
            d_state = _gradient_of_entering_state(piece, d_o, d_ends, P, M)
            everyone = all_gather(d_state, ctx.group, "gradients of states")
            if piece.leaves:
                later = everyone[dist.get_rank(ctx.group) + 1 : piece.until + 1]
                maps = torch.cat([M_later.mT, later], dim=-1).flip(0)  # from the right
                d_ends[piece.ended :] = fold(maps, torch.zeros_like(d_state))
        return None, None, None, d_o, d_ends, None, None, None, *ctx.adds


def _gradient_of_entering_state(piece, d_o, d_ends, P, M):
    """P^T d_o + M^T d_end, as if nothing to the right depended on this piece; [C, HV, K, V]."""
    rows = len(d_o) if piece.cu_seqlens is None else 1
    if not piece.enters:
        return d_ends.new_zeros(rows, *d_ends.shape[1:])
    with torch.autocast(d_o.device.type, enabled=False):
        P, d_o = P.to(d_ends.dtype), d_o[:, piece.entering].to(d_ends.dtype)
        return torch.einsum("cthk,cthv->chkv", P, d_o) + M.mT @ d_ends[:rows]


def _local_function(q, k, v, backend="auto"):
    """`chunk_kda` of the kernels where they run and take q, else that of the reference.

    With it q, k and v, for the kernels in the dtype of an enclosing autocast.
    """
    interpreted = kernels._missing is None and kernels.triton.knobs.runtime.interpret
    on_gpu = getattr(q, "is_cuda", False)
    automatic = (on_gpu or interpreted) and getattr(q, "dtype", None) != torch.float64
    if backend == "reference" or (backend == "auto" and not automatic):
        return reference.chunk_kda, (q, k, v)
    from ..kernels._common import autocast

    return kernels.chunk_kda, autocast(q, k, v)


def _state_dtype(q):
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _state_shape(piece, q, k, v, g, beta):
    """The states that cross one border: [B or 1, HV, K, V]."""
    rows = len(q) if piece.cu_seqlens is None else 1
    return rows, v.shape[2], q.shape[3], v.shape[3]
