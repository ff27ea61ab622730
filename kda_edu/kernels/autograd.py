"""Autograd: the two passes as custom operators that `torch.compile` and autograd can see.

An operator has fixed outputs, all tensors: what a call does not make is an empty one. Beside its
results the forward returns what the backward wants kept: `Scores` and `Sweep` of the six steps, or
the borders and `Prepared` of the two kernels, where these serve the call.

The operators' names carry the package's, so that a copy of this folder can live beside another.
"""

import torch
from torch import Tensor

from .backward import chunk_kda_bwd
from .forward import Scores, Sweep, chunk_kda_fwd, is_bounded
from .fused import CHUNK, SEGMENT_OF_TRAINING, Prepared, fused_chunk_kda_fwd, segment_count, serves
from .fused_backward import fused_chunk_kda_bwd
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
    "scale use_qk_l2norm use_gate use_beta_sigmoid allow_neg_eigval lower_bound state_v_first "
    "chunk_size"
).split()
_KEPT = len(Scores._fields + Sweep._fields)  # places for what a forward keeps


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
    """(o, final_state, *kept), see above; Sweep or Prepared only with `store`."""
    inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    options = dict(
        scale=scale,
        output_final_state=output_final_state,
        use_qk_l2norm=use_qk_l2norm,
        use_beta_sigmoid=use_beta_sigmoid,
        allow_neg_eigval=allow_neg_eigval,
        lower_bound=lower_bound,
        state_v_first=state_v_first,
    )
    if serves(q, v, use_gate, lower_bound):
        layout = _layout(q, CHUNK, cu_seqlens, cu_seqlens_cpu, fixed=True)
        o, final_state, made, borders = fused_chunk_kda_fwd(
            *inputs, **options, layout=layout, keep_borders=True
        )
        kept = (borders, *(made if store else ()))
    else:
        layout = _layout(q, chunk_size, cu_seqlens, cu_seqlens_cpu, fixed=store)
        options |= dict(use_gate=use_gate, chunk_size=chunk_size)
        o, final_state, scores, sweep = chunk_kda_fwd(
            *inputs, **options, layout=layout, with_qg=store
        )
        kept = (*scores, *(sweep if store else ()))
    made = (o, final_state, *kept, *[None] * (_KEPT - len(kept)))
    return tuple(q.new_empty(0) if x is None else x for x in made)


@chunk_kda_op.register_fake
def _(*arguments):
    a = dict(zip(_NAMES, arguments, strict=True))
    q, v, store = a["q"], a["v"], a["store"]
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    N = B if a["cu_seqlens"] is None else a["cu_seqlens"].shape[0] - 1
    fused = serves(q, v, a["use_gate"], a["lower_bound"])
    C = CHUNK if fused else a["chunk_size"]
    rows, NT = B, -(-T // C)
    if a["cu_seqlens"] is not None:
        rows, NT = 1, (T + N * (C - 1)) // C
    sides = (V, K) if a["state_v_first"] else (K, V)
    wide, narrow = torch.float32, q.dtype

    def make(exists, *shape, dtype=wide):
        return q.new_empty(*(shape if exists else (0,)), dtype=dtype if exists else q.dtype)

    made = [
        make(True, B, T, HV, V, dtype=v.dtype),
        make(a["output_final_state"], N, HV, *sides),
    ]
    if fused:
        segments = segment_count(NT, SEGMENT_OF_TRAINING)
        made += [
            make(segments > 1, segments - 1, rows, HV, V, K),
            *(make(store, B, T, HV, D, dtype=narrow) for D in (K, K, K, V, C)),
            make(store, rows * NT, HV, K),
            make(store, B, T, HV, C),
        ]
        return (*made, *(make(False) for _ in range(2 + _KEPT - len(made))))
    bounded = is_bounded(a["use_gate"], a["lower_bound"])
    return (
        *made,
        make(True, B, T, HV, C),
        make(True, B, T, HV, C, dtype=narrow),
        make(a["use_qk_l2norm"], B, T, H),
        make(a["use_qk_l2norm"], B, T, H),
        make(store, B, T, HV, K),
        make(store and q.dtype == wide and not bounded, B, T, HV, K),
        *(make(store, B, T, HV, K, dtype=narrow) for _ in range(3)),
        make(store, rows, NT, HV, V, K, dtype=state_dtype(q.dtype)),
        make(store, B, T, HV, V, dtype=narrow),
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
    use_qk_l2norm: bool,
    use_gate: bool,
    use_beta_sigmoid: bool,
    allow_neg_eigval: bool,
    lower_bound: float | None,
    state_v_first: bool,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the first eight; empty where there is no such input. saved: as returned."""
    if d_final_state is not None and d_final_state.numel() == 0:  # of a state that was not made
        d_final_state = None
    inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    d_outputs = (torch.zeros_like(v) if do is None else do, d_final_state)
    options = dict(
        scale=scale,
        use_beta_sigmoid=use_beta_sigmoid,
        allow_neg_eigval=allow_neg_eigval,
        lower_bound=lower_bound,
        state_v_first=state_v_first,
    )
    if serves(q, v, use_gate, lower_bound):
        borders, *made = map(_none_if_absent, saved[: 1 + len(Prepared._fields)])
        gradients = fused_chunk_kda_bwd(
            *inputs,
            *d_outputs,
            None if made[0] is None else Prepared(*made),
            borders,
            **options,
            use_qk_l2norm=use_qk_l2norm,
            layout=_layout(q, CHUNK, cu_seqlens, cu_seqlens_cpu, fixed=True),
        )
    else:
        scores, sweep = saved[: len(Scores._fields)], saved[len(Scores._fields) :]
        stored = sweep[0].dim() == 4
        gradients = chunk_kda_bwd(
            *inputs,
            *d_outputs,
            Scores(*map(_none_if_absent, scores)),
            Sweep(*map(_none_if_absent, sweep)) if stored else None,
            **options,
            use_gate=use_gate,
            chunk_size=chunk_size,
            layout=_layout(q, chunk_size, cu_seqlens, cu_seqlens_cpu, fixed=stored),
        )
    return tuple(q.new_empty(0) if x is None else x for x in gradients)


@chunk_kda_bwd_op.register_fake
def _(q, k, v, g, beta, A_log, dt_bias, initial_state, *_):
    inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    return tuple(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs)


def _layout(q, chunk_size, cu_seqlens, cu_seqlens_cpu, fixed):
    """fixed: outputs have a row per chunk: their number may depend on shapes only, no values."""
    known = None if fixed else cu_seqlens_cpu
    layout = chunk_layout(q.shape[0], q.shape[1], chunk_size, cu_seqlens, known)
    return layout._replace(covers=cu_seqlens is None or cu_seqlens_cpu is not None)


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
