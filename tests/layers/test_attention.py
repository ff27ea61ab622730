"""The layer: its formula derived anew, padding, packing, caches, the parameters of fla's layer."""

import pytest
import torch
from torch.nn import functional as F

from kda_edu import reference
from kda_edu.layers import Cache, KimiDeltaAttention, ShortConvolution
from kda_edu.teach.check import rms_error

BUDGET = 1e-5
SIZES = dict(hidden_size=24, head_dim=8, num_heads=2, num_v_heads=4, expand_v=1.5)
VARIANTS = {
    "softplus": {},
    "bounded": dict(safe_gate=True, lower_bound=-5.0),
    "negative eigenvalues, bias": dict(allow_neg_eigval=True, conv_bias=True),
    "no convolution": dict(use_short_conv=False),
}


def make(**options):
    torch.manual_seed(1)
    layer = KimiDeltaAttention(**SIZES | options, layer_idx=0, backend="reference").eval()
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.3 * torch.randn(p.shape))
    return layer


def sample(B=2, T=20, seed=0):
    return torch.randn(B, T, 24, generator=torch.Generator().manual_seed(seed))


def by_hand(layer, x):
    """The same, from the layer's parameters, token by token and without its code."""
    p = dict(layer.named_parameters())
    B, T, _ = x.shape

    def project(name):
        y = x @ p[f"{name}_proj.weight"].T
        if layer.use_short_conv:
            weight, bias = p[f"{name}_conv1d.weight"][:, 0], p.get(f"{name}_conv1d.bias", 0.0)
            shifted = [F.pad(y, (0, 0, s, 0))[:, :T] for s in range(4)]
            y = sum(weight[:, 3 - s] * shifted[s] for s in range(4)) + bias
        return y * torch.sigmoid(y)

    q, k, v = (project(name) for name in "qkv")
    q, k = (y.view(B, T, 2, 8).repeat_interleave(2, 2) for y in (q, k))
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    v = v.view(B, T, 4, 12)
    gate = x @ p["f_proj.0.weight"].T @ p["f_proj.1.weight"].T + p["dt_bias"]
    gate, rate = gate.view(B, T, 4, 8), p["A_log"].exp()[:, None]
    if layer.lower_bound is None:
        g = -rate * torch.log1p(gate.exp())
    else:
        g = layer.lower_bound * torch.sigmoid(rate * gate)
    beta = torch.sigmoid(x @ p["b_proj.weight"].T) * (2 if layer.allow_neg_eigval else 1)
    state, rows = torch.zeros(B, 4, 8, 12), []
    for t in range(T):
        state = g[:, t].exp()[..., None] * state
        delta = beta[:, t, :, None] * (v[:, t] - (k[:, t, :, :, None] * state).sum(2))
        state = state + k[:, t, :, :, None] * delta[:, :, None]
        rows.append((8**-0.5 * q[:, t, :, :, None] * state).sum(2))
    o = torch.stack(rows, 1)
    o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * p["o_norm.weight"]
    let_out = x @ p["g_proj.0.weight"].T @ p["g_proj.1.weight"].T + p["g_proj.1.bias"]
    o = (o * torch.sigmoid(let_out.view(B, T, 4, 12))).flatten(2)
    return o @ p["o_proj.weight"].T


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_layer_is_its_formula(variant, training):
    layer, x = make(**VARIANTS[variant]).train(training), sample()
    o, none, cache = layer(x)
    assert none is None and cache is None
    assert rms_error(o, by_hand(layer, x)) < BUDGET


def test_parameters_are_those_of_flash_linear_attention():
    """Names and shapes as in fla 0.5, hidden 24, 2 heads of 8, 4 value heads of 12."""
    wanted = {
        "A_log": (4,),
        "dt_bias": (32,),
        "q_proj.weight": (16, 24),
        "k_proj.weight": (16, 24),
        "v_proj.weight": (48, 24),
        "q_conv1d.weight": (16, 1, 4),
        "k_conv1d.weight": (16, 1, 4),
        "v_conv1d.weight": (48, 1, 4),
        "f_proj.0.weight": (12, 24),
        "f_proj.1.weight": (32, 12),
        "b_proj.weight": (4, 24),
        "g_proj.0.weight": (12, 24),
        "g_proj.1.weight": (48, 12),
        "g_proj.1.bias": (48,),
        "o_norm.weight": (12,),
        "o_proj.weight": (24, 48),
    }
    assert {name: tuple(p.shape) for name, p in make().named_parameters()} == wanted


