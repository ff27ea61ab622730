"""Exercises of chapter 14: bounds, and a forward in two kernels."""

import torch

from ... import reference
from ..inputs import make_inputs
from ._core import define

LOG2_E = 1.4426950408889634  # 1 / ln 2


# -- which need is the largest ---------------------------------------------------------------------


def some_kernels(seed):
    """Needs of kernels [n] in every proportion, so that each of the four bounds decides once."""
    draw = torch.Generator().manual_seed(seed)
    n = 6 + 3 * seed
    shares = torch.rand(4, n, generator=draw, dtype=torch.float64) + 0.01
    shares[:, :4] = torch.eye(4, dtype=torch.float64) + 0.5  # one bound each
    chip = dict(bandwidth=4e12, flops=9e14, issue=1e12, latency=1e-6)
    rates = torch.tensor([chip["bandwidth"], chip["flops"], chip["issue"], 1 / chip["latency"]])
    needs = 1e-3 * shares * rates.double()[:, None]
    return dict(zip(("bytes", "flops", "instructions", "steps"), needs, strict=True)) | dict(
        chip=chip
    )


def one_need_at_a_time(bytes, flops, instructions, steps, chip):
    least = []
    for n in range(len(bytes)):
        times = [bytes[n] / chip["bandwidth"], flops[n] / chip["flops"]]
        times += [instructions[n] / chip["issue"], steps[n] * chip["latency"]]
        least.append(sorted(float(t) for t in times)[-1])
    return torch.tensor(least, dtype=torch.float64) * 1000


def least_time(bytes, flops, instructions, steps, chip):
    """Milliseconds [n] that n kernels take at least. Their needs: four tensors [n].

    chip["bandwidth"] bytes, chip["flops"] operations and chip["issue"] instructions
    a second, chip["latency"] seconds for each of the steps that wait for one another.
    All four go on at the same time.
    """
    # BEGIN SOLUTION
    memory, products = bytes / chip["bandwidth"], flops / chip["flops"]
    issue, chain = instructions / chip["issue"], steps * chip["latency"]
    return 1000 * torch.stack([memory, products, issue, chain]).amax(dim=0)
    # END SOLUTION


define(
    least_time,
    title="Four bounds",
    stars=1,
    task="""
        A kernel moves bytes, multiplies, issues instructions, and takes steps of which each waits
        for the one before. On a good day all of that overlaps. How long does it take at least?
        """,
    hint="""
        Turn each need into a time of its own. What overlaps costs as much as its longest part. The
        answer is in milliseconds, the chip counts in seconds.
        """,
    arguments=some_kernels,
    expected=one_need_at_a_time,
    outputs={"ms": "N"},
    mutants={
        "nothing overlaps": ("amax(dim=0)", "sum(dim=0)"),
        "the shortest need decides": ("amax(dim=0)", "amin(dim=0)"),
        "seconds": ("1000 * torch", "torch"),
        "no step waits for another": ("issue, chain])", "issue])"),
        "instructions are free": ("products, issue, chain", "products, chain"),
        "memory is infinitely fast": ("[memory, products", "[products"),
        "latency divides": ('steps * chip["latency"]', 'steps / chip["latency"]'),
        "the slowest kernel stands for all": ("amax(dim=0)", "amax().expand(len(bytes))"),
    },
    why="""
        The time that you measure lies above it. Where it is close, a kernel can only get faster
        by needing less; where it is far off, find out what does not overlap.
        """,
)


# -- scores without a reference row ----------------------------------------------------------------


def steep_chunk(seed):
    """One chunk whose gates lie at their bound, at 0, or between; keys and queries are large."""
    C, K = [(16, 24), (13, 8), (16, 5)][seed]
    draw = torch.Generator().manual_seed(seed)
    q, k, g = torch.randn(3, C, K, generator=draw)
    g = [torch.full_like(g, -5.0), -5 * torch.sigmoid(g), -5.0 * (g > 0)][seed]
    return dict(q=1e6 * q, k=1e6 * k, g=g)


def pair_by_pair(q, k, g):
    q, k, g = q.double(), k.double(), g.double()
    A = torch.zeros(len(q), len(q), dtype=torch.float64)
    for i in range(len(q)):
        for j in range(i + 1):
            A[i, j] = (q[i] * k[j] * g[j + 1 : i + 1].sum(0).exp()).sum()
    return A.float()


