"""Context parallelism on 2, 3 and 4 processes equals the serial result, forward and backward.

All cases run in one start of four processes; groups of two and three are part of them. Float64
cases call the reference; the float32 ones call the kernels, interpreted on a CPU.
"""

import pytest
import torch
import torch.distributed as dist
import triton
from cp_cases import CASES, KERNELS, RANKS, errors
from cp_extras import EXTRAS
from ranks import run_on_ranks

EXACT = 1e-12
FLOAT32 = 1e-5


def _all_cases(rank):
    groups = {size: dist.new_group(list(members)) for size, members in RANKS.items()}
    results = {}
    for name, case in CASES.items():
        if rank in RANKS[case.ranks]:
            results[name] = errors(case, groups[case.ranks])
    for name, function in EXTRAS.items():
        results[name] = function(groups[4])
    return results


@pytest.fixture(scope="module")
def results():
    """What each of four processes found, by case."""
    return run_on_ranks(_all_cases, 4)


@pytest.mark.parametrize("name", CASES)
def test_equals_serial(results, name):
    case = CASES[name]
    budget = FLOAT32 if case.dtype == torch.float32 else EXACT
    for rank in RANKS[case.ranks]:
        found, _ = results[rank][name]
        assert len(found) >= 6
        for what, error in found.items():
            assert error <= budget, f"rank {rank}, {what}: {error:.1e}"


@pytest.mark.parametrize("name", [name for name in CASES if name not in KERNELS])
def test_bytes_follow_the_formula(results, name):
    case = CASES[name]
    R, inputs = case.ranks, dict(B=2, H=2, HV=4, K=6, V=5) | case.inputs
    cu = inputs.get("cu_seqlens")
    borders = [sum(case.lengths[: r + 1]) for r in range(R)]
    rows, N = (inputs["B"], inputs["B"]) if cu is None else (1, len(cu) - 1)
    crosses = cu is None or any(
        a < p < b for p in borders for a, b in zip(cu, cu[1:], strict=False)
    )
    HV, K, V, size = *(inputs[n] for n in ("HV", "K", "V")), 8
    expected = {}
    if crosses:
        expected["maps"] = (R - 1) * rows * HV * K * (K + V) * size
        expected["gradients of states"] = (R - 1) * rows * HV * K * V * size
    if case.final_state:
        ring = 2 * (R - 1) * N * HV * K * V * size // R
        expected |= {"final states": ring, "gradients of final states": ring}
    for rank in RANKS[R]:
        sent = dict(results[rank][name][1])
        asked = sent.pop("descriptions", 0) + sent.pop("lengths", 0)
        assert (asked > 0) == (case.check_ranks or cu is not None)
        assert sent == expected


@pytest.mark.parametrize("name", [n for n, f in EXTRAS.items() if f.budget is not None])
def test_beside_other_tools(results, name):
    for rank in range(4):
        for what, error in results[rank][name].items():
            assert error <= EXTRAS[name].budget, f"rank {rank}, {what}: {error:.1e}"


def test_kernels_run_where_they_can(results):
    """Without this, float32 cases could pass by the reference."""
    interpreted = triton.knobs.runtime.interpret
    for rank in range(4):
        assert results[rank]["what runs"] == [not interpreted, True]


def test_bytes_do_not_depend_on_length(results):
    for rank in range(4):
        short, long = results[rank]["bytes at two lengths"]
        assert short == long and sum(short.values()) > 0


def test_ranks_that_differ(results):
    """Every rank hears of it, in the same words."""
    expected = {
        "heads": "q: expected the same number of heads H on every rank, got 2 on rank 0 and 1 on "
        "rank 2",
        "dtype": "q: expected the same dtype on every rank, got torch.float64 on rank 0 and "
        "torch.float32 on rank 2",
        "scale": "scale: expected the same value on every rank, got others on rank 2 "
        "than on rank 0",
        "states": "initial_state: expected the same number of sequences (-1: None) on every rank, "
        "got -1 on rank 0 and 2 on rank 2",
        "gradients": "requires_grad: expected the same flag on every rank, got 0 on rank 0 and 1 "
        "on rank 2",
        "packing": "cu_seqlens: expected the same values on every rank, got others on rank 2 "
        "than on rank 0",
        "lengths": "lengths: expected the same values on every rank, got others on rank 3 than on "
        "rank 0",
        "end": "cu_seqlens: expected to end at T = 12, got 13",
    }
    for rank in range(4):
        said = results[rank]["ranks that differ"]
        assert said.keys() == expected.keys()
        for what, message in expected.items():
            assert said[what] == f"ValueError: {message}", f"rank {rank}"


def test_a_rank_that_refuses_its_arguments(results):
    for rank in range(4):
        said = results[rank]["a refused argument"]
        if rank == 2:
            assert said == "ValueError: beta: expected shape (1, 3, 2), got (1, 3, 3)"
        else:
            assert said == "ValueError: rank 2 has refused its arguments; its own message says why"


def test_bad_groups_and_lengths(results):
    for rank in range(4):
        *alike, last = results[rank]["what is no group"]
        assert alike == [
            "ValueError: group: expected a DeviceMesh with one dimension, got 2; take one of them, "
            'as in mesh["cp"]',
            "ValueError: group: this process is no member of it",
            "TypeError: group: expected a ProcessGroup or DeviceMesh, got str",
            "ValueError: lengths: expected 4 integers >= 0, one for each rank, got [1, 2, 3]",
            "ValueError: lengths: expected numbers that add up to 5 tokens, got [1, 2, 3, 4]",
            "ValueError: x, count: expected x [B, T, ...] and count >= 0, got (1, 5) and -1",
        ]
        assert last == f"ValueError: lengths: expected 5 for rank {rank}, as in its tensors, got 7"


def test_infinite_numbers_stay_in_their_sequence(results):
    for rank in range(4):
        bad, good = results[rank]["an infinite sequence"]
        assert bad > 0 and good == 0
