"""Run the reader's function on hard inputs and say, in words, what is wrong with it."""

from typing import NamedTuple

import torch

from ..check import rms_error
from ..report import describe_failure
from ._core import get

TICK, CROSS, OPEN = "✓", "✗", "○"


class Verdict(NamedTuple):
    """The result of checking one function against one exercise."""

    status: str  # "right", "wrong" or "unsolved"
    message: str
    mistakes: tuple = ()  # the mutants that behave like the function


def check_exercise(name, function):
    """Check the reader's `function` and print the verdict. Never stops the notebook.

    Raises KeyError for an unknown exercise and TypeError if `function` is not callable.
    """
    print(judge(get(name), function).message)


def judge(exercise, function):
    """The Verdict on a function, from calls with every seed of the exercise."""
    if not callable(function):
        raise TypeError(f"{exercise.name}: expected a function, got {type(function).__name__}")
    for seed in exercise.seeds:
        verdict = _judge_call(exercise, function, seed)
        if verdict:
            return verdict
    calls = len(exercise.seeds)
    return Verdict("right", f"{TICK} {exercise.title}: right on {calls} random inputs")


def _judge_call(exercise, function, seed):
    """None if the call is right."""
    arguments = exercise.arguments(seed)
    given = _copy(arguments)
    try:
        result = function(**given)
    except Exception as error:
        if isinstance(error, NotImplementedError) and not error.args:
            return _unsolved(exercise)  # the line of the stub; torch's own always says more
        return _wrong(exercise, seed, f"it raised {type(error).__name__}: {error}", None)
    if result is None or result is Ellipsis:
        return _unsolved(exercise)
    for key, value in arguments.items():
        if isinstance(value, torch.Tensor) and not _same(value, given[key]):
            complaint = f"it changed its argument {key!r}; work on a copy"
            return _wrong(exercise, seed, complaint, result)
    complaint = compare(exercise, result, exercise.expected(**_copy(arguments)))
    return _wrong(exercise, seed, complaint, result) if complaint else None


def compare(exercise, result, wanted):
    """None if every output is within the budget, else what is wrong with the first bad one."""
    results, wanted = _as_tuple(result), _as_tuple(wanted)
    results = tuple(_as_tensor(x) for x in results)
    names = list(exercise.outputs)
    if len(results) != len(names):
        return f"it returned {len(results)} results, expected {len(names)}: {', '.join(names)}"
    for (name, dims), got, want in zip(exercise.outputs.items(), results, wanted, strict=True):
        if not isinstance(got, torch.Tensor):
            return f"{name} is of type {type(got).__name__}, expected a torch.Tensor"
        if got.shape != want.shape:
            return f"{name} has shape {tuple(got.shape)}, expected {tuple(want.shape)}"
        error = rms_error(got, want)
        if not error <= exercise.budget:
            return describe_failure(got, want, name, error, exercise.budget, dims)
    return None


def _unsolved(exercise):
    return Verdict("unsolved", f"{OPEN} {exercise.title}: not solved yet")


def _wrong(exercise, seed, complaint, result):
    mistakes = () if result is None else _known_mistakes(exercise, seed, result)
    lines = [f"{CROSS} {exercise.title}: not right yet", complaint]
    if mistakes:
        lines.append("this is what happens when " + ", or when ".join(mistakes))
    return Verdict("wrong", "\n".join(lines), mistakes)


def _known_mistakes(exercise, seed, result):
    """The mutants whose results are those of the reader, on the call that went wrong."""
    return tuple(
        mistake for mistake in exercise.mutants if _behaves_like(exercise, mistake, seed, result)
    )


def _behaves_like(exercise, mistake, seed, result):
    try:
        mutant = exercise.build(exercise.mutant(mistake))
        other = mutant(**_copy(exercise.arguments(seed)))
    except Exception:
        return False
    pairs = list(
        zip(map(_as_tensor, _as_tuple(result)), map(_as_tensor, _as_tuple(other)), strict=False)
    )
    return bool(pairs) and all(_agree(a, b) for a, b in pairs)


def _agree(a, b):
    both = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    return both and a.shape == b.shape and rms_error(a, b) <= 1e-6


def _as_tuple(result):
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _as_tensor(x):
    """A number counts as a tensor of no dimension."""
    return torch.tensor(x, dtype=torch.float64) if isinstance(x, (bool, int, float)) else x


def _copy(arguments):
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in arguments.items()
    }


def _same(a, b):
    equal = (a == b) | (a.isnan() & b.isnan()) if a.shape == b.shape else torch.tensor(False)
    return bool(equal.all())
