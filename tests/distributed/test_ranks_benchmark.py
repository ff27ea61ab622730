"""The benchmark of several ranks, in small, on two processes of this machine."""

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks

PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "context_parallel.py"


def load():
    spec = importlib.util.spec_from_file_location("benchmark", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _rows(rank):
    benchmark = load()
    benchmark.HEADS, benchmark.K, benchmark.V, benchmark.CHECKED = 3, 8, 12, (0, 2)
    return benchmark.measure(33, dist.group.WORLD, torch.float64, "cpu", repeats=5)


def test_rows_of_two_ranks():
    rows, others = run_on_ranks(_rows, 2)
    assert others == []  # one rank reports
    forward, training = rows
    for row, mode, names in ((forward, "forward", ["o"]), (training, "training", list("qkvg"))):
        assert row["mode"] == mode and row["impl"] == "kda_edu on 2 GPUs"
        assert list(row["errors"])[: len(names)] == names
        assert row["error"] <= 1e-12 and row["repeats"] == 5
        assert 0 < row["p20"] <= row["median"] <= row["p80"]
    maps, gradients = 3 * 8 * (8 + 12) * 8, 3 * 8 * 12 * 8
    assert (forward["sent"], training["sent"]) == (maps, maps + gradients)
    assert training["flops"] == 3 * forward["flops"] > 0


def test_more_gpus_than_there_are():
    with pytest.raises(ValueError, match="--ranks: expected 1 to"):
        load().run(torch.cuda.device_count() + 1)
