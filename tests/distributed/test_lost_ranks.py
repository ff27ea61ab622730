"""A rank that hangs or dies ends the others, with a message, within the timeout of the group."""

import datetime
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from cp_extras import message_of, pieces, some_inputs

from kda_edu.distributed import context_parallel_kda

SECONDS = 3
SAYS = (
    "RuntimeError: rank {} of 3: exchanging maps failed. Another rank has ended, or did not come "
    "within the timeout of the group; look for the first error among the other ranks. "
    "The transport says: "
)


def _process(rank, folder):
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3)
    groups = [dist.new_group(timeout=timeout) for _ in range(2)]
    dist.barrier()
    cut = pieces(some_inputs(), None)
    if rank == 1:
        time.sleep(SECONDS + 1)  # hangs
        Path(folder, "awake").touch()
        time.sleep(0.5)  # the others wait for it again
        os._exit(3)
    for scenario, group in zip(("hangs", "dies"), groups, strict=True):
        start = time.monotonic()
        said = message_of(context_parallel_kda, *cut, group=group, check_ranks=False)
        torch.save((said, time.monotonic() - start), Path(folder, f"{scenario} {rank}"))
        while not Path(folder, "awake").exists():
            time.sleep(0.02)
    os._exit(0)  # torn-down groups would wait for the dead rank


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    start = torch.multiprocessing.get_context("spawn").Process
    processes = [start(target=_process, args=(rank, folder)) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode is not None, "a rank still waits"
    assert [process.exitcode for process in processes] == [0, 3, 0]
    return folder


@pytest.mark.parametrize("scenario", ["hangs", "dies"])
def test_the_others_end_with_a_message(folder, scenario):
    for rank in (0, 2):
        said, took = torch.load(folder / f"{scenario} {rank}")
        assert said.startswith(SAYS.format(rank)), said
        assert len(said) > len(SAYS.format(rank))
        if scenario == "hangs":
            assert "Timed out" in said and SECONDS - 0.1 < took < SECONDS + 3
        else:
            assert took < SECONDS + 3
