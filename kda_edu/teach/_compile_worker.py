"""Run by `compiled.ptx` in its own process: reads an order as JSON, prints PTX."""

import importlib.util
import json
import sys
import tempfile
from pathlib import Path


def load(source, name):
    """The kernel of that name. Triton reads sources from files."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cell.py"
        path.write_text(source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location("cell", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return getattr(module, name)


def main():
    order = json.load(sys.stdin)
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = load(order["source"], order["name"])
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, kind in enumerate(order["signature"].values())
        if kind.startswith("*")
    }
    source = ASTSource(kernel, order["signature"], order["constexprs"], aligned)
    target = GPUTarget("cuda", order["arch"], 32)
    made = triton.compile(source, target=target, options=dict(num_warps=order["num_warps"]))
    sys.stdout.write(made.asm["ptx"])


if __name__ == "__main__":
    main()
