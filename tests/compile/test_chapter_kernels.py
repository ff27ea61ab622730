"""Every Triton kernel of a chapter compiles for two GPUs, as it stands in the chapter's cells.

The chapters run in the interpreter here, which accepts what the compiler refuses. To add a chapter,
add an entry to CASES: kernel name -> a function that launches it once, on small CPU tensors.
Nothing is run. A kernel of a listed chapter without a case fails; so does a chapter that is not
listed.
"""

import ast
import importlib.util
from functools import cache
from pathlib import Path

import jupytext
import pytest
import torch
import triton
from harness import CHIPS, check_limits, compiled_kernels
from triton.compiler.errors import CompilationError

CHAPTERS = Path(__file__).resolve().parents[2] / "chapters"
# Bytes per thread that a teaching kernel may spill: a few registers, unless it is named here.
MAX_STACK = 64
MAX_STACK_OF = {"solve_kernel": 2304}  # float32 products of 64 x 64 have no tensor core
KEPT_CALLS = ("tl.constexpr", "constexpr", "teach.from_chapter")


# -- from a chapter to its kernels -----------------------------------------------------------------


def cells_of(chapter):
    """The sources of the code cells of chapters/<chapter>.md."""
    cells = jupytext.read(CHAPTERS / f"{chapter}.md").cells
    return [cell.source for cell in cells if cell.cell_type == "code"]


def kernel_source(cells):
    """A module with what kernels need: imports, constants for kernels, `@triton.jit` functions."""
    kept = ["import triton", "import triton.language as tl"]
    for source in cells:
        lines = source.splitlines()
        for node in ast.parse(source).body:
            if _belongs_to_kernels(node):
                kept.append("\n".join(lines[_first_line(node) - 1 : node.end_lineno]))
    return "\n\n\n".join(kept) + "\n"


def _belongs_to_kernels(node):
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return True
    if isinstance(node, ast.FunctionDef):
        return any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    is_constant = isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
    return is_constant and ast.unparse(node.value.func) in KEPT_CALLS


