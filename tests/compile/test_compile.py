"""Every kernel compiles for four GPUs, in every configuration, within their shared memory.

To add a case, append (name, function) to CASES: the function calls the library on CPU tensors.
"""

import importlib
import pkgutil

import pytest
import torch
import triton
import triton.language as tl
from harness import CHIPS, check_limits, compiled_kernels, launched_kernels
from triton.runtime import Autotuner, Heuristics, JITFunction

import kda_edu.kernels
from kda_edu import (
    chunk_kda,
    fused_recurrent_kda,
    fused_recurrent_kda_update,
    kda_gate_fwd,
    l2norm_fwd,
)
from kda_edu.kernels._autotune import autotune
from kda_edu.kernels.gate import kda_gate_fwd_kernel
from kda_edu.kernels.l2norm import l2norm_fwd_kernel
from kda_edu.teach.inputs import make_inputs

bf16, fp32 = torch.bfloat16, torch.float32


def all_in_kernel(HV, K):
    """Every option that is computed inside the kernels."""
    return dict(
        A_log=torch.zeros(HV),
        dt_bias=torch.zeros(HV * K),
        use_gate_in_kernel=True,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=True,
    )


def recurrent_bf16():
    """Packed and rectangular, both tile widths, both layouts of the state, both gates."""
    sizes = dict(H=2, HV=4, K=128, V=128, dtype=bf16)
    x = make_inputs(cu_seqlens=[0, 3, 8], **sizes)._asdict()
    fused_recurrent_kda(**x, **all_in_kernel(4, 128), output_final_state=True)
    many = make_inputs(B=64, T=1, **sizes)._asdict() | dict(initial_state=None)
    fused_recurrent_kda(**many, **all_in_kernel(4, 128), lower_bound=-5.0)


def recurrent_fp32():
    """Given gates; head dimensions that are no powers of two, or tiny, or the largest."""
    for K, V in ((64, 64), (60, 100), (1, 1), (256, 256)):
        x = make_inputs(B=1, T=3, H=1, HV=2, K=K, V=V, dtype=fp32)
        x = x._replace(initial_state=x.initial_state.transpose(2, 3))
        fused_recurrent_kda(**x._asdict(), output_final_state=True, state_v_first=True)


def pool_update():
    for state_v_first, index in ((False, torch.int32), (True, torch.int64)):
        x = make_inputs(B=2, T=1, H=2, K=128, V=128, dtype=bf16)._asdict()
        del x["initial_state"]
        fused_recurrent_kda_update(
            **x,
            **all_in_kernel(2, 128),
            state_pool=torch.zeros(5, 2, 128, 128),
            slot_indices=torch.tensor([3, -1], dtype=index),
            state_v_first=state_v_first,
        )


def gate():
    kda_gate_fwd(torch.zeros(2, 9, 4, 128, dtype=bf16), torch.zeros(4), torch.zeros(512))
    kda_gate_fwd(torch.zeros(9, 4, 60), lower_bound=-5.0)


def l2norm():
    l2norm_fwd(torch.zeros(2, 9, 4, 128, dtype=bf16))
    l2norm_fwd(torch.zeros(9, 100))
    l2norm_fwd(torch.zeros(9, 256, dtype=torch.float16), output_dtype=fp32)


def chunk_bf16():
    """Packed with the unbounded gate; both with the bounded one, which takes two kernels."""
    sizes = dict(H=2, HV=4, K=128, V=128, dtype=bf16)
    packed = make_inputs(cu_seqlens=[0, 3, 80], **sizes)._asdict()
    chunk_kda(**packed, **all_in_kernel(4, 128), output_final_state=True)
    chunk_kda(**packed, **all_in_kernel(4, 128), lower_bound=-5.0)
    x = make_inputs(B=1, T=70, **sizes)._asdict() | dict(initial_state=None)
    chunk_kda(**x, **all_in_kernel(4, 128), lower_bound=-5.0, safe_gate=True)


def chunk_fp32():
    x = make_inputs(B=1, T=70, H=1, K=64, V=64, dtype=fp32)
    x = x._replace(initial_state=x.initial_state.transpose(2, 3))
    chunk_kda(**x._asdict(), output_final_state=True, state_v_first=True)


def with_gradients(x, **options):
    """Forward and backward of `chunk_kda`, from losses on the output and on the final state."""
    floats = (name for name, y in x.items() if torch.is_tensor(y) and y.is_floating_point())
    leaves = x | {name: x[name].detach().requires_grad_() for name in list(floats)}
    o, state = chunk_kda(**leaves, **options, output_final_state=True)
    (o.float().sum() + state.sum()).backward()


def backward_bf16():
    """Packed, the unbounded gate, shared key heads; then many heads with the bounded gate."""
    x = make_inputs(cu_seqlens=[0, 3, 80], H=2, HV=4, K=128, V=128, dtype=bf16)._asdict()
    with_gradients(x, **all_in_kernel(4, 128))
    x = make_inputs(B=1, T=70, H=64, K=128, V=128, dtype=bf16)._asdict()
    with_gradients(x, **all_in_kernel(64, 128), lower_bound=-5.0)


