"""Kimi Delta Attention: a textbook's reference implementation and its Triton kernels."""

from . import reference
from .kernels import *  # noqa: F403
from .kernels import __all__ as _kernels

__version__ = "0.1.0"
__all__ = ["reference", *_kernels]
