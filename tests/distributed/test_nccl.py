"""The same on two GPUs through NCCL, with the compiled kernels. Skipped where there is only one."""

import pytest
import torch
import torch.distributed as dist
from cp_cases import RAW, Case, errors
from ranks import run_on_ranks

from kda_edu.teach.check import budget_for

SIZES = dict(B=1, H=2, HV=4, K=64, V=48)
CASES = {
    "float32": Case(2, [130, 71], SIZES, {**RAW, "lower_bound": -5.0}, dtype=torch.float32),
    "bfloat16": Case(2, [130, 71], SIZES, RAW, dtype=torch.bfloat16),
    "packed": Case(2, [100, 101], SIZES | dict(cu_seqlens=[0, 40, 170, 201]), dtype=torch.float32),
    "an empty rank": Case(2, [0, 90], SIZES, dtype=torch.float32),
}


def _cases(rank):
    return {name: errors(case, dist.group.WORLD, "cuda")[0] for name, case in CASES.items()}


@pytest.fixture(scope="module")
def results():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    return run_on_ranks(_cases, 2, backend="nccl")


@pytest.mark.parametrize("name", CASES)
def test_two_gpus_equal_the_oracle(results, name):
    dtype = CASES[name].dtype
    budget = 1e-4 if dtype == torch.float32 else budget_for(dtype, "gradient")
    for rank in range(2):
        assert len(results[rank][name]) >= 8
        for what, error in results[rank][name].items():
            assert error <= budget, f"rank {rank}, {what}: {error:.1e}"