def test_a_state_dict_of_fla_loads():
    fla = pytest.importorskip("fla.layers")
    names = ("hidden_size", "head_dim", "num_heads", "num_v_heads", "expand_v")
    theirs = fla.KimiDeltaAttention(**{name: SIZES[name] for name in names}, layer_idx=0)
    make().load_state_dict(theirs.state_dict())


def test_initial_gates_are_spread_as_in_the_paper():
    layer = KimiDeltaAttention(hidden_size=8, head_dim=64, num_heads=64)
    rate, dt = layer.A_log.exp(), F.softplus(layer.dt_bias)
    assert 1 <= rate.min() < 2 and 15 < rate.max() <= 16
    assert 1e-3 * 0.999 < dt.min() < 1.1e-3 and 0.09 < dt.max() < 0.1 * 1.001
    assert abs(dt.log().mean() - torch.tensor(1e-2).log()) < 0.1
    assert not KimiDeltaAttention(8, head_dim=4, safe_gate=True, lower_bound=-5.0).A_log.any()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side):
    layer, x, lengths = make(), sample(B=3), (20, 7, 0)
    place = torch.arange(20)
    mask = torch.stack([place >= 20 - n if side == "left" else place < n for n in lengths])
    o, _, _ = layer(x.masked_fill(~mask[..., None], 1e4), attention_mask=mask.long())
    assert not o[~mask].any()
    for row in range(2):
        assert rms_error(o[row][mask[row]], layer(x[row][mask[row]][None])[0][0]) < BUDGET


def test_packed_sequences_are_those_alone():
    layer, x = make(conv_bias=True), sample(B=1)
    cu = torch.tensor([0, 3, 3, 4, 20])
    cache = Cache()
    o, _, _ = layer(x, cu_seqlens=cu, past_key_values=cache, use_cache=True)
    for n, (a, b) in enumerate(zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)):
        alone = Cache()
        if a < b:
            o_n, _, _ = layer(x[:, a:b], past_key_values=alone, use_cache=True)
            assert rms_error(o[:, a:b], o_n) < BUDGET
            assert rms_error(cache.get(0)["state"][n], alone.get(0)["state"][0]) < BUDGET
            windows = cache.get(0)["convolution"], alone.get(0)["convolution"]
            for got, want in zip(*windows, strict=True):
                assert rms_error(got[n], want[0]) < BUDGET or not want.any()


def test_any_split_gives_the_same():
    """Prefill and decode, in pieces of any length, some of a single token."""
    layer, x = make(), sample(T=90)
    whole, _, _ = layer(x)
    draw = torch.Generator().manual_seed(3)
    for _ in range(3):
        cuts = sorted(torch.randint(1, 90, (4,), generator=draw).tolist())
        cache, parts = Cache(), []
        for a, b in zip([0, *cuts], [*cuts, 90], strict=True):
            parts.append(layer(x[:, a:b], past_key_values=cache, use_cache=True)[0])
        assert rms_error(torch.cat(parts, 1), whole) < BUDGET
    mask = torch.ones(2, 90).long()
    mask[1, :70] = 0  # padding on the left of a prompt, then single tokens
    cache = Cache()
    first, _, _ = layer(x[:, :80], mask[:, :80], cache, use_cache=True)
    rest = [
        layer(x[:, t : t + 1], mask[:, : t + 1], cache, use_cache=True)[0] for t in range(80, 90)
    ]
    got = torch.cat([first, *rest], 1)
    assert rms_error(got[0], whole[0]) < BUDGET
    assert rms_error(got[1, 70:], layer(x[1:, 70:])[0][0]) < BUDGET


