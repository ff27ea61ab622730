"""The inputs are what the oracle and the kernels expect, and hard to pass by accident."""

import math

import pytest
import torch

from kda_edu import reference
from kda_edu.teach import make_inputs, rms_error


def test_shapes_dtypes_and_ranges():
    made = make_inputs(B=3, T=33, H=2, HV=6, K=8, V=10, dtype=torch.bfloat16)
    q, k, v, g, beta, state, cu_seqlens = made
    assert q.shape == k.shape == (3, 33, 2, 8) and v.shape == (3, 33, 6, 10)
    assert g.shape == (3, 33, 6, 8) and beta.shape == (3, 33, 6) and state.shape == (3, 6, 8, 10)
    assert q.dtype == k.dtype == v.dtype == beta.dtype == torch.bfloat16
    assert g.dtype == state.dtype == torch.float32 and cu_seqlens is None
    assert g.max() < 0 and 0 < beta.min() and beta.max() < 1
    assert rms_error(k.double().norm(dim=-1), torch.ones(3, 33, 2)) < 4e-3


def test_the_defaults_are_ragged_and_not_square():
    made = make_inputs()
    B, T, H, K = made.q.shape
    V = made.v.shape[-1]
    assert all(T % chunk for chunk in (16, 32, 64)) and T > 64
    assert K != V and B > 1 and H > 1
    assert made.initial_state.abs().min() > 0


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others():
    a, b, c = make_inputs(seed=3), make_inputs(seed=3), make_inputs(seed=4)
    assert all(torch.equal(x, y) for x, y in zip(a[:6], b[:6], strict=True))
    assert all(rms_error(x, y) > 0.3 for x, y in zip(a[:6], c[:6], strict=True))


def test_the_oracle_gets_the_rounded_numbers():
    made = make_inputs(dtype=torch.bfloat16)
    exact = make_inputs(dtype=torch.float64)
    assert torch.equal(made.double().q, made.q.double())
    assert 1e-4 < rms_error(made.double().q, exact.q) < 4e-3
    assert {x.dtype for x in made.double() if x is not None} == {torch.float64}


def test_the_oracle_takes_them_whole():
    made = make_inputs(HV=4).double()
    o, _ = reference.recurrent_kda(**made._asdict())
    assert o.shape == (2, 70, 4, 24)
    packed = make_inputs(HV=4, cu_seqlens=[0, 7, 7, 50]).double()
    assert packed.q.shape == (1, 50, 2, 16) and packed.initial_state.shape == (3, 4, 16, 24)
    assert packed.cu_seqlens.tolist() == [0, 7, 7, 50] and packed.cu_seqlens.dtype == torch.int32
    o, _ = reference.recurrent_kda(**packed._asdict())
    assert o.shape == (1, 50, 4, 24)


@pytest.mark.parametrize("head", range(4))
def test_a_head_is_what_the_oracle_computes_alone(head):
    made = make_inputs(HV=4, dtype=torch.float64)
    o, _ = reference.recurrent_kda(**made._asdict())
    q, k, v, g, beta, state = made.head(batch=1, head=head)
    alone, _ = reference.recurrent_kda(
        *(x[None, :, None] for x in (q, k, v, g, beta)), initial_state=state[None, None]
    )
    assert rms_error(alone[0, :, 0], o[1, :, head]) < 1e-14


@pytest.mark.parametrize("gate", [0, -0.5, -math.inf])
def test_a_constant_gate(gate):
    assert torch.equal(make_inputs(gate=gate).g, torch.full((2, 70, 2, 16), float(gate)))


def test_gates_by_name():
    assert make_inputs(gate="none").g.abs().max() == 0
    mixed = make_inputs(gate="mixed", dtype=torch.float64).g
    assert mixed.unique().tolist() == [-20.0, -5.0, -0.1, -1e-6, 0.0]
    reset = make_inputs(gate="reset").g
    assert reset.isinf().flatten(2).all(-1)[0].nonzero().flatten().tolist() == [22, 45, 68]
    assert reset.isinf().sum() == 2 * 3 * 2 * 16
    low, middle, high = (
        make_inputs(T=2000).g[0, :, 0].flatten().quantile(torch.tensor([0.01, 0.5, 0.99]))
    )
    assert -1.7 < low < -1.1 and -0.15 < middle < -0.12 and -0.016 < high < -0.011


def test_keys_by_name():
    k = make_inputs(keys="correlated", dtype=torch.float64).k[0, :, 0]
    assert (k @ k.T).min() > 0.8
    k = make_inputs(keys="orthogonal", dtype=torch.float64).k[1, :, 1]
    for first in (0, 16, 32, 48):
        group = k[first : first + 16]
        assert rms_error(group @ group.T, torch.eye(16, dtype=torch.float64)) < 1e-14
    k = make_inputs(dtype=torch.float64, T=500).k[0, :, 0]
    assert (k @ k.T).mean().abs() < 0.05


def test_beta_and_state_can_be_fixed():
    assert torch.equal(make_inputs(beta=1.0).beta, torch.ones(2, 70, 2))
    assert make_inputs(initial_state=False).initial_state is None


def test_gradients_and_moves():
    leaves = make_inputs(dtype=torch.float64, cu_seqlens=[0, 5]).requires_grad()
    assert all(x.is_leaf and x.requires_grad for x in leaves[:6])
    moved = make_inputs(cu_seqlens=[0, 5], device="meta")
    assert all(x.device.type == "meta" for x in moved)
    assert make_inputs(cu_seqlens=[0, 5]).to(torch.float16).cu_seqlens.dtype == torch.int32


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(HV=3), "HV: expected a multiple of H = 2, got 3"),
        (dict(K=0), "K: expected an integer >= 1, got 0"),
        (dict(T=1.5), "T: expected an integer >= 0, got 1.5"),
        (dict(gate="fast"), "gate: expected one of .*, got 'fast'"),
        (dict(gate=0.1), "gate: expected one of .* or a number <= 0, got 0.1"),
        (dict(gate=True), "gate: expected one of .*, got True"),
        (dict(keys="equal"), "keys: expected one of .*, got 'equal'"),
        (dict(beta="big"), "beta: expected 'random' or a number, got 'big'"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        make_inputs(**options)
