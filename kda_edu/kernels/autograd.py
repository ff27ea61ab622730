"""Autograd: the two passes as custom operators that `torch.compile` and autograd can see.

An operator has fixed outputs, all tensors: what a call does not make is an empty one. The
operators' names carry the package's, so that a copy of this folder can live beside another.
"""

import torch
from torch import Tensor

from .backward import chunk_kda_bwd
from .forward import Scores, Sweep, chunk_kda_fwd
from .sequences import chunk_layout
from .state import state_dtype

NAMESPACE = __package__.replace(".", "_")
_NAMES = (
    "q k v g beta A_log dt_bias initial_state cu_seqlens cu_seqlens_cpu scale output_final_state "
    "use_qk_l2norm use_gate use_beta_sigmoid allow_neg_eigval lower_bound state_v_first chunk_size "
    "store"
).split()
_TENSORS = _NAMES[:10]
_OF_BACKWARD = (
    "scale use_gate use_beta_sigmoid allow_neg_eigval lower_bound state_v_first chunk_size"
).split()


@torch.library.custom_op(f"{NAMESPACE}::chunk_kda_fwd", mutates_args=())
def chunk_kda_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    scale: float,
    output_final_state: bool,
    use_qk_l2norm: bool,
    use_gate: bool,
    use_beta_sigmoid: bool,
    allow_neg_eigval: bool,
    lower_bound: float | None,
    state_v_first: bool,
    chunk_size: int,
    store: bool,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
]:  # fmt: skip
    """(o, final_state, *Scores, *Sweep) of `chunk_kda_fwd`; the Sweep only with `store`."""
    o, final_state, scores, sweep = chunk_kda_fwd(
        q,
        k,
        v,
        g,
        beta,
        A_log,
        dt_bias,
        initial_state,
        scale=scale,
        output_final_state=output_final_state,
        use_qk_l2norm=use_qk_l2norm,
        use_gate=use_gate,
        use_beta_sigmoid=use_beta_sigmoid,
        allow_neg_eigval=allow_neg_eigval,
        lower_bound=lower_bound,
        state_v_first=state_v_first,
        chunk_size=chunk_size,
        layout=_layout(q, chunk_size, cu_seqlens, cu_seqlens_cpu, store),
        with_qg=store,
    )
    sweep = sweep if store else [None] * len(Sweep._fields)
    return tuple(q.new_empty(0) if x is None else x for x in (o, final_state, *scores, *sweep))


@chunk_kda_op.register_fake
def _(*arguments):
    a = dict(zip(_NAMES, arguments, strict=True))
    q, v, C, store = a["q"], a["v"], a["chunk_size"], a["store"]
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    N = B if a["cu_seqlens"] is None else a["cu_seqlens"].shape[0] - 1
    chunks = -(-T // C) if a["cu_seqlens"] is None else (T + N * (C - 1)) // C
    sides = (V, K) if a["state_v_first"] else (K, V)
    bounded = a["use_gate"] and a["lower_bound"] is not None and a["lower_bound"] >= -5.0
    residual = q.dtype == torch.float32 and not bounded
    wide = torch.float32

    def make(exists, *shape, dtype):
        return q.new_empty(*(shape if exists else (0,)), dtype=dtype if exists else q.dtype)

    return (
        make(True, B, T, HV, V, dtype=v.dtype),
        make(a["output_final_state"], N, HV, *sides, dtype=wide),
        make(True, B, T, HV, C, dtype=wide),
        make(True, B, T, HV, C, dtype=q.dtype),
        make(a["use_qk_l2norm"], B, T, H, dtype=wide),
        make(a["use_qk_l2norm"], B, T, H, dtype=wide),
        make(store, B, T, HV, K, dtype=wide),
        make(store and residual, B, T, HV, K, dtype=wide),
        make(store, B, T, HV, K, dtype=q.dtype),
        make(store, B, T, HV, K, dtype=q.dtype),
        make(store, B, T, HV, K, dtype=q.dtype),
        make(store, B, chunks, HV, V, K, dtype=state_dtype(q.dtype)),
        make(store, B, T, HV, V, dtype=q.dtype),
    )


@torch.library.custom_op(f"{NAMESPACE}::chunk_kda_bwd", mutates_args=())
def chunk_kda_bwd_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    do: Tensor | None,
    d_final_state: Tensor | None,
    saved: list[Tensor],
    scale: float,
    use_gate: bool,
    use_beta_sigmoid: bool,
    allow_neg_eigval: bool,
    lower_bound: float | None,
    state_v_first: bool,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the first eight; empty where there is no such input. saved: as returned."""
    scores, sweep = saved[: len(Scores._fields)], saved[len(Scores._fields) :]
    stored = sweep[0].dim() == 4
    if d_final_state is not None and d_final_state.numel() == 0:  # of a state that was not made
        d_final_state = None
    gradients = chunk_kda_bwd(
        q,
        k,
        v,
        g,
        beta,
        A_log,
        dt_bias,
        initial_state,
        torch.zeros_like(v) if do is None else do,
        d_final_state,
        Scores(*map(_none_if_absent, scores)),
        Sweep(*map(_none_if_absent, sweep)) if stored else None,
        scale=scale,
        use_gate=use_gate,
        use_beta_sigmoid=use_beta_sigmoid,
        allow_neg_eigval=allow_neg_eigval,
        lower_bound=lower_bound,
        state_v_first=state_v_first,
        chunk_size=chunk_size,
        layout=_layout(q, chunk_size, cu_seqlens, cu_seqlens_cpu, stored),
    )
    return tuple(q.new_empty(0) if x is None else x for x in gradients)


@chunk_kda_bwd_op.register_fake
def _(q, k, v, g, beta, A_log, dt_bias, initial_state, *_):
    inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    return tuple(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs)


def _layout(q, chunk_size, cu_seqlens, cu_seqlens_cpu, store):
    """h is an output in stored mode: its size may then depend on shapes only, not on values."""
    known = None if store else cu_seqlens_cpu
    return chunk_layout(q.shape[0], q.shape[1], chunk_size, cu_seqlens, known)


def _none_if_absent(x):
    return None if x.dim() == 1 else x


def _keep(ctx, inputs, output):
    a = dict(zip(_NAMES, inputs, strict=True))
    ctx.options = {name: a[name] for name in _OF_BACKWARD}
    ctx.save_for_backward(*(a[name] for name in _TENSORS), *output[2:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx, do, d_final_state, *_):
    kept = ctx.saved_tensors  # once: a checkpoint unpacks them a single time
    tensors, saved = kept[: len(_TENSORS)], kept[len(_TENSORS) :]
    gradients = chunk_kda_bwd_op(*tensors, do, d_final_state, list(saved), **ctx.options)
    return only_of_tensors(tensors, gradients) + (None,) * (len(_NAMES) - len(gradients))


def only_of_tensors(tensors, gradients):
    """None for the gradient of an input that was not given."""
    return tuple(None if x is None else d for x, d in zip(tensors, gradients, strict=False))


chunk_kda_op.register_autograd(_differentiate, setup_context=_keep)


def _twice(ctx, *_):
    raise NotImplementedError(
        "chunk_kda: expected to be differentiated once, got a second backward through its "
        "gradients. kda_edu.reference, the same formulas in plain PyTorch, can be differentiated "
        "any number of times."
    )


chunk_kda_bwd_op.register_autograd(_twice)
