"""What only a GPU can show: graphs, streams, large tensors, binaries, and a peer beside us."""

import contextlib
import importlib
import itertools
import pkgutil
from typing import NamedTuple

import pytest
import torch
from triton.runtime.jit import JITFunction

import kda_edu.kernels
from kda_edu import chunk_kda, fused_recurrent_kda, fused_recurrent_kda_update, reference
from kda_edu.teach import budget_for, make_inputs, rms_error

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16
KERNELS = pytest.mark.parametrize("kernel", [chunk_kda, fused_recurrent_kda])


def inputs(**sizes):
    """Ragged and non-square, with a state."""
    return make_inputs(**dict(B=2, T=100, H=2, HV=4, K=64, V=96) | sizes, device=DEVICE)


def run(kernel, x, **options):
    return kernel(**x._asdict() | dict(output_final_state=True) | options)


def oracle(x, **options):
    """(o, final state) in float64, on the GPU."""
    wide = {n: v.double() if torch.is_tensor(v) else v for n, v in options.items()}
    return reference.chunk_kda(**x.double()._asdict(), **wide, output_final_state=True)


def all_in_kernel(HV, K, **more):
    """Every option that is computed inside the kernels."""
    draw = torch.Generator().manual_seed(1)
    return dict(
        A_log=torch.linspace(-1, 1, HV, device=DEVICE),
        dt_bias=torch.randn(HV * K, generator=draw).to(DEVICE),
        use_gate_in_kernel=True,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        **more,
    )


def assert_right(got, want):
    for name, a, b in zip(("o", "final state"), got, want, strict=True):
        error = rms_error(a, b)
        assert error <= budget_for(got[0].dtype), f"{name}: {error:.1e}"


def assert_same(got, want):
    for name, a, b in zip(("o", "final state"), got, want, strict=True):
        assert torch.equal(a, b), name


# -- no waiting, no recording ----------------------------------------------------------------------


def capture(call):
    """A CUDA graph of call(), and its outputs, which each replay overwrites."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # compiles and tunes
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call()
    return graph, outputs


@KERNELS
def test_a_graph_replays_with_other_lengths(kernel):
    x = inputs(cu_seqlens=[0, 100, 256, 256], dtype=bf16)
    cu = x.cu_seqlens.long()
    x = x._replace(cu_seqlens=cu)
    graph, outputs = capture(lambda: run(kernel, x))
    for lengths in ([0, 5, 60, 256], [0, 0, 0, 256], [0, 256, 256, 256], [0, 100, 256, 256]):
        cu.copy_(torch.tensor(lengths))
        for output in outputs:
            output.fill_(float("nan"))
        graph.replay()
        assert_same(outputs, run(kernel, x))
        assert_right(outputs, oracle(x))


def test_a_graph_of_a_batch_reads_its_inputs_anew():
    x = inputs(dtype=bf16)
    graph, outputs = capture(lambda: run(chunk_kda, x))
    other = inputs(dtype=bf16, seed=1)
    for name in ("q", "k", "v", "g", "beta", "initial_state"):
        getattr(x, name).copy_(getattr(other, name))
    graph.replay()
    assert_same(outputs, run(chunk_kda, other))


@contextlib.contextmanager
def no_waiting():
    """Whatever makes the host wait for the GPU raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@KERNELS
@pytest.mark.parametrize("given", ["a batch", "cu_seqlens", "cu_seqlens and its copy"])
def test_the_host_never_waits(given, kernel):
    lengths = [0, 0, 7, 100]
    x = inputs(dtype=bf16) if given == "a batch" else inputs(dtype=bf16, cu_seqlens=lengths)
    options = all_in_kernel(4, 64)
    if given == "cu_seqlens and its copy" and kernel is chunk_kda:
        options["cu_seqlens_cpu"] = torch.tensor(lengths, dtype=torch.int32)
    want = run(kernel, x, **options)
    with no_waiting():
        got = run(kernel, x, **options)
    assert_same(got, want)


# -- the same bits ---------------------------------------------------------------------------------


def leave_behind(value):
    """Fill freed memory, of several sizes, with a value: the allocator hands it out next."""
    blocks = [torch.full((2**17,), value, device=DEVICE) for _ in range(64)]
    blocks += [torch.full((2**20,), value, device=DEVICE) for _ in range(64)]
    blocks += [torch.full((2**28,), value, device=DEVICE)]
    del blocks