def test_no_tokens():
    layer, cache = make(), Cache()
    o, _, _ = layer(sample(T=5), past_key_values=cache, use_cache=True)
    assert layer(sample(T=0), past_key_values=cache, use_cache=True)[0].shape == (2, 0, 24)
    again = layer(sample(T=3, seed=1), past_key_values=cache, use_cache=True)[0]
    both = torch.cat([sample(T=5), sample(T=3, seed=1)], 1)
    assert rms_error(torch.cat([o, again], 1), layer(both)[0]) < BUDGET


@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_convolution_under_autocast(bias):
    """In the dtype that each sequence alone would have, and its numbers."""
    conv, x = ShortConvolution(6, 4, bias=bias), torch.randn(1, 12, 6)
    cu = torch.tensor([0, 5, 12])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, _ = conv(x, cu_seqlens=cu)
        want = torch.cat([conv(x[:, :5])[0], conv(x[:, 5:])[0]], dim=1)
    assert got.dtype == want.dtype == torch.bfloat16
    assert (got - want).abs().max() < 2**-6


def test_a_convolution_is_causal_and_by_channel():
    torch.manual_seed(0)
    conv, x = ShortConvolution(6, 4, bias=True), torch.randn(1, 12, 6)
    y, _ = conv(x)
    changed = x.clone()
    changed[0, 5, 2] += 1
    moved = (conv(changed)[0] - y).abs() > 0
    assert moved[0, 5:9, 2].all() and moved.sum() == 4


def test_kernels_and_reference_agree():
    """The kernels of `backend="kernels"`, here in the interpreter, with gradients."""
    triton = pytest.importorskip("triton")
    if not triton.knobs.runtime.interpret:
        pytest.skip("needs TRITON_INTERPRET=1, or a GPU")
    layer, x = make().train(), sample(B=1, T=18)
    results = []
    for backend in ("reference", "kernels"):
        layer.backend = backend
        layer.zero_grad()
        o, _, _ = layer(x)
        o.square().sum().backward()
        results.append([o.detach(), *(p.grad.clone() for p in layer.parameters())])
    for a, b in zip(*results, strict=True):
        assert rms_error(a, b) < 5e-5


def test_the_backend_is_what_runs(monkeypatch):
    layer, called = make(), []
    for name in ("recurrent_kda", "chunk_kda"):
        original = getattr(reference, name)

        def note(*a, original=original, name=name, **o):
            called.append(name)
            return original(*a, **o)

        monkeypatch.setattr(reference, name, note)
    layer(sample(T=65)), layer(sample(T=64)), layer.train()(sample(T=3))
    assert called == ["chunk_kda", "recurrent_kda", "chunk_kda"]


@pytest.mark.parametrize(
    "options, error, words",
    [
        (dict(num_v_heads=3), ValueError, "num_v_heads: expected a multiple of num_heads = 2"),
        (dict(expand_v=0.3), ValueError, "expand_v: expected .* whole number, got 2.4"),
        (dict(safe_gate=True), ValueError, "lower_bound: expected -5 <= .* got None"),
        (dict(backend="gpu"), ValueError, "backend: expected one of .* got 'gpu'"),
    ],
)
def test_bad_options(options, error, words):
    with pytest.raises(error, match=words):
        KimiDeltaAttention(**SIZES | options)


def test_bad_inputs():
    layer, x = make(), sample()
    with pytest.raises(ValueError, match=r"hidden_states: expected shape \[B, T, 24\], got \(2"):
        layer(x[..., :20])
    with pytest.raises(TypeError, match="hidden_states: expected a torch.Tensor, got list"):
        layer([1.0])
    with pytest.raises(ValueError, match=r"attention_mask: expected shape \[2, at least 20\]"):
        layer(x, attention_mask=torch.ones(2, 19))
    with pytest.raises(ValueError, match="attention_mask: expected None beside cu_seqlens"):
        layer(x[:1], attention_mask=torch.ones(1, 20), cu_seqlens=torch.tensor([0, 20]))
