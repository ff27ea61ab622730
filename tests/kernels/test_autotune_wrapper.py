"""The autotune wrapper: several configurations, with and without the interpreter."""

import os
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl

from kda_edu.kernels._autotune import autotune

CONFIGS = [triton.Config({"BLOCK": block}, num_warps=4) for block in (16, 32, 64)]
interpreting = triton.knobs.runtime.interpret


@autotune(configs=CONFIGS, key=["n"])
@triton.heuristics({"DOUBLE": lambda args: 2 * args["BLOCK"]})
@triton.jit
def kernel(x, out, block, n, BLOCK: tl.constexpr, DOUBLE: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, 2.0 * tl.load(x + i, mask=i < n), mask=i < n)
    tl.store(block, BLOCK + 1000 * DOUBLE)


def launch(n, device):
    x = torch.randn(n, device=device)
    out, block = torch.full((n + 8,), -1.0, device=device), torch.zeros(1, device=device)
    kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, out, block, n)
    assert torch.equal(out[:n], 2 * x) and bool((out[n:] == -1).all())
    return int(block.item())


@pytest.mark.parametrize("n", [5, 50])
def test_a_kernel_with_several_configurations_runs(n, device):
    chosen = {block + 1000 * 2 * block for block in (16, 32, 64)}
    assert launch(n, device) in chosen
    if interpreting:
        assert launch(n, device) == 16 + 32000  # the first: nothing can be timed


def test_every_configuration_is_listed_and_can_be_chosen(device, monkeypatch):
    assert kernel.every_config == CONFIGS
    assert kernel.configs == (CONFIGS[:1] if interpreting else CONFIGS)
    for config in kernel.every_config:
        monkeypatch.setattr(kernel, "configs", [config])
        block = config.kwargs["BLOCK"]
        assert launch(50, device) == block + 2000 * block


def test_options_are_passed_on():
    def prune(configs, named_args, **kwargs):
        return configs

    kernel = autotune(CONFIGS, key=[], prune_configs_by={"early_config_prune": prune})(
        triton.jit(_body)
    )
    assert kernel.early_config_prune is prune


def _body(x, BLOCK: tl.constexpr):
    pass


WITHOUT_THE_WRAPPER = """
import torch, triton, triton.language as tl

@triton.autotune(configs=[triton.Config({"N": 16}), triton.Config({"N": 32})], key=[])
@triton.jit
def kernel(out, N: tl.constexpr):
    tl.store(out, N)

kernel[(1,)](torch.zeros(1))
"""


def test_the_wrapper_is_needed(tmp_path):
    """Triton's own autotune wants a driver even to interpret. If this fails, drop the wrapper."""
    script = tmp_path / "probe.py"
    script.write_text(WITHOUT_THE_WRAPPER)
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode != 0 and "0 active drivers" in done.stderr
