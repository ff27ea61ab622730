"""The layer: projections, short convolutions, gates, KDA, a gated norm."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from .. import kernels, reference
from ..distributed import context_parallel_kda, convolution_state
from .convolution import ShortConvolution
from .norm import GatedRMSNorm

BACKENDS = ("auto", "kernels", "reference")
RECURRENT_UP_TO = 64  # tokens; longer texts go chunk by chunk
REFERENCE_CHUNK = 8  # the fastest on a CPU, of 4, 8 and 16


class KimiDeltaAttention(nn.Module):
    """Kimi Delta Attention as a layer (Kimi Linear, arXiv 2510.26692).

    Parameters have the names and shapes of `fla.layers.KimiDeltaAttention`, so that its state
    dict loads.

    Args:
        hidden_size: channels of the input and output.
        expand_v: value channels per key channel of a head.
        head_dim: key channels of a head.
        num_heads: heads of queries and keys; num_v_heads: of values, a multiple of it.
        use_short_conv, conv_size, conv_bias: the causal convolutions on q, k and v.
        allow_neg_eigval: write strengths up to 2.
        safe_gate, lower_bound: with `lower_bound` (-5 <= it < 0 with `safe_gate`) the gate is
            lower_bound sigmoid(exp(A_log) (x + dt_bias)), else -exp(A_log) softplus(x + dt_bias).
        layer_idx: the layer's place in a model; its key in a `Cache`.
        norm_eps: of the norm of the output.
        backend: "kernels" (Triton), "reference" (PyTorch, any device), or "auto": kernels on a GPU.
    """

    def __init__(
        self,
        hidden_size=2048,
        expand_v=1.0,
        head_dim=128,
        num_heads=16,
        num_v_heads=None,
        use_short_conv=True,
        allow_neg_eigval=False,
        safe_gate=False,
        lower_bound=None,
        conv_size=4,
        conv_bias=False,
        layer_idx=None,
        norm_eps=1e-5,
        backend="auto",
    ):
        super().__init__()
        num_v_heads = num_heads if num_v_heads is None else num_v_heads
        value_dim = _whole("expand_v", expand_v, head_dim)
        if num_heads < 1 or num_v_heads % num_heads != 0:
            raise ValueError(
                f"num_v_heads: expected a multiple of num_heads = {num_heads}, got {num_v_heads}"
            )
        if safe_gate and (lower_bound is None or not -5 <= lower_bound < 0):
            raise ValueError(
                f"lower_bound: expected -5 <= lower_bound < 0 with safe_gate, got {lower_bound}"
            )
        if backend not in BACKENDS:
            raise ValueError(f"backend: expected one of {BACKENDS}, got {backend!r}")
        self.hidden_size, self.head_dim, self.value_dim = hidden_size, head_dim, value_dim
        self.num_heads, self.num_v_heads = num_heads, num_v_heads
        self.use_short_conv, self.allow_neg_eigval = use_short_conv, allow_neg_eigval
        self.lower_bound, self.layer_idx, self.backend = lower_bound, layer_idx, backend

        keys, values = num_heads * head_dim, num_v_heads * value_dim
        self.q_proj = nn.Linear(hidden_size, keys, bias=False)
        self.k_proj = nn.Linear(hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(hidden_size, values, bias=False)
        if use_short_conv:
            self.q_conv1d = ShortConvolution(keys, conv_size, conv_bias)
            self.k_conv1d = ShortConvolution(keys, conv_size, conv_bias)
            self.v_conv1d = ShortConvolution(values, conv_size, conv_bias)
        self.f_proj = _low_rank(hidden_size, value_dim, num_v_heads * head_dim)
        self.b_proj = nn.Linear(hidden_size, num_v_heads, bias=False)
        self.A_log = nn.Parameter(_initial_A_log(num_v_heads, safe_gate))
        self.dt_bias = nn.Parameter(_initial_dt_bias(num_v_heads * head_dim))
        self.g_proj = _low_rank(hidden_size, value_dim, values, bias=True)
        self.o_norm = GatedRMSNorm(value_dim, norm_eps)
        self.o_proj = nn.Linear(values, hidden_size, bias=False)

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        past_key_values=None,
        use_cache=False,
        output_attentions=False,
        cu_seqlens=None,
        cp_group=None,
        cp_lengths=None,
    ):
        """(output [B, T, hidden_size], None, past_key_values), as fla's layer returns them.

        attention_mask: [B, at least T], 0 where a token is padding, on either side; of its last T
            columns. A padded token changes nothing, and its output is 0.
        past_key_values: a `Cache`, read if it holds this layer, and updated with `use_cache`.
        cu_seqlens: int32 or int64 [N + 1], sequences packed along T; needs B = 1.
        cp_group: a ProcessGroup or 1-D DeviceMesh: hidden_states is this rank's piece of sequences
            that are split over it, see `kda_edu.distributed`. cu_seqlens is then of the whole
            batch. cp_lengths: tokens on each rank, if known; it saves an exchange.
        """
        _check_input(hidden_states, self.hidden_size, attention_mask, cu_seqlens)
        if cp_group is not None and (attention_mask is not None or past_key_values is not None):
            raise ValueError(
                "cp_group: expected neither attention_mask nor past_key_values beside it; pack "
                "sequences with cu_seqlens instead"
            )
        split = dict(group=cp_group, lengths=cp_lengths) if cp_group is not None else None
        B, T, _ = hidden_states.shape
        x, kept = hidden_states, None
        if attention_mask is not None:
            mask = attention_mask[:, attention_mask.shape[1] - T :]
            x, kept, cu_seqlens = _without_padding(x, mask)
        past = past_key_values.get(self.layer_idx) if past_key_values is not None else None
        q, k, v, windows = self._project(x, past, cu_seqlens, split)
        o, state = self._attend(
            q,
            k,
            v,
            self.f_proj(x).unflatten(-1, (self.num_v_heads, self.head_dim)),
            self.b_proj(x),
            initial_state=past["state"] if past else None,
            output_final_state=use_cache,
            cu_seqlens=cu_seqlens,
            short=T <= RECURRENT_UP_TO and not self.training,
            split=split,
        )
        if use_cache and past_key_values is not None:
            past_key_values.update(self.layer_idx, convolution=windows, state=state)
        gate = self.g_proj(x).unflatten(-1, (self.num_v_heads, self.value_dim))
        o = self.o_proj(self.o_norm(o, gate).flatten(-2))
        if kept is not None:
            o = o.new_zeros(B * T, o.shape[-1]).index_copy(0, kept, o[0]).unflatten(0, (B, T))
        return o, None, past_key_values

    def _project(self, x, past, cu_seqlens, split):
        """q, k, v by head, and the last inputs of their convolutions."""
        made, windows = [], []
        before = past["convolution"] if past and self.use_short_conv else (None,) * 3
        for name, window in zip("qkv", before, strict=True):
            y = getattr(self, f"{name}_proj")(x)
            if self.use_short_conv:
                conv, cu = getattr(self, f"{name}_conv1d"), cu_seqlens
                if split is not None:
                    before = conv.kernel_size[0] - 1
                    window, cu = convolution_state(y, before, cu_seqlens=cu_seqlens, **split)
                y, window = conv(y, window, cu)
                windows.append(window)
            else:
                y = F.silu(y)
            size = self.value_dim if name == "v" else self.head_dim
            made.append(y.unflatten(-1, (-1, size)))
        return *made, tuple(windows)

    def _attend(self, q, k, v, g, beta, *, short, split, **options):
        options |= dict(
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            allow_neg_eigval=self.allow_neg_eigval,
            lower_bound=self.lower_bound,
        )
        if split is not None:
            on_kernels = self.backend == "kernels" or (self.backend == "auto" and q.is_cuda)
            if on_kernels:
                split = split | dict(backend="kernels")
            else:
                split = split | dict(backend="reference", chunk_size=REFERENCE_CHUNK)
            return context_parallel_kda(q, k, v, g, beta, **options, **split)
        if self.backend == "kernels" or (self.backend == "auto" and q.is_cuda):
            kda = kernels.fused_recurrent_kda if short else kernels.chunk_kda
            return kda(q, k, v, g, beta, **options)
        if short:
            return reference.recurrent_kda(q, k, v, g, beta, **options)
        return reference.chunk_kda(q, k, v, g, beta, **options, chunk_size=REFERENCE_CHUNK)


def _low_rank(size_in, rank, size_out, bias=False):
    return nn.Sequential(nn.Linear(size_in, rank, bias=False), nn.Linear(rank, size_out, bias=bias))


def _initial_A_log(heads, safe_gate):
    """log of a rate between 1 and 16 per head; 0 for the gate with a lower bound."""
    return torch.zeros(heads) if safe_gate else torch.empty(heads).uniform_(1, 16).log()


def _initial_dt_bias(size, shortest=1e-3, longest=0.1):
    """softplus(dt_bias) is spread evenly, in its logarithm, between `shortest` and `longest`."""
    dt = torch.empty(size).uniform_(math.log(shortest), math.log(longest)).exp()
    return dt + torch.log(-torch.expm1(-dt))  # the inverse of softplus


def _without_padding(x, mask):
    """(the real tokens packed [1, tokens, D], their places in B * T, cu_seqlens)."""
    kept = mask.flatten().nonzero()[:, 0]
    cu_seqlens = F.pad(mask.bool().sum(1).cumsum(0), (1, 0))
    return x.flatten(0, 1)[kept][None], kept, cu_seqlens


def _whole(name, factor, size):
    product = factor * size
    if product < 1 or not math.isclose(product, round(product), rel_tol=1e-6):
        raise ValueError(f"{name}: expected {name} * {size} to be a whole number, got {product}")
    return round(product)


def _check_input(x, hidden_size, attention_mask, cu_seqlens):
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"hidden_states: expected a torch.Tensor, got {type(x).__name__}")
    if x.ndim != 3 or x.shape[-1] != hidden_size:
        raise ValueError(
            f"hidden_states: expected shape [B, T, {hidden_size}], got {tuple(x.shape)}"
        )
    if attention_mask is None:
        return
    if cu_seqlens is not None:
        raise ValueError("attention_mask: expected None beside cu_seqlens, got both")
    B, T, _ = x.shape
    if attention_mask.ndim != 2 or attention_mask.shape[0] != B or attention_mask.shape[1] < T:
        raise ValueError(
            f"attention_mask: expected shape [{B}, at least {T}], got {tuple(attention_mask.shape)}"
        )
