"""The language model: generation, caches, hybrids, files."""

import pytest
import torch

from kda_edu.layers import Cache, KDAConfig, KDAForCausalLM
from kda_edu.teach.check import rms_error

SMALL = dict(vocab_size=11, hidden_size=16, num_layers=2, num_heads=2, head_dim=4)


def make(**options):
    torch.manual_seed(2)
    model = KDAForCausalLM(KDAConfig(**SMALL | options), backend="reference").eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn(p.shape))
    return model


def prompt(B=2, T=9):
    return torch.randint(11, (B, T), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("softmax_every", [0, 1, 2])
def test_prefill_and_decode_give_the_logits_of_one_call(softmax_every):
    model, tokens = make(softmax_every=softmax_every), prompt(T=30)
    whole, cache, parts = model(tokens), Cache(), []
    for a, b in ((0, 13), (13, 14), (14, 15), (15, 30)):
        parts.append(model(tokens[:, a:b], past_key_values=cache, use_cache=True))
    assert rms_error(torch.cat(parts, 1), whole) < 1e-5 and cache.tokens == 30


def test_a_token_sees_no_later_one():
    for softmax_every in (0, 1):
        model, tokens = make(softmax_every=softmax_every), prompt(T=20)
        changed = tokens.clone()
        changed[:, 12] = (changed[:, 12] + 1) % 11
        difference = (model(changed) - model(tokens)).abs().amax((0, 2))
        assert difference[:12].max() < 1e-6 < difference[12:].min()


@pytest.mark.parametrize("softmax_every", [0, 2])
def test_generation_is_what_repeated_calls_give(softmax_every):
    model, tokens = make(softmax_every=softmax_every), prompt()
    got = model.generate(tokens, 12, temperature=0)
    want = tokens
    for _ in range(12):
        want = torch.cat([want, model(want)[:, -1:].argmax(-1)], 1)
    assert torch.equal(got, want)
    mask = torch.ones(2, 9).long()
    mask[1, :4] = 0
    padded = model.generate(tokens, 12, temperature=0, attention_mask=mask)
    assert torch.equal(padded[0], got[0])
    assert torch.equal(padded[1, 4:], model.generate(tokens[1:, 4:], 12, temperature=0)[0])


def test_sampling():
    model, tokens = make(), prompt()
    draws = [model.generate(tokens, 20, seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    greedy = model.generate(tokens, 20, temperature=0)
    assert torch.equal(model.generate(tokens, 20, top_k=1, seed=5), greedy)
    assert torch.equal(model.generate(tokens, 20, temperature=1e-4, seed=5), greedy)
    likely = model(tokens)[:, -1].topk(3).indices
    for seed in range(20):
        first = model.generate(tokens, 1, top_k=3, temperature=9.0, seed=seed)[:, -1]
        assert (likely == first[:, None]).any(1).all()
    assert model.training is False
    model.train()
    next(model.stream(tokens, 1))
    streamed = torch.stack(list(model.stream(tokens, 5, seed=3)), 1)
    assert model.training and torch.equal(streamed, model.generate(tokens, 5, seed=3)[:, 9:])


def test_a_kda_cache_does_not_grow_and_a_softmax_cache_does():
    for softmax_every, grows in ((0, False), (1, True)):
        model, sizes = make(softmax_every=softmax_every), []
        for T in (8, 16):
            cache = Cache()
            model(prompt(T=T), past_key_values=cache, use_cache=True)
            sizes.append(cache.bytes())
        assert (sizes[1] == 2 * sizes[0]) if grows else (sizes[1] == sizes[0] > 0)


def test_the_loss_is_the_cross_entropy_of_the_next_token():
    model, tokens = make(), prompt(T=9)
    p = model(tokens[:, :-1]).double().softmax(-1)
    want = -p.gather(2, tokens[:, 1:, None]).log().mean()
    assert abs(model.loss(tokens) - want) < 1e-6


def test_a_saved_model_is_the_same_model(tmp_path):
    model = make(softmax_every=2, lower_bound=-5.0)
    model.save(tmp_path / "model.pt")
    loaded = KDAForCausalLM.load(tmp_path / "model.pt")
    assert loaded.config == model.config
    assert torch.equal(loaded.eval()(prompt()), model(prompt()))
    with pytest.raises(FileNotFoundError, match="path: expected a checkpoint file, got .*none.pt"):
        KDAForCausalLM.load(tmp_path / "none.pt")


def test_the_convolutions_are_options():
    def names(**options):
        return {n.split(".")[-2:][0] + "." + n.split(".")[-1] for n in make(**options).state_dict()}

    assert "q_conv1d.weight" in names() and "q_conv1d.bias" not in names()
    assert "q_conv1d.bias" in names(conv_bias=True)
    assert not any("conv" in name for name in names(use_short_conv=False))


def test_a_save_that_stops_half_way_leaves_the_old_file(tmp_path, monkeypatch):
    model, path = make(), tmp_path / "model.pt"
    model.save(path)
    before = path.read_bytes()

    def stop(state, file):
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", stop)
    with pytest.raises(KeyboardInterrupt):
        model.save(path)
    assert path.read_bytes() == before


def test_a_mask_that_is_too_short_is_named():
    model, cache = make(softmax_every=2), Cache()
    model(prompt(), past_key_values=cache, use_cache=True)
    with pytest.raises(ValueError, match="attention_mask: expected a column for each of the 10"):
        model(prompt()[:, :1], torch.ones(2, 1), cache, use_cache=True)


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: KDAConfig(num_layers=0), ValueError, "num_layers: expected an integer >= 1"),
        (lambda: KDAConfig(softmax_every=-1), ValueError, "softmax_every: expected 0 or more"),
        (lambda: KDAForCausalLM({}), TypeError, "config: expected a KDAConfig, got dict"),
        (lambda: make()(torch.zeros(2, 3)), ValueError, r"tokens: expected integers of shape"),
        (lambda: make().generate(prompt(), 1, temperature=-1), ValueError, "temperature: expected"),
        (lambda: make().generate(prompt(), 1, top_k=0), ValueError, "top_k: expected at least 1"),
        (lambda: make().generate(prompt()[:, :0], 1), ValueError, "tokens: .* with T >= 1"),
        (
            lambda: make(softmax_every=1)(prompt(1), cu_seqlens=torch.tensor([0, 9])),
            ValueError,
            "cu_seqlens: expected None where softmax_every > 0",
        ),
    ],
)
def test_bad_arguments(call, error, words):
    with pytest.raises(error, match=words):
        call()
