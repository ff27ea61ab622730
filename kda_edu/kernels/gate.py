"""The gate: the natural log of the decay, g <= 0, from the raw gate input.

g = -exp(A_log) softplus(x + dt_bias), or g = lower_bound sigmoid(exp(A_log) (x + dt_bias)).

Grid: tiles of tokens x tiles of K x value heads. Reads the gate input once, writes g once:
2 K (bf16 input) + 4 K (float32 g) bytes per token and value head.
"""

import torch
import triton
import triton.language as tl

from ._autotune import autotune
from ._common import (
    as_rows,
    cdiv,
    forward_only,
    gate_rate,
    log_decay,
    next_power_of_2,
    on_device_of_first_argument,
    row_strides,
)
from .checks import (
    KERNEL_DTYPES,
    check_floating,
    check_gate_parameters,
    check_lower_bound,
    check_softplus,
)

SOFTPLUS_BETA = 1.0
SOFTPLUS_THRESHOLD = 20.0


@autotune(
    configs=[
        triton.Config({"BT": BT}, num_warps=num_warps)
        for BT, num_warps in ((16, 4), (32, 4), (32, 8), (64, 8), (128, 16))
    ],
    key=["HV", "K", "USE_LOWER_BOUND"],
)
@triton.jit(do_not_specialize=["T"])
def kda_gate_fwd_kernel(
    # inputs, output
    x,
    A_log,
    dt_bias,
    g,
    # sizes
    T,
    stride_token,
    stride_head,
    lower_bound,
    beta,
    threshold,
    HV: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    # options
    USE_LOWER_BOUND: tl.constexpr,
    BT: tl.constexpr,
):
    i_t, i_k, i_h = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_t = i_t.to(tl.int64) * BT + tl.arange(0, BT)
    o_k = i_k * BK + tl.arange(0, BK)
    i_h = i_h.to(tl.int64)  # times a stride between heads, which may be large
    m_k = o_k < K
    m_tk = (o_t < T)[:, None] & m_k[None, :]

    p_x = x + o_t[:, None] * stride_token + i_h * stride_head + o_k[None, :]
    b_x = tl.load(p_x, mask=m_tk, other=0.0).to(tl.float32)  # [BT, BK]
    if dt_bias is not None:
        b_x += tl.load(dt_bias + i_h * K + o_k, mask=m_k, other=0.0).to(tl.float32)[None, :]
    b_g = log_decay(b_x, gate_rate(A_log, i_h), lower_bound, beta, threshold, USE_LOWER_BOUND)

    p_g = g + (o_t[:, None] * HV + i_h) * K + o_k[None, :]
    tl.store(p_g, b_g.to(g.dtype.element_ty), mask=m_tk)


@on_device_of_first_argument
def kda_gate_fwd(
    g,
    A_log=None,
    dt_bias=None,
    lower_bound=None,
    beta=SOFTPLUS_BETA,
    threshold=SOFTPLUS_THRESHOLD,
    output_dtype=torch.float32,
):
    """The natural log of the decay from the raw gate input.

    Without `lower_bound`: -exp(A_log) softplus(g + dt_bias), where softplus(y) is
    log(1 + exp(beta y)) / beta, and y itself once beta y > threshold.
    With `lower_bound` l: l sigmoid(exp(A_log) (g + dt_bias)); A_log may then be None (exp = 1).

    Args:
        g: raw gate input [..., HV, K], any floating dtype. A view [B, T, HV, K] of a packed
            projection is read in place, other strided views are copied first.
        A_log: HV numbers. Keep them float32: exp turns the rounding of a bf16 logarithm into an
            error of 0.4 % of the rate.
        dt_bias: HV * K numbers, optional.
        lower_bound: a finite number < 0; selects the second form.
        beta, threshold: of the softplus; beta > 0, threshold >= 0.
        output_dtype: float32 (default), float16 or bfloat16.

    Returns:
        [..., HV, K] contiguous, <= 0.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came.

    Sources: Kimi Linear (arXiv 2510.26692); flash-linear-attention `fused_kda_gate`; `beta` and
    `threshold` as in vLLM's `fused_kda_gate`.
    """
    _check(g, A_log, dt_bias, lower_bound, beta, threshold, output_dtype)
    HV, K = g.shape[-2:]
    output = torch.empty(g.shape, dtype=output_dtype, device=g.device)
    x = as_rows(g if g.ndim == 4 else g.reshape(1, -1, HV, K))
    stride_token, stride_head = row_strides(x)
    T = x.shape[0] * x.shape[1]
    BK = min(next_power_of_2(K), 128)
    if output.numel() > 0:
        grid = lambda meta: (cdiv(T, meta["BT"]), cdiv(K, BK), HV)  # noqa: E731
        kda_gate_fwd_kernel[grid](
            x,
            None if A_log is None else A_log.contiguous(),
            None if dt_bias is None else dt_bias.contiguous(),
            output,
            T,
            stride_token,
            stride_head,
            0.0 if lower_bound is None else float(lower_bound),
            float(beta),
            float(threshold),
            HV=HV,
            K=K,
            BK=BK,
            USE_LOWER_BOUND=lower_bound is not None,
        )
    return forward_only("kda_gate_fwd", (output,), (g, A_log, dt_bias))[0]


def _check(g, A_log, dt_bias, lower_bound, beta, threshold, output_dtype):
    check_floating("g", g)
    if g.ndim < 2 or g.shape[-2] < 1 or g.shape[-1] < 1:
        raise ValueError(
            f"g: expected shape [..., HV, K], HV and K at least 1, got {tuple(g.shape)}"
        )
    if lower_bound is not None:
        check_lower_bound(lower_bound)
    check_gate_parameters(*g.shape[-2:], g.device, A_log, dt_bias, lower_bound)
    check_softplus(beta, threshold)
    if output_dtype not in KERNEL_DTYPES:
        raise TypeError(f"output_dtype: expected one of {KERNEL_DTYPES}, got {output_dtype}")