def steep_scores(q, k, g):
    """A [C, C]: A_ij = sum_d q_id k_jd e^(g_(j+1)d + ... + g_id) for j <= i, else 0.

    q, k, g [C, K] in float32, C <= 16, -5 <= g <= 0. One matrix product, in float32,
    of which no factor may overflow, although queries and keys reach 4e6.
    """
    # BEGIN SOLUTION
    G = LOG2_E * g.cumsum(0) + 58  # powers of two, from -58 to 58
    rows, columns = q * G.exp2(), k * (-G).exp2()
    return (rows @ columns.T).tril()
    # END SOLUTION


define(
    steep_scores,
    title="Sixteen tokens, no reference row",
    stars=2,
    task="""
        Write the scores of one short chunk as one product of rows and columns. Gates may be −5
        throughout: then a factor of each column grows to $2^{115}$, and with large keys that is
        more than float32 holds. Share the burden between rows and columns.
        """,
    hint="""
        Any constant may be added to $G$ in the rows, if the columns lose it again. The sum runs
        from 0 to −115.4. Which constant makes the largest exponent of either sign the smallest?
        """,
    arguments=steep_chunk,
    expected=pair_by_pair,
    outputs={"A": "CC"},
    budget=1e-4,
    mutants={
        "the columns carry it all": (" + 58", ""),
        "the rows carry it all": (" + 58", " + 116"),
        "shifted the wrong way": (" + 58", " - 58"),
        "powers of two of natural logs": ("LOG2_E * g", "g"),
        "a token's own gate counts twice": ("k * (-G).exp2()", "k * (LOG2_E * g - G).exp2()"),
        "the diagonal is left out": (".tril()", ".tril(-1)"),
        "later tokens are seen": (".tril()", ""),
        "rows and columns are exchanged": ("(rows @ columns.T)", "(columns @ rows.T)"),
    },
    why="""
        The prepare kernel does exactly this. The two factors of an entry multiply to a decay, so
        what one gains the other loses, and no bit of the result is lost.
        """,
)


# -- a chunk without w and u -----------------------------------------------------------------------


def one_chunk(seed):
    T, K, V = [(16, 12, 9), (7, 5, 8), (11, 16, 3)][seed]
    x = make_inputs(B=1, T=T, H=1, K=K, V=V, dtype=torch.float64, seed=seed)
    _, k, v, g, beta, S = x.head()
    kd = k * g.cumsum(0).exp()
    kr = k * (g.sum(0) - g.cumsum(0)).exp()
    scores = kd @ (k * (-g.cumsum(0)).exp()).T
    X = torch.linalg.inv(torch.eye(T) + beta[:, None] * scores.tril(-1))
    return dict(kd=kd, kr=kr, v=v, beta=beta, X=X, decay=g.sum(0).exp(), S=S)


def token_by_token(kd, kr, v, beta, X, decay, S):
    """From kd, kr and the last decay, every key and gate can be had again."""
    ratio = (kd / kr * decay).log() / 2  # G of each token: kd / kr = e^(2 G) / decay
    k, g = kd / ratio.exp(), ratio.diff(dim=0, prepend=torch.zeros_like(ratio[:1]))
    expand = [z[None, :, None] for z in (k, k, v, g)]
    options = dict(initial_state=S[None, None], output_final_state=True)
    last = reference.recurrent_kda(*expand, beta[None, :, None], **options)[1][0, 0]
    written, states = [], S
    for t in range(len(k)):
        states = g[t].exp()[:, None] * states
        written.append(beta[t] * (v[t] - states.T @ k[t]))
        states = states + torch.outer(k[t], written[-1])
    return torch.stack(written), last


def chunk_without_w_u(kd, kr, v, beta, X, decay, S):
    """v' [T, V] and the next state [K, V], from what a smaller prepare leaves.

    kd = 2^G k and kr = 2^(G_last - G) k [T, K], v [T, V], beta [T],
    X = (I + Diag(beta) L)^-1 [T, T], decay = 2^G_last [K], S [K, V] before the chunk.
    """
    # BEGIN SOLUTION
    missing = v - kd @ S  # [T, V], if nothing else were written in this chunk
    written = X @ (beta[:, None] * missing)  # v'
    return written, decay[:, None] * S + kr.T @ written
    # END SOLUTION


