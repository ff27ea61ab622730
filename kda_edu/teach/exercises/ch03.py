"""Exercises of chapter 3: gates."""

import math

import torch

from ... import reference
from ..inputs import make_inputs
from ._core import define


def wanted_half_lives(seed):
    """Half-lives [HV, K] in tokens, from a small part of one to thousands; gate parameters."""
    heads, channels = [(1, 9), (3, 16), (2, 7)][seed]
    draw = torch.Generator().manual_seed(seed)

    def uniform(low, high, *shape):
        return low + (high - low) * torch.rand(*shape, generator=draw, dtype=torch.float64)

    return dict(
        half_life=10 ** uniform(-1.5, 3.5, heads, channels),
        A_log=uniform(0.0, math.log(16.0), heads),
        dt_bias=uniform(-6.0, 1.0, heads, channels),
    )


def by_bisection(half_life, A_log, dt_bias):
    """The gate of the oracle falls as its input grows: halve an interval until it is a point."""
    low, high = torch.full_like(half_life, -60.0), torch.full_like(half_life, 60.0)
    for _ in range(200):
        middle = (low + high) / 2
        g = reference.kda_gate(middle, A_log, dt_bias)
        too_fast = math.log(2.0) / -g < half_life
        low, high = torch.where(too_fast, low, middle), torch.where(too_fast, middle, high)
    return (low + high) / 2


def gate_input(half_life, A_log, dt_bias):
    """The raw input x of the softplus gate that gives each channel its half-life.

    half_life [HV, K] in tokens, A_log [HV], dt_bias [HV, K]; returns x [HV, K].
    """
    # BEGIN SOLUTION
    log_decay = -math.log(2.0) / half_life  # [HV, K], g
    softplus = -log_decay / A_log.exp()[:, None]  # [HV, K], softplus(x + dt_bias)
    shifted = softplus + torch.log(-torch.expm1(-softplus))  # [HV, K], x + dt_bias
    return shifted - dt_bias
    # END SOLUTION


define(
    gate_input,
    title="A half-life to order",
    stars=1,
    task="""
        A channel should keep half of its content for `half_life` tokens. Find the raw gate input
        $x$ that makes the softplus gate do that: turn both formulas of this chapter round.
        """,
    hint="""
        From the half-life to $g$, from $g$ to $\\mathrm{softplus}(x + \\delta)$, from there to
        $x$. If $y = \\log(1 + e^x)$ then $e^x = e^y - 1$. For large $y$ that overflows; take
        $e^y$ out of the logarithm, as `torch.expm1` lets you.
        """,
    arguments=wanted_half_lives,
    expected=by_bisection,
    outputs={"x": "HK"},
    mutants={
        "the half-life is taken for the time to fall to 1/e": (
            "-math.log(2.0) / half_life",
            "-1 / half_life",
        ),
        "A_log is used without exp": ("A_log.exp()[:, None]", "A_log[:, None]"),
        "A_log is ignored": ("-log_decay / A_log.exp()[:, None]", "-log_decay"),
        "dt_bias is added twice over": ("shifted - dt_bias", "shifted + dt_bias"),
        "dt_bias is forgotten": ("shifted - dt_bias", "shifted"),
        "softplus is taken for exp": (
            "softplus + torch.log(-torch.expm1(-softplus))",
            "torch.log(softplus)",
        ),
        "softplus is taken for the identity": (
            "softplus + torch.log(-torch.expm1(-softplus))",
            "softplus",
        ),
        "the decay is a power of two, not of e": (
            "-math.log(2.0) / half_life",
            "-1 / (half_life * math.log(2.0))",
        ),
    },
    why="With $A$ and `dt` in place of a half-life, this is how `dt_bias` is initialised.",
)


def several_documents(seed):
    """One head, and for each token the number of its document."""
    sizes = [dict(T=23, K=8, V=5), dict(T=70, K=16, V=24), dict(T=41, K=12, V=7)][seed]
    made = make_inputs(B=1, H=1, dtype=torch.float64, seed=seed, initial_state=False, **sizes)
    q, k, v, g, beta, _ = made.head()
    starts = [[0, 9, 10], [0, 1, 30, 31, 64], [0, 40]][seed]
    document = torch.zeros(len(k), dtype=torch.long)
    for start in starts[1:]:
        document[start:] += 1
    return dict(q=q, k=k, v=v, g=g, beta=beta, document=document)


def by_packing(q, k, v, g, beta, document):
    """The oracle, told where the documents begin."""
    ends = torch.unique_consecutive(document, return_counts=True)[1].cumsum(0)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), ends])
    batched = (x[None, :, None] for x in (q, k, v, g, beta))
    return reference.recurrent_kda(*batched, cu_seqlens=cu_seqlens)[0][0, :, 0]


def read_documents(q, k, v, g, beta, document):
    """KDA over documents laid end to end; no document sees one before it.

    q, k, g [T, K], v [T, V], beta [T], document [T] (its number, never falling); returns o [T, V].
    """
    # BEGIN SOLUTION
    first = torch.zeros(len(document), dtype=torch.bool)  # [T], the first token of a document
    first[1:] = document[1:] != document[:-1]
    g = torch.where(first[:, None], -torch.inf, g)  # [T, K]
    # END SOLUTION
    o, _ = reference.recurrent_kda(*(x[None, :, None] for x in (q, k, v, g, beta)))
    return o[0, :, 0]


