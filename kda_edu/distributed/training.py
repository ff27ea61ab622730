"""Training with each sequence split over the ranks that `torchrun` has started.

Every rank holds the whole model and draws the same batch; each takes its piece of every sequence.
The gradients of the parameters are shares of one loss, so they are added up. Then all ranks take
the same step, and their models stay equal.
"""

import datetime
import os

import torch
import torch.distributed as dist
from torch.nn import functional as F

from .collectives import sum_over_ranks
from .pieces import split_lengths, split_sequence

SECONDS = 120  # until a rank that does not come counts as lost
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class Ranks:
    """All ranks of a training run, as one context-parallel group.

    Args:
        ranks: how many there have to be.
        device: "cuda" (each rank takes the GPU of its number on the host; NCCL), or "cpu" (gloo).
        seconds: timeout of the group.

    Raises ValueError where `torchrun` has started another number of processes, or none.
    """

    def __init__(self, ranks, device="cpu", seconds=SECONDS):
        started = int(os.environ.get("WORLD_SIZE", 1))
        missing = [name for name in VARIABLES if name not in os.environ]
        if missing or started != ranks:
            raise ValueError(
                f"--context-parallel: expected {ranks} processes, as `torchrun --nproc-per-node "
                f"{ranks} -m kda_edu.train` starts them, got {started}"
            )
        self.device = torch.device(device)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
        timeout = datetime.timedelta(seconds=seconds)
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timeout)
        self.group, self.rank, self.count = dist.group.WORLD, dist.get_rank(), ranks

    @property
    def first(self):
        """Whether this rank is the one that writes files and speaks."""
        return self.rank == 0

    def loss(self, model, tokens):
        """This rank's share of the mean cross-entropy of tokens [B, T + 1], as `model.loss`."""
        lengths = split_lengths(tokens.shape[1] - 1, self.count)
        inputs, targets = (
            split_sequence(x, self.group, lengths=lengths) for x in (tokens[:, :-1], tokens[:, 1:])
        )
        logits = model(inputs, cp_group=self.group, cp_lengths=lengths)
        logits, targets = logits.flatten(0, 1).float(), targets.flatten()
        return F.cross_entropy(logits, targets, reduction="sum") / tokens[:, 1:].numel()

    def sum(self, share):
        """The sum of a number over the ranks, without gradient."""
        return sum_over_ranks(share.detach(), self.group, "losses")

    def sum_gradients(self, model):
        """Add up the gradients of all parameters, in one message per dtype."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        for dtype in dict.fromkeys(p.dtype for p in parameters):
            some = [p for p in parameters if p.dtype == dtype]
            flat = torch.cat([p.grad.flatten() for p in some])
            flat = sum_over_ranks(flat, self.group, "gradients of parameters")
            for p, total in zip(some, flat.split([p.numel() for p in some]), strict=True):
                p.grad = total.view_as(p)

    def any(self, flag):
        """Whether the flag is set on any rank, so that all of them stop after the same step."""
        flag = torch.tensor(float(flag), device=self.device)
        return bool(sum_over_ranks(flag, self.group, "requests to stop"))

    def close(self):
        dist.destroy_process_group()
