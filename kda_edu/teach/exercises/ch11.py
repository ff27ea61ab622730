"""Exercises of chapter 11: state and output."""

import math

import torch

from ... import reference
from ..inputs import make_inputs
from ._core import define

SIZES = [dict(T=16, K=8, V=12), dict(T=23, K=12, V=5), dict(T=5, K=6, V=9)]


def one_chunk(seed):
    """One head of one chunk, and a state."""
    made = make_inputs(B=1, H=1, dtype=torch.float64, seed=seed, **SIZES[seed])
    return made.head()


def prepared_chunk(seed):
    """What a scan reads, drawn at random; the state transposed."""
    q, k, v, g, beta, S = one_chunk(seed)
    return dict(
        S_t=S.T.contiguous(), w=0.3 * q, u=v, kg=k, G_last=g.sum(dim=0) / math.log(2)
    )  # any numbers will do


def by_the_usual_layout(S_t, w, u, kg, G_last):
    S = S_t.T
    v_new = u - w @ S
    return v_new.T, (G_last.exp2()[:, None] * S + kg.T @ v_new).T


def transposed_step(S_t, w, u, kg, G_last):
    """One step of the scan on a transposed state.

    S_t [V, K], w, kg [C, K], u [C, V], G_last [K] in powers of two.
    Returns (v_new transposed [V, C], the next S_t [V, K]).
    """
    # BEGIN SOLUTION
    v_t = u.T - S_t @ w.T  # [V, C]
    return v_t, S_t * G_last.exp2() + v_t @ kg  # [V, K]
    # END SOLUTION


define(
    transposed_step,
    title="The step that the kernel takes",
    stars=1,
    task="""
        Write one step of the scan in PyTorch, as the kernel does it: the state lies transposed,
        and so do the values. Transpose inputs as you load them, but no result of a product.
        """,
    hint="""
        Transpose both sides of the two equations; $(A B)^\\top = B^\\top A^\\top$. The decay
        belongs to the key channels: which axis of `S_t` are they?
        """,
    arguments=prepared_chunk,
    expected=by_the_usual_layout,
    outputs={"v_new": "VC", "S": "VK"},
    mutants={
        "the correction is added": ("u.T - S_t", "u.T + S_t"),
        "the state does not decay": ("S_t * G_last.exp2()", "S_t"),
        "the decay is a power of e": ("G_last.exp2()", "G_last.exp()"),
        "the state writes u, not what is corrected": ("v_t @ kg", "u.T @ kg"),
        "the write decays too": (
            "S_t * G_last.exp2() + v_t @ kg",
            "(S_t + v_t @ kg) * G_last.exp2()",
        ),
        "the correction uses the decayed state": (
            "u.T - S_t @ w.T",
            "u.T - (S_t * G_last.exp2()) @ w.T",
        ),
        "w and kg are exchanged": [("S_t @ w.T", "S_t @ kg.T"), ("v_t @ kg", "v_t @ w")],
    },
    why="With the state on the left of both products, a tensor core reads it from registers.",
)


def chunk_with_deltas(seed):
    """A chunk after its scan: the state before it, keys, what was written, summed gates."""
    q, k, v, g, beta, S = one_chunk(seed)
    state, deltas = S, []
    for t in range(len(k)):
        state = g[t].exp()[:, None] * state
        deltas.append(beta[t] * (v[t] - state.T @ k[t]))
        state = state + torch.outer(k[t], deltas[-1])
    G = g.cumsum(dim=0) / math.log(2)
    return dict(S=S, k=k, v_new=torch.stack(deltas), G=G, t=[9, 0, 4][seed])


def by_gated_linear_attention(S, k, v_new, G, t):
    """With the deltas known, KDA is gated linear attention that writes them."""
    g = G.diff(dim=0, prepend=torch.zeros_like(G[:1])) * math.log(2)
    k, v, g = (x[None, : t + 1, None] for x in (k, v_new, g))
    options = dict(initial_state=S[None, None], output_final_state=True)
    return reference.linear_attention(k, k, v, g=g, **options)[1][0, 0]


def state_at_token(S, k, v_new, G, t):
    """The state after token t of a chunk, 0 <= t < C.

    S [K, V] before the chunk; k, G [C, K], v_new [C, V]; G in powers of two.
    """
    # BEGIN SOLUTION
    decayed = (G[t] - G[: t + 1]).exp2() * k[: t + 1]  # [t + 1, K], keys as token t sees them
    return G[t].exp2()[:, None] * S + decayed.T @ v_new[: t + 1]  # [K, V]
    # END SOLUTION


