"""Exercises of chapter 5: maps that compose, and scans."""

import torch

from ..inputs import make_inputs
from ._core import define


def maps_of(made):
    """The affine maps of one head's tokens: M [T, K, K], X [T, K, V]."""
    _, k, v, g, beta, _ = made.head()
    write = beta[:, None] * k  # [T, K]
    erase = torch.eye(k.shape[1], dtype=k.dtype) - write[:, :, None] * k[:, None, :]
    return erase * g.exp()[:, None, :], write[:, :, None] * v[:, None, :]


def one_head(seed, sizes):
    return make_inputs(B=1, H=1, dtype=torch.float64, seed=seed, **sizes[seed])


# -- the slip of step 3 ----------------------------------------------------------------------------


def two_maps_on_rows(seed):
    """Two maps of the convention S M + X, with a state [V, K]."""
    made = one_head(seed, [dict(T=2, K=6, V=4), dict(T=2, K=5, V=8), dict(T=2, K=12, V=7)])
    M, X = (x.mT for x in maps_of(made))
    return dict(earlier=(M[0], X[0]), later=(M[1], X[1]))


def by_probing(earlier, later):
    """Send basis states through both maps, one after the other, and read the one map off."""
    (M1, X1), (M2, X2) = earlier, later
    V, K = X1.shape

    def both(S):
        return (S @ M1 + X1) @ M2 + X2

    shift = both(torch.zeros_like(X1))  # [V, K]
    rows = []
    for i in range(K):
        probe = torch.zeros_like(X1)
        probe[0, i] = 1.0
        rows.append((both(probe) - shift)[0])
    return torch.stack(rows), shift


def compose_on_the_right(earlier, later):
    """One map for two, where a map (M [K, K], X [V, K]) takes a state S [V, K] to S M + X.

    Returns (M [K, K], X [V, K]).
    """
    # BEGIN SOLUTION
    M1, X1 = earlier
    M2, X2 = later
    return M1 @ M2, X1 @ M2 + X2
    # END SOLUTION


define(
    compose_on_the_right,
    title="The other side",
    stars=1,
    task="""
        Many texts store the state as [V, K] and multiply from the right: a map takes $S$ to
        $S M + X$. Find the map that does `earlier` and then `later`, and mind the order of every
        product. A published formula has one of them wrong.
        """,
    hint="""
        Write down $(S M_1 + X_1) M_2 + X_2$ and multiply out. Check the shapes: which products
        exist at all when K and V differ?
        """,
    arguments=two_maps_on_rows,
    expected=by_probing,
    outputs={"M": "KK", "X": "VK"},
    mutants={
        "the order of time is taken for the order of the factors": ("M1 @ M2", "M2 @ M1"),
        "the published slip, transposed until it fits": ("X1 @ M2", "(M2 @ X1.mT).mT"),
        "the later addition is mapped, not the earlier": ("X1 @ M2 + X2", "X2 @ M1 + X1"),
        "the later addition goes through the earlier map": ("X1 @ M2 + X2", "X1 + X2 @ M1"),
        "the earlier addition is not mapped": ("X1 @ M2 + X2", "X1 + X2"),
        "the additions are subtracted": ("X1 @ M2 + X2", "X1 @ M2 - X2"),
        "the earlier addition is forgotten": ("X1 @ M2 + X2", "X2"),
    },
    why="With the state as [K, V] everything is turned over, and the later map stands on the left.",
)


# -- the scan of Hillis and Steele -----------------------------------------------------------------


def maps_of_a_sequence(seed):
    made = one_head(seed, [dict(T=7, K=5, V=4), dict(T=16, K=4, V=6), dict(T=21, K=6, V=3)])
    M, X = maps_of(made)
    return dict(M=M, X=X)


def by_loop(M, X):
    """Each prefix from the one before it."""
    prefixes = [(M[0], X[0])]
    for t in range(1, len(M)):
        before = prefixes[-1]
        prefixes.append((M[t] @ before[0], M[t] @ before[1] + X[t]))
    return torch.stack([m for m, _ in prefixes]), torch.stack([x for _, x in prefixes])


def prefix_maps(M, X):
    """The map of all tokens up to and with each one, in about log2(T) batched steps.

    M [T, K, K], X [T, K, V], any T; a map takes S to M S + X. Returns M and X of the prefixes.
    """
    # BEGIN SOLUTION
    reach = 1
    while reach < len(M):
        later = M[reach:]  # [T - reach, K, K]
        M_new = later @ M[:-reach]
        X_new = later @ X[:-reach] + X[reach:]
        M = torch.cat([M[:reach], M_new])  # the first ones are complete
        X = torch.cat([X[:reach], X_new])
        reach = 2 * reach
    return M, X
    # END SOLUTION


