"""Random inputs that are hard to pass by accident: ragged, non-square, with a state.

Shapes and names are those of every public function of the project, so that
`recurrent_kda(**inputs._asdict())` works.
"""

import math
from typing import NamedTuple

import torch

GATES = ("random", "none", "mixed", "reset")
KEYS = ("unit", "correlated", "orthogonal")


class Inputs(NamedTuple):
    """What a KDA function reads. N is the number of sequences: B, or len(cu_seqlens) - 1."""

    q: torch.Tensor  # [B, T, H, K], unit rows
    k: torch.Tensor  # [B, T, H, K], unit rows
    v: torch.Tensor  # [B, T, HV, V]
    g: torch.Tensor  # [B, T, HV, K], natural log of the decay, <= 0
    beta: torch.Tensor  # [B, T, HV], write strength in (0, 1)
    initial_state: torch.Tensor | None  # [N, HV, K, V]
    cu_seqlens: torch.Tensor | None  # [N + 1], int32

    def double(self):
        """The oracle's inputs: the same, already rounded numbers in float64."""
        return self._map(lambda x: x.double())

    def to(self, target):
        """On another device, or in another dtype (floating tensors only)."""
        return self._map(lambda x: x.to(target), indices=not isinstance(target, torch.dtype))

    def requires_grad(self):
        """Fresh leaves that ask for a gradient."""
        return self._map(lambda x: x.detach().clone().requires_grad_())

    def head(self, batch=0, head=0):
        """One value head: q, k [T, K], v [T, V], g [T, K], beta [T] and the state [K, V].

        With packed sequences the state is that of the first.
        """
        group = self.v.shape[2] // self.q.shape[2]
        q, k = (x[batch, :, head // group] for x in (self.q, self.k))
        v, g, beta = (x[batch, :, head] for x in (self.v, self.g, self.beta))
        state = None if self.initial_state is None else self.initial_state[batch, head]
        return q, k, v, g, beta, state

    def _map(self, change, indices=False):
        def apply(x):
            return x if x is None or not (indices or x.is_floating_point()) else change(x)

        return Inputs(*(apply(x) for x in self))


def make_inputs(
    B=2,
    T=70,
    H=2,
    HV=None,
    K=16,
    V=24,
    dtype=torch.float32,
    gate="random",
    beta="random",
    keys="unit",
    initial_state=True,
    cu_seqlens=None,
    seed=0,
    device=None,
):
    """Inputs for one call; the same numbers on every device.

    B, T, H, HV, K, V   sizes; HV (value heads) defaults to H and must be a multiple of it.
    dtype               of q, k, v and beta, which are rounded to it here, once. g and the state
                        are float32 (float64 if dtype is).
    gate                "random": log decays around -0.14, nearly all in -1.4 to -0.013;
                        "none": 0, no decay; a number <= 0: that log decay everywhere, -inf
                        too; "mixed": channels with 0, -1e-6, -0.1, -5 and -20 in every token;
                        "reset": random, and every 23rd token forgets everything (-inf).
    beta                "random" in (0, 1), or a number.
    keys                "unit": random directions; "correlated": nearly the same direction (the
                        worst case for the triangular solve); "orthogonal": any K consecutive
                        keys of a head, counted from a multiple of K, are orthonormal.
    initial_state       True for a random one, False for None.
    cu_seqlens          packed sequences: a list or tensor [0, ..., total]. B becomes 1 and T
                        the total.
    seed, device        the numbers are drawn on the CPU, then moved.

    Raises ValueError for a size, gate or keys that are not among these.
    """
    HV = H if HV is None else HV
    if cu_seqlens is not None:
        cu_seqlens = torch.as_tensor(cu_seqlens, dtype=torch.int32)
        B, T = 1, int(cu_seqlens[-1])
    _require_sizes(B=B, T=T, H=H, HV=HV, K=K, V=V)
    draw = torch.Generator().manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    sequences = B if cu_seqlens is None else len(cu_seqlens) - 1
    q = _unit(_normal(draw, B, T, H, K))
    k = _make_keys(keys, draw, B, T, H, K)
    v = _normal(draw, B, T, HV, V)
    g = _make_gate(gate, draw, B, T, HV, K)
    strength = _make_beta(beta, draw, B, T, HV)
    state = _normal(draw, sequences, HV, K, V) / math.sqrt(K)
    q, k, v, strength = (x.to(dtype) for x in (q, k, v, strength))
    state = state.to(wide) if initial_state else None
    made = Inputs(q, k, v, g.to(wide), strength, state, cu_seqlens)
    return made if device is None else made.to(torch.device(device))


def _require_sizes(**sizes):
    for name, size in sizes.items():
        least = 0 if name == "T" else 1
        if not isinstance(size, int) or size < least:
            raise ValueError(f"{name}: expected an integer >= {least}, got {size!r}")
    if sizes["HV"] % sizes["H"]:
        raise ValueError(f"HV: expected a multiple of H = {sizes['H']}, got {sizes['HV']}")


def _normal(draw, *shape):
    return torch.randn(*shape, generator=draw, dtype=torch.float64)


def _unit(x):
    return x / x.norm(dim=-1, keepdim=True)


def _make_keys(keys, draw, B, T, H, K):
    if keys == "unit":
        return _unit(_normal(draw, B, T, H, K))
    if keys == "correlated":
        common = _unit(_normal(draw, B, 1, H, K))
        return _unit(common + 0.2 * _unit(_normal(draw, B, T, H, K)))
    if keys == "orthogonal":
        bases = torch.linalg.qr(_normal(draw, B, H, math.ceil(T / K), K, K))[0]
        return bases.reshape(B, H, -1, K)[:, :, :T].transpose(1, 2).contiguous()
    raise ValueError(f"keys: expected one of {KEYS}, got {keys!r}")


def _make_gate(gate, draw, B, T, HV, K):
    drawn = -torch.exp(_normal(draw, B, T, HV, K) - 2)
    if gate == "random":
        return drawn
    if gate == "none":
        return torch.zeros_like(drawn)
    if gate == "mixed":
        levels = torch.tensor([0.0, -1e-6, -0.1, -5.0, -20.0], dtype=torch.float64)
        choice = torch.randint(len(levels), drawn.shape, generator=draw)
        return levels[choice]
    if gate == "reset":
        drawn[:, 22::23] = -math.inf
        return drawn
    if isinstance(gate, (int, float)) and not isinstance(gate, bool) and gate <= 0:
        return torch.full_like(drawn, float(gate))
    raise ValueError(f"gate: expected one of {GATES} or a number <= 0, got {gate!r}")


def _make_beta(beta, draw, B, T, HV):
    drawn = torch.sigmoid(_normal(draw, B, T, HV))
    if beta == "random":
        return drawn
    if isinstance(beta, (int, float)) and not isinstance(beta, bool):
        return torch.full_like(drawn, float(beta))
    raise ValueError(f"beta: expected 'random' or a number, got {beta!r}")
