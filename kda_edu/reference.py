"""The oracle: Kimi Delta Attention in plain PyTorch, twice, by two independent algorithms.

`recurrent_kda` walks over tokens and is the definition. `chunk_kda` walks over chunks and solves
one triangular system per chunk. In float64 the two agree to 1e-12 for any gate, including 0 and
-inf. Both are differentiable, run on any device, and take the arguments of the kernels.

Definition, per head, with a state S of shape [K, V] (Kimi Linear, arXiv 2510.26692, eq. 1):

    S   <- Diag(exp g_t) S                  decay, one factor per channel
    d_t  = beta_t (v_t - S^T k_t)           what is missing from the decayed memory
    S   <- S + k_t d_t^T                    write
    o_t  = S^T (scale q_t)                  read the updated memory

With g = 0 this is DeltaNet, with one g per head Gated DeltaNet; without the erase term S^T k_t it
is (gated) linear attention.
"""

import torch

from .kernels.checks import (
    REFERENCE_DTYPES,
    check_cu_values,
    check_flags,
    check_floating,
    check_gate_parameters,
    check_integer,
    check_kda,
    check_lower_bound,
    check_qkv,
    check_softplus,
)

L2NORM_EPS = 1e-6


def recurrent_kda(
    q,
    k,
    v,
    g,
    beta,
    *,
    A_log=None,
    dt_bias=None,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    lower_bound=None,
    state_v_first=False,
    cu_seqlens=None,
):
    """Kimi Delta Attention, one token at a time.

    Args:
        q, k: queries and keys [B, T, H, K]; float64, float32, float16 or bfloat16.
        v: values [B, T, HV, V], same dtype. HV is a multiple of H; value head h reads
            query/key head h // (HV / H).
        g: natural log of the decay [B, T, HV, K], <= 0, any floating dtype; or the raw gate input
            x if `use_gate_in_kernel`, see `kda_gate`.
        beta: write strength [B, T, HV], any floating dtype; or its logit if
            `use_beta_sigmoid_in_kernel`.
        A_log, dt_bias: gate parameters, HV and HV * K numbers, with `use_gate_in_kernel`.
        scale: multiplies q. Default K ** -0.5.
        initial_state: [N, HV, K, V], float32 (or float64 with float64 q). Default zeros.
        output_final_state: also return the state after the last token.
        use_qk_l2norm_in_kernel: normalise q and k, see `l2norm`.
        allow_neg_eigval: beta = 2 sigmoid(logit), so that 1 - beta reaches -1.
        lower_bound: selects the lower-bound gate, with `use_gate_in_kernel`.
        state_v_first: states are [N, HV, V, K].
        cu_seqlens: int32 or int64 [N + 1], sequences packed along T; needs B = 1.

    Returns:
        (o [B, T, HV, V] in the dtype of v, final state or None). Arithmetic and state are float64
        if q is float64, else float32.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came.
    """
    return _run(_scan_tokens, locals())


def chunk_kda(
    q,
    k,
    v,
    g,
    beta,
    *,
    A_log=None,
    dt_bias=None,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    lower_bound=None,
    state_v_first=False,
    cu_seqlens=None,
    chunk_size=64,
):
    """Kimi Delta Attention, `chunk_size` tokens at a time. Arguments as in `recurrent_kda`.

    Any chunk size >= 1 gives the same result: 1 is the loop, T is the fully parallel form.
    """
    arguments = locals()
    chunk_size = arguments.pop("chunk_size")
    check_integer("chunk_size", chunk_size)
    if chunk_size < 1:
        raise ValueError(f"chunk_size: expected an integer >= 1, got {chunk_size}")

    def scan(q, k, v, g, beta, state):
        return _scan_chunks(q, k, v, g, beta, state, chunk_size)

    return _run(scan, arguments)


def linear_attention(q, k, v, *, g=None, scale=None, initial_state=None, output_final_state=False):
    """Linear attention S <- S + k v^T (Katharopoulos et al., arXiv 2006.16236), no normaliser.

    With `g` [B, T, HV, K] the state decays first: gated linear attention (arXiv 2312.06635).
    Shapes, dtypes and return values as in `recurrent_kda`.
    """
    check_qkv(q, k, v, REFERENCE_DTYPES, max_key_dim=None)
    if g is None:
        g = _decay_free(q, v)
    beta = torch.ones(v.shape[:-1], dtype=g.dtype, device=v.device)

    def scan(q, k, v, g, beta, state):
        return _scan_tokens(q, k, v, g, beta, state, erase=False)

    return _run(
        scan,
        dict(
            q=q,
            k=k,
            v=v,
            g=g,
            beta=beta,
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
        ),
    )


