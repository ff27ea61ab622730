"""Exercises of chapter 9: KDA in chunks, without overflow."""

import math

import torch

from ... import reference
from ..inputs import make_inputs
from ._core import define


def batched(*tensors):
    """One head as a batch: [T, *] -> [1, T, 1, *]."""
    return [x[None, :, None] for x in tensors]


def gate_and_format(seed):
    """A floor for the gates and a number format."""
    lower_bound, dtype = [(-5.0, torch.float32), (-0.7, torch.float16), (-2.5, torch.bfloat16)][
        seed
    ]
    return dict(lower_bound=lower_bound, dtype=dtype)


def by_trying(lower_bound, dtype):
    """Longer and longer blocks, until the factor of the first column is no longer finite."""
    rows = 1
    while torch.tensor(-lower_bound * rows, dtype=torch.float64).exp().to(dtype).isfinite():
        rows += 1
    return torch.tensor(float(rows), dtype=torch.float64)


def rows_that_fit(lower_bound, dtype):
    """The largest number of rows in a block whose first row serves as its reference.

    No gate is below lower_bound < 0; dtype: format of the factors. Returns a number.
    """
    # BEGIN SOLUTION
    limit = math.log(torch.finfo(dtype).max)  # the largest exponent, in nats
    spans = math.floor(limit / -lower_bound)  # gates between the first and the last row
    return spans + 1
    # END SOLUTION


define(
    rows_that_fit,
    title="How long may a block be?",
    stars=1,
    task="""
        The first row of a block is its reference, for the block itself too. How many rows may it
        have, so that no factor overflows whatever the gates are, as long as none is below
        `lower_bound`?
        """,
    hint="""
        The largest factor is that of a column with the reference as far away as possible. How
        many gates lie between two rows that are next to each other? `torch.finfo(dtype).max` is
        the largest number of a format.
        """,
    arguments=gate_and_format,
    expected=by_trying,
    outputs={"rows": ""},
    mutants={
        "the gate of the first row counts too, as without a reference": ("spans + 1", "spans"),
        "the limit is in octaves, the gate in nats": (
            "math.log(torch.finfo(dtype).max)",
            "math.log2(torch.finfo(dtype).max)",
        ),
        "the middle row is the reference": ("spans + 1", "2 * spans + 1"),
        "the smallest number is taken for the largest": (
            "math.log(torch.finfo(dtype).max)",
            "-math.log(torch.finfo(dtype).tiny)",
        ),
        "the block is one row too long": ("math.floor(", "math.ceil("),
        "every format is taken for float32": ("torch.finfo(dtype)", "torch.finfo(torch.float32)"),
        "every gate is taken for the usual bound": ("-lower_bound", "5.0"),
    },
    why="""
        18 rows for float32 and the bound of −5. Kernels take 16, a power of two and the smallest
        tile of a tensor core.
        """,
)


def one_chunk(seed):
    """One chunk of KDA and a memory that is not empty."""
    sizes = [dict(T=9, K=8, V=5), dict(T=21, K=16, V=24), dict(T=13, K=12, V=7)][seed]
    made = make_inputs(B=1, H=1, dtype=torch.float64, seed=seed, **sizes)
    _, k, v, g, beta, state = made.head()
    return dict(k=k, v=v, g=g, beta=beta, state=state)


def by_states(k, v, g, beta, state):
    """What each token writes: the oracle's next state less the decayed one, read by the key."""
    written = []
    for t in range(len(k)):
        now = slice(t, t + 1)
        token = batched(k[now], k[now], v[now], g[now], beta[now])
        options = dict(initial_state=state[None, None], output_final_state=True)
        after = reference.recurrent_kda(*token, **options)[1][0, 0]
        written.append((after - g[t].exp()[:, None] * state).T @ k[t])
        state = after
    return torch.stack(written)


def other_side(k, v, g, beta, state):
    """The deltas of one chunk of KDA, with beta on the columns of the system.

    k, g [C, K], v [C, V], beta [C], state [K, V]; returns the deltas [C, V].
    """
    # BEGIN SOLUTION
    G = g.cumsum(0)  # [C, K]
    reading, writing = G.exp() * k, (-G).exp() * k  # [C, K]
    lower = torch.tril(reading @ writing.T, diagonal=-1) * beta  # [C, C], entry i, j has beta_j
    system = torch.eye(len(k), dtype=k.dtype) + lower  # [C, C]
    missing = torch.linalg.inv(system) @ (v - reading @ state)  # [C, V], the deltas without beta
    return beta[:, None] * missing
    # END SOLUTION


