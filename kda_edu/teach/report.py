"""What a failed check says: where the result is wrong, and what that pattern suggests.

Everything here is text made from two tensors of one shape. Nothing decides whether a
result passes; `check.py` does that.
"""

import math

import torch

WORDS = {
    "B": "batch",
    "N": "sequence",
    "T": "token",
    "C": "token of the chunk",
    "H": "head",
    "K": "key channel",
    "V": "value channel",
    "?": "index",
}
MAX_ROWS, MAX_COLUMNS = 32, 64
CHUNKS = (64, 32, 16, 8, 4)


def words(letter, dims=""):
    """The word for a dimension's letter; a value channel is "channel" where no key channel is."""
    if letter == "V" and "K" not in dims:
        return "channel"
    return WORDS.get(letter, f"axis {letter}")


def place_of(flat, shape, dims):
    """`token 5, head 0, value channel 3` for a flat index. Axes of length 1 are left out."""
    index = [i.item() for i in torch.unravel_index(torch.tensor(flat), shape)] if shape else []
    named = [
        f"{words(letter, dims)} {i}"
        for letter, i, size in zip(dims, index, shape, strict=True)
        if size > 1
    ]
    return ", ".join(named) if named else "the only element"


def describe_failure(got, want, name, error, budget, dims):
    """The whole message of a failed check."""
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    wrong, bad = wrong_elements(got, want, budget)
    lines = [f"{name} is wrong: error {error:.1e}, budget {budget:g}, shape {tuple(got.shape)}"]
    share = f"{int(wrong.sum())} of {wrong.numel()} elements are wrong"
    if bad.any():
        share += f", {int(bad.sum())} of them NaN or infinite"
    lines.append(share)
    lines += _first_and_worst(got, want, wrong, bad, dims)
    hint = likely_cause(got, want, wrong, bad, budget, dims)
    if hint:
        lines.append(f"likely cause: {hint}")
    lines += _map(wrong, bad, dims)
    return "\n".join(lines)


def wrong_elements(got, want, budget):
    """Two boolean tensors: where `got` is too far from `want`, and where it is not finite.

    An element is wrong when it is off by more than ten budgets of the RMS of `want`; if no
    element is (the error is spread thin), by more than one.
    """
    bad = ~got.isfinite() & ~((got == want) & ~got.isnan())
    finite = want[want.isfinite()]
    size = finite.square().mean().sqrt().item() if finite.numel() else 0.0
    size = size if size > 0 else 1.0
    gap = torch.where(got == want, 0.0, (got - want).abs())
    wrong = bad | ~(gap <= 10 * budget * size)
    if not wrong.any():
        wrong = bad | ~(gap <= budget * size)
    if not wrong.any():
        wrong = gap == gap.max()
    return wrong, bad


def _first_and_worst(got, want, wrong, bad, dims):
    gap = torch.where(bad, torch.inf, torch.where(got == want, 0.0, (got - want).abs()))
    gap = torch.where(gap.isnan(), torch.inf, gap)
    flat = gap.argmax().item()
    worst = (
        f"worst at {place_of(flat, gap.shape, dims)}: "
        f"got {got.flatten()[flat].item():.4g}, want {want.flatten()[flat].item():.4g}"
    )
    axis = _token_axis(dims)
    if axis is None:
        return [worst]
    token = _along(wrong, axis).nonzero()[0].item()
    return [f"first wrong {words(dims[axis])}: {token} of {wrong.shape[axis]}", worst]


def _token_axis(dims):
    return next((i for i, letter in enumerate(dims) if letter in "TC"), None)


def _along(mask, axis):
    """Any over every axis but one: a vector."""
    return mask.movedim(axis, 0).flatten(1).any(1) if mask.ndim > 1 else mask


# -- likely causes ---------------------------------------------------------------------------


def likely_cause(got, want, wrong, bad, budget, dims):
    """A sentence, or None when the pattern says nothing. The first rule that fits wins."""
    tolerance = max(20 * budget, 1e-9)
    if bad.all():
        return "no element is a number: was the output ever written?"
    if bad.any():
        return _position_hint(wrong, dims) or "NaN or infinity: an exponent overflowed, or 0/0"
    if not got.any():
        return "the result is zero everywhere: was it ever stored?"
    for hint in (_factor_hint(got, want, tolerance), _swap_hint(got, want, tolerance, dims)):
        if hint:
            return hint
    return _shift_hint(got, want, tolerance, dims) or _position_hint(wrong, dims)


def _close(a, b, tolerance):
    size = b.square().mean().sqrt()
    return bool(size > 0) and bool((a - b).square().mean().sqrt() <= tolerance * size)


def _factor_hint(got, want, tolerance):
    factor = ((got * want).sum() / want.square().sum()).item()
    if not math.isfinite(factor) or abs(factor) < 1e-6 or abs(factor - 1) < 1e-3:
        return None
    if not _close(got, factor * want, tolerance):
        return None
    return f"everything is off by the factor {factor:.4g}{_name_of_factor(factor, want.shape)}"


