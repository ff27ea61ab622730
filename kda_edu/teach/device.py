"""The first cell of a chapter: where it runs, and the same random numbers for everyone."""

import os

import torch


def setup(seed=0):
    """Seed torch, print one line that says where this notebook runs, return the device.

    The line depends on the kind of machine only, never on a version: a notebook that ran on
    one CPU has the same output on another.
    """
    torch.manual_seed(seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(where(device))
    return device


def where(device):
    """One line: "GPU: kernels are compiled", or the two ways a CPU can be used."""
    if device.type == "cuda":
        return f"Runs on a GPU ({torch.cuda.get_device_name(device)}); kernels are compiled."
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "Runs on the CPU; Triton kernels run in the interpreter."
    return "Runs on the CPU; for Triton kernels set TRITON_INTERPRET=1 before Python starts."
