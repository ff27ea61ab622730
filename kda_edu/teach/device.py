"""The first cell of a chapter: where it runs, and the same random numbers for everyone."""

import os

import torch


def setup(seed=0, kernels=False):
    """Seed torch, print one line that says where this notebook runs, return the device.

    The line depends on the kind of machine only, never on a version: a notebook that ran on
    one CPU has the same output on another.

    kernels  True in chapters that run Triton kernels: on a CPU that needs the interpreter, and
             a second line says how to start it where it is off.
    """
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        device = torch.device("cuda")
        print(f"Running on a GPU, {torch.cuda.get_device_name(device)}: kernels are compiled.")
        return device
    print("Running on the CPU: kernels run in Triton's interpreter.")
    if kernels and os.environ.get("TRITON_INTERPRET") != "1":
        print("It is off: set TRITON_INTERPRET=1 before Python starts.")
    return torch.device("cpu")
