"""Compiles every kernel that a call would launch, for a GPU that need not be here.

`compiled_kernels(target, call)` runs `call` (public functions on CPU tensors) with Triton's launch
replaced by compilation: each launch is compiled for its actual arguments, and if it is autotuned,
once for each of its configurations. Nothing runs on a device, so outputs hold garbage.

The interpreter accepts much that the compiler refuses, and neither checks shared memory: both
checks are needed.
"""

import contextlib
import os
import re
import subprocess
import tempfile
from typing import NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction


class Chip(NamedTuple):
    """A GPU to compile for, and the shared memory in bytes that one of its programs may use."""

    target: GPUTarget
    shared_limit: int
    device: int  # Triton caches one backend per device index: a chip must not share its index


# The limits are the vendors' figures for a thread block (AMD: the LDS of a workgroup).
CHIPS = {
    "sm_80": Chip(GPUTarget("cuda", 80, 32), 166912, 101),
    "sm_90": Chip(GPUTarget("cuda", 90, 32), 232448, 102),
    "sm_100": Chip(GPUTarget("cuda", 100, 32), 232448, 103),
    "gfx942": Chip(GPUTarget("hip", "gfx942", 64), 65536, 104),
}


class Compiled(NamedTuple):
    """One kernel with one configuration, compiled.

    `shared` and `stack` are bytes: of shared memory per program, and of local memory per thread,
    which is where registers go that do not fit (spills). A bound on them may be asserted, never
    the value: it changes from one version of Triton to the next. `hash` is that of the binary.
    """

    kernel: str
    config: str
    shared: int
    stack: int
    registers: int
    hash: str
    asm: dict

    def __str__(self):
        return (
            f"{self.kernel} [{self.config}]: {self.registers} registers, {self.stack} B stack, "
            f"{self.shared} B shared"
        )


class _Driver(DriverBase):
    """Answers what Triton asks a driver before it compiles."""

    def __init__(self, chip):
        self.chip = chip

    @classmethod
    def is_active(cls):
        return True

    def get_current_target(self):
        return self.chip.target

    def get_current_device(self):
        return self.chip.device

    def get_current_stream(self, device=None):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_benchmarker(self):
        raise AssertionError("nothing can be timed while compiling")

    def map_python_to_cpp_type(self, ty):
        raise AssertionError("nothing is launched while compiling")


def compiled_kernels(chip, call):
    """The kernels that `call()` launches, compiled for `chip` in every configuration."""
    found, launch = [], JITFunction.run

    def compile_instead(self, *args, grid, warmup=False, **kwargs):
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        found.append(_describe(kernel, self, kwargs))
        return kernel

    def every_config(self, *args, **kwargs):
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        for config in self.prune_configs(kwargs):
            self.fn.run(*args, **kwargs, **config.all_kwargs())
        self.nargs = None

    with (
        _driver_of(chip),
        mock.patch.object(JITFunction, "run", compile_instead),
        mock.patch.object(Autotuner, "run", every_config),
    ):
        call()
    return found


def launched_kernels(chip, call):
    """The names of the kernels that `call()` launches. Nothing is compiled or run."""
    found = set()

    def note_only(self, *args, **kwargs):
        found.add(self.base_fn.__name__ if isinstance(self, Autotuner) else self.__name__)

    with (
        _driver_of(chip),
        mock.patch.object(JITFunction, "run", note_only),
        mock.patch.object(Autotuner, "run", note_only),
    ):
        call()
    return found


def check_limits(compiled, chip, max_stack=0):
    """Fail, naming kernel and configuration, where a kernel needs more than the chip has.

    max_stack: bytes of spilled registers per thread that are accepted.
    """
    for found in compiled:
        assert found.shared <= chip.shared_limit, (
            f"{found}: the limit on shared memory is {chip.shared_limit} B"
        )
        assert found.stack <= max_stack, f"{found}: the limit on the stack is {max_stack} B"


@contextlib.contextmanager
def _driver_of(chip):
    config = triton.runtime.driver
    before = config._active
    config.set_active(_Driver(chip))
    try:
        yield
    finally:
        config._active = before


def _describe(kernel, function, kwargs):
    config = ", ".join(
        f"{name}={value}" for name, value in kwargs.items() if isinstance(value, (bool, int))
    )
    if kernel.metadata.target.backend == "cuda":
        registers, stack = _cuda_resources(kernel.asm["cubin"])
    else:
        registers, stack = _amd_resources(kernel.asm["amdgcn"])
    return Compiled(
        kernel=function.__name__,
        config=config,
        shared=kernel.metadata.shared,
        stack=stack,
        registers=registers,
        hash=kernel.hash,
        asm=kernel.asm,
    )


def _cuda_resources(cubin):
    tool = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack, local = (
        int(re.search(rf"\b{name}:(\d+)", text).group(1)) for name in ("REG", "STACK", "LOCAL")
    )
    return registers, max(stack, local)


def _amd_resources(text):
    registers, stack = (
        int(re.findall(rf"\.{name}:\s+(\d+)", text)[-1])
        for name in ("vgpr_count", "private_segment_fixed_size")
    )
    return registers, stack
