"""Exercises of chapter 12: the backward pass."""

import torch

from ..inputs import make_inputs
from ._core import define

SIZES = [dict(T=16, K=8, V=12), dict(T=23, K=12, V=5), dict(T=5, K=6, V=9)]


def draw(seed, *shapes):
    generator = torch.Generator().manual_seed(seed + 7)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


def reverse_inputs(seed):
    """What one step of the reverse scan reads: any numbers will do."""
    T, K, V = (SIZES[seed][n] for n in "TKV")
    qg, kg, w, do, A_qk, dS, G_last = draw(
        seed, (T, K), (T, K), (T, K), (T, V), (T, T), (K, V), (K,)
    )
    return dict(qg=qg, kg=kg, w=w, do=do, A_qk=A_qk.tril(), G_last=-G_last.abs(), dS=dS)


def reverse_by_autograd(qg, kg, w, do, A_qk, G_last, dS):
    """The gradients of v_new and of S of a chunk that is written down forwards."""
    C, (K, V) = len(qg), dS.shape
    u, S = torch.zeros(C, V, dtype=qg.dtype), torch.zeros(K, V, dtype=qg.dtype)
    u.requires_grad_(), S.requires_grad_()
    v_new = u - w @ S
    o = qg @ S + A_qk @ v_new
    after = G_last.exp()[:, None] * S + kg.T @ v_new
    return torch.autograd.grad((o * do).sum() + (after * dS).sum(), (v_new, S))


def reverse_step(qg, kg, w, do, A_qk, G_last, dS):
    """One chunk of the reverse scan: (gradient of v_new [C, V], of the state before [K, V]).

    qg, kg, w [C, K], do [C, V], A_qk [C, C], G_last [K] in natural logarithms, dS [K, V]: the
    gradient of the state after the chunk.
    """
    # BEGIN SOLUTION
    dv_new = A_qk.T @ do + kg @ dS  # [C, V]
    return dv_new, G_last.exp()[:, None] * dS + qg.T @ do - w.T @ dv_new  # [K, V]
    # END SOLUTION


define(
    reverse_step,
    title="One step of the reverse scan",
    stars=1,
    task="""
        Given the gradient of the state after a chunk, find that of what the chunk wrote, and that
        of the state before it.
        """,
    hint="""
        Everything that reads `v_new` sends something back to it: the output and the next state.
        Everything that reads $S$: the output, `v_new`, and the next state.
        """,
    arguments=reverse_inputs,
    expected=reverse_by_autograd,
    outputs={"dv_new": "CV", "dS": "KV"},
    mutants={
        "A_qk is not transposed": ("A_qk.T @ do", "A_qk @ do"),
        "the next state sends nothing to v_new": (" + kg @ dS", ""),
        "the gradient of the state does not decay": ("G_last.exp()[:, None] * dS", "dS"),
        "the decay falls on the wrong axis": (
            "G_last.exp()[:, None] * dS",
            "(dS.T @ torch.diag(G_last.exp()).flip(0)).T",
        ),
        "what v_new takes back is added": ("- w.T", "+ w.T"),
        "v_new takes back from do": ("w.T @ dv_new", "w.T @ do"),
        "the output sends nothing to the state": (" + qg.T @ do", ""),
    },
    why="This chain over chunks, backwards, is the only sequential part of the backward pass.",
)


def triangle(seed):
    """A strictly lower matrix and a right-hand side."""
    T, V = SIZES[seed]["T"], SIZES[seed]["V"]
    L, r, dv_new = draw(seed, (T, T), (T, V), (T, V))
    return dict(L=0.3 * L.tril(-1), r=r, dv_new=dv_new)


def triangle_by_autograd(L, r, dv_new):
    L, r = L.clone().requires_grad_(), r.clone().requires_grad_()
    lower = torch.eye(len(L), dtype=L.dtype) + L.tril(-1)
    v_new = torch.linalg.solve_triangular(lower, r, upper=False)
    return torch.autograd.grad((v_new * dv_new).sum(), (r, L))


def through_the_inverse(L, r, dv_new):
    """v_new = (I + L)^-1 r. Returns (gradient of r [C, V], of L [C, C], strictly lower).

    Invert I + L once, and use the inverse only in products with matrices [C, V].
    """
    # BEGIN SOLUTION
    A_inv = torch.linalg.inv(torch.eye(len(L), dtype=L.dtype) + L)  # [C, C]
    v_new = A_inv @ r  # [C, V]
    dr = A_inv.T @ dv_new  # [C, V]
    return dr, -torch.tril(dr @ v_new.T, diagonal=-1)
    # END SOLUTION


