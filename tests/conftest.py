"""What every test shares: the tests in tests/gpu need CUDA, and are counted where it is absent.

KDA_KERNELS=/path/to/folder tests a copy of kda_edu/kernels in its place.
"""

import importlib.abc
import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

GPU_FOLDER = Path(__file__).parent / "gpu"

# How many tests lie in tests/gpu. A run with --count-gpu-tests fails when it meets another
# number, so that no test is lost in silence among the skipped.
GPU_TESTS = 252
NEEDS_GPU = ("needs", "gpu")


class CopiedKernels(importlib.abc.MetaPathFinder):
    """Finds kda_edu.kernels in another folder."""

    def __init__(self, folder):
        self.file = Path(folder).expanduser() / "__init__.py"
        if not self.file.is_file():
            raise pytest.UsageError(
                f"KDA_KERNELS: expected a folder with an __init__.py, got {folder}"
            )

    def find_spec(self, name, path=None, target=None):
        if name == "kda_edu.kernels":
            return importlib.util.spec_from_file_location(
                name, self.file, submodule_search_locations=[str(self.file.parent)]
            )


if "KDA_KERNELS" in os.environ:
    sys.meta_path.insert(0, CopiedKernels(os.environ["KDA_KERNELS"]))


def pytest_addoption(parser):
    parser.addoption(
        "--count-gpu-tests",
        action="store_true",
        help=f"fail unless the run holds exactly {GPU_TESTS} tests that need a GPU",
    )


def pytest_collection_modifyitems(items):
    for item in items:
        if GPU_FOLDER in item.path.parents:
            item.add_marker("gpu")
        if item.get_closest_marker("gpu"):
            item.user_properties.append(NEEDS_GPU)  # travels with the report from a worker
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


class GpuCount:
    """Counts the tests that need a GPU by their reports, which arrive from every worker."""

    def __init__(self):
        self.seen = set()
        self.skipped = set()

    def pytest_runtest_logreport(self, report):
        if NEEDS_GPU in [tuple(pair) for pair in report.user_properties]:
            self.seen.add(report.nodeid)
            if report.skipped:
                self.skipped.add(report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session):
        if len(self.seen) != GPU_TESTS and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        say = terminalreporter.write_line
        say(f"tests that need a GPU: {len(self.seen)}, of which skipped: {len(self.skipped)}")
        if len(self.seen) != GPU_TESTS:
            say(f"FAILED: tests/conftest.py says GPU_TESTS = {GPU_TESTS}", red=True)


def pytest_configure(config):
    is_worker = hasattr(config, "workerinput")
    if config.getoption("--count-gpu-tests") and not is_worker:
        config.pluginmanager.register(GpuCount())
