"""kda_edu/kernels is one folder to copy, and it imports where there is no Triton."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import triton

import kda_edu
import kda_edu.kernels

FOLDER = Path(kda_edu.kernels.__file__).parent
FILES = sorted(FOLDER.rglob("*.py"))


def imported(path):
    """Top-level names that a file imports, relative imports left out."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level < 2, f"{path.name}, line {node.lineno}: import from outside"
            if node.level == 0:
                yield node.module.split(".")[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_imports_torch_triton_and_the_folder_itself(path):
    allowed = {"torch", "triton"} | set(sys.stdlib_module_names)
    if path.name == "_interpreter.py":
        allowed.add("numpy")  # which Triton's interpreter itself needs
    assert set(imported(path)) <= allowed


def python(script, folder, **environment):
    """Run a script in a fresh process that finds its modules in `folder` first."""
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)} | environment,
        capture_output=True,
        text=True,
    )


COPIED = """
import importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "kda_edu":
            raise ImportError("the copy needs the original")

sys.meta_path.insert(0, Absent())
import torch
import delta_kernels

one = torch.ones(1, 1, 1, 1)
o, state = delta_kernels.fused_recurrent_kda(
    one, one, one, (0.5 * one).log(), 0.5 * one[..., 0], scale=1.0,
    initial_state=one, output_final_state=True,
)
assert o.item() == state.item() == 0.75
y, rstd = delta_kernels.l2norm_fwd(torch.tensor([[3.0, 4.0]]).bfloat16())
assert (y.float() - torch.tensor([[0.6, 0.8]])).abs().max() < 2e-3
g = delta_kernels.kda_gate_fwd(torch.zeros(1, 1, 4), torch.zeros(1))
assert (g + torch.log(torch.tensor(2.0))).abs().max() < 1e-6
assert not any(name.split(".")[0] == "kda_edu" for name in sys.modules)
print("works")
"""


def test_a_copy_under_another_name_works_alone(tmp_path):
    shutil.copytree(
        FOLDER, tmp_path / "delta_kernels", ignore=shutil.ignore_patterns("__pycache__")
    )
    done = python(COPIED, tmp_path, TRITON_INTERPRET="1")
    assert done.stdout == "works\n", done.stderr


BESIDE = """
import torch
import delta_kernels
import kda_edu
from delta_kernels import autograd as theirs
from kda_edu.kernels import autograd as ours

assert theirs.chunk_kda_op is not ours.chunk_kda_op
x = [torch.randn(1, 3, 1, 4, generator=torch.Generator().manual_seed(n)) for n in range(4)]
x = [*x[:3], -x[3].exp(), torch.full((1, 3, 1), 0.5)]
for name in ("chunk_kda", "fused_recurrent_kda"):
    results = []
    for library in (kda_edu, delta_kernels, kda_edu):
        leaves = [y.clone().requires_grad_() for y in x]
        o, state = getattr(library, name)(*leaves, output_final_state=True)
        results.append(torch.autograd.grad((o**2).sum() + (state**2).sum(), leaves))
    for a, b, c in zip(*results):
        assert a.any() and torch.equal(a, b) and torch.equal(a, c), name
for operators in (torch.ops.kda_edu_kernels, torch.ops.delta_kernels):
    assert {"chunk_kda_fwd", "chunk_kda_bwd", "fused_recurrent_kda"} <= set(dir(operators))
print("works")
"""


def test_a_copy_works_beside_the_package_with_gradients(tmp_path):
    """In one process: the names of the operators carry the package's, so they do not clash."""
    shutil.copytree(
        FOLDER, tmp_path / "delta_kernels", ignore=shutil.ignore_patterns("__pycache__")
    )
    script = f"import sys; sys.path.append({str(ROOT)!r})\n" + BESIDE
    done = python(script, tmp_path, TRITON_INTERPRET="1")
    assert done.stdout == "works\n", done.stderr


def test_the_tests_can_be_pointed_at_a_copy(tmp_path):
    """They pass on a faithful copy, and fail on one that was changed."""
    copy = tmp_path / "delta_kernels"
    shutil.copytree(FOLDER, copy, ignore=shutil.ignore_patterns("__pycache__"))
    test = ROOT / "tests" / "kernels" / "test_l2norm.py"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test]
    environment = os.environ | {"KDA_KERNELS": str(copy)}

    def passes():
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        return done.returncode == 0

    assert passes()
    file = copy / "l2norm.py"
    file.write_text(file.read_text().replace("b_y = b_x * b_rstd", "b_y = b_x + b_rstd"))
    assert not passes()
    environment["KDA_KERNELS"] = str(tmp_path / "nowhere")
    assert not passes()


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch, kda_edu
from kda_edu import {names}
from kda_edu import reference
from kda_edu.kernels import checks

one = torch.ones(1, 1, 1, 1)
o, _ = reference.recurrent_kda(one, one, one, 0 * one, one[..., 0])
assert o.item() == 1.0
assert set(kda_edu.kernels.__all__) <= set(kda_edu.__all__)
for name in kda_edu.kernels.__all__:
    function = getattr(kda_edu, name)
    assert function.__name__ == name
    try:
        function(one, one, key=one)
    except ImportError as error:
        assert name in str(error) and "Triton" in str(error), error
        print(error)
    else:
        raise AssertionError(name)
"""
ROOT = Path(kda_edu.__file__).parent.parent
NAMES = ", ".join(kda_edu.kernels.__all__)


def test_without_triton_the_package_imports_and_a_kernel_says_what_is_missing():
    script = WITHOUT_TRITON.format(names=NAMES)
    done = python(script, ROOT)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(kda_edu.kernels.__all__) > 0
    assert "not installed" in done.stdout and "kda_edu.reference" in done.stdout


def test_a_triton_that_is_too_old_is_named(monkeypatch):
    monkeypatch.setattr(triton, "__version__", "3.5.1")
    reason = kda_edu.kernels._what_is_missing()
    assert reason == "Triton >= 3.6; 3.5.1 is installed"
    with pytest.raises(ImportError, match="l2norm_fwd .* needs Triton >= 3.6; 3.5.1 is installed"):
        kda_edu.kernels._absent("l2norm_fwd", reason)(1)
    for version in ("3.6.0", "3.10.1", "4.0.0+git"):
        monkeypatch.setattr(triton, "__version__", version)
        assert kda_edu.kernels._what_is_missing() is None
