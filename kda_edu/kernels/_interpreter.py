"""Makes Triton's CPU interpreter compute bfloat16, and run on numpy >= 2.4.

Imported for its side effect, and only when TRITON_INTERPRET=1. Triton's interpreter keeps bfloat16
as uint16 bit patterns and, up to 3.9, multiplies those patterns in `tl.dot` and most arithmetic:
no error, results near 1e10 (triton-lang/triton issues 4972 and 11584). Here bfloat16 operands are
widened to float32 first and results rounded to nearest even, so numbers equal those of PyTorch.
Reductions over bfloat16 raise instead of lying, and `tl.device_assert` fires. Triton 3.6 also calls
`int()` on one-element arrays, which numpy >= 2.4 refuses; a tile answers `__index__` instead.

What stays untold by any interpreter: races, out-of-bounds access, what tf32 cuts off, tile limits.
"""

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

Builder, Handle, BF16 = interpreter.InterpreterBuilder, interpreter.TensorHandle, tl.bfloat16


def _widen(handle):
    """A bfloat16 tile as float32; any other tile unchanged."""
    if handle.dtype.scalar != BF16:
        return handle
    bits = handle.data.astype(np.uint32) << 16
    return Handle(bits.view(np.float32), tl.float32)


def _narrow(values):
    """float32 values as a bfloat16 tile, rounded to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return Handle(np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16), BF16)


def _install():
    dot, truncate = Builder.create_dot, Builder.create_fp_trunc
    binary, unary = Builder.binary_op, Builder.unary_op
    check, patch_tensor = (
        interpreter.ReduceScanOpInterface.check_tensor,
        interpreter._patch_lang_tensor,
    )

    def create_dot(self, a, b, acc, *rest):
        return dot(self, _widen(a), _widen(b), acc, *rest)

    def create_fp_trunc(self, src, dtype):
        if dtype.scalar == BF16:
            return _narrow(_widen(src).data.astype(np.float32))
        return truncate(self, src, dtype)

    def binary_op(self, lhs, rhs, op):
        if BF16 not in (lhs.dtype.scalar, rhs.dtype.scalar):
            return binary(self, lhs, rhs, op)
        result = binary(self, _widen(lhs), _widen(rhs), op)
        return _narrow(result.data) if result.data.dtype == np.float32 else result

    def unary_op(self, arg, op):
        if arg.dtype.scalar != BF16:
            return unary(self, arg, op)
        return _narrow(unary(self, _widen(arg), op).data)

    def check_tensor(self, inputs):
        if any(x.dtype.scalar == BF16 for x in inputs):
            raise TypeError("bfloat16 in a reduction or scan: convert to float32 first")
        check(self, inputs)

    def patch_lang_tensor(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    Builder.create_dot, Builder.create_fp_trunc = create_dot, create_fp_trunc
    Builder.binary_op, Builder.unary_op = binary_op, unary_op
    interpreter.ReduceScanOpInterface.check_tensor = check_tensor
    interpreter._patch_lang_tensor = patch_lang_tensor
    object.__setattr__(interpreter.interpreter_builder.options, "debug", True)


def _patch_once():
    """Let a kernel patch `triton.language` once, not again for each device function it calls.

    Patching takes about half of the time of an interpreted kernel.
    """
    patch, patched = interpreter._patch_lang, set()

    def patch_lang(function):
        modules = {m for m in (tl, tl.core) if any(m is x for x in function.__globals__.values())}
        if modules and modules <= patched:
            return interpreter._LangPatchScope()  # nothing to restore
        outermost, scope = not patched, patch(function)
        patched.update(modules)
        if outermost:
            restore = scope.restore

            def restore_all():
                patched.clear()
                restore()

            scope.restore = restore_all
        return scope

    interpreter._patch_lang = patch_lang


if not getattr(Builder, "_kda_edu_bf16", False):  # a copied folder may have installed it already
    _install()
    _patch_once()
    Builder._kda_edu_bf16 = True
