"""Exercises of chapter 8: the delta rule in chunks."""

import torch

from ... import reference
from ..inputs import make_inputs
from ._core import define

SIZES = [dict(T=9, K=8, V=5), dict(T=21, K=16, V=24), dict(T=13, K=12, V=7)]


def batched(*tensors):
    """One head as a batch: [T, *] -> [1, T, 1, *]."""
    return [x[None, :, None] for x in tensors]


def chunk_without_gate(seed):
    """One chunk of DeltaNet, and a memory that is not empty."""
    made = make_inputs(B=1, H=1, dtype=torch.float64, seed=seed, **SIZES[seed])
    _, k, v, _, beta, state = made.head()
    return dict(k=k, v=v, beta=2 * beta, state=state)


def by_states(k, v, beta, state):
    """What each token writes is the difference of two states of the oracle, read by its key."""
    written = []
    for t in range(len(k)):
        token = batched(k[t : t + 1], k[t : t + 1], v[t : t + 1], beta[t : t + 1])
        options = dict(initial_state=state[None, None], output_final_state=True)
        after = reference.delta_net(*token, **options)[1][0, 0]
        written.append((after - state).T @ k[t])  # the key has length one
        state = after
    return torch.stack(written), state


def write_chunk(k, v, beta, state):
    """One chunk of DeltaNet. k [C, K], v [C, V], beta [C], state [K, V].

    Returns what each token writes, [C, V], and the state after the chunk, [K, V].
    """
    # BEGIN SOLUTION
    lower = torch.tril(beta[:, None] * (k @ k.T), diagonal=-1)  # [C, C]
    system = torch.eye(len(k), dtype=k.dtype) + lower  # [C, C]
    missing = beta[:, None] * (v - k @ state)  # [C, V]
    v_new = torch.linalg.solve_triangular(system, missing, upper=False)  # [C, V]
    return v_new, state + k.T @ v_new
    # END SOLUTION


define(
    write_chunk,
    title="A chunk without U and W",
    stars=1,
    task="""
        The state is known. Then $U$ and $W$ are not needed: solve
        $(I + L)\\, V' = \\mathrm{Diag}(\\beta)(V - K S)$ for the deltas $V'$ of the chunk, and
        write them. Use no loop over tokens.
        """,
    hint="""
        `torch.linalg.solve_triangular(system, right_side, upper=False)`. Entry $L_{ij}$ says how
        much of the delta of token $j$ the key $i$ reads; a token never reads its own.
        """,
    arguments=chunk_without_gate,
    expected=by_states,
    outputs={"v_new": "TV", "state": "KV"},
    mutants={
        "beta stands on the columns of L": (
            "beta[:, None] * (k @ k.T)",
            "beta[None, :] * (k @ k.T)",
        ),
        "L keeps its diagonal": ("diagonal=-1", "diagonal=0"),
        "the memory is not read": ("v - k @ state", "v"),
        "beta is left out of the right side": ("beta[:, None] * (v - k @ state)", "v - k @ state"),
        "L has the wrong sign": ("dtype=k.dtype) + lower", "dtype=k.dtype) - lower"),
        "the system is multiplied, not solved": (
            "torch.linalg.solve_triangular(system, missing, upper=False)",
            "system @ missing",
        ),
        "the values are written, not the deltas": ("state + k.T @ v_new", "state + k.T @ v"),
        "tokens of the chunk do not see each other": (
            "torch.linalg.solve_triangular(system, missing, upper=False)",
            "missing",
        ),
    },
    why="""
        One product of C x C x K less than with $U$ and $W$, but the solve now waits for the
        state. With $U$ and $W$ only two products wait.
        """,
)


def full_tile(C):
    """Gated DeltaNet on exactly C rows; takes the summed gate, as a kernel would."""

    def kernel(q, k, v, G, beta, state):
        for name, x in (("q", q), ("k", k), ("v", v), ("G", G), ("beta", beta)):
            if len(x) != C:
                raise ValueError(f"{name}: expected {C} rows, got {len(x)}")
        row = torch.arange(C)
        mask = torch.where(row[:, None] >= row, G[:, None] - G, -torch.inf).exp()
        lower = torch.tril(beta[:, None] * (k @ k.T) * mask, diagonal=-1)
        system = torch.eye(C, dtype=k.dtype) + lower
        right = beta[:, None] * (v - G.exp()[:, None] * (k @ state))
        v_new = torch.linalg.solve_triangular(system, right, upper=False)
        o = G.exp()[:, None] * (q @ state) + (q @ k.T * mask) @ v_new
        k_end = (G[-1] - G).exp()[:, None] * k
        return o, G[-1].exp() * state + k_end.T @ v_new

    return kernel