@KERNELS
@pytest.mark.parametrize("packed", [False, True])
def test_what_memory_held_before_does_not_matter(packed, kernel):
    x = inputs(cu_seqlens=[0, 0, 33, 34, 100]) if packed else inputs()
    results = []
    for value in (float("nan"), 1e4, -1e30):
        leave_behind(value)
        results.append(run(kernel, x))
    for got in results:
        assert got[0].isfinite().all() and got[1].isfinite().all()
        assert_same(got, results[0])


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("dtype", [bf16, fp32])
def test_twenty_runs_give_the_same_bits(dtype, lower_bound):
    x = inputs(B=1, T=1024, H=8, HV=8, K=128, V=128, dtype=dtype)
    options = all_in_kernel(8, 128, lower_bound=lower_bound)
    want = run(chunk_kda, x, **options)
    noise, other = torch.randn(2048, 2048, device=DEVICE), torch.cuda.Stream()
    for _ in range(20):
        with torch.cuda.stream(other):  # disturbs the timing
            noise @ noise
        assert_same(run(chunk_kda, x, **options), want)
    assert_right(want, oracle(x, **options))


# -- more than 2^31 elements -----------------------------------------------------------------------


class Sizes(NamedTuple):
    T: int
    H: int
    K: int


LARGE = Sizes(T=2**17 + 100, H=129, K=128)  # T K (H - 1) > 2^31: the last head begins beyond
TAIL = 100


def tail_of_a_long_run(sizes, heads_first):
    """Zeros but for the last tokens of the last head, which start with a reset."""
    T, H, K = sizes

    def zeros():
        if heads_first:
            return torch.zeros(1, H, T, K, dtype=bf16, device=DEVICE).transpose(1, 2)
        return torch.zeros(1, T, H, K, dtype=bf16, device=DEVICE)

    q, k, v, g = (zeros() for _ in range(4))
    beta = torch.zeros(1, T, H, dtype=bf16, device=DEVICE)
    part = make_inputs(B=1, T=TAIL, H=1, K=K, V=K, dtype=bf16, device=DEVICE)
    part = part._replace(g=part.g.to(bf16), initial_state=None)
    part.g[:, 0] = -50.0
    for whole, end in zip((q, k, v, g, beta), part[:5], strict=True):
        whole[:, -TAIL:, -1:] = end
    return (q, k, v, g, beta), part


@pytest.fixture
def much_memory():
    if torch.cuda.get_device_properties(0).total_memory < 100 * 2**30:
        pytest.fail("this test needs a GPU with 100 GB")
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


@KERNELS
@pytest.mark.parametrize("layout", ["dense", "packed", "heads first"])
def test_offsets_beyond_32_bits(layout, kernel, much_memory):
    sizes = LARGE
    whole, part = tail_of_a_long_run(sizes, heads_first=layout == "heads first")
    options = {}
    if layout == "packed":
        cu = torch.tensor([0, sizes.T - TAIL - 1, sizes.T], dtype=torch.int32, device=DEVICE)
        options["cu_seqlens"] = cu
    o, state = kernel(*whole, **options, output_final_state=True)
    del whole
    o_end, state_end = o[:, -TAIL:, -1:].clone(), state[-1:, -1:].clone()
    assert not o[:, :-TAIL].any() and not o[:, -TAIL:, :-1].any()
    assert not state[:, :-1].any()
    del o, state
    assert_right((o_end, state_end), oracle(part))


def test_a_pool_beyond_32_bits(much_memory):
    """Slot 4096 of a pool whose slots hold 2^19 numbers begins at element 2^31."""
    HV, K = 32, 128
    x = inputs(B=2, T=1, H=HV, HV=HV, K=K, V=K, dtype=bf16)
    slots = torch.tensor([4096, 1], device=DEVICE)
    pool = torch.zeros(4098, HV, K, K, device=DEVICE)
    pool[slots] = x.initial_state
    tokens = {n: value for n, value in x._asdict().items() if n != "initial_state"}
    o = fused_recurrent_kda_update(**tokens, state_pool=pool, slot_indices=slots)
    o_want, state_want = run(fused_recurrent_kda, x)
    assert torch.equal(o, o_want) and torch.equal(pool[slots], state_want)
    assert not pool[0].any() and not pool[2:4096].any() and not pool[4097].any()


# -- binaries --------------------------------------------------------------------------------------


def jit_functions():
    """Every kernel of the library, without its tuner."""
    for module in pkgutil.iter_modules(kda_edu.kernels.__path__):
        if module.name != "_interpreter":
            contents = vars(importlib.import_module(f"kda_edu.kernels.{module.name}"))
            for name, value in contents.items():
                if name.endswith("_kernel"):
                    while not isinstance(value, JITFunction):
                        value = value.fn
                    yield name, value


def binaries():
    return {
        name: sum(len(cache[0]) for cache in kernel.device_caches.values())
        for name, kernel in jit_functions()
    }