def backward_fp32():
    with_gradients(make_inputs(B=1, T=70, H=1, K=64, V=64, dtype=fp32)._asdict())


CASES = [
    ("backward bf16", backward_bf16),
    ("backward fp32", backward_fp32),
    ("chunk bf16", chunk_bf16),
    ("chunk fp32", chunk_fp32),
    ("recurrent bf16", recurrent_bf16),
    ("recurrent fp32", recurrent_fp32),
    ("pool update", pool_update),
    ("gate", gate),
    ("l2norm", l2norm),
]

# Bytes per thread that a kernel may spill to memory: a few registers, unless it is named here.
MAX_STACK = 64
MAX_STACK_OF = {
    "scores_in_block_kernel": 512,
    "solve_tril_kda_kernel": 256,
    "chunk_kda_bwd_dhu_kernel": 640,  # with tiles of 64 columns on an A100, and in float32
    "chunk_kda_bwd_dA_kernel": 512,  # in float32 on an A100
    "chunk_kda_bwd_dqk_kernel": 768,  # eight warps would not spill, and take 1.4 times as long
}


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("case", [name for name, _ in CASES])
def test_compiles_within_the_chip(case, chip):
    compiled = compiled_kernels(CHIPS[chip], dict(CASES)[case])
    assert compiled
    for found in compiled:
        check_limits([found], CHIPS[chip], MAX_STACK_OF.get(found.kernel, MAX_STACK))
    code = {"sm": "ptx", "gfx": "amdgcn"}[chip.rstrip("0123456789_")]
    assert all(code in found.asm for found in compiled)


# -- shapes at the ends of the range --------------------------------------------------------------


def chunk_fp16_wide():
    x = make_inputs(B=1, T=70, H=1, HV=2, K=256, V=256, dtype=torch.float16)
    chunk_kda(**x._asdict(), **all_in_kernel(2, 256), output_final_state=True)


def chunk_fp32_wide():
    x = make_inputs(B=1, T=70, H=1, HV=2, K=256, V=256, dtype=fp32)
    chunk_kda(**x._asdict(), output_final_state=True)


def chunk_fp32_of_32():
    x = make_inputs(B=1, T=70, H=1, HV=2, K=64, V=96, gate="none", dtype=fp32)
    chunk_kda(**x._asdict(), chunk_size=32)


def backward_fp16_wide():
    x = make_inputs(B=1, T=70, H=1, HV=2, K=256, V=256, dtype=torch.float16)._asdict()
    with_gradients(x, **all_in_kernel(2, 256))


def backward_fp32_wide():
    with_gradients(make_inputs(B=1, T=70, H=1, HV=2, K=256, V=256, dtype=fp32)._asdict())


# Each on the chips whose limits it comes closest to, with the bytes that it may spill. The spills
# of float32 rows of 256 channels are known: three tf32 products hold three copies of an operand.
EXTREMES = [
    (chunk_fp16_wide, "sm_80", MAX_STACK),
    (chunk_fp16_wide, "gfx942", 2 * MAX_STACK),
    (chunk_fp32_wide, "sm_90", 1024),
    (chunk_fp32_of_32, "gfx942", MAX_STACK),
    (backward_fp16_wide, "sm_80", 1280),  # a row of 256 channels, twice, and three sums of it
    (backward_fp32_wide, "sm_90", 1664),
]


@pytest.mark.parametrize("call, chip, max_stack", EXTREMES)
def test_extremes_compile_within_the_chip(call, chip, max_stack):
    compiled = compiled_kernels(CHIPS[chip], call)
    assert len(compiled) >= 6
    check_limits(compiled, CHIPS[chip], max_stack)


# -- the harness sees everything ---------------------------------------------------------------


def kernels_of_the_library():
    """Names of all Triton functions of kda_edu.kernels that are launched, by their suffix."""
    for module in pkgutil.iter_modules(kda_edu.kernels.__path__):
        if module.name == "_interpreter":
            continue
        contents = vars(importlib.import_module(f"kda_edu.kernels.{module.name}"))
        for name, value in contents.items():
            if isinstance(value, (Autotuner, Heuristics, JITFunction)) and name.endswith("_kernel"):
                yield name


def test_every_kernel_has_a_case():
    launched = set().union(*(launched_kernels(CHIPS["sm_90"], call) for _, call in CASES))
    assert set(kernels_of_the_library()) <= launched


@pytest.mark.parametrize(
    "name, kernel", [("gate", kda_gate_fwd_kernel), ("l2norm", l2norm_fwd_kernel)]
)
def test_every_configuration_is_compiled(name, kernel):
    seen = {found.config for found in compiled_kernels(CHIPS["sm_90"], dict(CASES)[name])}
    for config in kernel.every_config:
        wanted = [f"{key}={value}" for key, value in config.kwargs.items()]
        wanted.append(f"num_warps={config.num_warps}")
        assert any(all(part in text for part in wanted) for text in seen), config


