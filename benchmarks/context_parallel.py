"""Times context parallelism on the GPUs of this host: `python benchmarks/run.py --ranks N`.

On 1, 2, 4, ... N GPUs, one process each: "strong" splits one sequence of 65,536 tokens over them,
"weak" gives each 8,192. Forward, and forward with backward; 32 heads, K = V = 128, bfloat16, every
option in the kernels. A time is that of the slowest rank, between two barriers. Beside it stand the
bytes that a rank has sent, and the error against the float64 oracle on three heads. Bytes and flops
of a row are those of one GPU.
"""

import datetime
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

from kda_edu import reference
from kda_edu.distributed import context_parallel_kda, count_bytes, split_lengths, split_sequence
from kda_edu.teach import budget_for, rms_error

HEADS, K, V, CHUNK = 32, 128, 128, 64
STRONG, WEAK = 65536, 8192  # tokens in all, tokens on each GPU
CHECKED = (0, HEADS // 2, HEADS - 1)  # heads do not meet, so a few tell of all
OPTIONS = dict(
    use_qk_l2norm_in_kernel=True,
    use_gate_in_kernel=True,
    use_beta_sigmoid_in_kernel=True,
    lower_bound=-5.0,
)
NAMES = ("q", "k", "v", "g", "beta")


def inputs(T, dtype, device):
    """All tokens of one sequence, the gate's parameters, and the gradient of the output."""
    draw = torch.Generator(device).manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=draw, device=device).to(dtype)

    tokens = [randn(1, T, HEADS, size) for size in (K, K, V, K)] + [randn(1, T, HEADS)]
    parameters = dict(
        A_log=torch.rand(HEADS, generator=draw, device=device).mul(16).log(),
        dt_bias=torch.randn(HEADS, K, generator=draw, device=device),
    )
    return tokens, parameters, randn(1, T, HEADS, V)


def oracle(tokens, parameters, d_o):
    """o and the gradients of the tokens of the checked heads, in float64."""
    heads = list(CHECKED)
    wide = [x[:, :, heads].double().requires_grad_() for x in tokens]
    own = {name: x[heads].double() for name, x in parameters.items()}
    o, _ = reference.chunk_kda(*wide, **own, **OPTIONS, chunk_size=16)
    gradients = torch.autograd.grad(o, wide, d_o[:, :, heads].double())
    return dict(o=o.detach(), **dict(zip(NAMES, gradients, strict=True)))


def measure(T, group, dtype=torch.bfloat16, device="cuda", repeats=20):
    """Rows for T tokens on the ranks of a group: forward, and training. Every rank calls it."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    tokens, parameters, d_o = inputs(T, dtype, device)
    lengths = split_lengths(T, ranks)
    want = {n: split_sequence(x, group) for n, x in oracle(tokens, parameters, d_o).items()}
    mine = [split_sequence(x, group).contiguous().requires_grad_() for x in tokens]
    d_o = split_sequence(d_o, group)

    def forward():
        return context_parallel_kda(
            *mine, **parameters, **OPTIONS, group=group, lengths=lengths, check_ranks=False
        )[0]

    def training():
        return torch.autograd.grad(forward(), mine, d_o)

    rows = []
    for mode, call, names in (("forward", forward, ("o",)), ("training", training, NAMES)):
        with torch.set_grad_enabled(mode == "training"), count_bytes() as sent:
            made = call()
        made = made if isinstance(made, tuple) else (made,)
        pairs = zip(names, made, strict=True)
        error = {n: rms_error(x.detach()[:, :, list(CHECKED)], want[n]) for n, x in pairs}
        error = dict(zip(error, _largest(list(error.values()), device, group), strict=True))
        with torch.set_grad_enabled(mode == "training"):
            times = _largest(_times(call, repeats, device, group), device, group)
        rows.append(_row(T, ranks, mode, times, error, sent.total, dtype))
    return rows if rank == 0 else []


def _times(call, repeats, device, group):
    """Milliseconds on this rank, after three calls that compile and tune."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times = []
    for _ in range(repeats + 3):
        dist.barrier(group)
        wait()
        start = time.perf_counter()
        call()
        wait()
        times.append(1e3 * (time.perf_counter() - start))
    return times[3:]


def _largest(numbers, device, group):
    """The largest over the ranks, number by number."""
    numbers = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
    return numbers.tolist()


def _row(T, ranks, mode, times, error, sent, dtype):
    passes = 3 if mode == "training" else 1
    quantiles = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    p20, median, p80 = torch.tensor(times, dtype=torch.float64).quantile(quantiles).tolist()
    per_token = HEADS * 2 * (3 * K + 2 * V + 1)  # bytes of inputs and output
    products = HEADS * 2 * (3 * K * V + CHUNK * (2 * K + 2 * V))
    return dict(
        impl=f"kda_edu on {ranks} GPUs",
        ranks=ranks,
        sent=sent,
        shape=dict(B=1, T=T, H=HEADS, K=K, V=V),
        mode=mode,
        dtype=str(dtype).removeprefix("torch."),
        repeats=len(times),
        p20=p20,
        median=median,
        p80=p80,
        bytes=per_token * T // ranks,
        flops=passes * products * T // ranks,
        error=max(error.values()),
        errors=error,
        budget=budget_for(dtype, "gradient" if mode == "training" else "forward"),
    )


def _process(rank, ranks, folder):
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(minutes=5),
        device_id=torch.device("cuda", rank),
    )
    rows = []
    sizes = [2**n for n in range(ranks.bit_length()) if 2**n <= ranks]
    for size in sizes:
        group = dist.new_group(list(range(size)))
        if rank < size:
            for T in sorted({STRONG, WEAK * size}):
                rows += measure(T, group)
        dist.barrier()
    if rank == 0:
        torch.save(rows, Path(folder, "rows"))
    dist.destroy_process_group()


def run(ranks):
    """The rows of the record "ranks", from processes on the first `ranks` GPUs of this host.

    Raises ValueError where the host has fewer.
    """
    if not 1 <= ranks <= torch.cuda.device_count():
        raise ValueError(
            f"--ranks: expected 1 to {torch.cuda.device_count()}, the GPUs of this host, "
            f"got {ranks}"
        )
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_process, (ranks, folder), nprocs=ranks)
        return torch.load(Path(folder, "rows"))
