"""Serving: the recurrence over a pool of states, one slot per request, updated in place."""

import torch

from ._common import autocast, forward_only
from .checks import check_flags, check_kda, check_state, check_tensor
from .recurrent import launch_recurrent


def fused_recurrent_kda_update(
    q,
    k,
    v,
    g,
    beta,
    state_pool,
    slot_indices,
    A_log=None,
    dt_bias=None,
    scale=None,
    use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    lower_bound=None,
    state_v_first=False,
    cu_seqlens=None,
):
    """Like `fused_recurrent_kda`, with the states of many requests in one pool, updated in place.

    Sequence n starts from `state_pool[slot_indices[n]]` and leaves its final state there. A new
    request must find zeros in its slot: the caller clears it. All else is as in
    `fused_recurrent_kda`, and the arguments not named here are the same.

    Args:
        state_pool: float32 [slots, HV, K, V] (`state_v_first`: [slots, HV, V, K]). It may be a
            strided view along its first dimension; each slot must be contiguous.
        slot_indices: int32 or int64 [N], where N is B, or len(cu_seqlens) - 1. Negative means
            padding: no state is touched and the rows of o are zero. No slot may occur twice, or
            the two sequences race. An index >= slots raises on a CPU; on a GPU, where reading it
            would mean waiting, it is treated as padding.

    Returns:
        o [B, T, HV, V] in the dtype of v.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came. A pool that
        would have to be copied or cast is refused, since the copy would be updated instead.
    """
    q, k, v = autocast(q, k, v)
    options = dict(
        A_log=A_log,
        dt_bias=dt_bias,
        scale=scale,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        lower_bound=lower_bound,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
    )
    check_flags(use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
    shapes = check_kda(q, k, v, g, beta, **options)
    _check_pool(state_pool, slot_indices, shapes, q, state_v_first)
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    launch_recurrent(
        (q, k, v, g, beta),
        o,
        shapes,
        initial_state=state_pool,
        final_state=state_pool,
        slot_indices=slot_indices.contiguous(),
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        **options,
    )
    inputs = (q, k, v, g, beta, A_log, dt_bias, state_pool)
    return forward_only("fused_recurrent_kda_update", (o,), inputs)[0]


def _check_pool(state_pool, slot_indices, shapes, q, state_v_first):
    check_tensor("state_pool", state_pool)
    slots = state_pool.shape[0] if state_pool.ndim else 0
    check_state("state_pool", state_pool, shapes, q, state_v_first, slots=slots)
    size = shapes.HV * shapes.K * shapes.V
    overlapping = slots > 1 and state_pool.stride(0) < size
    if slots > 0 and (overlapping or not state_pool[0].is_contiguous()):
        raise ValueError(
            "state_pool: expected contiguous slots that do not overlap, since it is updated in "
            f"place; got strides {state_pool.stride()} for shape {tuple(state_pool.shape)}"
        )
    check_tensor(
        "slot_indices",
        slot_indices,
        shape=(shapes.N,),
        dtypes=(torch.int32, torch.int64),
        device=q.device,
    )
    if slot_indices.device.type == "cpu" and shapes.N > 0 and int(slot_indices.max()) >= slots:
        raise ValueError(
            f"slot_indices: expected values below {slots}, the number of slots in state_pool, "
            f"got {int(slot_indices.max())}"
        )
