"""Exercises of chapter 15: a model."""

import math

import torch

from ... import reference
from ...layers import ShortConvolution
from ._core import define


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- half-lives on a text --------------------------------------------------------------------------


def gates_on_a_text(seed):
    """What f_proj gave on a text of T tokens, and the gate's parameters."""
    T, HV, K = [(9, 2, 5), (17, 3, 4), (6, 1, 8)][seed]
    return dict(
        raw=2 * normal(seed, T, HV, K),
        A_log=0.5 * normal(seed + 10, HV),
        dt_bias=normal(seed + 20, HV, K) - 1,
    )


def by_the_decay_of_the_whole_text(raw, A_log, dt_bias):
    """What the text leaves of a channel is exp(sum of g); half is left after so many tokens."""
    left = reference.kda_gate(raw, A_log, dt_bias).sum(0).exp()  # [HV, K]
    return len(raw) / -left.log2()


def half_lives(raw, A_log, dt_bias):
    """Half-life in tokens of each channel [HV, K], at its average rate.

    raw [T, HV, K] is what f_proj gave for the T tokens; A_log [HV],
    dt_bias [HV, K]. The gate is the one with softplus.
    """
    # BEGIN SOLUTION
    rate = A_log.exp()[:, None]  # [HV, 1]
    g = -rate * torch.log1p((raw + dt_bias).exp())  # [T, HV, K]
    return -math.log(2) / g.mean(0)
    # END SOLUTION


define(
    half_lives,
    title="Clocks of a trained layer",
    stars=1,
    task="""
        The gate depends on the token, so a channel has another half-life at each of them. Say how
        long it keeps half of its content on this text: average the log decays over the tokens,
        since log decays are what adds up, and turn the average into a half-life.
        """,
    hint="""
        Two formulas: that of the gate, and $\\ln 2 / (-g)$. `A_log` needs one more dimension to
        meet the channels of its head.
        """,
    arguments=gates_on_a_text,
    expected=by_the_decay_of_the_whole_text,
    outputs={"half-life": "HK"},
    mutants={
        "half-lives are averaged, not log decays": (
            "-math.log(2) / g.mean(0)",
            "(-math.log(2) / g).mean(0)",
        ),
        "decays are averaged, not log decays": ("g.mean(0)", "g.exp().mean(0).log()"),
        "A_log is taken for the rate": ("A_log.exp()[:, None]", "A_log[:, None]"),
        "the bias is left out": ("(raw + dt_bias)", "raw"),
        "the bias is subtracted": ("raw + dt_bias", "raw - dt_bias"),
        "a tenth is left, not half": ("math.log(2)", "math.log(10)"),
        "the half-life is negative": ("-math.log(2)", "math.log(2)"),
        "only the last token counts": ("g.mean(0)", "g[-1]"),
    },
    why="""
        A few tokens with a strong decay shorten the life of all that was stored before them. The
        average of half-lives does not see that: one token that decays nothing makes it infinite.
        """,
)


# -- recall without a loop -------------------------------------------------------------------------


def a_stream(seed):
    B, P, keys = [(3, 9, 3), (2, 14, 4), (4, 6, 2)][seed]
    draw = torch.Generator().manual_seed(seed)
    key = torch.randint(keys, (B, P), generator=draw)
    return dict(key=key, value=torch.randint(100, 200, (B, P), generator=draw))


def with_a_dictionary(key, value):
    rows = []
    for keys, values in zip(key.tolist(), value.tolist(), strict=True):
        stored, row = {}, []
        for k, v in zip(keys, values, strict=True):
            row.append(stored.get(k, -100))
            stored[k] = v
        rows.append(row)
    return torch.tensor(rows)


def recall_targets(key, value):
    """What a memory should answer at each pair: [B, P] integers.

    key, value [B, P], integers. At pair i that is the value of the last pair
    before i with the same key, and -100 where there is none. No loop.
    """
    # BEGIN SOLUTION
    pair = torch.arange(key.shape[1])  # [P]
    same = key[:, :, None] == key[:, None, :]  # [B, P, P]
    earlier = pair[None, :] < pair[:, None]  # [P, P]
    last = torch.where(same & earlier, pair, -1).amax(2)  # [B, P]
    return torch.where(last >= 0, value.gather(1, last.clamp(min=0)), -100)
    # END SOLUTION


define(
    recall_targets,
    title="Who was last",
    stars=2,
    task="""
        The loop of `recall_batch` walks over the pairs. Find the same targets at once, for all
        pairs of all sequences: what attention does, with a mask.
        """,
    hint="""
        A matrix [P, P] says which pairs have the same key, another which one is earlier. Where
        both hold, put the number of the pair, elsewhere -1. The largest of a row is the last.
        """,
    arguments=a_stream,
    expected=with_a_dictionary,
    outputs={"target": "BT"},
    mutants={
        "a pair answers itself": (
            "pair[None, :] < pair[:, None]",
            "pair[None, :] <= pair[:, None]",
        ),
        "the future answers": ("pair[None, :] < pair[:, None]", "pair[None, :] > pair[:, None]"),
        "the first value counts, not the last": (
            "torch.where(same & earlier, pair, -1).amax(2)",
            "torch.where(same & earlier, pair, len(pair)).amin(2) % len(pair)",
        ),
        "any earlier pair answers": ("same & earlier", "earlier"),
        "pair 0 never answers": ("last >= 0", "last > 0"),
        "new keys get the value of pair 0": ("last >= 0", "last >= -1"),
        "the key comes back, not its value": ("value.gather", "key.gather"),
    },
    why="""
        This is P² work for what a table does in P. Attention and a memory stand to each other in
        the same way.
        """,
)


