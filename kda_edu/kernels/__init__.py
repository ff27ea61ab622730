"""KDA kernels in Triton. Copy this folder: it imports torch, triton and itself, nothing else.

One file per step, named by what it computes. Where Triton is not installed (macOS, Windows) the
folder still imports, and calling a kernel says what is missing.
"""

try:
    import triton
except ImportError:
    triton = None

__all__ = []

if triton is not None:
    if triton.knobs.runtime.interpret:
        from . import _interpreter  # noqa: F401  (bfloat16 in the interpreter)
