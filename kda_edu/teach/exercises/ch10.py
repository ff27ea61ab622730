"""Exercises of chapter 10: the intra-chunk kernels, as PyTorch on tiles."""

import math

import torch

from ..inputs import make_inputs
from ._core import define


def packed_gates(seed):
    """Gates of sequences laid end to end, some with a reset, and a chunk length."""
    lengths, C = [([7, 1, 12], 4), ([40, 0, 33], 16), ([5, 19, 2, 8], 8)][seed]
    made = make_inputs(
        B=1, T=sum(lengths), H=1, K=6 + seed, dtype=torch.float64, gate="reset", seed=seed
    )
    g = made.g[0, :, 0].clone()
    g[3, 1] = -math.inf
    return dict(g=g, lengths=lengths, C=C)


def by_masked_sum(g, lengths, C):
    """Row t of a 0-1 matrix says which tokens lie in the chunk of t and not after it."""
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.cat([torch.arange(n) for n in lengths])
    together = (sequence[:, None] == sequence) & (place[:, None] // C == place // C)
    bounded = torch.maximum(g / math.log(2), torch.tensor(-160.0, dtype=g.dtype))
    return (together & (place[:, None] >= place)).to(g.dtype) @ bounded


def packed_cumsum(g, lengths, C):
    """G [T, K], in powers of two, of sequences end to end; g [T, K] natural logs.

    lengths: tokens of each sequence. A reset counts as -160, as in the kernel.
    """
    # BEGIN SOLUTION
    log2_decay = (g / math.log(2)).clamp(min=-160)  # [T, K]
    pieces = []
    for sequence in log2_decay.split(lengths):  # [length, K]
        for chunk in sequence.split(C):  # [C, K], the last one shorter
            pieces.append(chunk.cumsum(dim=0))
    return torch.cat(pieces)
    # END SOLUTION


define(
    packed_cumsum,
    title="Sequences end to end",
    stars=1,
    task="""
        In training, sequences of different lengths lie end to end in one tensor. A chunk never
        spans two of them: each sequence starts a chunk, and its last chunk may be short. Sum the
        gates of such a tensor.
        """,
    hint="`torch.split` takes a list of lengths, or one length, with a shorter piece at the end.",
    arguments=packed_gates,
    expected=by_masked_sum,
    outputs={"G": "TK"},
    mutants={
        "chunks are counted from the start of the tensor": (
            "log2_decay.split(lengths)",
            "(log2_decay,)",
        ),
        "the sum runs on from chunk to chunk": ("sequence.split(C)", "(sequence,)"),
        "the sum leaves out the token itself": (
            "chunk.cumsum(dim=0)",
            "chunk.cumsum(dim=0) - chunk",
        ),
        "the gates stay natural logarithms": ("g / math.log(2)", "g"),
        "the units are changed the wrong way": ("g / math.log(2)", "g * math.log(2)"),
        "a reset stays minus infinity": (".clamp(min=-160)", ""),
        "the sum is bounded, not the step": [
            (".clamp(min=-160)", ""),
            ("chunk.cumsum(dim=0)", "chunk.cumsum(dim=0).clamp(min=-160)"),
        ],
        "the sum runs over channels": ("chunk.cumsum(dim=0)", "chunk.cumsum(dim=1)"),
    },
    why="The library keeps a table of chunks for this, with first token and length: chapter 13.",
)


def chunk_lengths(seed):
    return dict(C=[64, 16, 48][seed])


def by_splitting(C):
    """Split the columns and rows of a block in halves until single rows are left."""
    rows = torch.full((C, C), -1)

    def fill(first, length):
        half = length // 2
        if half == 0:
            return
        middle = first + half
        rows[middle : middle + half, first:middle] = middle
        fill(first, half)
        fill(middle, half)

    for first in range(0, C, 16):
        rows[first : first + 16, :first] = first
        fill(first, 16)
    return rows


def reference_row(C):
    """Reference rows of all entries below the diagonal: integers [C, C], else -1.

    C is a multiple of 16. Blocks of 16 rows, squares of 8, 4, 2, 1 inside.
    """
    rows = torch.full((C, C), -1)
    # BEGIN SOLUTION
    for i in range(C):
        for j in range(i):
            if j < i // 16 * 16:  # a column before the block
                rows[i, j] = i // 16 * 16
            else:
                bit = (i ^ j).bit_length() - 1  # the highest bit in which they differ
                rows[i, j] = (i >> bit) << bit  # i with the bits below it cleared
    # END SOLUTION
    return rows


define(
    reference_row,
    title="Which row serves this entry?",
    stars=2,
    task="""
        The kernel finds the reference row with masks, for a whole tile. Find it for one entry
        $(i, j)$, $j < i$: the first of the 16 rows where column $j$ lies before the block, else
        the first row of the lower half of the square that holds the entry.
        """,
    hint="""
        Write $i$ and $j$ in binary. Inside a block of 16, in which half of 8 is each? If both are
        in the same, go on with the next bit. At the first bit that differs, $i$ has a 1 there.
        `a ^ b` has ones where two numbers differ, and `.bit_length()` finds the highest.
        """,
    arguments=chunk_lengths,
    expected=by_splitting,
    outputs={"rows": "TC"},
    mutants={
        "the first row of the block serves the block itself too": (
            "j < i // 16 * 16",
            "j < i // 16 * 16 + 16",
        ),
        "the lowest bit that differs is taken": (
            "(i ^ j).bit_length() - 1",
            "((i ^ j) & -(i ^ j)).bit_length() - 1",
        ),
        "the bit is one too high, so the row is that of the upper half": (
            "(i ^ j).bit_length() - 1",
            "(i ^ j).bit_length()",
        ),
        "the row is counted from j": ("(i >> bit) << bit", "((j >> bit) << bit) + 1"),
        "the row itself is its reference": ("(i >> bit) << bit", "i"),
        "the last row of the square is taken, which is a later one": (
            "(i >> bit) << bit",
            "((i >> bit) << bit) + (1 << bit) - 1",
        ),
        "columns before the block use squares as well": ("if j < i // 16 * 16:", "if False:"),
    },
    why="""
        Since $j < r \\le i$ always holds, both exponents are at most zero. And $r \\le i$ keeps
        the kernel causal to the last bit.
        """,
)


def alike_keys(seed):
    """The strictly lower matrix of one chunk whose keys point nearly the same way."""
    C, beta = [(64, 0.9), (39, 1.0), (20, 0.5)][seed]
    made = make_inputs(B=1, T=C, H=1, K=24, dtype=torch.float64, keys="correlated", seed=seed)
    k = made.k[0, :, 0]
    return dict(L=(beta * k @ k.T).tril(-1))


def by_solver(L):
    eye = torch.eye(len(L), dtype=L.dtype)
    return torch.linalg.solve_triangular(L + eye, eye, upper=False)


def invert_by_blocks(L):
    """(I + L)^-1 for a strictly lower L [C, C]: blocks of 16, then merges.

    C need not be a multiple of 16. No solver, no inverse of PyTorch.
    """
    C = len(L)
    X = torch.eye(C, dtype=L.dtype)
    # BEGIN SOLUTION
    i, j = torch.arange(C)[:, None], torch.arange(C)[None, :]
    in_block = L * (i // 16 == j // 16)  # [C, C]
    for r in range(1, 16):
        rows = torch.arange(r, C, 16)  # row r of every block
        X[rows] -= in_block[rows] @ X  # rows above it are final
    side = 16
    while side < C:
        join = (i // (2 * side) == j // (2 * side)) & (i // side > j // side)
        X = X - X @ (L * join) @ X
        side *= 2
    # END SOLUTION
    return X


define(
    invert_by_blocks,
    title="The solve, on a whole chunk",
    stars=3,
    task="""
        Write the solve of this chapter in PyTorch, for any chunk length: the blocks of 16 on the
        diagonal by substitution, all of them in the same 15 steps, then merges of blocks of 16,
        32, 64 and so on until one block is left. The last block may be short.
        """,
    hint="""
        With $L$ cut down to its blocks on the diagonal, row $r$ of every block of $X$ loses that
        row of $L$ times $X$. For a merge, $M$ holds the entries of $L$ whose row and column lie in
        the same pair of neighbours, the row in the second and the column in the first.
        """,
    arguments=alike_keys,
    expected=by_solver,
    outputs={"X": "CC"},
    mutants={
        "the merge adds instead of subtracting": ("X = X - X @", "X = X + X @"),
        "only one merge is made": ("side *= 2", "side = C"),
        "all of L below the blocks is merged at once": (
            "(i // (2 * side) == j // (2 * side)) & (i // side > j // side)",
            "(i // side > j // side)",
        ),
        "the three factors stand in the wrong order": (
            "X @ (L * join) @ X",
            "(L * join) @ X @ X",
        ),
        "the inverse of the lower block is forgotten": ("X @ (L * join) @ X", "(L * join) @ X"),
        "the substitution uses the whole row of L": (
            "in_block = L * (i // 16 == j // 16)",
            "in_block = L",
        ),
        "the last row of every block is left out": ("range(1, 16)", "range(1, 15)"),
        "the substitution uses the rows of I, not those already solved": (
            "in_block[rows] @ X",
            "in_block[rows]",
        ),
    },
    why="""
        Each merge is two products of the whole tile, most of it zeros. The library multiplies the
        16 x 16 blocks that are not zero, which is less work and needs more lines.
        """,
)