# -- one token -------------------------------------------------------------------------------------


def a_token(seed):
    """One head: what the projections give for a token, and what is remembered of earlier ones."""
    K, V, W = [(6, 5, 4), (4, 7, 3), (8, 3, 2)][seed]
    C = 2 * K + V
    return dict(
        x=normal(seed, C),
        window=normal(seed + 10, W - 1, C),
        weight=normal(seed + 20, C, W),
        S=normal(seed + 30, K, V),
        g=-normal(seed + 40, K).abs(),
        beta=normal(seed + 50, 1)[0].sigmoid(),
    )


def with_the_layers_parts(x, window, weight, S, g, beta):
    (C, W), K = weight.shape, len(S)
    convolution = ShortConvolution(C, W).double().requires_grad_(False)
    convolution.weight.copy_(weight[:, None])
    y, window = convolution(x[None, None], window[None])
    q, k, v = y[:, :, None].split([K, K, C - 2 * K], dim=-1)
    o, S = reference.recurrent_kda(
        q, k, v, g[None, None, None], beta.reshape(1, 1, 1), initial_state=S[None, None],
        output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    return o[0, 0, 0], S[0, 0], window[0]


def decode(x, window, weight, S, g, beta):
    """One token through one head: o [V], new state [K, V], new window [W - 1, C].

    x [C] is what the projections give for the token, q, k and v side by side,
    C = 2 K + V. window [W - 1, C] holds the same of the tokens before, the latest
    last; weight [C, W] has the present last. S [K, V], g [K], beta a number.
    Normalise y as y / (|y|^2 + 1e-6)^0.5; the scale of q is K^-0.5.
    """
    # BEGIN SOLUTION
    K = len(S)
    seen = torch.cat([window, x[None]])  # [W, C]
    y = (weight.T * seen).sum(0)  # [C]
    y = y * torch.sigmoid(y)
    q, k, v = y[:K], y[K : 2 * K], y[2 * K :]
    q = q / (q @ q + 1e-6).sqrt() / K**0.5
    k = k / (k @ k + 1e-6).sqrt()
    S = g.exp()[:, None] * S
    S = S + torch.outer(k, beta * (v - S.T @ k))
    return S.T @ q, S, seen[1:]
    # END SOLUTION


define(
    decode,
    title="One token, by hand",
    stars=3,
    task="""
        A layer that generates gets one token at a time. From the outputs of its projections, its
        window and its state, compute what the head reads, and what has to be remembered for the
        next token: both the state and the window.
        """,
    hint="""
        The window and the token together are the W inputs that the convolution sees. Then SiLU,
        then cut into q, k and v, then normalise q and k (after SiLU, not before), then one step
        of the recurrence. The next window is without the oldest.
        """,
    arguments=a_token,
    expected=with_the_layers_parts,
    outputs={"o": "V", "S": "KV", "window": "TC"},
    mutants={
        "the window keeps what the convolution made": (
            "return S.T @ q, S, seen[1:]",
            "return S.T @ q, S, torch.cat([window[1:], y[None]])",
        ),
        "the window keeps the oldest": ("seen[1:]", "seen[:-1]"),
        "the weights run the other way": ("weight.T * seen", "weight.T.flip(0) * seen"),
        "SiLU is forgotten": ("y = y * torch.sigmoid(y)", "pass"),
        "only the sigmoid of SiLU is taken": ("y = y * torch.sigmoid(y)", "y = torch.sigmoid(y)"),
        "the memory is read before it is written": (
            [
                ("S = S + torch.outer", "old = S\n    S = S + torch.outer"),
                ("return S.T @ q", "return old.T @ q"),
            ]
        ),
        "what is stored is read before it decays": (
            "v - S.T @ k",
            "v - (S / g.exp()[:, None]).T @ k",
        ),
        "q is not scaled": (".sqrt() / K**0.5", ".sqrt()"),
        "k keeps its length": ("k = k / (k @ k + 1e-6).sqrt()", "pass"),
        "q and k are exchanged": (
            "q, k, v = y[:K], y[K : 2 * K]",
            "k, q, v = y[:K], y[K : 2 * K]",
        ),
    },
    why="""
        This is the whole memory of a request: one matrix per head and a few columns per channel.
        Forget the window, and the first tokens after a cut come out a little wrong, which no
        shape reveals.
        """,
)
