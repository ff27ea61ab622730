"""Exercises of chapter 4: the first Triton kernels.

A kernel is defined inside the function that launches it, so that one stub holds both.
"""

import torch

from ... import reference
from ..inputs import make_inputs
from ._core import define

try:
    import triton
    import triton.language as tl
except ImportError:  # no Triton on this system: the exercises can be read, not run
    triton = tl = None


def gpu_if_any():
    """Where kernels run: compiled on a GPU, or interpreted on the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


# -- which cells does a program own? ----------------------------------------------------------


def some_program(seed):
    """A program of a grid over states [N, HV, K, V]; the last one has masked columns."""
    return [
        dict(i_v=0, i_hv=1, i_n=1, HV=3, K=5, V=12, BV=8),
        dict(i_v=1, i_hv=2, i_n=0, HV=4, K=7, V=20, BV=16),
        dict(i_v=2, i_hv=0, i_n=2, HV=2, K=6, V=19, BV=8),
    ][seed]


def by_numbering_every_cell(i_v, i_hv, i_n, HV, K, V, BV):
    """Number the cells of all states in order, cut out the tile, mark what does not exist."""
    states = torch.arange((i_n + 1) * HV * K * V).view(i_n + 1, HV, K, V)
    tile = states[i_n, i_hv, :, i_v * BV : (i_v + 1) * BV]
    missing = torch.full((K, BV - tile.shape[1]), -1)
    return torch.cat([tile, missing], dim=1)


def own_cells(i_v, i_hv, i_n, HV, K, V, BV):
    """The offsets of the cells of the states [N, HV, K, V] that program (i_v, i_hv, i_n) owns.

    Returns integers [K, BV]: the offset of each cell from the first of all, or -1 where the
    tile lies beyond the V columns.
    """
    # BEGIN SOLUTION
    o_k = torch.arange(K)  # [K]
    o_v = i_v * BV + torch.arange(BV)  # [BV], my columns
    row = (i_n * HV + i_hv) * K + o_k  # [K], rows of all states, counted through
    offsets = row[:, None] * V + o_v[None, :]  # [K, BV]
    return torch.where(o_v < V, offsets, -1)
    # END SOLUTION


define(
    own_cells,
    title="Whose cell is it?",
    stars=1,
    task="""
        Program $(i_v, i_{hv}, i_n)$ of the last kernel loads one tile of the states. Compute the
        offset of every cell of that tile, as the kernel does, and put −1 where the mask is off.
        (In the kernel the K rows are padded to a power of two as well; leave that out.)
        """,
    hint="""
        Count from the outside in: whole sequences, whole heads, whole rows, then columns.
        How many rows are there in one sequence?
        """,
    arguments=some_program,
    expected=by_numbering_every_cell,
    outputs={"offsets": "KV"},
    mutants={
        "every program starts at column 0": ("i_v * BV + torch.arange(BV)", "torch.arange(BV)"),
        "tiles lie one column apart": ("i_v * BV +", "i_v +"),
        "the heads of earlier sequences are not counted": ("i_n * HV + i_hv", "i_n + i_hv"),
        "every sequence reads the first one's state": ("(i_n * HV + i_hv)", "i_hv"),
        "a row has K cells": ("row[:, None] * V", "row[:, None] * K"),
        "the mask keeps one column too many": ("o_v < V", "o_v <= V"),
        "the mask looks at the column inside the tile": ("o_v < V", "torch.arange(BV) < V"),
        "the state is laid out [V, K]": (
            "row[:, None] * V + o_v[None, :]",
            "(i_n * HV + i_hv) * K * V + o_k[:, None] + o_v[None, :] * K",
        ),
    },
    why="Print what a kernel would touch before you let it: most wrong kernels are wrong here.",
)


# -- a whole kernel: the norm of chapter 2 ------------------------------------------------------


def rows_to_normalise(seed):
    """Rows of a size that is no power of two; one of them tiny, one zero."""
    rows, D = [(3, 12), (5, 20), (4, 7)][seed]
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, D, generator=draw)
    x[1] *= 1e-3
    x[2] = 0.0
    return dict(x=x.to(gpu_if_any()))


def by_oracle_norm(x):
    return reference.l2norm(x.double())


def normalise_rows(x):
    """Rows of x [rows, D] float32 over sqrt(sum of squares + 1e-6), by one program for each row."""

    # BEGIN SOLUTION
    @triton.jit
    def l2norm_kernel(x, y, D, BD: tl.constexpr):
        i_row = tl.program_id(0)
        o_d = tl.arange(0, BD)  # [BD]
        m_d = o_d < D
        b_x = tl.load(x + i_row * D + o_d, mask=m_d, other=0.0)  # [BD]
        b_y = b_x / tl.sqrt(tl.sum(b_x * b_x, axis=0) + 1e-6)  # [BD]
        tl.store(y + i_row * D + o_d, b_y, mask=m_d)

    rows, D = x.shape
    y = torch.full_like(x, float("nan"))  # [rows, D]
    l2norm_kernel[(rows,)](x, y, D, BD=triton.next_power_of_2(D))
    return y
    # END SOLUTION


define(
    normalise_rows,
    title="A kernel of your own: the norm",
    stars=2,
    task="""
        Write the norm of chapter 2 as a kernel: each program takes one row of D numbers, D need
        not be a power of two, and $\\varepsilon = 10^{-6}$ stands inside the root. Define the
        kernel inside the function (decorated with `triton.jit`), launch it, return the result.
        """,
    hint="""
        Start from the kernel that adds two matrices. `tl.sum(..., axis=0)` of a row is one number,
        and `tl.sqrt` is its root. What must `other` be, for the sum to be right?
        """,
    arguments=rows_to_normalise,
    expected=by_oracle_norm,
    outputs={"y": "TK"},
    budget=1e-5,
    mutants={
        "every program reads row 0": ("tl.load(x + i_row * D + o_d", "tl.load(x + o_d"),
        "rows are taken to lie BD numbers apart": (
            "tl.load(x + i_row * D + o_d",
            "tl.load(x + (i_row * BD) % (2 * D) + o_d",
        ),
        "the padding counts as ones": ("other=0.0", "other=1.0"),
        "the root is left out": ("tl.sqrt(tl.sum", "(tl.sum"),
        "epsilon is as small as that of torch's normalize": (
            "tl.sum(b_x * b_x, axis=0) + 1e-6",
            "tl.sum(b_x * b_x, axis=0) + 1e-12",
        ),
        "epsilon stands outside the root": (
            "tl.sqrt(tl.sum(b_x * b_x, axis=0) + 1e-6)",
            "(tl.sqrt(tl.sum(b_x * b_x, axis=0)) + 1e-6)",
        ),
        "the mean takes the place of the sum": (
            "tl.sum(b_x * b_x, axis=0)",
            "tl.sum(b_x * b_x, axis=0) / D",
        ),
    },
    why="""
        `kda_edu.l2norm_fwd` does this with several rows in a tile, so that short rows do not leave
        a program idle. The recurrent kernel of the library does it inside its loop.
        """,
)


# -- decoding with a pool of states -----------------------------------------------------------


def requests(seed):
    """One token for each of N requests, a pool of states, and which slot each request has."""
    sizes = [
        dict(B=3, H=1, HV=2, K=12, V=9),
        dict(B=2, H=2, HV=4, K=8, V=5),
        dict(B=4, H=1, HV=1, K=5, V=12),
    ][seed]
    made = make_inputs(T=1, seed=seed, initial_state=False, **sizes)
    slots = [[4, -1, 0], [1, 2], [-1, 3, 1, -1]][seed]
    draw = torch.Generator().manual_seed(100 + seed)
    pool = torch.randn(5, sizes["HV"], sizes["K"], sizes["V"], generator=draw)
    tokens = {name: getattr(made, name)[:, 0] for name in ("q", "k", "v", "g", "beta")}
    arguments = tokens | dict(pool=pool, slots=torch.tensor(slots))
    return {name: x.contiguous().to(gpu_if_any()) for name, x in arguments.items()}


def request_by_request(q, k, v, g, beta, pool, slots):
    """The oracle, once for each request that has a slot."""
    o, pool = torch.zeros_like(v, dtype=torch.float64), pool.double()
    for n, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        token = (x[n : n + 1, None].double() for x in (q, k, v, g, beta))
        start = dict(initial_state=pool[slot : slot + 1].clone(), output_final_state=True)
        read, state = reference.recurrent_kda(*token, **start)
        o[n], pool[slot] = read[0, 0], state[0]
    return o, pool


def decode_step(q, k, v, g, beta, pool, slots):
    """One KDA token for each of N requests; the state of request n lies in pool[slots[n]].

    q, k [N, H, K], v [N, HV, V], g [N, HV, K], beta [N, HV], pool [P, HV, K, V], slots [N] int64.
    slots[n] < 0 is padding: its outputs are zeros and it touches no state. The scale is K ** -0.5.
    Returns o [N, HV, V] and the pool after the step (work on a clone).
    """

    # BEGIN SOLUTION
    @triton.jit
    def decode_kernel(
        q, k, v, g, beta, o, pool, slots, scale,
        H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
        BK: tl.constexpr, BV: tl.constexpr,
    ):  # fmt: skip
        i_v, i_hv, i_n = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        i_key = i_n * H + i_hv // (HV // H)  # row of q and k
        i_value = i_n * HV + i_hv  # row of v, g, beta and o
        o_k = tl.arange(0, BK)  # [BK]
        o_v = i_v * BV + tl.arange(0, BV)  # [BV]
        m_k, m_v = o_k < K, o_v < V
        slot = tl.load(slots + i_n)
        m_S = m_k[:, None] & m_v[None, :] & (slot >= 0)  # [BK, BV]
        p_S = pool + (slot * HV + i_hv) * K * V + o_k[:, None] * V + o_v[None, :]  # [BK, BV]
        b_S = tl.load(p_S, mask=m_S, other=0.0)  # [BK, BV]
        b_q = tl.load(q + i_key * K + o_k, mask=m_k, other=0.0)  # [BK]
        b_k = tl.load(k + i_key * K + o_k, mask=m_k, other=0.0)  # [BK]
        b_v = tl.load(v + i_value * V + o_v, mask=m_v, other=0.0)  # [BV]
        b_g = tl.load(g + i_value * K + o_k, mask=m_k, other=0.0)  # [BK]
        b_S *= tl.exp(b_g)[:, None]  # [BK, BV]
        b_d = tl.load(beta + i_value) * (b_v - tl.sum(b_S * b_k[:, None], axis=0))  # [BV]
        b_S += b_k[:, None] * b_d[None, :]  # [BK, BV]
        b_o = tl.sum(b_S * (scale * b_q)[:, None], axis=0)  # [BV]
        tl.store(o + i_value * V + o_v, tl.where(slot >= 0, b_o, 0.0), mask=m_v)
        tl.store(p_S, b_S, mask=m_S)

    (N, H, K), (HV, V) = q.shape, v.shape[1:]
    o, pool = torch.full_like(v, float("nan")), pool.clone()
    sizes = dict(H=H, HV=HV, K=K, V=V, BK=triton.next_power_of_2(K), BV=8)
    grid = (triton.cdiv(V, 8), HV, N)
    decode_kernel[grid](q, k, v, g, beta, o, pool, slots, K**-0.5, **sizes)
    return o, pool
    # END SOLUTION


define(
    decode_step,
    title="A pool of states",
    stars=3,
    task="""
        A server answers many requests at once, and each batch holds others than the one before.
        So all states lie in one pool, and each request of a batch says which slot is its own. A
        batch may be padded: a request with a negative slot gets zeros and must touch no state.
        Write the kernel for one token per request. It updates the pool in place, and no state of a
        request that is not in the batch may change by a single bit.
        """,
    hint="""
        It is the kernel of step 9 without its loop. The program loads its slot number, and only
        the offset of the state uses it. A comparison with the slot number can be part of a mask.
        """,
    arguments=requests,
    expected=request_by_request,
    outputs={"o": "THV", "pool": "NHKV"},
    budget=1e-5,
    mutants={
        "the slot numbers are ignored": ("(slot * HV + i_hv)", "(i_n * HV + i_hv)"),
        "every program loads the first slot number": ("tl.load(slots + i_n)", "tl.load(slots)"),
        "a slot has one head": ("(slot * HV + i_hv)", "(slot + i_hv)"),
        "a slot of padding is taken for slot 0": [
            ("slot = tl.load(slots + i_n)", "slot = tl.maximum(tl.load(slots + i_n), 0)")
        ],
        "slot 0 is taken for padding": [
            ("m_v[None, :] & (slot >= 0)", "m_v[None, :] & (slot > 0)"),
            ("tl.where(slot >= 0", "tl.where(slot > 0"),
        ],
        "padding gets an output": ("tl.where(slot >= 0, b_o, 0.0)", "b_o"),
        "the decay comes after the delta": [
            ("        b_S *= tl.exp(b_g)[:, None]  # [BK, BV]\n", ""),
            ("b_S += b_k[:, None]", "b_S = tl.exp(b_g)[:, None] * b_S + b_k[:, None]"),
        ],
        "the state is not stored": ("tl.store(p_S, b_S, mask=m_S)", "pass"),
        "key heads are taken in turn": ("i_hv // (HV // H)", "i_hv % H"),
    },
    why="""
        This is `kda_edu.fused_recurrent_kda_update`. A comparison on a GPU can't raise an error,
        so the library treats a slot beyond the pool as padding too.
        """,
)