def delta_net(q, k, v, beta, **options):
    """DeltaNet (arXiv 2406.06484): KDA without forgetting, g = 0.

    Options as in `recurrent_kda`, except those of the gate.
    """
    check_qkv(q, k, v, REFERENCE_DTYPES, max_key_dim=None)
    if options.get("use_gate_in_kernel"):
        raise ValueError("use_gate_in_kernel: expected False, since DeltaNet has no gate, got True")
    return recurrent_kda(q, k, v, _decay_free(q, v), beta, **options)


def gated_delta_net(q, k, v, g, beta, **options):
    """Gated DeltaNet (arXiv 2412.06464): KDA with one log decay per head, g [B, T, HV]."""
    shapes = check_qkv(q, k, v, REFERENCE_DTYPES, max_key_dim=None)
    check_floating("g", g, shape=(shapes.B, shapes.T, shapes.HV), device=q.device)
    return recurrent_kda(q, k, v, g[..., None].expand(*g.shape, q.shape[-1]), beta, **options)


def kda_gate(x, A_log=None, dt_bias=None, lower_bound=None, beta=1.0, threshold=20.0):
    """The log decay g <= 0 from the raw gate input x [..., HV, K].

    Without `lower_bound`: g = -exp(A_log) softplus(x + dt_bias), where softplus(y) is
    log(1 + exp(beta y)) / beta, and y itself once beta y > threshold.
    With `lower_bound` l: g = l sigmoid(exp(A_log) (x + dt_bias)); A_log may then be None (exp = 1).

    Computed in float64 if x is float64, else in float32. Sources: Kimi Linear (arXiv 2510.26692)
    for the first form; the open-source flash-linear-attention `fused_kda_gate` for both.
    """
    check_floating("x", x)
    if x.ndim < 2 or 0 in x.shape[-2:]:
        raise ValueError(
            f"x: expected shape [..., HV, K], HV and K at least 1, got {tuple(x.shape)}"
        )
    check_softplus(beta, threshold)
    if lower_bound is not None:
        check_lower_bound(lower_bound)
    HV, K = x.shape[-2:]
    check_gate_parameters(HV, K, x.device, A_log, dt_bias, lower_bound)
    dtype = _compute_dtype(x)
    x = x.to(dtype)
    if dt_bias is not None:
        x = x + dt_bias.to(dtype).reshape(HV, K)
    rate = 1.0 if A_log is None else A_log.to(dtype).reshape(HV, 1).exp()
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(rate * x)
    return -rate * torch.nn.functional.softplus(x, beta=beta, threshold=threshold)


def l2norm(x, eps=L2NORM_EPS):
    """x / sqrt(sum x^2 + eps) over the last dimension: a zero row stays zero.

    Computed in float64 if x is float64, else in float32; returned in the dtype of x.
    """
    check_floating("x", x)
    wide = x.to(_compute_dtype(x))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def _run(scan, arguments):
    """Check and prepare the arguments, run `scan` on each sequence, restore the caller's layout."""
    a = dict(_DEFAULTS, **arguments)
    check_flags(**{name: a[name] for name in _FLAGS})
    options = {name: a[name] for name in _CHECKED}
    shapes = check_kda(
        a["q"], a["k"], a["v"], a["g"], a["beta"], **options, dtypes=REFERENCE_DTYPES,
        max_key_dim=None,
    )  # fmt: skip
    q, k, v, g, beta = _prepare(shapes, a)
    state = _initial_state(shapes, a, q)
    if a["cu_seqlens"] is None:
        o, state = scan(q, k, v, g, beta, state)
    else:
        o, state = _scan_packed(scan, q, k, v, g, beta, state, a["cu_seqlens"].tolist())
    if a["state_v_first"]:
        state = state.transpose(-1, -2)
    o = o.transpose(1, 2).to(a["v"].dtype)
    return o, state.contiguous() if a["output_final_state"] else None


_CHECKED = (
    "A_log",
    "dt_bias",
    "scale",
    "initial_state",
    "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval",
    "lower_bound",
    "state_v_first",
    "cu_seqlens",
)
_FLAGS = (
    "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval",
    "state_v_first",
    "use_qk_l2norm_in_kernel",
    "output_final_state",
)
_DEFAULTS = dict.fromkeys(_CHECKED, None) | dict.fromkeys(_FLAGS, False)


