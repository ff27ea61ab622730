"""Run a function in several processes that form a gloo group, and collect what it returns."""

import datetime
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing


def run_on_ranks(function, ranks, seconds=60, backend="gloo"):
    """[function(rank) for each rank], each in a process of its own; tensors and numbers come back.

    seconds: timeout of the group. backend: "gloo", or "nccl" with one GPU for each rank.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = function, ranks, folder, seconds, backend
        torch.multiprocessing.spawn(_process, arguments, nprocs=ranks)
        return [torch.load(Path(folder, f"{rank}.pt")) for rank in range(ranks)]


def _process(rank, function, ranks, folder, seconds, backend):
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=seconds),
    )
    torch.save(function(rank), Path(folder, f"{rank}.pt"))
