"""A small language model of KDA layers, with softmax attention every so often if asked."""

import dataclasses
import os

import torch
from torch import nn
from torch.nn import functional as F

from .attention import KimiDeltaAttention
from .cache import Cache
from .norm import RMSNorm


def save_whole(state, path):
    """torch.save into a new file beside `path`, that takes its place when all of it is on disk."""
    new = f"{os.fspath(path)}.new"
    with open(new, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


@dataclasses.dataclass
class KDAConfig:
    """Sizes and options of a `KDAForCausalLM`.

    softmax_every: every such layer is softmax attention instead, without positions, as in the
        3:1 hybrid of Kimi Linear (4); 0: none is.
    mlp_ratio: channels inside the feed-forward part, per channel of the model.
    The rest as in `KimiDeltaAttention`.
    """

    vocab_size: int = 256
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 2
    num_v_heads: int | None = None
    head_dim: int = 32
    expand_v: float = 1.0
    use_short_conv: bool = True
    conv_size: int = 4
    conv_bias: bool = False
    allow_neg_eigval: bool = False
    safe_gate: bool = False
    lower_bound: float | None = None
    softmax_every: int = 0
    mlp_ratio: float = 2.0
    norm_eps: float = 1e-5

    def __post_init__(self):
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "head_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: expected an integer >= 1, got {value!r}")
        if self.softmax_every < 0:
            raise ValueError(f"softmax_every: expected 0 or more, got {self.softmax_every}")