def _prepare(shapes, a):
    """Gate, norm, sigmoid and scale applied; one q and k per value head; layout [B, HV, T, *]."""
    dtype = _compute_dtype(a["q"])
    q, k, v, g, beta = (a[name].to(dtype) for name in ("q", "k", "v", "g", "beta"))
    if a["use_qk_l2norm_in_kernel"]:
        q, k = l2norm(q), l2norm(k)
    if a["use_gate_in_kernel"]:
        g = kda_gate(g, a["A_log"], a["dt_bias"], a["lower_bound"])
    if a["use_beta_sigmoid_in_kernel"]:
        beta = beta.sigmoid() * (2.0 if a["allow_neg_eigval"] else 1.0)
    q = q * (shapes.K**-0.5 if a["scale"] is None else a["scale"])
    group = shapes.HV // shapes.H
    q, k = (x.repeat_interleave(group, dim=2) for x in (q, k))
    return tuple(x.transpose(1, 2) for x in (q, k, v, g, beta))


def _initial_state(shapes, a, q):
    if a["initial_state"] is None:
        return q.new_zeros(shapes.N, shapes.HV, shapes.K, shapes.V)
    state = a["initial_state"].to(q.dtype, copy=True)  # with T = 0 it is the final state too
    return state.transpose(-1, -2) if a["state_v_first"] else state


def _scan_packed(scan, q, k, v, g, beta, state, cu):
    """Run `scan` on each of the sequences packed along T, each with its own state."""
    check_cu_values("cu_seqlens", cu, q.shape[2])  # where they lie on a GPU, first read here
    outputs, states = [], []
    for n, (start, end) in enumerate(zip(cu, cu[1:], strict=False)):
        tokens = (x[:, :, start:end] for x in (q, k, v, g, beta))
        o, s = scan(*tokens, state[n : n + 1])
        outputs.append(o)
        states.append(s)
    if not outputs:
        return torch.zeros_like(v), state
    return torch.cat(outputs, dim=2), torch.cat(states, dim=0)


def _scan_tokens(q, k, v, g, beta, state, erase=True):
    """The definition. q, k, g [B, HV, T, K], v [B, HV, T, V], beta [B, HV, T], S [B, HV, K, V]."""
    outputs = []
    for t in range(q.shape[2]):
        state = g[:, :, t].exp()[..., None] * state
        target = v[:, :, t]
        if erase:
            target = target - torch.einsum("bhk,bhkv->bhv", k[:, :, t], state)
        delta = beta[:, :, t, None] * target
        state = state + k[:, :, t, :, None] * delta[:, :, None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, :, t], state))
    return torch.stack(outputs, dim=2) if outputs else torch.zeros_like(v), state


def _scan_chunks(q, k, v, g, beta, state, chunk_size):
    """The same, chunk by chunk: within a chunk the deltas solve (I + L) delta = rhs.

    L[i, j] = beta_i sum_d k_id k_jd exp(g_{j+1,d} + ... + g_{i,d}) for j < i. The exponents are
    sums of gates, never differences of two sums, so that -inf and huge gates stay exact.
    """
    outputs = []
    for q_c, k_c, v_c, g_c, beta_c in zip(
        *(x.split(chunk_size, dim=2) for x in (q, k, v, g, beta)), strict=True
    ):
        if q_c.shape[2] == 0:  # split() yields one empty chunk when T = 0
            break
        between = _segment_decay(g_c)  # [B, HV, C, C, K]: from after token j to token i
        from_start = g_c.cumsum(2).exp()  # [B, HV, C, K]: from before the chunk to token i
        decayed = between * k_c[:, :, None]  # [B, HV, C, C, K]: key j as token i finds it

        # one product for both: k and q of token i with every decayed key; [B, HV, C, C] each
        kk, qk = (decayed @ torch.stack([k_c, q_c], dim=-1)).unbind(-1)
        lower = torch.tril(beta_c[..., None] * kk, diagonal=-1)
        rhs = beta_c[..., None] * (v_c - (from_start * k_c) @ state)
        delta = torch.linalg.solve_triangular(lower, rhs, upper=False, unitriangular=True)

        outputs.append((from_start * q_c) @ state + torch.tril(qk) @ delta)
        at_end = decayed[:, :, -1]  # [B, HV, C, K]
        state = from_start[:, :, -1, :, None] * state + at_end.transpose(-1, -2) @ delta
    return torch.cat(outputs, dim=2) if outputs else torch.zeros_like(v), state


def _segment_decay(g):
    """exp of the sum of g over tokens j+1 .. i, 1 for j >= i. [B, HV, C, K] -> [B, HV, C, C, K]."""
    row = torch.arange(g.shape[2], device=g.device)
    later = (row[:, None] > row[None, :])[..., None]  # [C, C, 1]
    return torch.where(later, g[:, :, :, None, :], 0.0).cumsum(2).exp()


def _decay_free(q, v):
    return torch.zeros(*v.shape[:-1], q.shape[-1], dtype=_compute_dtype(q), device=v.device)


def _compute_dtype(x):
    return torch.float64 if x.dtype == torch.float64 else torch.float32
