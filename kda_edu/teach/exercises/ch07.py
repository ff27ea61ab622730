"""Exercises of chapter 7: the triangular solve."""

import torch

from ..inputs import make_inputs
from ._core import define

try:
    import triton
    import triton.language as tl
except ImportError:  # no Triton on this system: the exercises can be read, not run
    triton = tl = None


def strictly_lower(C, seed, beta):
    """N [C, C] of correlated keys, float64, zero on and above the diagonal."""
    sizes = dict(B=1, T=C, H=1, K=12, keys="correlated")
    k = make_inputs(dtype=torch.float64, seed=seed, **sizes).k[0, :, 0]  # [C, K]
    return torch.tril(beta * k @ k.T, -1)


def normal(*shape, seed):
    draw = torch.Generator().manual_seed(100 + seed)
    return torch.randn(*shape, generator=draw, dtype=torch.float64)


def by_dense_solver(N, right):
    """PyTorch's solver, which knows nothing of triangles, in float64 on the same device."""
    N, right = N.double().tril(-1), right.double()
    return torch.linalg.solve(torch.eye(len(N), dtype=N.dtype, device=N.device) + N, right)


# -- from the last row up -------------------------------------------------------------------------


def transposed_system(seed):
    C, D = [(5, 3), (16, 7), (9, 12)][seed]
    beta = [0.8, 1.0, 1.5][seed]
    return dict(N=strictly_lower(C, seed, beta), right=normal(C, D, seed=seed))


def by_dense_transposed_solver(N, right):
    return torch.linalg.solve(torch.eye(len(N), dtype=N.dtype) + N.T, right)


def solve_transposed(N, right):
    """X with (I + N)^T X = right, row by row. N [C, C] strictly lower, right [C, D]."""
    # BEGIN SOLUTION
    X = right.clone()  # [C, D]
    for i in reversed(range(len(N))):
        X[i] = right[i] - N[i + 1 :, i] @ X[i + 1 :]  # [D]
    return X
    # END SOLUTION


define(
    solve_transposed,
    title="From the last row up",
    stars=1,
    task="""
        The gradient of a solve is a solve with the transposed matrix (chapter 12). Solve
        $(I + N)^\\top X = R$ by substitution, without transposing $N$ and without an inverse. Any
        number of columns may stand on the right.
        """,
    hint="""
        $(I + N)^\\top$ is upper triangular, so one row of $X$ is known at once. Which one? Write
        down equation $i$ and look at which rows of $X$ it contains.
        """,
    arguments=transposed_system,
    expected=by_dense_transposed_solver,
    outputs={"X": "TV"},
    mutants={
        "N itself is solved, from the first row down": (
            [
                ("reversed(range(len(N)))", "range(len(N))"),
                ("N[i + 1 :, i] @ X[i + 1 :]", "N[i, :i] @ X[:i]"),
            ]
        ),
        "the rows are filled from the first to the last": (
            "reversed(range(len(N)))",
            "range(len(N))",
        ),
        "what is known is added": ("right[i] - N", "right[i] + N"),
        "rows of the right-hand side are subtracted, not of X": (
            "@ X[i + 1 :]",
            "@ right[i + 1 :]",
        ),
        "a row of N is taken for a column": ("N[i + 1 :, i]", "N[i, i + 1 :]"),
        "the last row is left out": (
            "N[i + 1 :, i] @ X[i + 1 :]",
            "N[i + 1 : -1, i] @ X[i + 1 : -1]",
        ),
        "row i is subtracted from itself": (
            "right[i] - N[i + 1 :, i] @ X[i + 1 :]",
            "(right[i] - N[i + 1 :, i] @ X[i + 1 :]) / 2",
        ),
    },
    why="""
        Substitution is backward stable: the result solves exactly a system that differs from the
        given one by round-off only (Higham, Accuracy and Stability, chapter 8).
        """,
)


# -- a kernel that solves -------------------------------------------------------------------------


def one_system(seed):
    """N [16, 16] with garbage on and above the diagonal, and a right-hand side, float32."""
    D, beta = [(20, 0.7), (5, 1.0), (40, 1.6)][seed]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    upper = torch.ones(16, 16).triu().bool()
    N = strictly_lower(16, seed, beta).masked_fill(upper, float("nan"))
    return dict(N=N.float().to(device), right=normal(16, D, seed=seed).float().to(device))


def solve_columns(N, right):
    """X with (I + N) X = right, by a kernel; a program for every 16 columns.

    N [16, 16] float32, to be read below its diagonal only; right [16, D], any D.
    """

    # BEGIN SOLUTION
    @triton.jit
    def solve_columns_kernel(N, right, X, D, BC: tl.constexpr, BD: tl.constexpr):
        i_d = tl.program_id(0)
        o_r = tl.arange(0, BC)  # [BC]
        o_d = i_d * BD + tl.arange(0, BD)  # [BD]
        m_d = o_d < D
        o_x = o_r[:, None] * D + o_d[None, :]  # [BC, BD]
        b_X = tl.load(right + o_x, mask=m_d[None, :], other=0.0)  # [BC, BD]
        for i in range(1, BC):
            b_n = tl.load(N + i * BC + o_r, mask=o_r < i, other=0.0)  # [BC]
            b_x = tl.sum(b_n[:, None] * b_X, axis=0)  # [BD]
            b_X -= tl.where(o_r[:, None] == i, b_x[None, :], 0.0)  # [BC, BD]
        tl.store(X + o_x, b_X, mask=m_d[None, :])

    D = right.shape[1]
    X = torch.full_like(right, float("nan"))  # [16, D]
    solve_columns_kernel[(triton.cdiv(D, 16),)](N, right, X, D, BC=16, BD=16)
    return X
    # END SOLUTION