class SoftmaxAttention(nn.Module):
    """Causal attention over all earlier tokens, without positions: KDA's gates know the order."""

    def __init__(self, config, layer_idx):
        super().__init__()
        self.heads, self.layer_idx = config.num_heads, layer_idx
        width = config.num_heads * config.head_dim
        self.qkv_proj = nn.Linear(config.hidden_size, 3 * width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x, attention_mask=None, past_key_values=None, use_cache=False):
        T = x.shape[1]
        q, k, v = self.qkv_proj(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        past = past_key_values.get(self.layer_idx) if past_key_values is not None else None
        if past:
            k, v = (torch.cat([past[n], y], 1) for n, y in (("keys", k), ("values", v)))
        if use_cache and past_key_values is not None:
            past_key_values.update(self.layer_idx, keys=k, values=v)
        S = k.shape[1]
        if attention_mask is not None and attention_mask.shape[1] < S:
            raise ValueError(
                f"attention_mask: expected a column for each of the {S} tokens so far, "
                f"got {attention_mask.shape[1]}"
            )
        row = torch.arange(S - T, S, device=x.device)[:, None]
        visible = (torch.arange(S, device=x.device)[None] <= row)[None, None]  # [1, 1, T, S]
        if attention_mask is not None:
            real = attention_mask[:, attention_mask.shape[1] - S :].bool()[:, None, None]
            # a row with nothing to see would be NaN; padding sees itself
            itself = torch.arange(S, device=x.device)[None] == row
            visible = (visible & real) | itself
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return self.o_proj(o.transpose(1, 2).flatten(-2)), None, past_key_values


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), the mlp a SwiGLU."""

    def __init__(self, config, layer_idx, backend):
        super().__init__()
        D, inner = config.hidden_size, int(config.mlp_ratio * config.hidden_size)
        self.attn_norm = RMSNorm(D, config.norm_eps)
        self.mlp_norm = RMSNorm(D, config.norm_eps)
        if config.softmax_every and (layer_idx + 1) % config.softmax_every == 0:
            self.attn = SoftmaxAttention(config, layer_idx)
        else:
            names = (
                "hidden_size expand_v head_dim num_heads num_v_heads allow_neg_eigval safe_gate "
                "lower_bound use_short_conv conv_size conv_bias norm_eps"
            ).split()
            options = {name: getattr(config, name) for name in names}
            self.attn = KimiDeltaAttention(**options, layer_idx=layer_idx, backend=backend)
        self.gate_up = nn.Linear(D, 2 * inner, bias=False)
        self.down = nn.Linear(inner, D, bias=False)

    def forward(self, x, **options):
        x = x + self.attn(self.attn_norm(x), **options)[0]
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class KDAForCausalLM(nn.Module):
    """Embedding, blocks, norm, and a head that shares the embedding's weight.

    config: a `KDAConfig`. backend: of its KDA layers, see `KimiDeltaAttention`.
    """

    def __init__(self, config, backend="auto"):
        super().__init__()
        if not isinstance(config, KDAConfig):
            raise TypeError(f"config: expected a KDAConfig, got {type(config).__name__}")
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, i, backend) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.apply(_initialise)

    def forward(self, tokens, attention_mask=None, past_key_values=None, use_cache=False, **packed):
        """Logits [B, T, vocab_size] of the token after each of `tokens` [B, T].

        attention_mask, past_key_values, use_cache as in `KimiDeltaAttention`; cu_seqlens, cp_group
        and cp_lengths too, where no layer is softmax attention.
        """
        self._check(tokens, packed)
        options = dict(attention_mask=attention_mask, past_key_values=past_key_values)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, use_cache=use_cache, **options, **packed)
        if use_cache and past_key_values is not None:
            past_key_values.tokens += tokens.shape[1]
        return F.linear(self.norm(x), self.embedding.weight)

    def loss(self, tokens):
        """Mean cross-entropy in nats of tokens [B, T + 1]: each but the first is predicted."""
        logits = self(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    @torch.no_grad()
    def stream(
        self, tokens, max_new_tokens, temperature=1.0, top_k=None, seed=None, attention_mask=None
    ):
        """Yield the next tokens [B], one step after the other.

        tokens: the prompt [B, T], T >= 1. temperature: 0 takes the likeliest. top_k: draw among
        the k likeliest. seed: the same seed draws the same. attention_mask: 0 on padding, which
        must lie on the left, so that every prompt ends in the last column.
        """
        _check_sampling(tokens, max_new_tokens, temperature, top_k)
        draw = None
        if seed is not None:
            draw = torch.Generator(tokens.device).manual_seed(seed)
        cache, was_training = Cache(), self.training
        self.eval()
        try:
            for _ in range(max_new_tokens):
                logits = self(tokens, attention_mask, cache, use_cache=True)[:, -1].float()
                tokens = _draw(logits, temperature, top_k, draw)[:, None]
                if attention_mask is not None:
                    one = attention_mask.new_ones(tokens.shape)
                    attention_mask = torch.cat([attention_mask, one], dim=1)
                yield tokens[:, 0]
        finally:
            self.train(was_training)

    def generate(self, tokens, max_new_tokens, **options):
        """The prompt [B, T] and `max_new_tokens` more; options as in `stream`."""
        made = list(self.stream(tokens, max_new_tokens, **options))
        return torch.cat([tokens, *(x[:, None] for x in made)], dim=1)

    def save(self, path):
        """Write config and weights to one file. Stopped half way, it leaves an old file whole."""
        save_whole(dict(config=dataclasses.asdict(self.config), model=self.state_dict()), path)

    @classmethod
    def load(cls, path, device="cpu", backend="auto"):
        """The model of a file that `save` or `kda_edu.train` wrote. No code in it is run."""
        if not os.path.isfile(path):
            raise FileNotFoundError(f"path: expected a checkpoint file, got {os.fspath(path)!r}")
        saved = torch.load(path, map_location=device, weights_only=True)
        model = cls(KDAConfig(**saved["config"]), backend).to(device)
        model.load_state_dict(saved["model"])
        return model

    def _check(self, tokens, packed):
        if not isinstance(tokens, torch.Tensor) or tokens.ndim != 2 or tokens.is_floating_point():
            got = getattr(tokens, "shape", type(tokens).__name__)
            raise ValueError(f"tokens: expected integers of shape [B, T], got {got}")
        for name, value in packed.items():
            if value is not None and self.config.softmax_every:
                raise ValueError(
                    f"{name}: expected None where softmax_every > 0, since softmax attention here "
                    "takes whole, unpacked sequences"
                )


def _initialise(module):
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
        if getattr(module, "bias", None) is not None:
            nn.init.zeros_(module.bias)


def _check_sampling(tokens, max_new_tokens, temperature, top_k):
    if tokens.ndim != 2 or tokens.shape[1] < 1:
        raise ValueError(f"tokens: expected shape [B, T] with T >= 1, got {tuple(tokens.shape)}")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens: expected 0 or more, got {max_new_tokens}")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature: expected a number >= 0, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k: expected at least 1, got {top_k}")


def _draw(logits, temperature, top_k, generator):
    if temperature == 0:
        return logits.argmax(-1)
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -float("inf"))
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]