define(
    prefix_maps,
    title="A scan in one sweep",
    stars=2,
    task="""
        Hillis and Steele scan without a tree. In the first round every token takes in the map of
        its neighbour on the left. In the next round it takes in the one two places to the left,
        which by then stands for two tokens, then four places, and so on. After about $\\log_2 T$
        rounds each token holds all that came before it, **and itself**. Write it with batched
        products, for any T. It needs no padding.
        """,
    hint="""
        Before a round with reach $r$, place $t$ holds tokens $t - r + 1$ to $t$, or all up to $t$
        where there are fewer. Who has nothing to take in? All of a round must read what the round
        before has left, so don't write into a tensor that you still read.
        """,
    arguments=maps_of_a_sequence,
    expected=by_loop,
    outputs={"M": "TKK", "X": "TKV"},
    mutants={
        "the earlier map stands on the left": (
            "M_new = later @ M[:-reach]",
            "M_new = M[:-reach] @ later",
        ),
        "the matrix of the earlier map moves the addition": (
            "later @ X[:-reach] + X[reach:]",
            "M[:-reach] @ X[:-reach] + X[reach:]",
        ),
        "the earlier addition is not mapped": ("later @ X[:-reach]", "X[:-reach]"),
        "one round only": ("while reach < len(M):", "while reach < 2:"),
        "the last round is left out": ("while reach < len(M):", "while 2 * reach < len(M):"),
        "the reach grows by one, not twofold": ("reach = 2 * reach", "reach = reach + 1"),
        "the reach grows fourfold": ("reach = 2 * reach", "reach = 4 * reach"),
        "the additions are added up, as in a plain sum": (
            "later @ X[:-reach] + X[reach:]",
            "X[:-reach] + X[reach:]",
        ),
    },
    why="""
        About half the depth of the two sweeps, and $\\log_2 T / 2$ times their work. On a GPU
        that is the usual choice inside one program, where depth is what counts.
        """,
)


# -- maps kept as columns and rows -----------------------------------------------------------------


def two_factored_maps(seed):
    """Two spans of DeltaNet tokens, each as I - A B^T with the keys as the columns of B."""
    made = one_head(
        seed,
        [
            dict(T=5, K=8, V=3, gate="none"),
            dict(T=7, K=12, V=3, gate="none"),
            dict(T=9, K=16, V=3, gate="none"),
        ],
    )
    M, _ = maps_of(made)
    keys, split = made.head()[1], [2, 4, 3][seed]
    spans = {}
    for name, part in (("earlier", slice(None, split)), ("later", slice(split, None))):
        B = keys[part].mT  # [K, n]
        product = torch.eye(B.shape[0], dtype=B.dtype)
        for matrix in M[part]:
            product = matrix @ product
        spans[f"A_{name}"] = left_factor(product, B)
        spans[f"B_{name}"] = B.contiguous()
    return spans


def left_factor(product, B):
    """A in product = I - A B^T, where B [K, n] has independent columns."""
    rest = torch.eye(B.shape[0], dtype=B.dtype) - product  # [K, K]
    return rest @ torch.linalg.pinv(B).mT  # [K, n]


def by_multiplying_out(A_earlier, B_earlier, A_later, B_later):
    identity = torch.eye(B_later.shape[0], dtype=B_later.dtype)
    product = (identity - A_later @ B_later.mT) @ (identity - A_earlier @ B_earlier.mT)
    return left_factor(product, torch.cat([B_earlier, B_later], dim=1))


def compose_factored(A_earlier, B_earlier, A_later, B_later):
    """A of (I - A_later B_later^T)(I - A_earlier B_earlier^T) = I - A B^T.

    A_*, B_* [K, n]; B is B_earlier and B_later side by side. Returns A [K, n_earlier + n_later].
    No K x K matrix is formed.
    """
    # BEGIN SOLUTION
    overlap = B_later.mT @ A_earlier  # [n_later, n_earlier]
    return torch.cat([A_earlier - A_later @ overlap, A_later], dim=1)
    # END SOLUTION


define(
    compose_factored,
    title="Compose without multiplying out",
    stars=3,
    task="""
        Without gates, the product over a span of $n$ tokens is $I - A B^\\top$, where the columns
        of $B$ are the span's keys and $A$ is K × n. Two spans follow each other. Their product
        has this form again, and its $B$ is both $B$ side by side. Find its $A$, with products of
        thin matrices only.
        """,
    hint="""
        Multiply $(I - A_2 B_2^\\top)(I - A_1 B_1^\\top)$ out: four terms. Sort them by what stands
        at their right end, $B_1^\\top$ or $B_2^\\top$.
        """,
    arguments=two_factored_maps,
    expected=by_multiplying_out,
    outputs={"A": "KC"},
    mutants={
        "the two are put side by side as they are": (
            "A_earlier - A_later @ overlap",
            "A_earlier",
        ),
        "the mixed term is added": ("A_earlier - A_later", "A_earlier + A_later"),
        "the later span changes, not the earlier": (
            "A_earlier - A_later @ overlap, A_later",
            "A_earlier, A_later - A_earlier @ (B_earlier.mT @ A_later)",
        ),
        "both change": (
            "overlap, A_later]",
            "overlap, A_later - A_earlier @ (B_earlier.mT @ A_later)]",
        ),
        "the keys overlap with keys": ("B_later.mT @ A_earlier", "B_later.mT @ B_earlier"),
        "the overlap is taken the other way round": (
            "B_later.mT @ A_earlier",
            "A_later.mT @ B_earlier",
        ),
        "the later span comes first": (
            "A_earlier - A_later @ overlap, A_later",
            "A_later, A_earlier - A_later @ overlap",
        ),
    },
    why="""
        It costs $2\\, K\\, n_1 n_2$ products in place of $K^3$. With a later span of one token it
        is the induction step of chapter 6.
        """,
)
