"""Times the kernels, and each peer that is installed, on the same inputs in one process.

    python benchmarks/run.py                     every record
    python benchmarks/run.py forward decode      these records
    python benchmarks/run.py --cases T8192       cases whose name holds this text; writes nothing
    python benchmarks/run.py --ranks 4           one sequence on 1, 2 and 4 GPUs of this host

forward and training (forward and backward) compare with the peers, sequence_length the token loop
with the chunks over T, decode is one token for each of B requests, in a CUDA graph that visits more
states than the L2 cache holds. Each time stands beside the error of the same call against the
float64 oracle, on three of the heads; a wrong result is not recorded. A peer that fails, or is not
installed, is listed with its error. All options run in the kernels: gate with a lower bound of -5,
norm of q and k, sigmoid of beta; K = V = 128, bfloat16, float32 state in and out. Times are medians
with the L2 cache flushed between calls.
"""

import argparse
import contextlib
import importlib.util
import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
import triton.testing
from triton.runtime.autotuner import Autotuner

from kda_edu import chunk_kda, fused_recurrent_kda, fused_recurrent_kda_update, reference
from kda_edu.kernels.forward import chunk_kda_fwd
from kda_edu.kernels.sequences import chunk_layout
from kda_edu.teach import budget_for, records, rms_error

LOWER_BOUND = -5.0
DTYPE = torch.bfloat16


class Case(NamedTuple):
    name: str
    B: int
    T: int
    H: int
    lengths: tuple = ()  # of the sequences packed along T
    gate: str = "lower bound"
    K: int = 128
    V: int = 128


MIXED = (1300, 547, 2048, 963, 271, 3063)
FORWARD = [
    Case("B1 T8192 H64", 1, 8192, 64),
    Case("B1 T8192 H96", 1, 8192, 96),
    Case("B2 T4096 H64", 2, 4096, 64),
    Case("B1 T8192 H64 packed", 1, 8192, 64, MIXED),
    Case("B1 T8192 H96 packed", 1, 8192, 96, (1024,) * 8),
    Case("B1 T8192 H32", 1, 8192, 32),
    Case("B1 T65536 H32", 1, 65536, 32),
    Case("B1 T512 H64", 1, 512, 64),
    Case("B1 T8192 H64 softplus", 1, 8192, 64, gate="softplus"),
]
TRAINING = [
    Case("B1 T8192 H32", 1, 8192, 32),
    Case("B1 T8192 H64", 1, 8192, 64),
    Case("B1 T8192 H64 packed", 1, 8192, 64, MIXED),
    Case("B1 T8192 H64 softplus", 1, 8192, 64, gate="softplus"),
]
SEQUENCE_LENGTH = [Case(f"B1 T{T} H32", 1, T, 32) for T in (64, 256, 1024, 4096, 16384)]
DECODE = [Case(f"B{B} T1 H32", B, 1, 32) for B in (1, 8, 64, 256)]
POOL_BYTES = 512 * 2**20  # several times the L2 cache


def inputs(case):
    """Tensors and options of one call, as a trained layer would make them."""
    draw = torch.Generator("cuda").manual_seed(0)

    def randn(*shape, dtype=DTYPE):
        return torch.randn(*shape, generator=draw, device="cuda", dtype=torch.float32).to(dtype)

    B, T, H, K, V = case.B, case.T, case.H, case.K, case.V
    q, k, g = (randn(B, T, H, K) for _ in range(3))
    v, beta = randn(B, T, H, V), randn(B, T, H)
    ends = torch.tensor([0, *case.lengths], device="cuda").cumsum(0)
    N = len(case.lengths) or B
    options = dict(
        A_log=torch.rand(H, generator=draw, device="cuda").mul(16).log(),
        dt_bias=randn(H * K, dtype=torch.float32),
        initial_state=randn(N, H, K, V, dtype=torch.float32),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        lower_bound=LOWER_BOUND if case.gate == "lower bound" else None,
        cu_seqlens=ends if case.lengths else None,
    )
    return (q, k, v, g, beta), options


def fla_chunk_kda(*tensors, **options):
    """flash-linear-attention, on its fast path where the gate is bounded."""
    from fla.ops.kda import chunk_kda as fla

    return fla(*tensors, **options, safe_gate=options["lower_bound"] is not None)


