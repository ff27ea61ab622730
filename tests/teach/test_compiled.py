"""The PTX that a chapter shows is what the compiler makes of the chapter's kernel."""

import linecache

import pytest
import triton
import triton.language as tl

from kda_edu.teach import from_chapter
from kda_edu.teach.compiled import instructions, ptx, source_with_needs

FACTOR = tl.constexpr(3.5)


@triton.jit
def scaled(x):
    """Called by the kernel, so it has to travel with it."""
    return FACTOR * tl.exp2(x)


@triton.jit
def scaled_kernel(x, y, n, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(y + o, scaled(tl.load(x + o, mask=o < n, other=0.0)), mask=o < n)


@triton.jit
def copy_kernel(x, y, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(y + o, tl.load(x + o))


@triton.jit
def product_kernel(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, P: tl.constexpr):
    o_m, o_n, o_k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    b_a = tl.load(a + o_m[:, None] * K + o_k[None, :])
    b_b = tl.load(b + o_k[:, None] * N + o_n[None, :])
    tl.store(c + o_m[:, None] * N + o_n[None, :], tl.dot(b_a, b_b, input_precision=P))


def products(num_warps=1, arch=90, dtype="*fp32", **sizes):
    sizes = dict(M=16, N=16, K=32, P="tf32") | sizes
    text = ptx(product_kernel, arch=arch, num_warps=num_warps, a=dtype, b=dtype, c="*fp32", **sizes)
    assert f".target sm_{arch}" in text
    return [i for i in instructions(text) if i.startswith(("fma", "mma.", "wgmma.mma"))]


def test_functions_and_numbers_that_a_kernel_uses_come_along():
    source = source_with_needs(scaled_kernel)
    assert source.index("FACTOR = tl.constexpr(3.5)") < source.index("def scaled(")
    assert source.index("def scaled(") < source.index("def scaled_kernel(")
    made = instructions(ptx(scaled_kernel, x="*fp32", y="*fp32", n="i32", N=32, num_warps=1))
    assert sum(i.startswith("ex2.approx") for i in made) == 1
    assert sum(i.startswith("mul") and i.endswith("f32") for i in made) == 1


def test_pointers_are_aligned_so_a_thread_loads_four_numbers_at_once():
    made = instructions(ptx(copy_kernel, x="*fp32", y="*fp32", N=128, num_warps=1))
    assert [i for i in made if ".global." in i] == ["ld.global.v4.b32", "st.global.v4.b32"]


def test_a_kernel_of_a_notebook_cell_compiles():
    cell = (
        "@triton.jit\ndef cell_kernel(x, y):\n"
        "    tl.store(y, (tl.load(x).to(tl.float32) * 2.0).to(tl.bfloat16))\n"
    )
    linecache.cache["<cell>"] = (len(cell), None, cell.splitlines(keepends=True), "<cell>")
    namespace = dict(triton=triton, tl=tl, __name__="__main__")
    exec(compile(cell, "<cell>", "exec"), namespace)
    made = instructions(ptx(namespace["cell_kernel"], x="*bf16", y="*bf16"))
    assert "st.global.b16" in made


first_row = from_chapter("ch10", "first_row")


@triton.jit
def row_kernel(y, T, HV: tl.constexpr):
    tl.store(y, first_row(tl.program_id(0), tl.program_id(1), T, HV, 16))


def test_a_function_of_an_earlier_chapter_comes_along():
    """Its module cannot be imported: it is the cells of that chapter."""
    assert "def first_row(" in source_with_needs(row_kernel)
    assert "st.global.b64" in instructions(ptx(row_kernel, y="*i64", T="i32", HV=2, num_warps=1))


@pytest.mark.parametrize(
    "options, count, name",
    [
        (dict(P="ieee"), 16 * 16 * 32 // 32, "fma.rn.f32"),
        (dict(), 8, "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"),
        (dict(arch=80), 8, "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"),
        (dict(P="tf32x3"), 24, "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"),
        (
            dict(M=64, N=64, num_warps=4, dtype="*bf16"),
            2,
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16",
        ),
    ],
)
def test_options_reach_the_compiler(options, count, name):
    assert products(**options) == [name] * count


def test_instructions_leave_labels_directives_and_operands_out():
    text = (
        ".version 8.7\n.visible .entry f(\n\t.param .u64 f_param_0\n)\n{\n"
        "\t.reg .pred \t%p<3>;\n$L__BB0_1:\n\tmul.f32 \t%r2, %r1, 0f3FB8AA3B;\n"
        "\t@%p1 st.global.b32 [ %rd2 + 0 ], { %r3 };\n\t@!%p2 bra.uni \t$L__BB0_1;\n\tret;\n}\n"
    )
    assert instructions(text) == ["mul.f32", "st.global.b32", "bra.uni"]


def test_arguments_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="arguments: expected x, y, n, N, got x, y"):
        ptx(scaled_kernel, x="*fp32", y="*fp32")


def test_what_the_compiler_says_is_passed_on():
    with pytest.raises(RuntimeError, match="(?s)scaled_kernel does not compile.*power of 2"):
        ptx(scaled_kernel, x="*fp32", y="*fp32", n="i32", N=24)