define(
    through_the_inverse,
    title="Through the triangular solve",
    stars=2,
    task="""
        Send a gradient back through `v_new = (I + L)^-1 r`, to `r` and to `L`.
        """,
    hint="""
        Differentiate $(I + L)\\, v' = r$ instead of the inverse: a change of $L$ acts like a
        change of $r$ by $-dL\\, v'$.
        """,
    arguments=triangle,
    expected=triangle_by_autograd,
    outputs={"dr": "CV", "dL": "CC"},
    mutants={
        "the inverse is not transposed": ("A_inv.T @ dv_new", "A_inv @ dv_new"),
        "the sign is lost": ("-torch.tril(", "torch.tril("),
        "the diagonal is included": ("diagonal=-1", "diagonal=0"),
        "r instead of the solution": ("dr @ v_new.T", "dr @ r.T"),
        "the gradient of the solution instead of that of r": ("dr @ v_new.T", "dv_new @ v_new.T"),
        "rows and columns are exchanged": ("dr @ v_new.T", "v_new @ dr.T"),
        "the upper triangle": ("torch.tril(dr", "torch.triu(dr"),
    },
    why="Two products of a chunk with its values, and the inverse needs no derivative of its own.",
)


def scores(seed):
    """q, k [C, K], the gate g, and the gradient of a score matrix."""
    made = make_inputs(B=1, H=1, dtype=torch.float64, seed=seed, **SIZES[seed])
    q, k, _, g, _, _ = made.head()
    (dA,) = draw(seed, (len(q), len(q)))
    return dict(q=q, k=k, g=g, dA=dA.tril())


def _by_pairs(q, k, g, dA):
    """dg [C, K] of A[i, j] = sum_d q_id k_jd exp(g_{j+1,d} + ... + g_{i,d}), pair by pair."""
    G, dg = g.cumsum(0), torch.zeros_like(g)
    for i in range(len(q)):
        for j in range(i):
            term = dA[i, j] * q[i] * k[j] * (G[i] - G[j]).exp()
            dg[j + 1 : i + 1] += term
    return dg


def gate_gradient(q, k, g, dA):
    """The gradient of g [C, K], given that of A [C, C], lower triangular:

    A[i, j] = sum over d of q[i, d] k[j, d] exp(G[i, d] - G[j, d]),  G the cumulated g.
    """
    # BEGIN SOLUTION
    G = g.cumsum(0)  # [C, K]
    between = (G[:, None] - G[None]).exp()  # [C, C, K]
    off = torch.tril(dA, diagonal=-1)[:, :, None] * between  # [C, C, K]
    dq = (off * k[None]).sum(1)  # [C, K] as rows
    dk = (off * q[:, None]).sum(0)  # [C, K] as columns
    dG = q * dq - k * dk
    return dG.flip(0).cumsum(0).flip(0)
    # END SOLUTION


define(
    gate_gradient,
    title="The gate's gradient without a product of its own",
    stars=3,
    task="""
        The decay multiplies q and k, so its gradient can be read off theirs. Find the gradient of
        the gate itself, token by token. No loop over tokens.
        """,
    hint="""
        $G_i$ appears with a plus in row $i$, $G_j$ with a minus in column $j$; $g_t$ is part of
        every $G_i$ with $i \\ge t$. What does the diagonal contribute?
        """,
    arguments=scores,
    expected=_by_pairs,
    outputs={"dg": "CK"},
    mutants={
        "the columns are added": ("q * dq - k * dk", "q * dq + k * dk"),
        "the columns are forgotten": ("q * dq - k * dk", "q * dq"),
        "the sum runs forwards": ("dG.flip(0).cumsum(0).flip(0)", "dG.cumsum(0)"),
        "the gradient of G is returned": ("return dG.flip(0).cumsum(0).flip(0)", "return dG"),
        "the sum leaves out its own token": (
            "return dG.flip(0).cumsum(0).flip(0)",
            "return dG.flip(0).cumsum(0).flip(0) - dG",
        ),
        "rows and columns are exchanged": ("q * dq - k * dk", "k * dk - q * dq"),
        "the decay runs the wrong way": ("(G[:, None] - G[None])", "(G[None] - G[:, None])"),
    },
    why="Two elementwise products and a sum: the gate is the cheapest gradient of all.",
)
