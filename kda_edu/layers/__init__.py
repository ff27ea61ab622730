"""A Kimi Delta Attention layer, and a small language model made of it, in plain PyTorch modules."""

from .attention import KimiDeltaAttention
from .cache import Cache
from .convolution import ShortConvolution
from .model import KDAConfig, KDAForCausalLM
from .norm import GatedRMSNorm, RMSNorm

__all__ = [
    "Cache",
    "GatedRMSNorm",
    "KDAConfig",
    "KDAForCausalLM",
    "KimiDeltaAttention",
    "RMSNorm",
    "ShortConvolution",
]
