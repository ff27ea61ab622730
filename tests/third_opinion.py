"""Kimi Delta Attention in numpy, with nothing of the two algorithms that it judges."""

import math

import numpy as np
import torch


def numpy_head(q, k, v, g, beta, S):
    """One head, q scaled: q, k, g [T, K], v [T, V], beta [T], S [K, V]."""
    o = np.zeros_like(v)
    for t in range(len(v)):
        S = np.exp(g[t])[:, None] * S
        delta = beta[t] * (v[t] - S.T @ k[t])
        S = S + np.outer(k[t], delta)
        o[t] = S.T @ q[t]
    return o, S


def numpy_kda(x, *, scale=None, cu_seqlens=None, state_v_first=False, **options):
    """(o, final state) as tensors, head by head and sequence by sequence."""
    q, k, v, g, beta = (value.numpy() for value in x[:5])
    (B, length, H, K), (HV, V) = q.shape, v.shape[2:]
    q, k, g, beta = numpy_in_kernel(q, k, g, beta, **options)
    q = q * (1 / math.sqrt(K) if scale is None else scale)
    if cu_seqlens is None:
        pieces = [(b, slice(0, length)) for b in range(B)]
    else:
        ends = cu_seqlens.tolist()
        pieces = [(0, slice(ends[n], ends[n + 1])) for n in range(len(ends) - 1)]
    o, states = np.zeros_like(v), np.zeros((len(pieces), HV, K, V))
    for n, (b, tokens) in enumerate(pieces):
        for h in range(HV):
            S = np.zeros((K, V))
            if x.initial_state is not None:
                S = x.initial_state[n, h].numpy()
                S = S.T if state_v_first else S
            at, at_k = (b, tokens, h), (b, tokens, h // (HV // H))
            o[at], states[n, h] = numpy_head(q[at_k], k[at_k], v[at], g[at], beta[at], S)
    states = states.swapaxes(-1, -2) if state_v_first else states
    return torch.from_numpy(o), torch.from_numpy(states)


def numpy_in_kernel(
    q,
    k,
    g,
    beta,
    *,
    A_log=None,
    dt_bias=None,
    lower_bound=None,
    use_gate_in_kernel=False,
    use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
):
    if use_gate_in_kernel:
        rate = 1.0 if A_log is None else np.exp(A_log.numpy().reshape(-1, 1))
        y = g if dt_bias is None else g + dt_bias.numpy().reshape(g.shape[-2:])
        if lower_bound is None:
            g = -rate * np.where(y > 20, y, np.logaddexp(0, y))
        else:
            g = lower_bound / (1 + np.exp(-rate * y))
    if use_qk_l2norm_in_kernel:
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    if use_beta_sigmoid_in_kernel:
        beta = (2 if allow_neg_eigval else 1) / (1 + np.exp(-beta))
    return q, k, g, beta