def six_steps(q, k, v, g, beta, **options):
    """The forward that any call can take, where `chunk_kda` would choose two kernels."""
    cu_seqlens = options.pop("cu_seqlens")
    for name in ("use_qk_l2norm", "use_gate", "use_beta_sigmoid"):
        options[name] = options.pop(f"{name}_in_kernel")
    layout = chunk_layout(*q.shape[:2], 64, cu_seqlens)
    scale = q.shape[-1] ** -0.5
    return chunk_kda_fwd(q, k, v, g, beta, **options, scale=scale, layout=layout)[:2]


def flash_kda_fwd(
    q, k, v, g, beta, A_log, dt_bias, initial_state, lower_bound, cu_seqlens, **always
):
    """FlashKDA, which norms and takes the sigmoid always, and keeps the state with V first."""
    import flash_kda

    if lower_bound is None:
        raise ValueError("lower_bound: FlashKDA expects one, got None")
    H, K = q.shape[2:]
    state = initial_state.mT.contiguous()
    o, last = torch.empty_like(v), torch.empty_like(state)
    flash_kda.fwd(
        q, k, v, g, beta, K**-0.5, o, A_log, dt_bias.view(H, K), lower_bound,
        initial_state=state, final_state=last, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    return o, last.mT


def fla_decode(q, k, v, g, beta, pool, slots, **options):
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd as fla

    out = torch.empty_like(v)
    fla(q, k, v, g, beta, initial_state=pool, ssm_state_indices=slots, out=out, **options)
    return out


def stored_chunk_kda(*tensors, **options):
    return chunk_kda(*tensors, **options, disable_recompute=True)


def checked_heads(case):
    """Heads do not meet, so a few tell of all: a wrong offset shows in the last."""
    return sorted({0, case.H // 2, case.H - 1})


def oracle(case, gradients=False):
    """What a call should return for the checked heads, in float64; and gradients, by name."""
    heads = checked_heads(case)
    (q, k, v, g, beta), options = inputs(case)
    options["A_log"] = options["A_log"][heads]
    options["dt_bias"] = options["dt_bias"].view(case.H, case.K)[heads].flatten()
    options["initial_state"] = options["initial_state"][:, heads]
    wide = {n: x.double() if _is_float(x) else x for n, x in options.items()}
    tensors = [x[:, :, heads].double() for x in (q, k, v, g, beta)]
    leaves = dict(zip("q k v g beta".split(), tensors, strict=True))
    leaves |= {n: x for n, x in wide.items() if _is_float(x)}
    for x in leaves.values():
        x.requires_grad_(gradients)
    with torch.set_grad_enabled(gradients):
        results = reference.chunk_kda(*tensors, **wide, chunk_size=16)
        if not gradients:
            return dict(zip(("o", "state"), results, strict=True))
        weights = [x[:, :, heads] for x in upstream(case)[:1]] + [upstream(case)[1][:, heads]]
        torch.autograd.backward(results, [w.double() for w in weights])
    return {n: x.grad for n, x in leaves.items()}


def upstream(case):
    """Gradients of the output and of the final state."""
    draw = torch.Generator("cuda").manual_seed(1)
    N = len(case.lengths) or case.B
    shapes = (case.B, case.T, case.H, case.V), (N, case.H, case.K, case.V)
    do, d_state = (torch.randn(*shape, generator=draw, device="cuda") for shape in shapes)
    return do.to(DTYPE), d_state


def of_heads(case, made):
    """The checked heads of outputs or gradients, by name."""
    heads, H, K = checked_heads(case), case.H, case.K
    pick = {
        "A_log": lambda x: x[heads],
        "dt_bias": lambda x: x.view(H, K)[heads].flatten(),
        "state": lambda x: x[:, heads],
        "initial_state": lambda x: x[:, heads],
    }
    return {n: pick.get(n, lambda x: x[:, :, heads])(x) for n, x in made.items()}


def errors(case, made, want):
    made = of_heads(case, made)
    return {name: rms_error(made[name], want[name]) for name in want}


def _is_float(x):
    return torch.is_tensor(x) and x.is_floating_point()


def least_bytes(case):
    """Every input read once, every output written once, in bytes."""
    N = len(case.lengths) or case.B
    per_token = 2 * (3 * case.K + 2 * case.V + 1)
    return case.B * case.T * case.H * per_token + N * case.H * case.K * case.V * 8


def least_flops(case, chunk=64):
    """Products of the chunk form: scores and solve inside a chunk, three K x V with the state."""
    K, V = case.K, case.V
    per_token = 2 * (3 * K * V + chunk * (2 * K + 2 * V))
    return case.B * case.T * case.H * per_token


def training_bytes(case):
    """The forward; then its inputs and the gradient of the output read, five gradients written."""
    per_token = 2 * (3 * case.K + 2 * case.V + 1) + 2 * (3 * case.K + case.V + 1)
    return least_bytes(case) + case.B * case.T * case.H * per_token


def training_flops(case):
    """The forward, and two products in the backward for each of its own."""
    return 3 * least_flops(case)


def measure(case, call, want):
    """One row of a record: a forward call, its times, peak memory and error."""
    tensors, options = inputs(case)
    forward = lambda: call(*tensors, **options)  # noqa: E731
    with torch.no_grad():
        got, memory = peak_memory(forward)
        error = errors(case, dict(zip(("o", "state"), got, strict=True)), want)
        del got
        times = timed(forward)
    return row(case, "forward", times, error) | dict(memory=memory)


def measure_training(case, call, want):
    """One row: forward and backward, their times, peak memory and the errors of all gradients."""
    tensors, options = inputs(case)
    leaves = dict(zip("q k v g beta".split(), tensors, strict=True))
    leaves |= {n: x for n, x in options.items() if _is_float(x)}
    for x in leaves.values():
        x.requires_grad_()
    weights = upstream(case)

    def step():
        return torch.autograd.grad(call(*tensors, **options), list(leaves.values()), weights)

    got, memory = peak_memory(step)
    error = errors(case, dict(zip(leaves, got, strict=True)), want)
    del got
    made = row(case, "training", timed(step), error, training_bytes(case), training_flops(case))
    return made | dict(memory=memory)


def peak_memory(call):
    """(what the call returns, the most bytes that it held beside its inputs)."""
    call()  # compiles, tunes
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    made = call()
    return made, torch.cuda.max_memory_allocated() - before


def timed(call):
    """Milliseconds of 10 calls at least, and of 100 ms of them."""
    once = triton.testing.do_bench(call, warmup=1, rep=1)
    return triton.testing.do_bench(call, warmup=50, rep=max(100, 10 * once), return_mode="all")


def measure_decode(case, call, want):
    """One row: a step of decoding, captured in a graph of steps on other states each time."""
    (q, k, v, g, beta), options = inputs(case)
    state = options.pop("initial_state")
    for name in ("output_final_state", "cu_seqlens"):
        del options[name]
    rounds = max(1, POOL_BYTES // (state.numel() * 4))
    pool = state.repeat(rounds, 1, 1, 1)
    slots = torch.arange(rounds * case.B, device="cuda").view(rounds, case.B)

    def step(i):
        return call(q, k, v, g, beta, pool, slots[i], **options)

    o = step(0)
    error = errors(case, dict(o=o, state=pool[: case.B]), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(rounds):
            step(i)
    times = [elapsed(graph.replay) / rounds for _ in range(25)][5:]
    return row(case, "decode", times, error)


def elapsed(call):
    """Milliseconds between two events around a call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def row(case, mode, times, error, bytes=None, flops=None):
    """error: of each output or gradient, by name; the row's is the largest."""
    p20, median, p80 = torch.tensor(times).quantile(torch.tensor([0.2, 0.5, 0.8])).tolist()
    return dict(
        case=case.name,
        shape={name: getattr(case, name) for name in ("B", "T", "H", "K", "V")},
        lengths=list(case.lengths),
        gate=case.gate,
        mode=mode,
        dtype="bfloat16",
        repeats=len(times),
        p20=p20,
        median=median,
        p80=p80,
        bytes=bytes or least_bytes(case),
        flops=flops or least_flops(case),
        error=max(error.values()),
        errors=error,
        budget=budget_for(DTYPE, "gradient" if mode == "training" else "forward"),
    )


def compile_configurations_at_once():
    """Triton's autotuner compiles one configuration at a time, which for a peer with hundreds of
    them takes minutes. Compile those of a call side by side first; it times them as ever.
    """
    choose = Autotuner.prune_configs

    def prune_configs(self, kwargs):
        configs = choose(self, kwargs)
        ahead = triton.AsyncCompileMode(ThreadPoolExecutor(), ignore_errors=True)
        with contextlib.suppress(Exception), ahead:  # what fails here fails again where it is timed
            for config in configs:
                options = {**kwargs, **config.all_kwargs(), "warmup": True}
                self.fn.run(*self.nargs.values(), **options)
        return configs

    Autotuner.prune_configs = prune_configs


CHUNKS = {"kda_edu chunk_kda": chunk_kda}
FORWARD_PEERS = {"fla chunk_kda": fla_chunk_kda}
if importlib.util.find_spec("flash_kda"):  # no package registry has it
    FORWARD_PEERS["FlashKDA fwd"] = flash_kda_fwd
RECORDS = {
    "forward": (
        FORWARD,
        CHUNKS | {"kda_edu chunk_kda, six steps": six_steps} | FORWARD_PEERS,
        measure,
    ),
    "training": (
        TRAINING,
        CHUNKS | {"kda_edu chunk_kda, stored": stored_chunk_kda, "fla chunk_kda": fla_chunk_kda},
        measure_training,
    ),
    "sequence_length": (
        SEQUENCE_LENGTH,
        CHUNKS | {"kda_edu fused_recurrent_kda": fused_recurrent_kda},
        measure,
    ),
    "decode": (
        DECODE,
        {
            "kda_edu fused_recurrent_kda_update": fused_recurrent_kda_update,
            "fla fused_recurrent_kda_fwd": fla_decode,
        },
        measure_decode,
    ),
}


def run(name, only=""):
    """Yields the rows of a record and what failed, as far as known after each call."""
    cases, calls, measure_one = RECORDS[name]
    rows, failures = [], []
    cases = [case for case in cases if only in case.name]
    for case, (impl, call) in itertools.product(cases, calls.items()):
        if impl == next(iter(calls)):
            want = oracle(case, gradients=name == "training")
        try:
            made = dict(impl=impl) | measure_one(case, call, want)
        except Exception as error:  # a peer may fail in any way; the others still run
            failures.append(dict(impl=impl, case=case.name, error=f"{error!r}"[:300]))
            print(f"{case.name:24} {impl:36} FAILED {error!r:.200}", flush=True)
            yield rows, failures
            continue
        rows.append(made)
        print(
            f"{case.name:24} {impl:36} {made['median']:9.4f} ms  [{made['p20']:.4f}, "
            f"{made['p80']:.4f}]  error {made['error']:.1e}",
            flush=True,
        )
        yield rows, failures


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", nargs="*", metavar="RECORD", help=", ".join(RECORDS))
    parser.add_argument("--cases", default="", help="only cases whose name holds this text")
    parser.add_argument("--commit", help="what is measured, where this is no git checkout")
    parser.add_argument("--folder", help="where to write, default benchmarks/results")
    parser.add_argument("--ranks", type=int, help="only context parallelism, on this many GPUs")
    arguments = parser.parse_args()
    if unknown := set(arguments.records) - set(RECORDS):
        parser.error(f"expected records among {', '.join(RECORDS)}, got {', '.join(unknown)}")
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/run.py: no CUDA GPU here. Times of a CPU say nothing.")
    compile_configurations_at_once()
    if arguments.ranks is not None:
        import context_parallel

        rows = context_parallel.run(arguments.ranks)
        print("written:", write("ranks", rows, [], arguments))
        return
    for name in arguments.records or RECORDS:
        rows, path = [], None
        for rows, failures in run(name, arguments.cases):
            if rows and not arguments.cases:  # after each row: a run that is stopped keeps them
                path = write(name, rows, failures, arguments)
        if path:
            print("written:", path)
        if not rows:
            print(f"{name}: no case holds {arguments.cases!r}, or all failed")


def write(name, rows, failures, arguments):
    """The path of one record; printed instead where it is refused."""
    record = records.environment(name, arguments.commit) | dict(rows=rows, failures=failures)
    try:
        return records.write(record, arguments.folder)
    except records.RecordError as error:
        print(json.dumps(record))
        raise SystemExit(f"not recorded: {error}") from None


if __name__ == "__main__":
    main()
