"""Who holds which tokens and sequences; and the algebra of pieces, in one process."""

import functools
import random

import pytest
import torch

from kda_edu import reference
from kda_edu.distributed import count_bytes, find_piece, split_lengths, split_sequence
from kda_edu.distributed.collectives import as_group
from kda_edu.distributed.kda import fold, response
from kda_edu.teach.check import rms_error
from kda_edu.teach.inputs import make_inputs


def random_split(rng):
    """Lengths on up to 6 ranks and a packing, many of them empty, many borders shared."""
    lengths = [rng.choice([0, 0, 1, 2, 5]) for _ in range(rng.randint(1, 6))]
    T = sum(lengths)
    borders = [sum(lengths[:r]) for r in range(len(lengths))]
    inside = [rng.choice([*borders, rng.randint(0, T)]) for _ in range(rng.randint(0, 5))]
    return lengths, [0, *sorted(inside), T]


@pytest.mark.parametrize("seeds", [range(n, n + 50) for n in range(0, 400, 50)], ids=str)
def test_pieces_of_a_packed_batch(seeds):
    for seed in seeds:
        lengths, cu = random_split(random.Random(seed))
        check_pieces(lengths, cu)


def check_pieces(lengths, cu):
    """Against a table of which rank holds each token."""
    pieces = [find_piece(rank, lengths, cu_seqlens=cu) for rank in range(len(lengths))]
    owner = [rank for rank, n in enumerate(lengths) for _ in range(n)]
    spans = list(zip(cu, cu[1:], strict=False))

    ended = [n for p in pieces for n in range(p.ending.start, p.ending.stop)]
    assert ended == list(range(len(spans)))  # each sequence ends on exactly one rank, in order
    for rank, p in enumerate(pieces):
        assert p.stop - p.start == lengths[rank] == p.cu_seqlens[-1]
        local = zip(p.cu_seqlens, p.cu_seqlens[1:], strict=False)
        for (a, b), (begin, end) in zip(local, spans[p.first : p.last], strict=True):
            tokens = {t for t in range(begin, end) if owner[t] == rank}
            assert {p.start + t for t in range(a, b)} == tokens
        enters = next((n for n, (b, e) in enumerate(spans) if b < p.start < e), None)
        leaves = next((n for n, (b, e) in enumerate(spans) if b < p.stop < e), None)
        assert p.enters == (enters is not None) and p.leaves == (leaves is not None)
        assert p.passes_through == (p.enters and enters == leaves)
        if p.enters:
            assert p.first == enters and p.since == owner[spans[enters][0]]
            assert p.entering == slice(0, min(spans[enters][1], p.stop) - p.start)
        if p.leaves:
            assert p.last == leaves + 1 and p.until == owner[spans[leaves][1] - 1]
            assert p.leaving == slice(max(spans[leaves][0], p.start) - p.start, lengths[rank])
        assert p.any_crosses == any(q.leaves for q in pieces)


def test_pieces_of_a_batch():
    first, middle, last = (find_piece(rank, [3, 0, 4], batch=5) for rank in range(3))
    assert (first.enters, first.leaves, first.ended) == (False, True, 0)
    assert (middle.enters, middle.leaves, middle.passes_through) == (True, True, True)
    assert (last.enters, last.leaves, last.ending) == (True, False, slice(0, 5))
    assert [(p.start, p.stop) for p in (first, middle, last)] == [(0, 3), (3, 3), (3, 7)]
    assert (last.entering, last.leaving) == (slice(0, 4), slice(4, 4))
    assert (first.entering, first.leaving) == (slice(0, 0), slice(0, 3))
    alone = find_piece(0, [7], batch=2)
    assert not (alone.enters or alone.leaves or alone.any_crosses) and alone.ended == 2


def test_split_lengths():
    assert split_lengths(10, 4) == [3, 3, 2, 2]
    assert split_lengths(2, 3) == [1, 1, 0]
    assert split_lengths(0, 2) == [0, 0]


@pytest.mark.parametrize(
    "raises, message, call",
    [
        (ValueError, r"expected tokens >= 0 and ranks >= 1", lambda: split_lengths(-1, 2)),
        (TypeError, r"ranks: expected an int, got float", lambda: split_lengths(4, 2.0)),
        (
            ValueError,
            r"cu_seqlens: expected to end at T = 4",
            lambda: find_piece(0, [4], 1, [0, 3]),
        ),
        (RuntimeError, r"call init_process_group first", lambda: as_group(None)),
        (TypeError, r"x: expected a torch.Tensor, got list", lambda: split_sequence([1, 2])),
    ],
)
def test_bad_input(raises, message, call):
    with pytest.raises(raises, match=message):
        call()


@pytest.mark.parametrize(
    "dtype, budget, gate", [(torch.float64, 1e-13, "mixed"), (torch.float32, 1e-5, "random")]
)
def test_a_chain_of_eight_responses(dtype, budget, gate):
    """M, X and P of eight pieces give the state after them, and the outputs of the last."""
    x = make_inputs(B=2, T=64, H=2, HV=4, K=8, V=5, gate=gate, seed=3, dtype=dtype)
    x.g[:, :, 1] = -10.0  # one head forgets at once: heads must not be mixed up
    want_o, want = reference.recurrent_kda(**x.double()._asdict(), output_final_state=True)
    call = functools.partial(reference.chunk_kda, output_final_state=True)
    cut = [[t[:, 8 * r : 8 * r + 8] for t in x[:5]] for r in range(8)]
    pieces = [response(call, *tokens) for tokens in cut]
    maps = torch.stack([torch.cat([p.M, p.X], dim=-1) for p in pieces])
    state = fold(maps[:7], x.initial_state)
    assert rms_error(fold(maps, x.initial_state), want) <= budget
    o = torch.einsum("bthk,bhkv->bthv", pieces[7].P, state) + call(*cut[7])[0]
    assert rms_error(o, want_o[:, 56:]) <= budget


def test_counting_nests_and_ends():
    with count_bytes() as outer:
        with count_bytes() as inner:
            pass
    assert outer == inner == {} and outer.total == 0
