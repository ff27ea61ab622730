"""Exercises of chapter 16: one sequence on many GPUs."""

import torch

from ..inputs import make_inputs
from ._core import define


def maps_of_pieces(seed, counts, K, V):
    """The maps of pieces of one sequence, one head: M [R, K, K], X [R, K, V], and the pieces."""
    made = make_inputs(B=1, T=sum(counts), H=1, K=K, V=V, dtype=torch.float64, seed=seed)
    _, k, v, g, beta, _ = made.head()
    maps = []
    for piece in zip(*(x.split(counts) for x in (k, v, g, beta)), strict=True):
        M, X = torch.eye(K, dtype=torch.float64), torch.zeros(K, V, dtype=torch.float64)
        for key, value, gate, strength in zip(*piece, strict=True):
            decay = gate.exp()[:, None]  # [K, 1]
            erase = torch.eye(K, dtype=torch.float64) - strength * torch.outer(key, key)
            M, X = erase @ (decay * M), erase @ (decay * X) + strength * torch.outer(key, value)
        maps.append((M, X))
    return torch.stack([M for M, _ in maps]), torch.stack([X for _, X in maps]), made


# -- which tokens of which sequence ----------------------------------------------------------------


def a_packed_batch(seed):
    cu = [[0, 4, 15, 21, 30], [0, 7, 9, 26], [0, 3, 12, 19, 24, 33]][seed]
    start, stop = [(9, 24), (9, 20), (4, 19)][seed]
    return dict(cu_seqlens=torch.tensor(cu), start=start, stop=stop)


def token_by_token(cu_seqlens, start, stop):
    """Label every token with its sequence, cut, and look where the label changes."""
    sequence = torch.searchsorted(cu_seqlens, torch.arange(int(cu_seqlens[-1])), right=True)
    mine = sequence[start:stop]
    changes = [i for i in range(1, len(mine)) if mine[i] != mine[i - 1]]
    return torch.tensor([0, *changes, len(mine)])


def local_cu_seqlens(cu_seqlens, start, stop):
    """Where the sequences begin and end within the tokens start, ..., stop - 1 of a packed batch.

    cu_seqlens [N + 1] of the whole batch, 0 <= start < stop <= its last number. No sequence is
    empty. Returns the local numbers: 0 first, then rising, stop - start last.
    """
    # BEGIN SOLUTION
    inside = (cu_seqlens > start) & (cu_seqlens < stop)
    edges = cu_seqlens.new_tensor([start]), cu_seqlens[inside], cu_seqlens.new_tensor([stop])
    return torch.cat(edges) - start
    # END SOLUTION


define(
    local_cu_seqlens,
    title="What lies on this GPU",
    stars=1,
    task="""
        Several sequences are packed end to end, and the whole is cut into pieces, one per GPU,
        without regard to where sequences end. A GPU holds the tokens from `start` up to but not
        including `stop`. Give it its own `cu_seqlens`. A part of a sequence counts as a sequence.
        """,
    hint="""
        Which of the numbers in `cu_seqlens` lie strictly inside the piece? A sequence that ends
        exactly at a border must not leave an empty one behind.
        """,
    arguments=a_packed_batch,
    expected=token_by_token,
    outputs={"cu": "T"},
    mutants={
        "positions are still those of the whole batch": ("(edges) - start", "(edges)"),
        "a border at the start counts twice": ("cu_seqlens > start", "cu_seqlens >= start"),
        "a border at the end counts twice": ("cu_seqlens < stop", "cu_seqlens <= stop"),
        "borders after the piece are kept": (" & (cu_seqlens < stop)", ""),
        "borders before the piece are kept": ("(cu_seqlens > start) & ", ""),
        "the part that enters from the left is lost": ("cu_seqlens.new_tensor([start]), ", ""),
        "the part that leaves to the right is lost": (", cu_seqlens.new_tensor([stop])", ""),
    },
    why="`kda_edu.distributed.find_piece` does this, and also places empty sequences.",
)


# -- the gradient that comes from the right --------------------------------------------------------


def gradients_of_pieces(seed):
    counts, K, V = [([5, 3, 4, 6], 5, 3), ([2, 7, 1], 4, 6), ([4, 4, 3, 2, 5], 6, 4)][seed]
    M, X, _ = maps_of_pieces(seed, counts, K, V)
    return dict(M=M, dX=X.flip(0).contiguous(), rank=[1, 0, 2][seed])  # any numbers will do for dX


def by_autograd(M, dX, rank):
    """Run the later pieces as a chain, and let autograd find the gradient of its start."""
    start = torch.zeros_like(dX[0]).requires_grad_()
    state, loss = start, 0.0
    for r in range(rank + 1, len(M)):
        loss = loss + (dX[r] * state).sum()  # what the outputs of piece r add to the gradient
        state = M[r] @ state
    return torch.autograd.grad(loss, start)[0]


def gradient_from_the_right(M, dX, rank):
    """The gradient of the state after piece `rank`, [K, V], from the pieces to its right.

    M [R, K, K] of all pieces; dX [R, K, V]: the gradient of the state before each piece, as if
    nothing to the right of it existed. 0 <= rank < R - 1.
    """
    # BEGIN SOLUTION
    dS = torch.zeros_like(dX[0])  # [K, V], after the last piece
    for r in range(len(M) - 1, rank, -1):
        dS = M[r].mT @ dS + dX[r]
    return dS
    # END SOLUTION