define(
    chunk_without_w_u,
    title="Leave w and u out",
    stars=2,
    task="""
        The prepare kernel of this chapter writes $w = X \\operatorname{Diag}(\\beta)\\, 2^G k$ and
        $u = X \\operatorname{Diag}(\\beta)\\, v$. It could leave $X$ instead, which is eight times
        smaller than $u$, and the scan does the rest. Write that step of the scan.
        """,
    hint="""
        Put $w$ and $u$ into $v' = u - w S$ and take out the common factor on the left.
        """,
    arguments=one_chunk,
    expected=token_by_token,
    outputs={"v'": "CV", "S": "KV"},
    budget=1e-8,
    mutants={
        "beta on the wrong side": (
            "X @ (beta[:, None] * missing)",
            "beta[:, None] * (X @ missing)",
        ),
        "beta left out": ("beta[:, None] * missing", "missing"),
        "the state before is not read": ("v - kd @ S", "v"),
        "read with the keys of the write": ("v - kd @ S", "v - kr @ S"),
        "tokens of the chunk do not see one another": ("X @ (beta", "(beta"),
        "the state does not decay": ("decay[:, None] * S", "S"),
        "written with the keys of the read": ("kr.T @ written", "kd.T @ written"),
        "nothing is kept": ("decay[:, None] * S + ", ""),
    },
    why="""
        FlashKDA does this. It saves memory, and puts one more product into the chain of products
        that each chunk waits for: the table of things tried says what that cost in Triton.
        """,
)


# -- a pipeline of segments ------------------------------------------------------------------------


def segments(seed):
    draw = torch.Generator().manual_seed(seed)
    n = [4, 7, 1][seed]
    prepare, scan = 0.1 + torch.rand(2, n, generator=draw, dtype=torch.float64)
    if seed == 1:
        prepare[2], scan[4] = 3.0, 5.0  # each once the slower one
    return dict(prepare=prepare, scan=scan)


def by_longest_path(prepare, scan):
    """The latest end over all the ways through: prepare up to i, then the scans from i on."""
    ends = [prepare[: i + 1].sum() + scan[i:].sum() for i in range(len(scan))]
    return torch.stack(ends).max()


def end_of_pipeline(prepare, scan):
    """When the last scan ends. prepare [n] and scan [n] are the times of n segments.

    Prepares run one after another without a pause. The scan of a segment begins when its
    prepare has ended and the scan before it has ended. They do not slow each other down.
    """
    # BEGIN SOLUTION
    end = torch.zeros(())
    for ready, took in zip(prepare.cumsum(0), scan, strict=True):
        end = torch.maximum(ready, end) + took
    return end
    # END SOLUTION


define(
    end_of_pipeline,
    title="While one prepares, the other scans",
    stars=2,
    task="""
        A long sequence goes in segments over two streams. When is it done? Equation
        `eq-ch14-pipeline` holds for segments of equal cost; here they differ.
        """,
    hint="""
        Walk through the segments with one number, the end of the last scan. When is segment $i$
        prepared? Two things have to be over before its scan begins.
        """,
    arguments=segments,
    expected=by_longest_path,
    outputs={"end": ""},
    mutants={
        "a scan does not wait for its prepare": ("torch.maximum(ready, end)", "end"),
        "a scan does not wait for the scan before": ("torch.maximum(ready, end)", "ready"),
        "nothing overlaps": ("torch.maximum(ready, end)", "ready + end"),
        "prepares run all at once": ("prepare.cumsum(0)", "prepare"),
        "prepares begin from the end": ("prepare.cumsum(0)", "prepare.flip(0).cumsum(0).flip(0)"),
        "the last prepare ends it": ("return end", "return prepare.sum()"),
        "only the scans count": ("return end", "return scan.sum()"),
    },
    why="""
        In truth the two share one chip and do slow each other down, so the gain is smaller. The
        bound is still worth having: where it promises little, there is nothing to try.
        """,
)
