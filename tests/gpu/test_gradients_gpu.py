"""The backward on a GPU: every launch, graphs, the same bits, large tensors, compiled models."""

import itertools

import pytest
import torch
from test_chunk_gpu import (
    all_in_kernel,
    binaries,
    capture,
    inputs,
    leave_behind,
    much_memory,
    no_waiting,
)

from kda_edu import chunk_kda, fused_recurrent_kda, reference
from kda_edu.kernels.backward_state import reverse_tile
from kda_edu.kernels.state import state_tile
from kda_edu.teach import budget_for, make_inputs, rms_error

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16
KERNELS = pytest.mark.parametrize("kernel", [chunk_kda, fused_recurrent_kda])
LEAVES = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")
__all__ = ["much_memory"]  # a fixture


def leaves_of(arguments):
    given = {n: arguments[n] for n in LEAVES if arguments.get(n) is not None}
    return {n: y.detach().clone().requires_grad_() for n, y in given.items()}


def upstream_for(x, seed=3):
    """Random gradients of o, in its dtype, and of the final state."""
    draw = torch.Generator().manual_seed(seed)
    B, _, HV, K = x.g.shape
    N = B if x.cu_seqlens is None else len(x.cu_seqlens) - 1
    state = torch.randn(N, HV, K, x.v.shape[-1], generator=draw)
    return torch.randn(x.v.shape, generator=draw).to(x.v), state.to(x.v.device)


def gradients(kernel, x, upstream=None, **options):
    """{name: gradient} of every floating tensor of a call."""
    arguments = x._asdict() | options
    leaves = leaves_of(arguments)
    outputs = kernel(**arguments | leaves, output_final_state=True)
    upstream = upstream_for(x) if upstream is None else upstream
    found = torch.autograd.grad(outputs, list(leaves.values()), upstream)
    return dict(zip(leaves, found, strict=True))


def oracle(x, upstream=None, **options):
    upstream = [y.double() for y in upstream or upstream_for(x)]
    wide = {
        n: y.double() if torch.is_tensor(y) and y.is_floating_point() else y
        for n, y in options.items()
    }
    return gradients(reference.chunk_kda, x.double(), upstream, **wide, chunk_size=16)


def assert_right(got, want, dtype, scale=1.0):
    """Within the budget of a gradient; float32 products on a GPU are three of tf32 each."""
    limit = scale * (1e-4 if dtype == fp32 else budget_for(dtype, "gradient"))
    assert got.keys() == want.keys()
    errors = {n: rms_error(got[n], want[n]) for n in got}
    print(", ".join(f"{n} {error:.1e}" for n, error in errors.items()))
    wrong = {n: error for n, error in errors.items() if not error <= limit}
    assert not wrong, wrong


def assert_same(got, want):
    assert got.keys() == want.keys()
    for n, y in got.items():
        assert torch.equal(y, want[n]), n


# -- every launch ----------------------------------------------------------------------------------

DIMS = [(64, 64), (128, 128), (256, 256), (96, 40), (16, 100)]


