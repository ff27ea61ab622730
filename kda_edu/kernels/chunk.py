"""`chunk_kda`: Kimi Delta Attention over whole sequences, chunk by chunk.

Here is what a caller meets: arguments, checks, gradients. The six steps of the forward pass are
listed in forward.py, those of the backward in backward.py; fused.py does the forward in two kernels
where it can: bfloat16, K and V up to 128, a gate computed in the kernel with a lower bound of -5 or
more, and no gradient asked for.
"""

import torch

from ._common import autocast, forward_only
from .autograd import chunk_kda_op
from .checks import check_flags, check_kda
from .forward import chunk_kda_fwd
from .fused import CHUNK, fused_chunk_kda_fwd, serves
from .sequences import chunk_layout

# Set by the package's part for several GPUs, where there is one: this folder imports itself alone.
context_parallel = None


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
    cp_group=None,
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
            -5 <= lower_bound < 0. Nothing has to be promised: every gate is right, and such a
            bound alone selects the faster products.
        disable_recompute: keep what the sweep over the chunks made for the backward (about
            2 KB per token and value head at K = V = 128 in bf16) instead of making it anew.
        return_intermediate_states: also return the state before each chunk; inference only.
        state_v_first: states are [N, HV, V, K].
        cu_seqlens: int32 or int64 [N + 1] on the GPU: sequences packed along T; needs B = 1. Its
            values are not read on the host: start at 0, never decrease, end at T.
        cu_seqlens_cpu: a copy on the CPU; its values are checked, and spare an upper bound.
        A_log, dt_bias: gate parameters, HV and HV * K numbers.
        chunk_size: 16, 32 or 64 tokens, of the six steps; it changes rounding, nothing else.
        cp_group: a ProcessGroup or 1-D DeviceMesh over whose ranks the tokens are split, see
            `kda_edu.distributed.context_parallel_kda`, which has to be imported first.

    Returns:
        (o, final_state), o [B, T, HV, V] in v's dtype, final_state None unless asked for; with
        `return_intermediate_states` (o, final_state, h), h [B, NT, HV, K, V] ([.., V, K] with
        `state_v_first`).

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came.
        NotImplementedError: in a second backward() through the gradients, and in backward() with
            `return_intermediate_states`.

    Differentiable in q, k, v, g, beta, A_log, dt_bias and initial_state; gradients come in each
    input's dtype, the same bits on every run.
    """
    if cp_group is not None:
        if context_parallel is None:
            raise ImportError("cp_group: expected `import kda_edu.distributed` before the call")
        if return_intermediate_states:
            raise ValueError("return_intermediate_states: expected False with cp_group, got True")
        return context_parallel(
            q,
            k,
            v,
            g,
            beta,
            group=cp_group,
            initial_state=initial_state,
            output_final_state=output_final_state,
            state_v_first=state_v_first,
            cu_seqlens=cu_seqlens,
            cu_seqlens_cpu=cu_seqlens_cpu,
            scale=scale,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            use_gate_in_kernel=use_gate_in_kernel,
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
            allow_neg_eigval=allow_neg_eigval,
            safe_gate=safe_gate,
            lower_bound=lower_bound,
            disable_recompute=disable_recompute,
            A_log=A_log,
            dt_bias=dt_bias,
            chunk_size=chunk_size,
        )
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
    check_flags(
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        disable_recompute=disable_recompute,
        return_intermediate_states=return_intermediate_states,
    )
    inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    options = dict(
        scale=shapes.K**-0.5 if scale is None else float(scale),
        output_final_state=output_final_state,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
        use_gate=use_gate_in_kernel,
        use_beta_sigmoid=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        lower_bound=None if lower_bound is None else float(lower_bound),
        state_v_first=state_v_first,
        chunk_size=chunk_size,
    )
    differentiable = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in inputs
    )
    if not return_intermediate_states and (differentiable or torch.compiler.is_compiling()):
        o, final_state, *_ = chunk_kda_op(
            *inputs, cu_seqlens, cu_seqlens_cpu, **options, store=disable_recompute
        )
        return o, final_state if output_final_state else None

    with torch.no_grad():
        if not return_intermediate_states and serves(q, v, use_gate_in_kernel, lower_bound):
            del options["use_gate"], options["chunk_size"]
            layout = chunk_layout(shapes.B, shapes.T, CHUNK, cu_seqlens, cu_seqlens_cpu)
            return fused_chunk_kda_fwd(*inputs, **options, layout=layout)
        layout = chunk_layout(shapes.B, shapes.T, chunk_size, cu_seqlens, cu_seqlens_cpu)
        o, final_state, _, sweep = chunk_kda_fwd(*inputs, **options, layout=layout)
    if not return_intermediate_states:
        return o, final_state
    h = sweep.h if state_v_first else sweep.h.transpose(-1, -2)
    return *forward_only("chunk_kda with return_intermediate_states", (o, final_state), inputs), h
