"""`chunk_kda`: Kimi Delta Attention over whole sequences, chunk by chunk.

The six steps, each in its own file, and the matrices they pass on:

    1 cumsum      g -> G                          cumulated gate, log2 units
    2 intra       q, k, G, beta -> A_kk, A_qk     products with the decay inside
    3 solve_tril  A_kk -> A_inv                   (I + A_kk)^-1
    4 wy          A_inv, k, v, G, beta -> w, u, kg
    5 state       w, u, kg, G -> h, v', S         the one sequential pass
    6 output      q, G, h, A_qk, v' -> o
"""

import torch

from ._common import autocast, forward_only, on_device_of_first_argument
from .checks import SAFE_LOWER_BOUND, check_kda
from .cumsum import chunk_local_cumsum, kda_gate_chunk_cumsum
from .intra import chunk_kda_scaled_dot_kkt_fwd
from .output import chunk_gla_fwd_o_gk
from .sequences import chunk_layout
from .solve_tril import solve_tril_kda
from .state import chunk_gated_delta_rule_fwd_h_kda
from .wy import recompute_w_u_fwd


@on_device_of_first_argument
def chunk_kda(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    safe_gate=False,
    lower_bound=None,
    disable_recompute=False,
    return_intermediate_states=False,
    state_v_first=False,
    cu_seqlens=None,
    cu_seqlens_cpu=None,
    *,
    A_log=None,
    dt_bias=None,
    chunk_size=64,
):
    """Kimi Delta Attention (arXiv 2510.26692), in chunks of `chunk_size` tokens.

    Args:
        q, k: queries and keys [B, T, H, K], K <= 256; float32, float16 or bfloat16.
        v: values [B, T, HV, V], same dtype; HV is a multiple of H, and value head h reads
            query/key head h // (HV / H).
        g: natural log of the decay [B, T, HV, K], <= 0, -inf allowed; or the raw gate input with
            `use_gate_in_kernel`. Any floating dtype; computed in float32.
        beta: write strength [B, T, HV]; or its logit with `use_beta_sigmoid_in_kernel`.
        scale: multiplies q. Default K ** -0.5.
        initial_state: float32 [N, HV, K, V]; N = B, or the number of packed sequences.
        output_final_state: also return the float32 state after the last token.
        use_qk_l2norm_in_kernel: x / sqrt(sum x^2 + 1e-6) for q and k first.
        use_gate_in_kernel: g = -exp(A_log) softplus(g + dt_bias); with `lower_bound`,
            g = lower_bound sigmoid(exp(A_log) (g + dt_bias)).
        use_beta_sigmoid_in_kernel: beta = sigmoid(beta); with `allow_neg_eigval` twice that.
        safe_gate: accepted for compatibility, and with `use_gate_in_kernel` checks that
            -5 <= lower_bound < 0. Nothing has to be promised: every gate is right, and the fast
            path is chosen per 16 tokens by the gates themselves.
        disable_recompute: accepted for compatibility; it concerns the backward pass.
        return_intermediate_states: also return the state before each chunk; inference only.
        state_v_first: states are [N, HV, V, K].
        cu_seqlens: int32 or int64 [N + 1] on the GPU: sequences packed along T; needs B = 1. Its
            values are not read on the host: start at 0, never decrease, end at T.
        cu_seqlens_cpu: a copy on the CPU; its values are checked, and spare an upper bound.
        A_log, dt_bias: gate parameters, HV and HV * K numbers.
        chunk_size: 16, 32 or 64.

    Returns:
        (o, final_state), o [B, T, HV, V] in v's dtype, final_state None unless asked for; with
        `return_intermediate_states` (o, final_state, h), h [B, NT, HV, K, V] ([.., V, K] with
        `state_v_first`).

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came.
        NotImplementedError: in backward().
    """
    q, k, v = autocast(q, k, v)
    shapes = check_kda(
        q,
        k,
        v,
        g,
        beta,
        A_log=A_log,
        dt_bias=dt_bias,
        scale=scale,
        initial_state=initial_state,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        safe_gate=safe_gate,
        lower_bound=lower_bound,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        chunk_size=chunk_size,
    )
    inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    with torch.no_grad():
        o, final_state, h = chunk_kda_fwd(
            *(None if x is None else x.detach() for x in inputs),
            scale=shapes.K**-0.5 if scale is None else float(scale),
            output_final_state=output_final_state,
            use_qk_l2norm=use_qk_l2norm_in_kernel,
            use_gate=use_gate_in_kernel,
            use_beta_sigmoid=use_beta_sigmoid_in_kernel,
            allow_neg_eigval=allow_neg_eigval,
            lower_bound=lower_bound,
            state_v_first=state_v_first,
            chunk_size=chunk_size,
            layout=chunk_layout(shapes.B, shapes.T, chunk_size, cu_seqlens, cu_seqlens_cpu),
        )
    o, final_state = forward_only("chunk_kda", (o, final_state), inputs)
    if return_intermediate_states:
        return o, final_state, h if state_v_first else h.transpose(-1, -2)
    return o, final_state


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
):
    """The six steps in order. Arguments as in `chunk_kda`, already checked.

    Returns:
        (o, final_state or None, h), h as in `chunk_gated_delta_rule_fwd_h_kda`.
    """
    bounded = use_gate and lower_bound is not None and lower_bound >= SAFE_LOWER_BOUND
    residual = q.dtype == torch.float32 and not bounded
    beta_options = dict(use_beta_sigmoid=use_beta_sigmoid, allow_neg_eigval=allow_neg_eigval)
    if use_gate:
        G = kda_gate_chunk_cumsum(
            g, A_log, dt_bias, lower_bound, chunk_size, layout=layout, residual=residual
        )
    else:
        G = chunk_local_cumsum(g, chunk_size, layout=layout, residual=residual)
    G, G_residual = G if residual else (G, None)
    gate = dict(G_residual=G_residual, layout=layout)

    A_kk, A_qk, q_rstd, k_rstd = chunk_kda_scaled_dot_kkt_fwd(
        q,
        k,
        G,
        beta,
        scale,
        chunk_size,
        bounded=bounded,
        use_qk_l2norm=use_qk_l2norm,
        **beta_options,
        **gate,
    )
    A_inv = solve_tril_kda(A_kk, layout=layout, output_dtype=k.dtype)
    w, u, kg = recompute_w_u_fwd(k, v, beta, A_inv, G, k_rstd=k_rstd, **beta_options, **gate)
    h, v_new, final_state = chunk_gated_delta_rule_fwd_h_kda(
        kg,
        w,
        u,
        G,
        chunk_size,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        **gate,
    )
    o = chunk_gla_fwd_o_gk(q, v_new, G, A_qk, h, scale, q_rstd=q_rstd, **gate)
    return o, final_state, h
