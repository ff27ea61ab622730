"""Every example runs as its first lines say, is short, and shows that its results are right."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the examples run kernels")

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(path, tmp_path):
    """Standard output of the example, run from elsewhere in a fresh process."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, path], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_there_are_examples():
    assert EXAMPLES


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short_and_says_how_to_run_it(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 40
    assert f"TRITON_INTERPRET=1 python examples/{path.name}" in text
    assert not re.search(r"environ|setdefault", text)  # the variable is the shell's business


def test_a_paragraph_goes_through_both_kernels(tmp_path):
    output = run(ROOT / "examples/paragraph.py", tmp_path)
    errors = {}
    for name, of_o, of_state in re.findall(r"(\w+) +error of o (\S+), of the state (\S+)", output):
        errors[name] = (float(of_o), float(of_state))
    assert set(errors) == {"chunk_kda", "fused_recurrent_kda"}
    for pair in errors.values():
        assert all(0 < error < 1e-5 for error in pair), output
    letters, K, V = map(int, re.search(r"(\d+) bytes .* (\d+) x (\d+) numbers", output).groups())
    assert letters > 3 * 64 and K != V  # several chunks, the last one not full
    assert letters % 64
    assert "Notice:" in output