def ragged_text(seed):
    """A sequence that tiles of C rows do not divide, and the kernel for them."""
    T, C = [(9, 4), (37, 16), (21, 8)][seed]
    made = make_inputs(B=1, H=1, T=T, K=8, V=5 + seed, dtype=torch.float64, seed=seed)
    q, k, v, g, beta, state = made.head()
    return dict(kernel=full_tile(C), C=C, q=q, k=k, v=v, g=g[:, 0], beta=beta, state=state)


def by_the_loop(kernel, C, q, k, v, g, beta, state):
    """The oracle, token by token."""
    options = dict(scale=1.0, initial_state=state[None, None], output_final_state=True)
    o, final = reference.gated_delta_net(*batched(q, k, v, g, beta), **options)
    return o[0, :, 0], final[0, 0]


def fixed_tiles(kernel, C, q, k, v, g, beta, state):
    """Gated DeltaNet over T tokens with a kernel that takes exactly C rows.

    q, k [T, K], v [T, V], g, beta [T], state [K, V]; returns o [T, V] and the last state.
    kernel(q, k, v, G, beta, state) -> (o [C, V], state), G [C] summed in the tile.
    """
    # BEGIN SOLUTION
    missing = -len(k) % C

    def fill(x):
        return torch.cat([x, x.new_zeros(missing, *x.shape[1:])])

    outputs = []
    for tile in zip(*(fill(x).split(C) for x in (q, k, v, g, beta)), strict=True):
        q_c, k_c, v_c, g_c, beta_c = tile
        o, state = kernel(q_c, k_c, v_c, g_c.cumsum(0), beta_c, state)
        outputs.append(o)
    return torch.cat(outputs)[: len(k)], state
    # END SOLUTION


define(
    fixed_tiles,
    title="Tiles of one size",
    stars=2,
    task="""
        A kernel has tiles of exactly C rows, and the text has T tokens. Cut the text into tiles,
        fill the last one so that the additional rows change nothing, sum the gates for each
        tile, hand the state on, and return the T real outputs.
        """,
    hint="""
        Which row writes nothing and decays nothing? Fill the gates before you sum them. The
        number of rows to add is `-T % C`.
        """,
    arguments=ragged_text,
    expected=by_the_loop,
    outputs={"o": "TV", "state": "KV"},
    mutants={
        "the rows that do not fill a tile are dropped": [
            ("torch.cat([x, x.new_zeros(missing, *x.shape[1:])])", "x[: len(x) // C * C]"),
            (
                "torch.cat(outputs)[: len(k)]",
                "torch.cat([*outputs, v.new_zeros(len(k) % C, v.shape[1])])",
            ),
        ],
        "the summed gate is filled with zeros, not the gate": (
            "g_c.cumsum(0)",
            "g_c.cumsum(0) * (torch.arange(C) < (C if len(outputs) < len(k) // C else len(k) % C))",
        ),
        "the last row is repeated to fill the tile": (
            "x.new_zeros(missing, *x.shape[1:])",
            "x[-1:].expand(missing, *x.shape[1:])",
        ),
        "the gates are summed over the whole text": (
            "for x in (q, k, v, g, beta)",
            "for x in (q, k, v, g.cumsum(0), beta)",
        ),
        "the gates are not summed": ("g_c.cumsum(0)", "g_c"),
        "every tile starts from the first state": (
            "o, state = kernel(q_c, k_c, v_c, g_c.cumsum(0), beta_c, state)",
            "o, last = kernel(q_c, k_c, v_c, g_c.cumsum(0), beta_c, state)",
        ),
        "the additional outputs are returned too": (
            "torch.cat(outputs)[: len(k)]",
            "torch.cat(outputs)",
        ),
        "the text is filled at its front": (
            "[x, x.new_zeros(missing, *x.shape[1:])]",
            "[x.new_zeros(missing, *x.shape[1:]), x]",
        ),
    },
    why="""
        A Triton kernel does the same with masks: `tl.load(..., mask=row < count, other=0.0)`
        reads the zeros, and a store with the same mask cuts the outputs.
        """,
)