define(
    solve_columns,
    title="A kernel that solves",
    stars=2,
    task="""
        If an inverse has one use only, you need not make it: substitution works on any right-hand
        side. Change the kernel of this chapter so that it solves $(I + N) X = R$ for R [16, D],
        with one program for every 16 columns of R. D is any number. N holds NaN on and above its
        diagonal. Define the kernel inside the function (decorated with `triton.jit`).
        """,
    hint="""
        The tile starts as the columns of R that the program owns, in place of the unit matrix.
        The loop stays as it is. Which mask does the last program need?
        """,
    arguments=one_system,
    expected=by_dense_solver,
    outputs={"X": "TV"},
    budget=1e-5,
    mutants={
        "every program takes the first 16 columns": ("i_d * BD + tl.arange", "tl.arange"),
        "the tile starts as the unit matrix": (
            "tl.load(right + o_x, mask=m_d[None, :], other=0.0)",
            "tl.where(o_r[:, None] == o_d[None, :], 1.0, 0.0)",
        ),
        "what is known is added": ("b_X -= ", "b_X += "),
        "the row of N is not masked": ("mask=o_r < i, other=0.0", "mask=o_r < BC, other=0.0"),
        "a column of N is read, not a row": ("N + i * BC + o_r", "N + i + o_r * BC"),
        "the last row is never reached": ("range(1, BC)", "range(1, BC - 1)"),
        "every row is changed, not only row i": (
            "tl.where(o_r[:, None] == i, b_x[None, :], 0.0)",
            "b_x[None, :] + tl.zeros([BC, BD], dtype=tl.float32)",
        ),
        "the last columns have no program": ("triton.cdiv(D, 16)", "max(D // 16, 1)"),
    },
    why="""
        With K + V = 256 columns this takes 16 programs per block, and each does the same 15 steps.
        The library inverts once, with 16 columns, and leaves the rest to matrix products.
        """,
)


# -- repair ---------------------------------------------------------------------------------------


def a_rough_inverse(seed):
    """N [C, C], and an inverse of I + N that has lost most of its digits."""
    C, beta, spread = [(6, 0.9, 0.01), (16, 1.0, 0.002), (11, 1.4, 0.05)][seed]
    N = strictly_lower(C, seed, beta)
    rough = torch.linalg.inv(torch.eye(C, dtype=N.dtype) + N)
    return dict(N=N, rough=rough * (1 + spread * normal(C, C, seed=seed).tril()))


def by_squared_residual(N, rough):
    """The step whose residual is R^2 where the residual was R, found with a solver."""
    unit = torch.eye(len(N), dtype=N.dtype)
    residual = unit - (unit + N) @ rough
    left = residual @ residual
    return torch.linalg.solve(unit + N, unit - left), torch.linalg.matrix_norm(left)


def newton_step(N, rough):
    """A better inverse of I + N from a rough one [C, C], by two matrix products.

    Returns (the better inverse [C, C], the Frobenius norm of its residual I - (I + N) X).
    """
    # BEGIN SOLUTION
    unit = torch.eye(len(N), dtype=N.dtype)  # [C, C]
    residual = unit - rough - N @ rough  # [C, C], R
    better = rough + rough @ residual  # [C, C]
    return better, torch.linalg.matrix_norm(residual @ residual)
    # END SOLUTION


define(
    newton_step,
    title="Twice as many digits",
    stars=3,
    task="""
        You have an inverse $X$ of $I + N$ from 16-bit products. Its residual is
        $R = I - (I + N) X$. Find a correction of the form $X' = X + X\\,(\\dots)$ whose residual is
        $R^2$: three good digits become six. Return $X'$ and the norm of **its** residual.
        """,
    hint="""
        $(I + N) X = I - R$. What would you have to multiply $I - R$ by, to get $I - R^2$? The
        same factor on the right of $X$ does it. The norm needs no new residual.
        """,
    arguments=a_rough_inverse,
    expected=by_squared_residual,
    outputs={"X": "CC", "norm": ""},
    mutants={
        "the correction is subtracted": ("rough + rough @ residual", "rough - rough @ residual"),
        "the residual is added without the inverse": (
            "rough + rough @ residual",
            "rough + residual",
        ),
        "the norm is that of the old residual": (
            "matrix_norm(residual @ residual)",
            "matrix_norm(residual)",
        ),
        "the norm is squared, not the residual": (
            "torch.linalg.matrix_norm(residual @ residual)",
            "torch.linalg.matrix_norm(residual) ** 2",
        ),
        "the unit matrix is left out of I + N": ("unit - rough - N @ rough", "unit - N @ rough"),
        "the residual is taken on the other side": ("N @ rough  #", "rough @ N  #"),
        "the step is taken twice": (
            "rough + rough @ residual",
            "rough + rough @ (residual + residual @ residual)",
        ),
    },
    why="""
        This is Newton's method for an inverse (Schulz, 1933). It repairs a small residual and makes
        a large one larger, so it can't rescue the Neumann product of this chapter where that has
        lost everything. Both residuals, $I - (I + N) X$ and $I - X (I + N)$, become squares.
        """,
)
