"""Gradients beside those of the float64 oracle, shared by the tests of the backward."""

import itertools
import random

import torch
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
    return gradients(reference.chunk_kda, x.to("cpu"), loss, torch.Tensor.double, **options)


# An error below this is none: what float32 flushes to zero; with float16 inputs the keys and
# queries that meet the state are kept in float16, in steps of 2^-24 below its normal range.
FLOORS = {torch.float32: 1e-30, torch.bfloat16: 1e-30, torch.float16: 2**-24}


def assert_gradients(got, want, dtype, budget=None):
    """All within the budget of a call whose q has this dtype; RMS, and the worst element.

    A gradient stored in 16 bits may add its own rounding. Those of the gate's parameters sum
    gradients of either sign over all tokens: in float32 1e-4, the larger of the two budgets.
    """
    assert got.keys() == want.keys()
    for name, a in got.items():
        a, b = a.detach().cpu(), want[name].cpu()
        assert a.shape == b.shape, name
        limit = budget or budget_for(dtype, "gradient")
        if name in PARAMETERS:
            limit = max(limit, 1e-4)
        if a.dtype == torch.bfloat16:
            limit = max(limit, 2**-8)
        error = max_error(a, b)
        if error <= FLOORS[dtype]:
            continue
        assert rms_error(a, b) <= limit, f"d{name}: {rms_error(a, b):.1e}"
        peak = b.abs().max().item()
        assert error <= 2 * limit * peak, f"d{name}: the worst element, {error:.1e} of {peak:.1e}"


def assert_same_gradients(got, want):
    """Bit for bit."""
    assert got.keys() == want.keys()
    for name, a in got.items():
        assert a.dtype == want[name].dtype and torch.equal(a, want[name]), f"d{name}"
