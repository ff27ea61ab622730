"""The two-kernel backward: which calls it serves, segments, borders, what it keeps.

The tests of the backward meet it too, wherever a bfloat16 call has a bounded gate.
"""

from unittest import mock

import pytest
import torch
from backward_cases import assert_gradients, assert_same_gradients, gradients, oracle_gradients
from cases import small

from kda_edu import chunk_kda
from kda_edu.kernels import autograd, fused, fused_backward
from kda_edu.teach.check import rms_error

fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16
BOUNDED = dict(use_gate_in_kernel=True, lower_bound=-5.0)


def sample(device, lengths=None, **changes):
    """A call that the two kernels serve; raw gates of both signs. lengths: of packed sequences."""
    sizes = dict(T=53, K=32, V=20, dtype=bf16) | changes
    if lengths is not None:
        sizes |= dict(T=sum(lengths), B=1)
    x = small(device, **sizes)
    x = x._replace(g=(4 * x.g.float() + 3).to(bf16))
    if lengths is None:
        return x
    cu = torch.tensor([0, *lengths]).cumsum(0).to(device)
    state = x.initial_state.expand(len(lengths), -1, -1, -1).contiguous()
    return x._replace(cu_seqlens=cu, initial_state=state)


def cut(monkeypatch, least):
    """Segments of `least` chunks or more."""
    for module in (fused, fused_backward, autograd):
        monkeypatch.setattr(module, "SEGMENT_OF_TRAINING", least)


def inside(HV, K, device):
    draw = torch.Generator().manual_seed(3)
    return BOUNDED | dict(
        A_log=torch.randn(HV, generator=draw).to(device),
        dt_bias=torch.randn(HV * K, generator=draw).to(device),
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
    )


def backwards(call):
    """The names of the backward passes that a call takes."""
    taken = []
    with (
        mock.patch.object(
            autograd, "fused_chunk_kda_bwd", side_effect=_note(taken, "two kernels", fused_backward)
        ),
        mock.patch.object(autograd, "chunk_kda_bwd", side_effect=_note(taken, "steps", None)),
    ):
        call()
    return taken


def _note(taken, name, module):
    real = autograd.chunk_kda_bwd if module is None else module.fused_chunk_kda_bwd

    def call(*arguments, **options):
        taken.append(name)
        return real(*arguments, **options)

    return call


def test_which_calls_are_served(device):
    def way(x, **options):
        return backwards(lambda: gradients(chunk_kda, x, **options))

    x = sample(device, T=5)
    assert way(x, **BOUNDED) == way(x, **BOUNDED, disable_recompute=True) == ["two kernels"]
    assert way(x, **BOUNDED | dict(lower_bound=-5.1)) == ["steps"]
    assert way(x._replace(g=-x.g.abs())) == ["steps"]
    for changes in (dict(dtype=fp16), dict(dtype=fp32), dict(K=129), dict(V=129)):
        assert way(sample(device, T=5, **changes), **BOUNDED) == ["steps"]


@pytest.mark.parametrize("lengths", [None, (53,), (1, 0, 17, 35, 0), (0, 40, 13)])
@pytest.mark.parametrize("store", [False, True])
def test_segments_change_no_bit(lengths, store, device, monkeypatch):
    """Each begins at a kept border, and hands the gradient of the state on to the one before it.

    Sequences end at borders, cross them, and lie between them; others are empty.
    """
    x = sample(device, lengths, B=2, HV=2)
    options = inside(2, 32, device) | dict(disable_recompute=store)
    want = gradients(chunk_kda, x, "both", **options)
    assert_gradients(want, oracle_gradients(x, "both", **inside(2, 32, device)), bf16)
    for least in (2, 1):
        cut(monkeypatch, least)
        assert_same_gradients(gradients(chunk_kda, x, "both", **options), want, exact=True)


@pytest.mark.parametrize("loss", ["output", "final state"])
@pytest.mark.parametrize("H, HV", [(1, 3), (2, 2)])
def test_heads_and_losses_over_several_segments(loss, H, HV, device, monkeypatch):
    cut(monkeypatch, 1)
    x = sample(device, H=H, HV=HV, K=16, V=36, T=70)
    x = x._replace(g=(x.g.float() - 4).to(bf16))  # or the last state would know of few tokens
    options = inside(HV, 16, device)
    got = gradients(chunk_kda, x, loss, **options)
    assert_gradients(got, oracle_gradients(x, loss, **options), bf16)


def test_as_good_as_the_steps(device, monkeypatch):
    x = sample(device, T=200, K=64, V=64, H=1, HV=1)
    options = inside(1, 64, device)
    want = oracle_gradients(x, "both", **options)
    two = gradients(chunk_kda, x, "both", **options)
    monkeypatch.setattr(autograd, "serves", lambda *_: False)
    six = gradients(chunk_kda, x, "both", **options)
    for name, gradient in want.items():
        a, b = (rms_error(y[name].cpu(), gradient) for y in (two, six))
        assert a < max(1.2 * b, 2e-3), f"d{name}: {a:.1e}, the steps {b:.1e}"


def test_what_is_kept(device, monkeypatch):
    """States at borders alone, or also what prepare made; the rest of the places are empty."""
    cut(monkeypatch, 1)
    x = sample(device, B=2, H=1, HV=2)  # 4 chunks
    names = dict.fromkeys(autograd._NAMES) | x._asdict() | BOUNDED
    names |= dict(scale=1.0, use_gate=True, lower_bound=-5.0, chunk_size=64)
    for flag in ("output_final_state", "use_qk_l2norm", "use_beta_sigmoid", "allow_neg_eigval"):
        names[flag] = False
    sizes = {}
    for store in (False, True):
        values = names | dict(store=store, state_v_first=False)
        kept = autograd.chunk_kda_op(*(values[name] for name in autograd._NAMES))[2:]
        assert kept[0].shape == (3, 2, 2, 20, 32)
        sizes[store] = sum(y.numel() for y in kept[1:])
    per_token = 3 * 32 + 20 + 16 + 16  # qd, kr, w, u, A_qk, A_inv
    assert sizes[False] == 0
    assert sizes[True] == 2 * 53 * 2 * per_token + 2 * 4 * 2 * 32  # and the decay of each chunk
