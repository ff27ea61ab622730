"""The forward pass of `chunk_kda`: the six steps, each in its own file, and what they pass on.

1 cumsum      g -> G                          cumulated gate, log2 units
2 intra       q, k, G, beta -> A_kk, A_qk     products with the decay inside
3 solve_tril  A_kk -> A_inv                   (I + A_kk)^-1
4 wy          A_inv, k, v, G, beta -> w, u, kg
5 state       w, u, kg, G -> h, v', S         the one sequential pass
6 output      q, G, h, A_qk, v' -> o
"""

from typing import NamedTuple

import torch

from .checks import SAFE_LOWER_BOUND
from .cumsum import chunk_local_cumsum, kda_gate_chunk_cumsum
from .intra import chunk_kda_scaled_dot_kkt_fwd
from .output import chunk_gla_fwd_o_gk
from .solve_tril import solve_tril_kda
from .state import chunk_gated_delta_rule_fwd_h_kda
from .wy import recompute_w_u_fwd


class Scores(NamedTuple):
    """What the steps within a chunk leave behind, all that a backward cannot make anew cheaply.

    A_qk: float32 [B, T, HV, C]; A_inv: [B, T, HV, C] in q's dtype; q_rstd, k_rstd: float32
    [B, T, H], or None without the norm.
    """

    A_qk: torch.Tensor
    A_inv: torch.Tensor
    q_rstd: torch.Tensor | None
    k_rstd: torch.Tensor | None


class Sweep(NamedTuple):
    """What the sweep over the chunks made: G and its residual (or None), w, kg, h, v', and qg.

    Large, so by default the backward makes it anew. qg is None where no backward asks for it.
    """

    G: torch.Tensor
    G_residual: torch.Tensor | None
    w: torch.Tensor
    kg: torch.Tensor
    qg: torch.Tensor | None
    h: torch.Tensor
    v_new: torch.Tensor


def chunk_kda_fwd(
    q,
    k,
    v,
    g,
    beta,
    A_log=None,
    dt_bias=None,
    initial_state=None,
    *,
    scale,
    output_final_state=False,
    use_qk_l2norm=False,
    use_gate=False,
    use_beta_sigmoid=False,
    allow_neg_eigval=False,
    lower_bound=None,
    state_v_first=False,
    chunk_size=64,
    layout,
    with_qg=False,
):
    """The six steps in order. Arguments as in `chunk_kda`, already checked.

    layout: the `ChunkLayout` of the call. with_qg: also make qg, which only a backward needs.

    Returns:
        (o, final_state or None, Scores, Sweep).
    """
    beta_options = dict(use_beta_sigmoid=use_beta_sigmoid, allow_neg_eigval=allow_neg_eigval)
    G, G_residual = cumulated_gate(
        q, g, A_log, dt_bias, use_gate, lower_bound, chunk_size, layout=layout
    )
    gate = dict(G_residual=G_residual, layout=layout)
    A_kk, A_qk, q_rstd, k_rstd = chunk_kda_scaled_dot_kkt_fwd(
        q,
        k,
        G,
        beta,
        scale,
        chunk_size,
        bounded=is_bounded(use_gate, lower_bound),
        use_qk_l2norm=use_qk_l2norm,
        **beta_options,
        **gate,
    )
    A_inv = solve_tril_kda(A_kk, layout=layout, output_dtype=k.dtype)
    del A_kk
    scores = Scores(A_qk, A_inv, q_rstd, k_rstd)
    sweep, final_state = sweep_chunks(
        q if with_qg else None,
        k,
        v,
        beta,
        G,
        scores,
        initial_state,
        scale=scale,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        **beta_options,
        **gate,
    )
    o = chunk_gla_fwd_o_gk(q, sweep.v_new, G, A_qk, sweep.h, scale, q_rstd=q_rstd, **gate)
    return o, final_state, scores, sweep


def is_bounded(use_gate, lower_bound) -> bool:
    """Whether no gate can be below -5, so that one reference row serves 16 tokens."""
    return use_gate and lower_bound is not None and lower_bound >= SAFE_LOWER_BOUND


def cumulated_gate(q, g, A_log, dt_bias, use_gate, lower_bound, chunk_size, *, layout):
    """(G, residual or None): step 1. Unbounded gates with float32 inputs need the residual."""
    residual = q.dtype == torch.float32 and not is_bounded(use_gate, lower_bound)
    options = dict(layout=layout, residual=residual)
    if use_gate:
        G = kda_gate_chunk_cumsum(g, A_log, dt_bias, lower_bound, chunk_size, **options)
    else:
        G = chunk_local_cumsum(g, chunk_size, **options)
    return G if residual else (G, None)


def sweep_chunks(
    q,
    k,
    v,
    beta,
    G,
    scores,
    initial_state,
    *,
    scale,
    G_residual,
    layout,
    output_final_state=False,
    state_v_first=False,
    **beta_options,
):
    """Steps 4 and 5, which the forward runs, and the backward again. q: None unless qg is wanted.

    Returns:
        (Sweep, final state or None).
    """
    gate = dict(G_residual=G_residual, layout=layout)
    w, u, kg, *qg = recompute_w_u_fwd(
        k,
        v,
        beta,
        scores.A_inv,
        G,
        k_rstd=scores.k_rstd,
        q=q,
        q_rstd=scores.q_rstd,
        scale=scale,
        **beta_options,
        **gate,
    )
    h, v_new, final_state = chunk_gated_delta_rule_fwd_h_kda(
        kg,
        w,
        u,
        G,
        scores.A_qk.shape[-1],
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        **gate,
    )
    return Sweep(G, G_residual, w, kg, qg[0] if qg else None, h, v_new), final_state