@pytest.mark.parametrize("dtype", [fp32, fp16, bf16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("K, V", DIMS)
@pytest.mark.parametrize("chains", [4, 64])
def test_every_tile_of_the_scans(chains, K, V, dtype):
    """Few chains and many: the scans have no tuner, their tiles follow from the shapes."""
    x = inputs(B=chains // 4, T=150, H=2, HV=4, K=K, V=V, dtype=dtype)
    for tile in (state_tile, reverse_tile):
        chosen = tile(chains, K, V, 64, dtype)
        wide = chains >= 48 and K <= 128 and V > 32 and dtype != fp32
        assert (chosen["BV"] == 64) == wide
    options = all_in_kernel(4, K)
    assert_right(gradients(chunk_kda, x, **options), oracle(x, **options), dtype)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("chunk_size", [16, 32, 64])
@pytest.mark.parametrize("T", [64, 128, 256])
def test_chunks_of_every_size(T, chunk_size, lower_bound):
    """Products with transposed operands were miscompiled for Hopper at 64 x 64 with four warps."""
    for K, dtype in itertools.product((64, 128), (fp16, bf16)):
        x = inputs(B=1, T=T, H=4, HV=4, K=K, V=K, dtype=dtype)
        options = all_in_kernel(4, K, lower_bound=lower_bound)
        got = gradients(chunk_kda, x, **options, chunk_size=chunk_size)
        assert_right(got, oracle(x, **options), dtype)


@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize("dtype", [bf16, fp32])
def test_packed(dtype, store):
    lengths = [0, 1, 1, 62, 123, 187, 252, 380, 383]
    x = inputs(cu_seqlens=lengths, H=2, HV=4, dtype=dtype)
    options = all_in_kernel(4, 64)
    want = oracle(x, **options)
    for known in (None, torch.tensor(lengths, dtype=torch.int32)):
        got = gradients(chunk_kda, x, **options, cu_seqlens_cpu=known, disable_recompute=store)
        assert_right(got, want, dtype)
    assert_right(gradients(fused_recurrent_kda, x, **options), want, dtype)


@pytest.mark.parametrize("gate", ["none", -1e-4, -20.0, -1e4, "mixed", "reset"])
@pytest.mark.parametrize("dtype", [bf16, fp32])
def test_any_gate(dtype, gate):
    """With no decay the gradient of a gate is a difference of two nearly equal sums."""
    x = inputs(B=1, T=1024, H=4, HV=4, K=128, V=128, gate=gate, dtype=dtype)
    got, want = gradients(chunk_kda, x), oracle(x)
    assert all(y.isfinite().all() for y in got.values())
    if gate == -1e4:  # nothing passes
        assert got.pop("g").abs().max() < 1e-5 and not got.pop("initial_state").any()
        want.pop("g"), want.pop("initial_state")
    elif gate != -20.0:
        bias = (got["g"].double() - want["g"]).mean().abs()
        assert bias < 1e-2 * want["g"].square().mean().sqrt()
    assert_right(got, want, dtype)


# -- no waiting, no recording ----------------------------------------------------------------------


@KERNELS
def test_a_graph_of_forward_and_backward(kernel):
    """Captured once, replayed with other lengths and other values."""
    x = inputs(cu_seqlens=[0, 100, 256, 256], dtype=bf16)
    cu = x.cu_seqlens.long()
    x = x._replace(cu_seqlens=cu)
    options, upstream = all_in_kernel(4, 64), upstream_for(x)
    arguments = x._asdict() | options
    leaves = leaves_of(arguments)

    def step():
        outputs = kernel(**arguments | leaves, output_final_state=True)
        return torch.autograd.grad(outputs, list(leaves.values()), upstream)

    graph, found = capture(step)
    for lengths in ([0, 5, 60, 256], [0, 0, 0, 256], [0, 256, 256, 256], [0, 100, 256, 256]):
        cu.copy_(torch.tensor(lengths))
        with torch.no_grad():
            leaves["v"].mul_(0.5)
        for gradient in found:
            gradient.fill_(float("nan"))
        graph.replay()
        y = x._replace(v=leaves["v"].detach())
        assert_same(
            dict(zip(leaves, found, strict=True)), gradients(kernel, y, upstream, **options)
        )
        assert_right(dict(zip(leaves, found, strict=True)), oracle(y, upstream, **options), bf16)


@KERNELS
@pytest.mark.parametrize("packed", [False, True])
def test_the_host_never_waits(packed, kernel):
    x = inputs(dtype=bf16, **(dict(cu_seqlens=[0, 0, 7, 100]) if packed else {}))
    options, upstream = all_in_kernel(4, 64), upstream_for(x)
    want = gradients(kernel, x, upstream, **options)
    with no_waiting():
        got = gradients(kernel, x, upstream, **options)
    assert_same(got, want)


# -- the same bits ---------------------------------------------------------------------------------


@KERNELS
@pytest.mark.parametrize("packed", [False, True])
def test_what_memory_held_before_does_not_matter(packed, kernel):
    x = inputs(cu_seqlens=[0, 0, 33, 34, 100]) if packed else inputs()
    results = []
    for value in (float("nan"), 1e4, -1e30):
        leave_behind(value)
        results.append(gradients(kernel, x, **all_in_kernel(4, 64)))
    for got in results:
        assert all(y.isfinite().all() for y in got.values())
        assert_same(got, results[0])


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("dtype", [bf16, fp32])
def test_twenty_runs_give_the_same_bits(dtype, lower_bound):
    x = inputs(B=1, T=1024, H=8, HV=8, K=128, V=128, dtype=dtype)
    options = all_in_kernel(8, 128, lower_bound=lower_bound)
    want = gradients(chunk_kda, x, **options)
    noise, other = torch.randn(2048, 2048, device=DEVICE), torch.cuda.Stream()
    for _ in range(20):
        with torch.cuda.stream(other):  # disturbs the timing
            noise @ noise
        assert_same(gradients(chunk_kda, x, **options), want)
    assert_right(want, oracle(x, **options), dtype)


def test_stored_equals_made_anew():
    x = inputs(B=1, T=1000, H=4, HV=8, K=128, V=128, dtype=bf16)
    options = all_in_kernel(8, 128)
    want = gradients(chunk_kda, x, **options)
    assert_same(gradients(chunk_kda, x, **options, disable_recompute=True), want)


# -- more than 2^31 elements -----------------------------------------------------------------------

LONG, MANY, TAIL = 2**17 + 100, 129, 100  # LONG 128 (MANY - 1) > 2^31


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("K, V, chunk_size", [(128, 16, 16), (16, 128, 64)])
def test_gradients_beyond_32_bits(K, V, chunk_size, packed, much_memory):
    """Zeros but for the last tokens of the last head, which start with a reset.

    With K = 128 and chunks of 16 the queries, gates and states pass 2^31 elements, with V = 128
    the values and what belongs to them.
    """
    sizes = dict(q=K, k=K, v=V, g=K)
    whole = {n: torch.zeros(1, LONG, MANY, D, dtype=bf16, device=DEVICE) for n, D in sizes.items()}
    whole["beta"] = torch.zeros(1, LONG, MANY, dtype=bf16, device=DEVICE)
    part = make_inputs(B=1, T=TAIL, H=1, K=K, V=V, dtype=bf16, device=DEVICE)
    part = part._replace(g=part.g.to(bf16), initial_state=None)
    part.g[:, 0] = -50.0
    do, _ = upstream_for(part)
    whole_do = torch.zeros_like(whole["v"])
    whole_do[:, -TAIL:, -1:] = do
    for n in whole:
        whole[n][:, -TAIL:, -1:] = getattr(part, n)
        whole[n].requires_grad_()
    options = dict(chunk_size=chunk_size)
    if packed:
        cu = torch.tensor([0, LONG - TAIL - 1, LONG], dtype=torch.int32, device=DEVICE)
        options["cu_seqlens"] = cu
    o, _ = chunk_kda(**whole, **options)
    found = torch.autograd.grad(o, list(whole.values()), whole_do)
    got = {n: y[:, -TAIL:, -1:].clone() for n, y in zip(whole, found, strict=True)}
    for n, y in zip(whole, found, strict=True):
        assert not y[:, -TAIL:, :-1].any() and not y[:, : -TAIL - 64].any(), n
    del o, found
    torch.cuda.empty_cache()
    arguments = {n: y.double().requires_grad_() for n, y in part._asdict().items() if n in whole}
    o, _ = reference.chunk_kda(**arguments)
    want = torch.autograd.grad(o, list(arguments.values()), do.double())
    assert_right(got, dict(zip(arguments, want, strict=True)), bf16)


# -- binaries, compiled models, other devices ------------------------------------------------------


@KERNELS
def test_a_new_length_needs_no_new_binary(kernel):
    """At most four per kernel: a size of 1 and a multiple of 16 may have their own."""

    def call(T):
        gradients(kernel, inputs(B=1, T=T, H=1, HV=1, K=32, V=32))

    for T in (200, 9):  # the backward of the recurrence takes chunks of 64, or of 16
        call(T)
    before = binaries()
    assert sum(n for name, n in before.items() if "bwd" in name) > 0
    for T in range(1, 200, 7):
        call(T)
    for name, count in binaries().items():
        assert count - before[name] < 8, name


def test_no_binary_is_used_for_another_call():
    """Head sizes, dtypes and options in both orders: a wrong key of a cache would show."""
    calls = [
        (dict(K=64, V=64), {}),
        (dict(K=128, V=64), {}),
        (dict(K=64, V=64, dtype=bf16), {}),
        (dict(K=64, V=64, T=64, initial_state=False), {}),
        (dict(K=64, V=64), all_in_kernel(4, 64)),
        (dict(K=64, V=64), all_in_kernel(4, 64, lower_bound=-5.0)),
        (dict(K=64, V=64), dict(chunk_size=32)),
    ]
    for sizes, options in (*calls, *reversed(calls)):
        x = inputs(**sizes)
        got = gradients(chunk_kda, x, **options)
        exact = {n: y for n, y in options.items() if n != "chunk_size"}
        assert_right(got, oracle(x, **exact), x.q.dtype)


@KERNELS
def test_compiled_by_inductor(kernel):
    """One graph for every length, forward and backward, in a model with something around it."""
    torch._dynamo.reset()
    options = all_in_kernel(4, 64)
    parameters = {n: options.pop(n) for n in ("A_log", "dt_bias")}

    def model(q, v, **rest):
        o, state = kernel(q * 1.5, v=torch.tanh(v), **rest, **options, output_final_state=True)
        return (o.sin() * o).sum() + (state**2).sum()

    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for T in (100, 131, 260):
        arguments = inputs(T=T)._asdict() | parameters
        results = []
        for function in (model, compiled):
            leaves = leaves_of(arguments)
            found = torch.autograd.grad(function(**arguments | leaves), list(leaves.values()))
            results.append(dict(zip(leaves, found, strict=True)))
        for n, y in results[0].items():
            assert rms_error(results[1][n], y) < 1e-5, n
    torch._dynamo.reset()


@KERNELS
def test_a_gpu_that_is_not_the_current_one(kernel):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = inputs()
    y = x.to(torch.device("cuda:1"))
    got, want = gradients(kernel, y, upstream_for(y)), gradients(kernel, x)
    for n, gradient in got.items():
        assert gradient.device == torch.device("cuda:1")
        assert torch.equal(gradient.to(x.q.device), want[n]), n