def test_heuristics_see_the_configuration():
    """BT = TILE / BD rows, in each configuration of l2norm."""
    for found in compiled_kernels(CHIPS["sm_90"], lambda: l2norm_fwd(torch.zeros(9, 128))):
        values = dict(part.split("=") for part in found.config.split(", "))
        assert int(values["BT"]) == int(values["TILE"]) // 128


# -- the limits bite ---------------------------------------------------------------------------


@autotune(configs=[triton.Config({"N": N}, num_warps=8) for N in (32, 512)], key=[])
@triton.jit
def greedy_kernel(a, b, c, N: tl.constexpr):
    """A product whose second configuration keeps 64 x 512 + 512 x 256 numbers in shared memory."""
    o_i, o_j, o_k = tl.arange(0, 64), tl.arange(0, 256), tl.arange(0, N)
    b_a = tl.load(a + o_i[:, None] * N + o_k[None, :])
    b_b = tl.load(b + o_k[:, None] * 256 + o_j[None, :])
    tl.store(c + o_i[:, None] * 256 + o_j[None, :], tl.dot(b_a, b_b))


@triton.jit
def spilling_kernel(x, out, N: tl.constexpr):
    """Far more numbers alive in one warp than it has registers."""
    o = tl.arange(0, N)
    b_x = tl.load(x + o)
    total = tl.sum(b_x, axis=0)
    tl.store(out + o, b_x * total)


@pytest.mark.parametrize("chip", ["sm_90", "gfx942"])
def test_too_much_shared_memory_is_caught(chip):
    x = torch.zeros(512 * 256, dtype=torch.float16)
    compiled = compiled_kernels(CHIPS[chip], lambda: greedy_kernel[(1,)](x, x, x))
    assert len(compiled) == 2
    check_limits(compiled[:1], CHIPS[chip], max_stack=1 << 20)
    with pytest.raises(AssertionError, match="greedy_kernel .N=512.*limit on shared memory"):
        check_limits(compiled, CHIPS[chip], max_stack=1 << 20)


@pytest.mark.parametrize("chip, N", [("sm_90", 16384), ("gfx942", 32768)])
def test_spills_are_caught(chip, N):
    x = torch.zeros(N)
    compiled = compiled_kernels(CHIPS[chip], lambda: spilling_kernel[(1,)](x, x, N=N, num_warps=1))
    with pytest.raises(AssertionError, match="spilling_kernel.*limit on the stack"):
        check_limits(compiled, CHIPS[chip])


# -- no compilation for a new length -------------------------------------------------------------


def binaries(call):
    return len({found.hash for found in compiled_kernels(CHIPS["sm_90"], call)})


def test_a_new_length_or_batch_needs_no_new_binary():
    def rectangular():
        for B, T in ((1, 2), (1, 16), (2, 1), (3, 17), (16, 5), (1, 100)):
            x = make_inputs(B=B, T=T, H=1, K=16, V=16)
            fused_recurrent_kda(**x._asdict(), output_final_state=True)

    def packed():
        for N in (1, 2, 3, 16, 20):
            x = make_inputs(H=1, K=16, V=16, cu_seqlens=list(range(N + 1)))
            fused_recurrent_kda(**x._asdict())

    def pool():
        for slots in (2, 3, 16):
            x = make_inputs(B=2, T=1, H=1, K=16, V=16)._asdict()
            del x["initial_state"]
            state = torch.zeros(slots, 1, 16, 16)
            fused_recurrent_kda_update(**x, state_pool=state, slot_indices=torch.tensor([0, 1]))

    assert binaries(rectangular) == binaries(packed) == binaries(pool) == 1


def test_a_new_number_of_rows_needs_no_new_binary():
    def gates():
        for T in (1, 2, 16, 33):
            kda_gate_fwd(torch.zeros(T, 2, 16), torch.zeros(2))

    def norms():
        for T in (1, 2, 16, 33):
            l2norm_fwd(torch.zeros(T, 16))

    assert binaries(gates) == len(kda_gate_fwd_kernel.every_config)
    assert binaries(norms) == len(l2norm_fwd_kernel.every_config)


def test_a_new_length_needs_few_new_binaries_of_the_chunk_kernels():
    """Numbers of chunks, rows and sequences: 1 and multiples of 16 may have their own."""

    def call(**sizes):
        x = make_inputs(H=1, K=16, V=16, dtype=bf16, **sizes)._asdict()
        gate = dict(use_gate_in_kernel=True, lower_bound=-5.0)
        chunk_kda(**x, **gate, output_final_state=True, chunk_size=16)

    def lengths():
        for T in (1, 15, 16, 17, 40, 64, 100, 241, 256, 257):
            call(B=1, T=T)

    def rows():
        for B in (1, 2, 3, 16):
            call(B=B, T=40)

    def packed():
        for N in (1, 2, 3, 16, 17, 20):
            call(cu_seqlens=[9 * n for n in range(N + 1)])

    for calls in (lengths, rows, packed):
        compiled = compiled_kernels(CHIPS["sm_90"], calls)
        for kernel in {found.kernel for found in compiled}:
            configs = {}
            for found in compiled:
                if found.kernel == kernel:
                    configs.setdefault(found.config, set()).add(found.hash)
            assert max(map(len, configs.values())) <= 4, kernel