define(
    state_at_token,
    title="The state in the middle of a chunk",
    stars=2,
    task="""
        The scan keeps states at the borders of chunks only. A server that guesses several tokens
        ahead and rejects some of them needs the state after any token. Compute it from the state
        before the chunk and what the chunk wrote, with one product.
        """,
    hint="""
        The chunk's last state is the case $t = C - 1$. Which of its rows has an index that must
        become $t$, and which tokens have not been seen yet?
        """,
    arguments=chunk_with_deltas,
    expected=by_gated_linear_attention,
    outputs={"S": "KV"},
    mutants={
        "token t itself is left out": [
            ("G[: t + 1]).exp2() * k[: t + 1]", "G[:t]).exp2() * k[:t]"),
            ("v_new[: t + 1]", "v_new[:t]"),
        ],
        "keys are decayed to the end of the chunk": (
            "(G[t] - G[: t + 1])",
            "(G[-1] - G[: t + 1])",
        ),
        "the old state is decayed to the end of the chunk": (
            "G[t].exp2()[:, None]",
            "G[-1].exp2()[:, None]",
        ),
        "the old state does not decay": ("G[t].exp2()[:, None] * S", "S"),
        "the keys do not decay": ("(G[t] - G[: t + 1]).exp2() * k[: t + 1]", "k[: t + 1]"),
        "the keys decay from the start, not from their token": (
            "(G[t] - G[: t + 1]).exp2()",
            "G[: t + 1].exp2()",
        ),
        "the exponent has the wrong sign": ("(G[t] - G[: t + 1])", "(G[: t + 1] - G[t])"),
        "decays are powers of e": [
            ("(G[t] - G[: t + 1]).exp2()", "(G[t] - G[: t + 1]).exp()"),
            ("G[t].exp2()", "G[t].exp()"),
        ],
    },
    why="No state has to be stored per token, and the recurrence need not run again.",
)


def raw_chunk(seed):
    q, k, v, g, beta, S = one_chunk(seed)
    G = g.cumsum(dim=0)  # [C, K]
    decay = (G[:, None] - G[None, :]).clamp(max=0).exp()  # [C, C, K]
    products = torch.einsum("ik,jk,ijk->ij", k, k, decay)  # [C, C]
    return dict(k=k, v=v, g=g, beta=beta, L=(beta[:, None] * products).tril(-1))


def by_probing(k, v, g, beta, L):
    """Run the oracle on an empty state, and on the identity with nothing to write."""
    K = k.shape[1]
    k, v, g, beta = (x[None, :, None] for x in (k, v, g, beta))

    def last(v, state):
        options = dict(initial_state=state, output_final_state=True)
        return reference.recurrent_kda(k, k, v, g, beta, **options)[1][0, 0]

    nothing = torch.zeros(1, k.shape[1], 1, K, dtype=k.dtype)
    identity = torch.eye(K, dtype=k.dtype)[None, None]
    return last(nothing, identity), last(v, None)


def affine_chunk(k, v, g, beta, L):
    """M [K, K], X [K, V]: the state after the chunk is M S + X, for any S before.

    k, g [C, K], v [C, V], beta [C], L [C, C]; g natural logarithms. No loop over tokens.
    """
    # BEGIN SOLUTION
    G = g.cumsum(dim=0)  # [C, K], natural logarithms here
    A = (
        torch.linalg.inv(torch.eye(len(k), dtype=k.dtype) + L) * beta
    )  # [C, C], (I + L)^-1 Diag(beta)
    w = A @ (G.exp() * k)  # [C, K]
    u = A @ v  # [C, V]
    kg = (G[-1] - G).exp() * k  # [C, K]
    return torch.diag(G[-1].exp()) - kg.T @ w, kg.T @ u
    # END SOLUTION


define(
    affine_chunk,
    title="A chunk is an affine map",
    stars=3,
    task="""
        Chapter 5 found that one token maps the state to $M S + X$. So does a whole chunk. Put the
        first line of this chapter's chunk form into the second, collect what multiplies $S$, and
        compute $M$ and $X$. The strictly lower $L$ of the chunk is given.
        """,
    hint="""
        $S_+ = \\mathrm{Diag}(e^{G_{last}}) S + \\tilde K^\\top (U - W S)$. You need $W$, $U$ and
        $\\tilde K$ of chapter 10, in natural logarithms here.
        """,
    arguments=raw_chunk,
    expected=by_probing,
    outputs={"M": "KK", "X": "KV"},
    mutants={
        "what is erased is added": ("- kg.T @ w", "+ kg.T @ w"),
        "the incoming state does not decay": ("torch.diag(G[-1].exp())", "torch.eye(k.shape[1])"),
        "beta stands on the left of the inverse": ("+ L) * beta", "+ L) * beta[:, None]"),
        "beta is forgotten": ("+ L) * beta", "+ L)"),
        "w takes keys without their decay": ("A @ (G.exp() * k)", "A @ k"),
        "keys are not decayed to the end": ("(G[-1] - G).exp() * k", "k"),
        "u takes the decayed values of w": ("u = A @ v", "u = A @ (G.exp().mean(1)[:, None] * v)"),
        "w and kg are exchanged": ("- kg.T @ w", "- w.T @ kg"),
        "the solve is left out": (
            "torch.linalg.inv(torch.eye(len(k), dtype=k.dtype) + L)",
            "(torch.eye(len(k), dtype=k.dtype) - L)",
        ),
    },
    why="""
        $M$ and $X$ compose. That is how a sequence is split over several GPUs in chapter 16: each
        computes the map of its part, and only the maps travel.
        """,
)
