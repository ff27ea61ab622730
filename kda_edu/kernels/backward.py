"""The backward pass of `chunk_kda`, in four steps.

    0 forward           makes G, w, kg, qg, h and v' anew, unless they were stored
    1 backward_state    do, dS -> dv', dh, d initial state     the one sequential pass
    2 backward_scores   dv', do -> dr, dv, dA_kk, dA_qk        through the triangular inverse
    3 backward_qk       dr, dh, dA -> dq, dk, dG, dbeta        the decay inside the products
    4 backward_gate     dG -> dg, dA_log, d dt_bias            reverse cumulated sum, gate

Bytes per token and head, K = V = 128, C = 64, bf16, one value head per key head, once from memory:
steps 0 to 4 move 4.7 + 2.1 + 2.2 + 4.4 + 1.1 = 14.4 KB. Stored mode leaves out 0: 9.7 KB.
"""

from .backward_gate import chunk_kda_bwd_gate
from .backward_qk import chunk_kda_bwd_dqk
from .backward_scores import chunk_kda_bwd_dA
from .backward_state import chunk_kda_bwd_dhu
from .forward import cumulated_gate, is_bounded, sweep_chunks


def chunk_kda_bwd(
    q,
    k,
    v,
    g,
    beta,
    A_log,
    dt_bias,
    initial_state,
    do,
    d_final_state,
    scores,
    sweep=None,
    *,
    scale,
    use_gate=False,
    use_beta_sigmoid=False,
    allow_neg_eigval=False,
    lower_bound=None,
    state_v_first=False,
    chunk_size=64,
    layout,
):
    """Gradients of every input of `chunk_kda_fwd`.

    Args:
        q ... initial_state: as given to the forward.
        do: gradient of the output [B, T, HV, V]; d_final_state: of the final state, or None.
        scores: the `Scores` of the forward. sweep: its `Sweep`, or None: made anew.
        The rest as in the forward.

    Returns:
        (dq, dk, dv, dg, dbeta, dA_log, d_dt_bias, d_initial_state), each in its input's dtype,
        None where there is no such input.
    """
    beta_options = dict(use_beta_sigmoid=use_beta_sigmoid, allow_neg_eigval=allow_neg_eigval)
    if sweep is None:
        G, residual = cumulated_gate(
            q, g, A_log, dt_bias, use_gate, lower_bound, chunk_size, layout=layout
        )
        sweep, _ = sweep_chunks(
            q,
            k,
            v,
            beta,
            G,
            scores,
            initial_state,
            scale=scale,
            state_v_first=state_v_first,
            G_residual=residual,
            layout=layout,
            **beta_options,
        )
    G, residual, w, kg, qg, h, v_new = sweep
    del sweep
    dh, dv_new, d_initial_state = chunk_kda_bwd_dhu(
        qg,
        kg,
        w,
        do,
        scores.A_qk,
        G,
        layout,
        G_residual=residual,
        d_final_state=d_final_state,
        output_d_initial_state=initial_state is not None,
        state_v_first=state_v_first,
    )
    del qg, kg, w
    dr, dv, dA_kk, dA_qk, dbeta = chunk_kda_bwd_dA(
        scores.A_inv, v_new, do, v, beta, dv_new, layout, **beta_options
    )
    del dv_new
    dq, dk, dG, dG_end, dbeta = chunk_kda_bwd_dqk(
        q,
        k,
        G,
        beta,
        do,
        dr,
        v_new,
        h,
        dh,
        dA_qk,
        dA_kk,
        dbeta,
        layout,
        scale,
        G_residual=residual,
        q_rstd=scores.q_rstd,
        k_rstd=scores.k_rstd,
        bounded=is_bounded(use_gate, lower_bound),
        **beta_options,
    )
    del G, h, dh, v_new, dr, dA_kk, dA_qk
    dg, dA_log, d_dt_bias = chunk_kda_bwd_gate(
        dG,
        dG_end,
        g,
        chunk_size,
        layout,
        use_gate=use_gate,
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
    )
    return dq, dk, dv, dg, dbeta, dA_log, d_dt_bias, d_initial_state