@KERNELS
def test_a_new_length_needs_no_new_binary(kernel):
    """At most four per kernel: a size of 1 and a multiple of 16 may have their own."""
    longest = inputs(B=1, T=200, H=1, HV=1, K=32, V=32)
    run(kernel, longest)
    before = binaries()
    assert sum(before.values()) > 0
    for T in range(1, 201):
        cut = {n: getattr(longest, n)[:, :T] for n in ("q", "k", "v", "g", "beta")}
        run(kernel, longest._replace(**cut))
    for name, count in binaries().items():
        assert count - before[name] < 4, name


@KERNELS
def test_a_new_number_of_sequences_needs_no_new_binary(kernel):
    def call(N):
        x = inputs(cu_seqlens=[0, *itertools.accumulate([7] * N)], H=1, HV=1, K=32, V=32)
        run(kernel, x)

    call(20)
    before = binaries()
    for N in range(1, 20):
        call(N)
    for name, count in binaries().items():
        assert count - before[name] < 4, name


def test_no_binary_is_used_for_another_call():
    """Head sizes, dtypes and options in both orders: a wrong key of a cache would show."""
    calls = [
        (dict(K=64, V=64), {}),
        (dict(K=128, V=64), {}),
        (dict(K=128, V=64, gate="mixed"), {}),
        (dict(K=64, V=64, dtype=bf16), {}),
        (dict(K=64, V=64, T=1500), {}),
        (dict(K=64, V=64, T=64, initial_state=False), {}),
        (dict(K=64, V=64), dict(use_qk_l2norm_in_kernel=True)),
        (dict(K=64, V=64), all_in_kernel(4, 64)),
        (dict(K=64, V=64), all_in_kernel(4, 64, lower_bound=-5.0)),
        (dict(K=64, V=64), all_in_kernel(4, 64, lower_bound=-4.0)),
        (dict(K=64, V=64), dict(chunk_size=32)),
    ]
    for sizes, options in (*calls, *reversed(calls)):
        x = inputs(**sizes)
        assert_right(run(chunk_kda, x, **options), oracle(x, **options))


@KERNELS
def test_a_gpu_that_is_not_the_current_one(kernel):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = inputs()
    y = x.to(torch.device("cuda:1"))
    got = run(kernel, y)
    assert all(value.device == torch.device("cuda:1") for value in got)
    for a, b in zip(got, run(kernel, x), strict=True):
        assert torch.equal(a.to(x.q.device), b)


# -- beside flash-linear-attention -----------------------------------------------------------------

PEER_CASES = {
    "given gate": (dict(), dict()),
    "given gate, fp16": (dict(dtype=fp16), dict()),
    "softplus gate": (dict(), dict(gate=True)),
    "bounded gate": (dict(), dict(gate=True, lower_bound=-5.0)),
    "packed": (dict(cu_seqlens=[0, 15, 300, 301, 1000]), dict()),
    "packed, bounded gate": (
        dict(cu_seqlens=[0, 256, 500, 1000], K=128, V=128),
        dict(gate=True, lower_bound=-5.0),
    ),
    "more value heads": (dict(H=2, HV=8), dict(gate=True)),
}


def peer_call(sizes, gate=False, lower_bound=None):
    """(inputs, options) that both libraries take."""
    x = inputs(**dict(B=2, T=1000, H=4, HV=4, K=64, V=64, dtype=bf16) | sizes)
    HV, K = x.g.shape[2:]
    options = dict(use_qk_l2norm_in_kernel=True)
    if gate:
        options |= all_in_kernel(HV, K)
        options.pop("use_beta_sigmoid_in_kernel")
        options["lower_bound"] = lower_bound
        x = x._replace(g=(30 * x.g + 4).to(x.q.dtype))
    if x.cu_seqlens is not None:
        x = x._replace(cu_seqlens=x.cu_seqlens.long())
    return x, options


@KERNELS
@pytest.mark.parametrize("case", PEER_CASES)
def test_beside_fla(case, kernel):
    """The same call, the same inputs, both against the oracle."""
    fla = pytest.importorskip("fla.ops.kda", reason="fla-core is not installed")
    sizes, gate = PEER_CASES[case]
    x, options = peer_call(sizes, **gate)
    want = oracle(x, **options)
    safe = {}
    if kernel is chunk_kda and options.get("lower_bound") is not None:
        safe = dict(safe_gate=True)
    ours = run(kernel, x, **options, **safe)
    x = x._replace(initial_state=x.initial_state.clone())
    theirs = run(getattr(fla, kernel.__name__), x, **options, **safe)
    for name, a, b, exact in zip(("o", "final state"), ours, theirs, want, strict=True):
        error, peer_error = rms_error(a, exact), rms_error(b, exact)
        print(f"{kernel.__name__}, {case}, {name}: ours {error:.2e}, fla {peer_error:.2e}")
        assert error <= budget_for(x.q.dtype), f"{name}: {error:.1e}"
        assert error <= 1.5 * peer_error, f"{name}: ours {error:.1e}, fla {peer_error:.1e}"
