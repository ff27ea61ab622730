"""A short causal convolution per channel, followed by SiLU."""

import torch
from torch import nn
from torch.nn import functional as F


class ShortConvolution(nn.Conv1d):
    """y[t] = silu(sum_s weight[s] x[t - s]), for s < kernel_size, each channel by itself.

    The weight is [channels, 1, kernel_size] with the present last, as torch.nn.Conv1d keeps it.
    """

    def __init__(self, channels, kernel_size=4, bias=False):
        super().__init__(channels, channels, kernel_size, groups=channels, bias=bias)

    def forward(self, x, state=None, cu_seqlens=None):
        """(y, new state) for x [B, T, channels].

        state: the last kernel_size - 1 inputs before x, [N, kernel_size - 1, channels]; zeros
            where None. N is B, or the number of sequences packed along T by `cu_seqlens`.
        """
        before = self.kernel_size[0] - 1
        N = x.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
        if state is None:
            state = x.new_zeros(N, before, x.shape[-1])
        if cu_seqlens is not None:
            return self._packed(x, state.to(x.dtype), cu_seqlens)
        if x.shape[1] == 0:  # all stays in the graph: other ranks may wait for its gradient
            return x + 0 * (state.sum() + sum(p.sum() for p in self.parameters())), state
        x = torch.cat([state.to(x.dtype), x], dim=1)
        y = F.conv1d(x.transpose(1, 2), self.weight, self.bias, groups=self.groups)
        return F.silu(y.transpose(1, 2)), x[:, x.shape[1] - before :]

    def _packed(self, x, state, cu_seqlens):
        """As tokens look back, those of another sequence are replaced by the state of their own."""
        before, T = state.shape[1], x.shape[1]
        cu = cu_seqlens.long()
        token = torch.arange(T, device=x.device)
        sequence = torch.searchsorted(cu[1:], token, right=True)
        table = torch.cat([state.flatten(0, 1), x[0]])  # [N * before + T, channels]

        def look_back(sequence, place):
            """Rows of the table: the input at `place` of a sequence, negative in its state."""
            own = cu[sequence] + place + state.shape[0] * before
            return table[torch.where(place >= 0, own, (sequence + 1) * before + place)]

        y = x.new_zeros(T, x.shape[-1]) if self.bias is None else self.bias.expand(T, -1)
        for s in range(before + 1):
            seen = look_back(sequence, token - cu[sequence] - s)
            y = y + self.weight[:, 0, before - s] * seen
        every = torch.arange(state.shape[0], device=x.device)[:, None]
        last = cu.diff()[:, None] - torch.arange(before, 0, -1, device=x.device)
        device = x.device.type  # as conv1d does
        if torch.is_autocast_enabled(device):
            y = y.to(torch.get_autocast_dtype(device))
        return F.silu(y)[None], look_back(every, last)