def _name_of_factor(factor, shape):
    known = {"the sign": -1.0, "ln 2: natural logarithm or log2?": math.log(2.0)}
    known["1/ln 2: natural logarithm or log2?"] = 1 / math.log(2.0)
    for n in sorted({2, *shape, 16, 32, 64, 128, 256}):
        if n > 1:
            known[f"sqrt({n})"], known[f"1/sqrt({n})"] = n**0.5, n**-0.5
            known[f"{n}"], known[f"1/{n}"] = float(n), 1.0 / n
    for name, value in known.items():
        if abs(factor / value - 1) < 1e-3:
            return f" ({name})"
    return ""


def _swap_hint(got, want, tolerance, dims):
    for i in range(want.ndim - 1, 0, -1):
        for j in range(i - 1, -1, -1):
            if want.shape[i] == want.shape[j] > 1:
                if _close(got.transpose(i, j), want, tolerance):
                    pair = f"{words(dims[j], dims)} and {words(dims[i], dims)}"
                    return f"the axes {pair} are swapped (transposed)"
    return None


def _shift_hint(got, want, tolerance, dims):
    axis = _token_axis(dims)
    if axis is None or want.shape[axis] < 3:
        return None
    last = want.shape[axis] - 1
    if _close(got.narrow(axis, 1, last), want.narrow(axis, 0, last), tolerance):
        return (
            "every token holds the value of the token before: the state was read before its update"
        )
    if _close(got.narrow(axis, 0, last), want.narrow(axis, 1, last), tolerance):
        return "every token holds the value of the token after it: the future leaks in"
    return None


def _position_hint(wrong, dims):
    for axis, letter in enumerate(dims):
        if letter in "TC" or wrong.shape[axis] < 2:
            continue
        where = _along(wrong, axis).nonzero().flatten().tolist()
        if len(where) == 1:
            return f"only {words(letter, dims)} {where[0]} of {wrong.shape[axis]} is wrong"
    axis = _token_axis(dims)
    return None if axis is None else _token_hint(_along(wrong, axis).tolist())


def _token_hint(tokens):
    """What a vector of wrong tokens suggests."""
    total, where = len(tokens), [t for t, is_wrong in enumerate(tokens) if is_wrong]
    if len(where) == total:
        return None
    if where == [0]:
        return "only token 0 is wrong: look at the initial state"
    for chunk in CHUNKS:
        hint = _chunk_hint(where, total, chunk) if total > chunk else None
        if hint:
            return hint
    first = where[0]
    if where == list(range(first, total)) and first > 0:
        for chunk in CHUNKS:
            if first % chunk == 0:
                return (
                    f"all is right before token {first}, a multiple of {chunk}: "
                    "look at what passes from chunk to chunk"
                )
        return f"all is right before token {first} and wrong from there on"
    return None


def _chunk_hint(where, total, chunk):
    """What the wrong tokens `where` say if the kernel works on chunks of this length."""
    tail = total - total % chunk
    if total % chunk and where[0] >= tail and len(where) > 1:
        return f"only the last, shorter chunk of {chunk} is wrong: look at the mask"
    if len({t // chunk for t in where}) < 2:
        return None
    places = {t % chunk for t in where}
    if places == {0}:
        return (
            f"only the first token of each chunk of {chunk} is wrong: "
            "look at the state that comes in"
        )
    if len(places) <= chunk // 4 and places == set(range(chunk - len(places), chunk)):
        return f"only the last tokens of each chunk of {chunk} are wrong"
    return None


# -- the map ---------------------------------------------------------------------------------


def _map(wrong, bad, dims):
    """Rows are tokens, columns channels, every other axis is merged."""
    if wrong.ndim == 0:
        return []
    rows = _token_axis(dims)
    if rows is None:
        rows = max(wrong.ndim - 2, 0)
    columns = wrong.ndim - 1 if wrong.ndim - 1 != rows else None
    marks = _merge(wrong, rows, columns).long()
    marks = torch.maximum(marks, 2 * _merge(bad, rows, columns).long())
    marks, row_step = _shrink(marks, MAX_ROWS)
    marks, column_step = _shrink(marks.T, MAX_COLUMNS)
    across = f", columns are {words(dims[columns], dims)}s" if columns is not None else ""
    steps = f" ({row_step} x {column_step} to a mark)" if row_step * column_step > 1 else ""
    lines = [
        f"rows are {words(dims[rows], dims)}s{across}{steps}:  . right  x wrong  ! NaN or infinite"
    ]
    width = len(str(wrong.shape[rows] - 1))
    for i, row in enumerate(marks.T.tolist()):
        lines.append(f"  {i * row_step:>{width}} " + "".join(".x!"[mark] for mark in row))
    return lines


def _merge(mask, rows, columns):
    mask = mask.movedim(rows, 0)
    if columns is None:
        return mask.reshape(mask.shape[0], -1).any(1, keepdim=True)
    return mask.reshape(mask.shape[0], -1, mask.shape[-1]).any(1)


def _shrink(marks, limit):
    """At most `limit` rows, each the worst of the rows it stands for."""
    step = math.ceil(marks.shape[0] / limit) or 1
    return torch.stack([part.amax(0) for part in marks.split(step)]), step
