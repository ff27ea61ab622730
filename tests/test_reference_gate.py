"""The gates and the norm of the oracle, against closed forms and at their tails."""

import math

import pytest
import torch

from kda_edu.reference import kda_gate, l2norm
from kda_edu.teach.check import rms_error

INF = math.inf
F64 = torch.float64


def softplus_gate(x, dtype=F64, **options):
    """(gate, its derivative) of each number in x, with A_log = 0."""
    x = torch.tensor(x, dtype=dtype).reshape(-1, 1, 1).requires_grad_()
    g = kda_gate(x, torch.zeros(1, dtype=dtype), **options)
    (slope,) = torch.autograd.grad(g.sum(), x)
    return g.flatten().tolist(), slope.flatten().tolist()


@pytest.mark.parametrize("dtype, budget", [(F64, 1e-15), (torch.float32, 2e-7)])
def test_the_tails_of_softplus(dtype, budget):
    """log(1 + exp x) in float32 is 0 below -17 and infinite above 88; the gate must be neither."""
    points = [-100.0, -20.0, -17.0, -1.0, 0.0, 19.9, 20.0, 20.1, 89.0, 1e4]
    gates, slopes = softplus_gate(points, dtype)
    for x, g, slope in zip(points, gates, slopes, strict=True):
        want = -x if x > 20 else -math.log1p(math.exp(x))
        assert abs(g - want) <= budget * abs(want) + 1e-44, x
        want = -1.0 if x > 20 else -1 / (1 + math.exp(-x))
        assert abs(slope - want) <= budget * abs(want) + 1e-44, x
    assert gates[1] == pytest.approx(-2.0611536e-9, rel=1e-7)
    assert gates[2] == pytest.approx(-4.1399375e-8, rel=1e-7)


def test_softplus_is_linear_above_the_threshold_and_does_not_jump():
    (below, at, above), _ = softplus_gate([19.999999, 20.0, 20.000001])
    assert below < -19.999999 and above == -20.000001
    assert 2e-9 < -20.0 - at <= 20 * 2e-9  # what the line leaves out, at most
    (curved, linear), _ = softplus_gate([1.4, 1.6], beta=2.0, threshold=3.0)
    assert curved == pytest.approx(-math.log1p(math.exp(2.8)) / 2, rel=1e-14) and linear == -1.6


def test_both_gates_in_closed_form():
    """Each head has its rate, each head and channel its bias."""
    draw = torch.Generator().manual_seed(0)
    x, A_log, bias = (
        torch.randn(*shape, generator=draw, dtype=F64) for shape in ((2, 5, 3, 4), (3,), (3, 4))
    )
    soft, bounded = kda_gate(x, A_log, bias), kda_gate(x, A_log, bias, lower_bound=-5.0)
    for h in range(3):
        for d in range(4):
            y, rate = x[..., h, d] + bias[h, d], math.exp(A_log[h])
            assert rms_error(soft[..., h, d], -rate * (1 + y.exp()).log()) <= 1e-14
            assert rms_error(bounded[..., h, d], -5 / (1 + (-rate * y).exp())) <= 1e-14
    assert torch.equal(kda_gate(x, A_log, bias.flatten()), soft)
    assert torch.equal(kda_gate(x, A_log.reshape(1, 1, 3, 1), bias), soft)
    no_rate = kda_gate(x, None, bias, lower_bound=-5.0)
    assert torch.equal(no_rate, kda_gate(x, 0 * A_log, bias, lower_bound=-5.0))
    far = torch.tensor([[-INF, -1e4, 1e4, INF]], dtype=F64)
    assert kda_gate(far, lower_bound=-5.0).tolist() == [[0.0, 0.0, -5.0, -5.0]]
    assert kda_gate(x.bfloat16(), A_log).dtype == torch.float32


def test_l2norm():
    """Ordinary rows come out with length 1, small ones shorter, zeros stay; eps is in the root."""
    unit = torch.tensor([0.6, 0.0, 0.8], dtype=F64)
    lengths = [0.0, 1e-30, 1e-3, 1.0, 1e4]
    x = torch.stack([length * unit for length in lengths]).requires_grad_()
    y = l2norm(x)
    for length, row in zip(lengths, y, strict=True):
        want = unit * length / math.sqrt(length**2 + 1e-6)
        assert rms_error(row, want) <= 1e-15
    (dx,) = torch.autograd.grad(y[0].sum(), x)
    assert dx[0].tolist() == pytest.approx([1e3] * 3)
    half = l2norm(torch.tensor([[3e4, 4e4]], dtype=torch.float16))  # the squares overflow float16
    assert half.dtype == torch.float16 and half.tolist()[0] == pytest.approx([0.6, 0.8], abs=1e-3)