define(
    other_side,
    title="Beta on the other side",
    stars=2,
    task="""
        A derivation solves for the residuals $\\tilde v_i = v_i - S'^\\top_{i} k_i$, where
        $S'_i$ is the decayed state, and gets a system whose entry $i, j$ carries $\\beta_j$.
        Finish it so that it is consistent, and return what each token writes,
        $d_i = \\beta_i \\tilde v_i$. The gates are mild: $e^{-G}$ may be used.
        """,
    hint="""
        $\\tilde v_i + \\sum_{j<i} \\langle K, K\\rangle_{ij}\\, \\beta_j \\tilde v_j
        = v_i - S^\\top (e^{G_i} \\odot k_i)$. Where does $\\beta_i$ of the token itself come in?
        """,
    arguments=one_chunk,
    expected=by_states,
    outputs={"v_new": "TV"},
    mutants={
        "beta stands on the right of the inverse, the published mixture": [
            ("(v - reading @ state)", "(beta[:, None] * (v - reading @ state))"),
            ("beta[:, None] * missing", "missing"),
        ],
        "the residuals are returned, not the deltas": ("beta[:, None] * missing", "missing"),
        "beta stands on the rows": ("diagonal=-1) * beta", "diagonal=-1) * beta[:, None]"),
        "the key that reads the state has no gate": ("v - reading @ state", "v - k @ state"),
        "both keys carry exp(+G)": ("reading @ writing.T", "reading @ reading.T"),
        "the system keeps its diagonal": ("diagonal=-1", "diagonal=0"),
        "the gates are not summed": ("g.cumsum(0)", "g"),
        "G leaves out the token's own gate": ("g.cumsum(0)", "g.cumsum(0) - g"),
    },
    why="""
        The two systems have the same deltas by the identity of step 4. With $\\beta_i$ on the
        rows, one multiplication with $\\beta$ is enough for $L$, $U$ and $W$.
        """,
)


def strong_gates(seed):
    """Two kinds of rows and gates so strong that exp(-G) overflows even in float64."""
    T, gate = [(16, "mixed"), (37, -100.0), (90, "random")][seed]
    made = make_inputs(B=1, H=1, T=T, K=8 + seed, V=4, gate=gate, dtype=torch.float64, seed=seed)
    q, k, _, g, _, _ = made.head()
    if seed == 2:
        g[:, 1::2] -= 40.0  # every other channel
    return dict(x=q, k=k, G=g.cumsum(0))


def by_linear_attention(x, k, G):
    """Linear attention whose values are the unit vectors returns its own scores."""
    g = torch.cat([G[:1], G.diff(dim=0)])
    values = torch.eye(len(k), dtype=k.dtype)
    x, k, values, g = batched(x, k, values, g)
    return reference.linear_attention(x, k, values, g=g, scale=1.0)[0][0, :, 0]


def halve(x, k, G):
    """The scores of n tokens: sum over d of x_id k_jd exp(G_id - G_jd), 0 for j > i.

    x, k, G [n, K], any n >= 1 and any finite gates; returns [n, n].
    """
    n = len(k)
    if n == 1:
        return (x * k).sum().reshape(1, 1)
    # BEGIN SOLUTION
    m = n // 2
    reference_row = G[m]  # [K], the first row of the lower half
    left = x[m:] * (G[m:] - reference_row).exp()  # [n - m, K], at most 1 x
    right = k[:m] * (reference_row - G[:m]).exp()  # [m, K], at most 1 k
    above = halve(x[:m], k[:m], G[:m])  # [m, m]
    below = halve(x[m:], k[m:], G[m:])  # [n - m, n - m]
    top = torch.cat([above, k.new_zeros(m, n - m)], dim=1)
    return torch.cat([top, torch.cat([left @ right.T, below], dim=1)])
    # END SOLUTION


define(
    halve,
    title="Squares all the way down",
    stars=3,
    task="""
        Compute the scores of any number of tokens by halving: two triangles on the diagonal,
        which the function computes by calling itself, and one rectangle below, which is one
        matrix product with a reference row. No exponent may be positive, whatever the gates.
        """,
    hint="""
        Rows $m$ to $n - 1$ are later than columns 0 to $m - 1$. Which row of $G$ lies between
        all of them? The upper right corner is zero.
        """,
    arguments=strong_gates,
    expected=by_linear_attention,
    outputs={"scores": "TT"},
    mutants={
        "the first row of all is the reference": ("reference_row = G[m]", "reference_row = G[0]"),
        "the last row is the reference": ("reference_row = G[m]", "reference_row = G[-1]"),
        "the reference is one number for all channels": (
            "reference_row = G[m]",
            "reference_row = G[m].mean()",
        ),
        "no reference at all": ("reference_row = G[m]", "reference_row = 0 * G[m]"),
        "the columns decay the wrong way": (
            "(reference_row - G[:m]).exp()",
            "(G[:m] - reference_row).exp()",
        ),
        "the columns do not decay": ("k[:m] * (reference_row - G[:m]).exp()", "k[:m]"),
        "the rows do not decay": ("x[m:] * (G[m:] - reference_row).exp()", "x[m:]"),
        "the rectangle stands above the diagonal": (
            "return torch.cat([top, torch.cat([left @ right.T, below], dim=1)])",
            "return torch.cat([top, torch.cat([left @ right.T, below], dim=1)]).T",
        ),
        "the rectangle is left out": ("[left @ right.T, below]", "[0 * left @ right.T, below]"),
    },
    why="""
        This cuts the triangle as the picture of this chapter does, without fixed sides. A kernel
        takes all squares of one side in one product, since tensor cores want 16 rows.
        """,
)