def _first_line(node):
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def kernels_in(module):
    """Name -> kernel, for what a module launches: not the functions that its kernels call."""
    found = {n: x for n, x in vars(module).items() if isinstance(x, triton.runtime.JITFunction)}
    here = {n: x for n, x in found.items() if x.fn.__module__ == module.__name__}
    called = {
        node.func.id
        for kernel in here.values()
        for node in ast.walk(kernel.parse())
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    return {name: kernel for name, kernel in here.items() if name not in called}


def load(name, source, folder):
    """The module with this source; Triton reads a kernel's text from its file."""
    path = Path(folder) / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def kernels(tmp_path_factory):
    """A function: chapter -> its kernels by name."""
    folder = tmp_path_factory.mktemp("chapters")

    @cache
    def of(chapter):
        return kernels_in(load(chapter, kernel_source(cells_of(chapter)), folder))

    return of


# -- the cases -------------------------------------------------------------------------------------


def f32(*shape):
    """Float32 zeros; no kernel runs, so the numbers do not matter."""
    return torch.zeros(*shape)


def one_head(K=12, V=20):
    """q, k, v, beta, o, T, scale."""
    return f32(5, K), f32(5, K), f32(5, V), f32(5), f32(5, V), 5, 0.3


def recurrent(kernel):
    """In float32 and in bfloat16, for a few tokens and for one; and with sizes of one."""
    for dtype in (torch.float32, torch.bfloat16):
        for T in (1, 5):
            q, v = (torch.zeros(2, T, n, dtype=dtype) for n in (2 * 12, 4 * 20))
            g, beta, state = f32(2, T, 4 * 12), f32(2, T, 4), f32(2, 4, 12, 20)
            sizes = dict(H=2, HV=4, K=12, V=20, BK=16, BV=8)
            kernel[(3, 4, 2)](q, q, v, g, beta, state, v, state, T, 0.3, **sizes)
    kernel[(1, 1, 1)](*8 * [f32(1)], 1, 0.3, H=1, HV=1, K=1, V=1, BK=1, BV=16)


def merges(kernel):
    """16 to 32 and 32 to 64, the second with 32 x 32 products."""
    for BC in (16, 32):
        A = f32(1, 38, 2, 64)
        kernel[(1, 1, 2)](A, A, 38, HV=2, C=64, BC=BC)


def chunks(C=32):
    """q or k, G, beta, A, v of one sequence with one key head, two value heads and a tail."""
    return f32(1, 38, 1, 20), f32(1, 38, 2, 20), f32(1, 38, 2), f32(1, 38, 2, C), f32(1, 38, 2, 24)


def gate_and_cumsum(kernel):
    for bounded in (False, True):
        G = chunks()[1]
        kernel[(2, 2)](G, f32(2), f32(40), G, 38, -5.0, HV=2, K=20, C=32, BK=32, BOUNDED=bounded)


def scores(kernel):
    for C in (16, 64):
        k, G, beta, A, _ = chunks(C)
        kernel[(3, C // 16, 2)](k, k, G, beta, A, A, 38, 0.3, H=1, HV=2, K=20, C=C, BK=32)


def solves(kernel):
    for C, merges in ((16, 0), (32, 1), (64, 2)):
        A = f32(1, 38, 2, C)
        kernel[(3, 2)](A, A, 38, HV=2, C=C, MERGES=merges)


def w_and_u(kernel):
    k, G, beta, A, v = chunks()
    sizes = dict(H=1, HV=2, K=20, V=24, C=32, BK=32, BV=32)
    kernel[(2, 2)](k, v, beta, A, G, G, v, G, 38, **sizes)


def products(kernel):
    for P in ("ieee", "tf32"):  # tf32x3 exists on NVIDIA's chips alone
        kernel[(1,)](f32(16, 32), f32(32, 16), f32(16, 16), N=16, K=32, P=P)


def scan_of_one_head(kernel):
    """In float32 and in bfloat16, which the chapter compiles."""
    for dtype in (torch.float32, torch.bfloat16):
        w, u = torch.zeros(38, 20, dtype=dtype), torch.zeros(38, 24, dtype=dtype)
        state, v_new = f32(20, 24), f32(38, 24)
        sizes = dict(K=20, V=24, C=32, BK=32, BV=16)
        kernel[(2,)](w, u, w, f32(38, 20), state, v_new, state, 38, **sizes)


def scan(kernel):
    _, G, _, _, v = chunks()
    state, h = f32(1, 2, 20, 24), f32(1, 2, 2, 24, 20)
    kernel[(2, 2)](G, v, G, G, state, h, v, state, 38, HV=2, K=20, V=24, C=32, BK=32, BV=16)


def packed_scan(kernel):
    """In float32 and in bfloat16; the table as `chunk_table` makes it."""
    for dtype in (torch.float32, torch.bfloat16):
        w, u = torch.zeros(1, 38, 2, 20, dtype=dtype), torch.zeros(1, 38, 2, 24, dtype=dtype)
        table, offsets = torch.zeros(4, 2, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
        states, h = f32(3, 2, 20, 24), f32(4, 2, 24, 20)
        tensors = (w, u, w, f32(1, 38, 2, 20), states, table, offsets, h, f32(1, 38, 2, 24), states)
        kernel[(2, 6)](*tensors, HV=2, K=20, V=24, C=16, BK=32, BV=16)


def reverse_of_one_head(kernel):
    k, v, state = f32(38, 20), f32(38, 24), f32(20, 24)
    sizes = dict(K=20, V=24, C=32, BK=32, BV=16)
    kernel[(2,)](k, k, k, v, k, f32(38, 32), state, v, state, 38, **sizes)


def reverse(kernel):
    _, G, _, A, v = chunks()
    state, h = f32(1, 2, 20, 24), f32(1, 2, 2, 24, 20)
    sizes = dict(HV=2, K=20, V=24, C=32, BK=32, BV=16)
    kernel[(2, 2)](G, G, G, v, G, A, state, h, v, state, 38, **sizes)


def output_of_one_chunk(kernel):
    rows, v = f32(6, 20), f32(6, 24)
    kernel[(1,)](rows, v, rows, f32(6, 32), f32(20, 24), v, 6, 0.3, K=20, V=24, C=32, BK=32, BV=32)


def outputs(kernel):
    k, G, _, A, v = chunks()
    h = f32(1, 2, 2, 24, 20)
    sizes = dict(H=1, HV=2, K=20, V=24, C=32, BK=32, BV=16)
    kernel[(2, 2, 2)](k, v, G, A, h, v, 38, 0.3, **sizes)


def prepares(kernel):
    """As the chapter checks it, and as it counts instructions."""
    for dtype, P in ((torch.float32, "ieee"), (torch.bfloat16, "tf32")):
        k, v, beta, A = (torch.zeros(1, 38, 2, *n, dtype=dtype) for n in ((20,), (24,), (), (16,)))
        made = (k, k, k, v, A, f32(1, 3, 2, 20))
        sizes = dict(HV=2, K=20, V=24, C=16, BK=32, BV=32, P=P)
        kernel[(3, 2)](k, k, v, k, beta, *made, 38, 0.3, **sizes)


def scan_with_outputs(kernel):
    """In float32 and in bfloat16."""
    for dtype in (torch.float32, torch.bfloat16):
        k, v, A = (torch.zeros(1, 38, 2, n, dtype=dtype) for n in (20, 24, 16))
        states = f32(1, 2, 20, 24)
        tensors = (k, k, k, v, A, f32(1, 3, 2, 20), states, v, states)
        kernel[(2, 2)](*tensors, 38, HV=2, K=20, V=24, C=16, BK=32, BV=16)


CASES = {
    "ch04_recurrent_kernel": {
        "copy_row_kernel": lambda kernel: kernel[(1,)](f32(16), f32(16), K=16),
        "copy_rows_kernel": lambda kernel: kernel[(5,)](f32(5, 16), f32(5, 16), K=16),
        "careless_kernel": lambda kernel: kernel[(5,)](f32(72), f32(5, 16), 12, BK=16),
        "add_rows_kernel": lambda kernel: kernel[(5,)](*3 * [f32(5, 12)], 12, BK=16),
        "read_state_kernel": lambda kernel: kernel[(3,)](
            f32(12, 20), f32(12), f32(20), 12, 20, BK=16, BV=8
        ),
        "delta_rule_kernel": lambda kernel: kernel[(1,)](*one_head(), K=12, V=20, BK=16, BV=32),
        "delta_rule_grid_kernel": lambda kernel: kernel[(2, 2, 2)](
            *one_head(), H=2, K=12, V=20, BK=16, BV=16
        ),
        "recurrent_kda_kernel": recurrent,
    },
    "ch07_ut_transform": {
        "invert_block_kernel": lambda kernel: kernel[(1,)](f32(16, 16), f32(16, 16), BC=16),
        "invert_blocks_kernel": lambda kernel: kernel[(3, 1, 2)](
            f32(1, 38, 2, 64), f32(1, 38, 2, 64), 38, HV=2, C=64, BC=16
        ),
        "merge_kernel": merges,
    },
    "ch10_intra_kernel": {
        "exp_kernel": lambda kernel: kernel[(1,)](f32(1), f32(1)),
        "exp2_kernel": lambda kernel: kernel[(1,)](f32(1), f32(1)),
        "cumsum_block_kernel": lambda kernel: kernel[(1,)](
            f32(6, 20), f32(6, 20), 6, K=20, C=32, BK=32
        ),
        "cumsum_kernel": lambda kernel: kernel[(2, 2)](
            f32(1, 38, 2, 20), f32(1, 38, 2, 20), 38, HV=2, K=20, C=32, BK=32
        ),
        "gate_cumsum_kernel": gate_and_cumsum,
        "block_kernel": lambda kernel: kernel[(1,)](
            f32(32, 20), f32(32, 20), f32(16, 16), K=20, BK=32
        ),
        "strip_kernel": lambda kernel: kernel[(4,)](
            f32(59, 20), f32(59, 20), f32(59, 64), 59, K=20, C=64, BK=32
        ),
        "square_kernel": lambda kernel: kernel[(1,)](
            *3 * [f32(11, 20)], f32(16, 16), f32(16, 16), 11, K=20, BK=32
        ),
        "scores_kernel": scores,
        "solve_kernel": solves,
        "wu_kernel": w_and_u,
        "product_kernel": products,
    },
    "ch11_state_and_output": {
        "scan_kernel": scan_of_one_head,
        "scan_transposed_kernel": scan_of_one_head,
        "state_kernel": scan,
        "output_block_kernel": output_of_one_chunk,
        "output_kernel": outputs,
    },
    "ch12_backward": {
        "reverse_tile_kernel": reverse_of_one_head,
        "reverse_kernel": reverse,
    },
    "ch13_real_inputs": {"packed_state_kernel": packed_scan},
    "ch14_fast": {"prepare_kernel": prepares, "scan_kernel": scan_with_outputs},
}


ALL = [(chapter, kernel) for chapter, cases in CASES.items() for kernel in cases]


@pytest.mark.parametrize("chip", ["sm_90", "gfx942"])
@pytest.mark.parametrize("chapter, kernel", ALL)
def test_compiles_within_the_chip(kernels, chapter, kernel, chip):
    launch = CASES[chapter][kernel]
    compiled = compiled_kernels(CHIPS[chip], lambda: launch(kernels(chapter)[kernel]))
    assert kernel in [found.kernel for found in compiled]
    check_limits(compiled, CHIPS[chip], MAX_STACK_OF.get(kernel, MAX_STACK))


# -- nothing is left out ---------------------------------------------------------------------------


def chapters_with_kernels():
    """The chapters that define a kernel in a cell."""
    for path in sorted(CHAPTERS.glob("ch*.md")):
        if "@triton.jit" in "\n".join(cells_of(path.stem)):
            yield path.stem


def test_every_chapter_with_kernels_is_listed():
    assert set(CASES) == set(chapters_with_kernels())


@pytest.mark.parametrize("chapter", CASES)
def test_every_kernel_of_a_chapter_has_a_case(kernels, chapter):
    assert set(CASES[chapter]) == set(kernels(chapter))


# -- the extractor and the compiler do their work --------------------------------------------------

SAMPLE = '''
@triton.jit
def double(x):
    """Called by a kernel, launched by nobody."""
    return FACTOR * x


@triton.jit
def double_kernel(x, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(x + o, double(tl.load(x + o)))
'''


def test_the_extractor_keeps_what_a_kernel_needs_and_nothing_else(tmp_path):
    cells = ["import math\nfigures = 1 / 0", "FACTOR = tl.constexpr(2.0)\nprint(later)", SAMPLE]
    module = load("sample", kernel_source(cells), tmp_path)
    assert list(kernels_in(module)) == ["double_kernel"]
    compiled = compiled_kernels(CHIPS["sm_90"], lambda: module.double_kernel[(1,)](f32(16), N=16))
    assert [found.kernel for found in compiled] == ["double_kernel"]


REFUSED = {
    "a break": "for i in range(N):\n        if i > 3:\n            break",
    "a tile side that is no power of two": "o = tl.arange(0, 12)",
    "a type that changes in a loop": "b = 0\n    for i in range(N):\n        b = b * 0.5",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_only_the_interpreter_accepts_is_refused(what, tmp_path):
    source = f"@triton.jit\ndef bad_kernel(x, N):\n    {REFUSED[what]}\n    tl.store(x, 0.0)\n"
    kernel = load("refused", kernel_source([source]), tmp_path).bad_kernel
    with pytest.raises((CompilationError, ValueError)):
        compiled_kernels(CHIPS["sm_90"], lambda: kernel[(1,)](f32(16), N=8))