define(
    gradient_from_the_right,
    title="Folding from the right",
    stars=2,
    task="""
        In the backward pass every GPU has sent its matrix dX to all others: the gradient of the
        state before its piece, as far as its own outputs are concerned. Find the whole gradient
        of the state *after* piece `rank`. Nothing depends on the state after the last piece.
        """,
    hint="""
        The state before piece $r$ changes the loss in two ways: through the outputs of piece $r$,
        and through the state after it, $M_r S + X_r$. Begin at the last piece.
        """,
    arguments=gradients_of_pieces,
    expected=by_autograd,
    outputs={"S": "KV"},
    mutants={
        "the map is not transposed": ("M[r].mT @ dS", "M[r] @ dS"),
        "own piece included": ("rank, -1)", "rank - 1, -1)"),
        "the next piece left out": ("rank, -1)", "rank + 1, -1)"),
        "the last piece left out": ("len(M) - 1, rank", "len(M) - 2, rank"),
        "from the left": ("range(len(M) - 1, rank, -1)", "range(rank + 1, len(M))"),
        "dX is mapped too": ("M[r].mT @ dS + dX[r]", "M[r].mT @ (dS + dX[r])"),
        "only the neighbour counts": ("M[r].mT @ dS + dX[r]", "dX[r]"),
        "the map of the piece to the left of it": ("M[r].mT", "M[r - 1].mT"),
    },
    why="The same loop as in the forward pass, with transposed maps, in the other direction.",
)


# -- fast links inside, slow links outside ---------------------------------------------------------


def a_cluster(seed):
    counts, gpus, K, V = [
        ([3, 2, 4, 1, 5, 2], 3, 5, 3),
        ([2, 3, 1, 4, 2, 2, 3, 1], 2, 4, 6),
        ([4, 1, 3, 2], 2, 6, 4),
    ][seed]
    M, X, made = maps_of_pieces(seed, counts, K, V)
    shape = (len(counts) // gpus, gpus)
    return dict(M=M.unflatten(0, shape), X=X.unflatten(0, shape), S=made.head()[5])


def one_long_chain(M, X, S):
    """Every piece after the other, as one long sequence."""
    states = []
    for M_piece, X_piece in zip(M.flatten(0, 1), X.flatten(0, 1), strict=True):
        states.append(S)
        S = M_piece @ S + X_piece
    return torch.stack(states).unflatten(0, M.shape[:2])


def two_levels(M, X, S):
    """The state before every piece, [nodes, gpus, K, V], with one map per node on the slow links.

    M [nodes, gpus, K, K], X [nodes, gpus, K, V] in the order of the sequence; S [K, V] before it.
    """
    # BEGIN SOLUTION
    M_node, X_node = M[:, 0], X[:, 0]  # [nodes, K, K], [nodes, K, V]
    for i in range(1, M.shape[1]):  # inside the nodes, all of them at once
        M_node, X_node = M[:, i] @ M_node, M[:, i] @ X_node + X[:, i]
    before = [S]  # the state before each node
    for n in range(len(M) - 1):  # between nodes
        before.append(M_node[n] @ before[n] + X_node[n])
    states = [torch.stack(before)]  # [nodes, K, V] for each place in a node
    for i in range(M.shape[1] - 1):  # inside the nodes again
        states.append(M[:, i] @ states[i] + X[:, i])
    return torch.stack(states, dim=1)
    # END SOLUTION


define(
    two_levels,
    title="One map per node",
    stars=3,
    task="""
        A node holds several GPUs with fast links between them; between nodes the links are slow.
        If every GPU sends its map to every other, the slow links carry all of them. Find the
        state before every piece with less: compose the maps inside each node to one, exchange
        only those between the nodes, and then go through each node.
        """,
    hint="""
        Three loops: compose inside a node, the later map on the left; send the state from node to
        node through the composed maps; inside a node start with its state and apply single maps.
        """,
    arguments=a_cluster,
    expected=one_long_chain,
    outputs={"S": "NCKV"},
    mutants={
        "the earlier map stands on the left": ("M[:, i] @ M_node,", "M_node @ M[:, i],"),
        "the addition of a node is not mapped": ("M[:, i] @ X_node + X[:, i]", "X_node + X[:, i]"),
        "the first piece of a node is left out": (
            "M_node, X_node = M[:, 0], X[:, 0]",
            "M_node, X_node = torch.eye(M.shape[-1], dtype=M.dtype), torch.zeros_like(X[:, 0])",
        ),
        "every node begins with the state of the first": (
            "M_node[n] @ before[n] + X_node[n]",
            "before[n]",
        ),
        "nodes do not see the state before them": (
            "M_node[n] @ before[n] + X_node[n]",
            "X_node[n]",
        ),
        "a node's state goes through its last piece only": (
            "M_node[n] @ before[n]",
            "M[n, -1] @ before[n]",
        ),
        "states after the pieces, not before": (
            "M[:, i] @ states[i] + X[:, i]",
            "M[:, i + 1] @ states[i] + X[:, i + 1]",
        ),
        "nodes and places in them are exchanged": (
            "torch.stack(states, dim=1)",
            "torch.stack(states, dim=0).reshape(*M.shape[:2], *S.shape)",
        ),
    },
    why="""
        With 8 GPUs in a node, an eighth of the bytes on the slow links. Blelloch's tree of
        chapter 5 is this with as many levels as there are powers of two.
        """,
)
