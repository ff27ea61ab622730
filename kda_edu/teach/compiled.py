"""What Triton's compiler makes of a kernel: its PTX, NVIDIA's assembly text. No GPU is needed.

A process either interprets kernels or compiles them, so the compiler runs in a process of its own.
"""

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

WORKER = Path(__file__).with_name("_compile_worker.py")
SECONDS = 120
NUMBERS = ("i1", "i8", "i16", "i32", "i64", "fp16", "bf16", "fp32", "fp64")


def ptx(kernel, *, arch=90, num_warps=4, **arguments):
    """The PTX of `kernel`, a function decorated with `triton.jit`, as text.

        ptx(add_kernel, x="*fp32", y="*fp32", n="i32", BLOCK=64)

    arguments   one for each parameter of the kernel: the name of a type (`"*fp32"` is a pointer,
                `"i32"` a number), or the value of a `tl.constexpr`. Pointers are taken to be
                aligned to 16 bytes, as those of tensors are.
    arch        compute capability: 80 for A100, 90 for H100 and H200, 100 for B200.
    num_warps   warps of 32 threads per program.

    The text changes from one version of Triton to the next. Raises ValueError for arguments that
    do not fit the kernel, RuntimeError with the compiler's last words where it fails.
    """
    parameters = list(inspect.signature(kernel.fn).parameters)
    if sorted(parameters) != sorted(arguments):
        raise ValueError(
            f"arguments: expected {', '.join(parameters)}, got {', '.join(arguments) or 'none'}"
        )
    types = {name: value for name, value in arguments.items() if _is_type(value)}
    order = {
        "source": source_with_needs(kernel),
        "name": kernel.fn.__name__,
        "signature": {name: types.get(name, "constexpr") for name in parameters},
        "constexprs": {name: v for name, v in arguments.items() if name not in types},
        "arch": arch,
        "num_warps": num_warps,
    }
    done = subprocess.run(
        [sys.executable, str(WORKER)],
        input=json.dumps(order),
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    if done.returncode:
        raise RuntimeError(f"{order['name']} does not compile:\n{done.stderr.strip()[-2000:]}")
    return done.stdout


def instructions(text):
    """The instructions of a PTX text in their order, without operands: "ex2.approx.ftz.f32"."""
    return re.findall(r"^\s*(?:@!?%p\d+\s+)?([a-z][a-z0-9_]*(?:\.[a-z0-9_:]+)+)\s", text, re.M)


def source_with_needs(kernel):
    """Source of a kernel, after the device functions and `tl.constexpr` numbers that it uses."""
    parts = {}
    _collect(kernel, parts)
    head = "import triton\nimport triton.language as tl\n"
    return "\n\n".join([head, *parts.values()])


def _collect(kernel, parts):
    import triton.language as tl

    function = kernel.fn
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if name in parts or name == function.__name__:
            continue
        if isinstance(value, tl.constexpr):
            parts[name] = f"{name} = tl.constexpr({value.value!r})"
        elif hasattr(value, "fn") and not value.fn.__module__.startswith("triton."):
            _collect(value, parts)
    parts[function.__name__] = inspect.getsource(function)


def _is_type(value):
    return isinstance(value, str) and value.lstrip("*") in NUMBERS