define(
    read_documents,
    title="A wall between documents",
    stars=2,
    task="""
        Several documents lie end to end in one sequence, and the memory starts empty. Change
        the gates so that no document reads anything from the ones before it. The rest of the
        function runs the oracle on your `g`.
        """,
    hint="""
        A token decays the state before it writes. Which token of a document has to forget, and
        by what factor?
        """,
    arguments=several_documents,
    expected=by_packing,
    outputs={"o": "TV"},
    mutants={
        "the last token of a document forgets, not the first": (
            "first[1:] = document[1:] != document[:-1]",
            "first[:-1] = document[1:] != document[:-1]",
        ),
        "the second token of a document forgets": (
            "first[1:] = document[1:] != document[:-1]",
            "first[2:] = document[1:-1] != document[:-2]",
        ),
        "the decay is zero in the logarithm, which keeps all": ("-torch.inf", "0.0"),
        "the decay is strong, but not complete": ("-torch.inf", "g - 5.0"),
        "one channel is reset, not all": (
            "first[:, None], -torch.inf",
            "first[:, None] & (torch.arange(g.shape[1]) == 0), -torch.inf",
        ),
        "every token of a later document forgets": (
            "document[1:] != document[:-1]",
            "document[1:] != document[0]",
        ),
        "only the second document is walled off": (
            "document[1:] != document[:-1]",
            "(document[1:] == 1) & (document[:-1] == 0)",
        ),
    },
    why="""
        The reset is exact, since $e^{-\\infty} = 0$. Kernels take the document borders as
        `cu_seqlens` instead, which also gives each document a state of its own.
        """,
)


def mild_gates(seed):
    """One head with so little decay that its inverse stays a usual number."""
    sizes = [dict(T=9, K=8, V=5), dict(T=21, K=16, V=24), dict(T=14, K=12, V=7)][seed]
    made = make_inputs(B=1, H=1, dtype=torch.float64, seed=seed, initial_state=False, **sizes)
    q, k, v, g, beta, _ = made.head()
    return dict(q=q, k=k, v=v, g=g, beta=beta)


def by_recurrence(q, k, v, g, beta):
    """The oracle, with the usual decaying state."""
    batched = (x[None, :, None] for x in (q, k, v, g, beta))
    o, state = reference.recurrent_kda(*batched, scale=1.0, output_final_state=True)
    return o[0, :, 0], state[0, 0]


def undecayed_memory(q, k, v, g, beta):
    """KDA with a state that never decays: the keys and queries carry the decay.

    q, k, g [T, K], v [T, V], beta [T]; no scale, empty memory at the start.
    Returns (o [T, V], the usual state after the last token [K, V]).
    """
    # BEGIN SOLUTION
    total = g.cumsum(0)  # [T, K], log decay from the start to each token
    state = torch.zeros(k.shape[1], v.shape[1], dtype=k.dtype)  # [K, V], Diag(exp(-total)) S
    outputs = []
    for t in range(len(k)):
        old = state.T @ (total[t].exp() * k[t])  # [V]
        delta = beta[t] * (v[t] - old)  # [V]
        state = state + torch.outer((-total[t]).exp() * k[t], delta)  # [K, V]
        outputs.append(state.T @ (total[t].exp() * q[t]))  # [V]
    return torch.stack(outputs), total[-1].exp()[:, None] * state
    # END SOLUTION


define(
    undecayed_memory,
    title="A memory that does not decay",
    stars=3,
    task="""
        Measure each channel in units that shrink as fast as the channel does. With $G_t$ the sum
        of $g$ up to and with token $t$, let $\\hat S_t = \\mathrm{Diag}(e^{-G_t})\\, S_t$. Put
        $S_t = \\mathrm{Diag}(e^{G_t})\\, \\hat S_t$ into the four lines of KDA: the decay
        disappears, and the key that writes, the key that erases and the query each get a factor.
        Run the loop on $\\hat S$, and return the outputs and the usual state at the end.

        A published derivation gives both keys the factor $e^{+G}$. Which of the two is the slip?
        """,
    hint="""
        Erasing and reading take something out of $S$; writing puts something in. If a channel is
        counted in smaller units, what you put in is a larger number.
        """,
    arguments=mild_gates,
    expected=by_recurrence,
    outputs={"o": "TV", "state": "KV"},
    mutants={
        "both keys carry exp(+G), the published slip": ("(-total[t]).exp()", "total[t].exp()"),
        "both keys carry exp(-G)": (
            "old = state.T @ (total[t].exp() * k[t])",
            "old = state.T @ ((-total[t]).exp() * k[t])",
        ),
        "the query carries no factor": ("(total[t].exp() * q[t])", "q[t]"),
        "the key that erases carries no factor": ("@ (total[t].exp() * k[t])", "@ k[t]"),
        "the key that writes carries no factor": ("(-total[t]).exp() * k[t]", "k[t]"),
        "G leaves out the token's own decay": ("g.cumsum(0)", "g.cumsum(0) - g"),
        "the decays are used one by one, not summed": ("g.cumsum(0)", "g"),
        "the state is returned in the shrinking units": (
            "total[-1].exp()[:, None] * state",
            "state",
        ),
    },
    why="""
        This turns KDA into the delta rule of chapter 2 with two different keys, which is what
        chapter 9 needs. It also shows the danger: $e^{-G}$ grows without bound, so a long
        sequence or a strong gate overflows. Try it with 200 tokens.
        """,
)
