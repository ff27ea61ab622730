"""Gradients beside those of the float64 oracle, shared by the tests of the backward."""

import itertools
import random

import torch
import torch.nn.functional as F
from cases import NAMES

from kda_edu import reference
from kda_edu.teach.check import budget_for, max_error, rms_error

LOSSES = ("output", "final state", "both", "slice")
PARAMETERS = ("A_log", "dt_bias")


def covering_cases(options, seed=0, tries=100):
    """Dicts that name one value of every option, such that every pair of values occurs.

    Greedy: of some random draws the one that holds most of the pairs still missing.
    """
    draw = random.Random(seed)
    missing, cases = _pairs(options), []
    while missing:
        first = dict(min(missing, key=repr))
        tried = [
            {name: draw.choice(values) for name, values in options.items()} | first
            for _ in range(tries)
        ]
        best = max(tried, key=lambda case: len(missing & pairs_of(case)))
        missing -= pairs_of(best)
        cases.append(best)
    return cases


def _pairs(options):
    items = [[(name, value) for value in values] for name, values in options.items()]
    both = itertools.combinations(items, 2)
    return {pair for a, b in both for pair in itertools.product(a, b)}


def pairs_of(case):
    return set(itertools.combinations(case.items(), 2))


def _clone(x):
    return x.detach().clone()


def leaves_of(x, options, copy=_clone):
    """(leaves {name: tensor}, arguments of a call): every floating tensor asks for a gradient."""
    arguments = x._asdict() | options
    leaves = {}
    for name in (*NAMES, "initial_state", *PARAMETERS):
        if arguments.get(name) is not None:
            leaves[name] = arguments[name] = copy(arguments[name]).requires_grad_()
    return leaves, arguments


def loss_of(o, state, loss, dtype):
    """A random projection; its weights are rounded to dtype, so that the oracle meets the same."""
    draw = torch.Generator().manual_seed(7)
    weights = torch.randn(o.shape, generator=draw).to(dtype).to(o)
    total = 0.0
    if loss in ("output", "both"):
        total = (o * weights).sum()
    if loss == "slice":
        part = (slice(None), slice(1, None, 2), slice(None), slice(None, None, 2))
        total = (o[part] * weights[part]).sum()
    if loss in ("final state", "both"):
        total = total + (state * torch.randn(state.shape, generator=draw).to(state)).sum()
    return total


def gradients(function, x, loss="both", copy=_clone, **options):
    """{name: gradient} of every tensor of the call; zeros where nothing flows.

    loss: one of LOSSES, or a function of (o, final state).
    """
    leaves, arguments = leaves_of(x, options, copy)
    output_final_state = loss not in ("output", "slice")
    o, state = function(**arguments | dict(output_final_state=output_final_state))
    total = loss(o, state) if callable(loss) else loss_of(o, state, loss, x.v.dtype)
    found = torch.autograd.grad(
        total, list(leaves.values()), allow_unused=True, materialize_grads=True
    )
    return dict(zip(leaves, found, strict=True))


def oracle_gradients(x, loss="both", **options):
    """The same from the reference, in float64 on the CPU, at the same rounded inputs."""
    options = {n: y.cpu() if isinstance(y, torch.Tensor) else y for n, y in options.items()}
    x = x.to("cpu")
    found = gradients(reference.chunk_kda, x, loss, torch.Tensor.double, **options)
    return Gradients(found, spread_of_parameters(x, found, options))


class Gradients(dict):
    """Gradients by name, and of those that are sums over all tokens the spread, by name."""

    def __init__(self, found, spread):
        super().__init__(found)
        self.spread = spread


def spread_of_parameters(x, found, options):
    """sqrt(sum of squares) of what every token and channel adds to dA_log and d dt_bias.

    Terms of either sign may leave next to nothing of a sum. Each is known to the budget of a
    gradient, relative to itself, so the error of the sum is measured by this, not by the sum.
    """
    A_log, bias = options.get("A_log"), options.get("dt_bias")
    y = x.g.double() + (0.0 if bias is None else bias.double().reshape(x.g.shape[2:]))
    ratio = torch.where(y < -30, 1.0, F.softplus(y) / y.sigmoid())
    if options.get("lower_bound") is not None:
        ratio = y
    spread = {}
    if A_log is not None:
        spread["A_log"] = (ratio * found["g"]).square().sum((0, 1, 3)).sqrt()
    if bias is not None:
        spread["dt_bias"] = found["g"].square().sum((0, 1)).sqrt().reshape(bias.shape)
    return spread


# An error below this is none: what float32 flushes to zero; with float16 inputs the keys and
# queries that meet the state are kept in float16, in steps of 2^-24 below its normal range.
FLOORS = {torch.float32: 1e-30, torch.bfloat16: 1e-30, torch.float16: 2**-24}


def assert_gradients(got, want, dtype):
    """All within the budget of a call whose q has this dtype; RMS, and the worst element.

    A gradient stored in 16 bits may add its own rounding. Those of the gate's parameters sum
    gradients of either sign over all tokens: in float32 1e-4, the larger of the two budgets, and
    relative to the spread of the terms.
    """
    assert got.keys() == want.keys()
    for name, a in got.items():
        limit = budget_for(dtype, "gradient")
        if name in PARAMETERS or a.is_cuda:  # on a GPU a float32 product is three of tf32
            limit = max(limit, 1e-4)
        a, b = a.detach().cpu(), want[name].cpu()
        assert a.shape == b.shape, name
        if a.dtype == torch.bfloat16:
            limit = max(limit, 2**-8)
        error = max_error(a, b)
        if error <= FLOORS[dtype]:
            continue
        if name in getattr(want, "spread", {}):
            a, b = (y.double() / want.spread[name].clamp(min=1e-30) for y in (a, b))
            rms = (a - b).square().mean().sqrt().item()
            assert rms <= limit, f"d{name}: {rms:.1e} of the spread of its terms"
            continue
        assert rms_error(a, b) <= limit, f"d{name}: {rms_error(a, b):.1e}"
        peak = b.abs().max().item()
        assert error <= 2 * limit * peak, f"d{name}: the worst element, {error:.1e} of {peak:.1e}"


def assert_same_gradients(got, want, exact=False):
    """Bit for bit. On a GPU to rounding, unless exact: the width of a load orders its sums."""
    assert got.keys() == want.keys()
    for name, a in got.items():
        b = want[name]
        assert a.dtype == b.dtype, name
        if exact or not a.is_cuda:
            assert torch.equal(a, b), f"d{name}"
        else:
            rounding = 1e-6 if a.dtype == torch.float32 else 2**-9
            assert rms_error(a, b) <= rounding, f"d{name}: {rms_error(a, b):.1e}"