def chunk_with_gate(seed):
    """The keys, values, gates and write strengths of one chunk of Gated DeltaNet."""
    made = make_inputs(B=1, H=1, dtype=torch.float64, seed=seed, **SIZES[seed])
    _, k, v, g, beta, _ = made.head()
    return dict(k=k, v=v, g=g[:, 0], beta=beta)


def by_unit_states(k, v, g, beta):
    """The oracle maps each unit state; with no values only the matrix is left."""
    eye = torch.eye(k.shape[1], dtype=k.dtype)
    no_values = v.new_zeros(len(k), k.shape[1])
    _, matrix = reference.gated_delta_net(
        *batched(k, k, no_values, g, beta), initial_state=eye[None, None], output_final_state=True
    )
    _, written = reference.gated_delta_net(*batched(k, k, v, g, beta), output_final_state=True)
    return matrix[0, 0], written[0, 0]


def chunk_as_a_map(k, v, g, beta):
    """What one chunk of Gated DeltaNet does to any state S: S -> M S + X.

    k [C, K], v [C, V], g, beta [C]; returns M [K, K] and X [K, V].
    """
    # BEGIN SOLUTION
    G = g.cumsum(0)  # [C]
    row = torch.arange(len(k))  # [C]
    mask = torch.where(row[:, None] >= row, G[:, None] - G, -torch.inf).exp()  # [C, C]
    eye = torch.eye(len(k), dtype=k.dtype)  # [C, C]
    system = eye + torch.tril(beta[:, None] * (k @ k.T) * mask, diagonal=-1)  # [C, C]
    solved = torch.linalg.inv(system) * beta  # [C, C], (I + L)^-1 Diag(beta)
    k_end = (G[-1] - G).exp()[:, None] * k  # [C, K]
    erased = k_end.T @ solved @ (G.exp()[:, None] * k)  # [K, K]
    return G[-1].exp() * torch.eye(k.shape[1], dtype=k.dtype) - erased, k_end.T @ solved @ v
    # END SOLUTION


define(
    chunk_as_a_map,
    title="A chunk is one affine map",
    stars=3,
    task="""
        Put $V' = U - W S$ into the last line of the chunk algorithm for Gated DeltaNet and
        collect the terms with $S$: a chunk maps the state to $M S + X$, with a K x K matrix $M$
        and a K x V matrix $X$ that do not depend on $S$. Return both.
        """,
    hint="""
        $S_+ = e^{G_C} S + \\bar K^\\top (U - W S)$, where the rows of $\\bar K$ are the keys
        decayed to the end of the chunk. Check with $C = 1$: $M = e^g (I - \\beta k k^\\top)$.
        """,
    arguments=chunk_with_gate,
    expected=by_unit_states,
    outputs={"M": "KK", "X": "KV"},
    mutants={
        "M adds what it should erase": ("dtype=k.dtype) - erased", "dtype=k.dtype) + erased"),
        "the state does not decay in M": (
            "G[-1].exp() * torch.eye(k.shape[1], dtype=k.dtype)",
            "torch.eye(k.shape[1], dtype=k.dtype)",
        ),
        "W is built from keys without decay": ("(G.exp()[:, None] * k)", "k"),
        "keys are not decayed to the end of the chunk": ("(G[-1] - G).exp()[:, None] * k", "k"),
        "keys are decayed from the start, not to the end": (
            "(G[-1] - G).exp()[:, None] * k",
            "G.exp()[:, None] * k",
        ),
        "beta multiplies the rows of the inverse": (
            "torch.linalg.inv(system) * beta",
            "torch.linalg.inv(system) * beta[:, None]",
        ),
        "L carries no decay": ("(k @ k.T) * mask", "(k @ k.T)"),
        "L keeps its diagonal": ("diagonal=-1", "diagonal=0"),
        "tokens of the chunk do not see each other": (
            "torch.linalg.inv(system) * beta",
            "torch.diag(beta)",
        ),
    },
    why="""
        Affine maps compose, as in chapter 5, and here one map stands for C tokens. Chapter 16
        gives each GPU its own chunks of a long text, and they exchange $M$ and $X$.
        """,
)
