"""RMS normalisation, and the gated one that follows KDA's output."""

import torch
from torch import nn


class RMSNorm(nn.Module):
    """x / sqrt(mean x^2 + eps) times a learned weight, over the last dimension, in float32."""

    def __init__(self, size, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight.float()).to(x.dtype)


class GatedRMSNorm(RMSNorm):
    """The same, times sigmoid(gate): what a head lets out (Kimi Linear, arXiv 2510.26692)."""

    def forward(self, x, gate):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight.float() * gate.float().sigmoid()).to(x.dtype)
