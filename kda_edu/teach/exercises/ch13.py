"""Exercises of chapter 13: real inputs."""

import torch

from ... import reference
from ..inputs import make_inputs
from ._core import define


def oracle(q, k, v, g, beta, state, cu_seqlens=None):
    """o and the last state, by the loop over tokens."""
    options = dict(initial_state=state, output_final_state=True, cu_seqlens=cu_seqlens)
    return reference.recurrent_kda(q, k, v, g, beta, **options)


# -- tokens that mean nothing ----------------------------------------------------------------------


def padded_batch(seed):
    """A batch of texts of different lengths, each at the end of its row; before it, garbage."""
    lengths = [[5, 9, 2], [1, 6, 6, 4], [8, 0, 3]][seed]
    sizes = dict(B=len(lengths), T=max(lengths) + 1, H=1, HV=2, K=6 + seed, V=5)
    x = make_inputs(**sizes, dtype=torch.float64, seed=seed)
    tokens = dict(k=x.k, v=x.v, g=x.g, beta=x.beta)
    return dict(**tokens, states=x.initial_state, lengths=torch.tensor(lengths))


def one_text_at_a_time(k, v, g, beta, states, lengths):
    last = []
    for n, length in enumerate(lengths.tolist()):
        text = (x[n : n + 1, x.shape[1] - length :] for x in (k, k, v, g, beta))
        last.append(oracle(*text, states[n : n + 1])[1])
    return torch.cat(last)


def left_padded(k, v, g, beta, states, lengths):
    """The last states [B, HV, K, V] of texts that lie at the end of their rows.

    k [B, T, H, K], v [B, T, HV, V], g [B, T, HV, K], beta [B, T, HV],
    states [B, HV, K, V]. Row n holds T - lengths[n] tokens of garbage (finite
    numbers), then its text. No loop, one call of
    oracle(q, k, v, g, beta, states) -> (o, last states).
    """
    # BEGIN SOLUTION
    T = k.shape[1]
    real = torch.arange(T) >= T - lengths[:, None]  # [B, T]
    g = torch.where(real[:, :, None, None], g, 0.0)  # nothing decays
    beta = torch.where(real[:, :, None], beta, 0.0)  # nothing is written
    return oracle(k, k, v, g, beta, states)[1]
    # END SOLUTION


define(
    left_padded,
    title="A token that does nothing",
    stars=1,
    task="""
        A batch comes padded on the left, and you may not repack it. Make the pad tokens harmless:
        each state must be that after its own text alone. Change two of the inputs, and call the
        oracle once. It needs queries too, but their outputs are not asked for; give it the keys.
        """,
    hint="""
        Which gate keeps all of the state, and which write strength writes nothing? Build a mask
        [B, T] from `torch.arange(T)` and the lengths.
        """,
    arguments=padded_batch,
    expected=one_text_at_a_time,
    outputs={"S": "NHKV"},
    mutants={
        "pad tokens decay the state": ("g = torch.where(real[:, :, None, None], g, 0.0)", "pass"),
        "pad tokens write": ("beta = torch.where(real[:, :, None], beta, 0.0)", "pass"),
        "pad tokens forget everything": ("None, None], g, 0.0)", "None, None], g, -torch.inf)"),
        "the texts lie at the start": (">= T - lengths[:, None]", "< lengths[:, None]"),
        "the first token of each text is lost": (">= T - lengths", "> T - lengths"),
        "one pad token counts as text": (">= T - lengths", ">= T - 1 - lengths"),
        "real and pad tokens are exchanged": (">= T - lengths", "< T - lengths"),
        "the initial state is forgotten": (
            "(k, k, v, g, beta, states)",
            "(k, k, v, g, beta, None)",
        ),
    },
    why="""
        With $g = 0$ and $\\beta = 0$ the update is $S \\leftarrow S$, exactly. The kernels use
        the same numbers for the rows of a chunk that lie past the end of its sequence.
        """,
)


# -- a prompt for many -----------------------------------------------------------------------------


def prompt_and_answers(seed):
    """A prompt, then several continuations of it, all in one packed row."""
    prompt, lengths = [(7, [3, 5]), (1, [4, 0, 2]), (5, [1, 6, 3])][seed]
    T = prompt + sum(lengths)
    x = make_inputs(B=1, T=T, H=1, HV=2, K=6, V=5 + seed, dtype=torch.float64, seed=seed)
    tokens = dict(q=x.q, k=x.k, v=x.v, g=x.g, beta=x.beta)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    return dict(**tokens, state=x.initial_state, prompt=prompt, cu=cu)


def every_text_in_full(q, k, v, g, beta, state, prompt, cu):
    """Read the prompt again for each continuation."""
    outputs, last = [], []
    for start, end in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        rows = [*range(prompt), *range(prompt + start, prompt + end)]
        o, S = oracle(*(x[:, rows] for x in (q, k, v, g, beta)), state)
        outputs.append(o[:, prompt:])
        last.append(S)
    return torch.cat(outputs, dim=1), torch.cat(last)


def shared_prompt(q, k, v, g, beta, state, prompt, cu):
    """o of N continuations [1, sum of lengths, HV, V] and last states [N, HV, K, V].

    q, k, v, g, beta: [1, T, ...]. The first `prompt` tokens are the prompt, the
    others the N continuations, end to end; cu [N + 1] counts from the end of the
    prompt. state [1, HV, K, V] is that before the prompt. Two calls of
    oracle(q, k, v, g, beta, states, cu_seqlens) -> (o, last states).
    """
    # BEGIN SOLUTION
    x = (q, k, v, g, beta)
    _, after = oracle(*(z[:, :prompt] for z in x), state)  # [1, HV, K, V]
    states = after.expand(len(cu) - 1, -1, -1, -1)  # [N, HV, K, V]
    return oracle(*(z[:, prompt:] for z in x), states, cu)
    # END SOLUTION


define(
    shared_prompt,
    title="A prompt that many requests share",
    stars=2,
    task="""
        All requests to an assistant begin with the same instructions. Read those once, keep the
        state, and start every request from it: a *prefix cache*. The continuations then run as
        one packed row, with one state each.
        """,
    hint="""
        The final state of the prompt is the initial state of every continuation. The second call
        has N sequences, so it needs N states; `expand` repeats without copying.
        """,
    arguments=prompt_and_answers,
    expected=every_text_in_full,
    outputs={"o": "BTHV", "S": "NHKV"},
    mutants={
        "continuations start from the state before the prompt": (
            "states = after.expand",
            "states = state.expand",
        ),
        "continuations start from nothing": (
            "after.expand(len(cu) - 1, -1, -1, -1)",
            "torch.zeros_like(after.expand(len(cu) - 1, -1, -1, -1))",
        ),
        "the continuations are read as one text": (
            "states, cu)",
            "after, None)",
        ),
        "the prompt's last token is read twice": ("z[:, :prompt]", "z[:, : prompt + 1]"),
        "the prompt loses its last token": ("z[:, :prompt]", "z[:, : prompt - 1]"),
        "the prompt starts from an empty state": (
            "for z in x), state)",
            "for z in x), None)",
        ),
        "the first continuation alone gets the state": (
            "after.expand(len(cu) - 1, -1, -1, -1)",
            "torch.cat([after] + [torch.zeros_like(after)] * (len(cu) - 2))",
        ),
        "the prompt is left out": ("z[:, :prompt]", "z[:, :0]"),
    },
    why="""
        A cached prefix costs one state, however long it was. A KV cache of it would have one
        entry per token.
        """,
)


# -- a batch in two parts --------------------------------------------------------------------------


def a_batch_and_a_cut(seed):
    lengths, cut = [([4, 7, 3], 6), ([5, 0, 2, 6], 5), ([1, 8, 1, 4], 13)][seed]
    cu = torch.tensor([0, *lengths]).cumsum(0)
    x = make_inputs(H=1, HV=2, K=6, V=5 + seed, cu_seqlens=cu, dtype=torch.float64, seed=seed)
    tokens = dict(q=x.q, k=x.k, v=x.v, g=x.g, beta=x.beta)
    return dict(**tokens, states=x.initial_state, cu=cu, cut=cut)


def in_one_call(q, k, v, g, beta, states, cu, cut):
    return oracle(q, k, v, g, beta, states, cu)


def in_two_parts(q, k, v, g, beta, states, cu, cut):
    """o [1, T, HV, V] and last states [N, HV, K, V] of a packed batch.

    q, k, v, g, beta: [1, T, ...]; states [N, HV, K, V]; cu [N + 1]. The first call
    gets the tokens before `cut`, 0 < cut < T, the second the others; the cut may lie
    inside a sequence. No loop, no `if`, two calls of
    oracle(q, k, v, g, beta, states, cu_seqlens) -> (o, last states).
    """
    # BEGIN SOLUTION
    x = (q, k, v, g, beta)
    before = cu.clamp(max=cut)  # later sequences have no token yet
    o_1, states = oracle(*(z[:, :cut] for z in x), states, before)
    after = (cu - cut).clamp(min=0)  # earlier ones have none left
    o_2, states = oracle(*(z[:, cut:] for z in x), states, after)
    return torch.cat([o_1, o_2], dim=1), states
    # END SOLUTION


define(
    in_two_parts,
    title="A packed batch that is too long",
    stars=3,
    task="""
        A packed batch does not fit into one call, so it is cut at token `cut`, wherever that is.
        Some sequences end before the cut, one may straddle it, some begin after it. Find the
        lengths that each call needs, so that *all* N states pass through both calls, and no
        sequence is treated as a special case.
        """,
    hint="""
        Give both calls N sequences. One that has ended before the cut has no tokens in the second
        call: what does an empty sequence do with its state? Two `clamp` make the two lists.
        """,
    arguments=a_batch_and_a_cut,
    expected=in_one_call,
    outputs={"o": "BTHV", "S": "NHKV"},
    mutants={
        "the second call starts from the first states": (
            [("o_1, states = oracle", "o_1, _ = oracle")]
        ),
        "the second call starts from nothing": (
            "for z in x), states, after)",
            "for z in x), torch.zeros_like(states), after)",
        ),
        "the states before the cut are returned": ("o_2, states = oracle", "o_2, _ = oracle"),
        "the lengths of the second call count from token 0": (
            "(cu - cut).clamp(min=0)",
            "cu.clamp(min=cut)",
        ),
        "the first call gets all lengths": ("cu.clamp(max=cut)", "cu"),
        "the cut begins a new sequence": (
            "for z in x), states, after)",
            "for z in x), torch.where((cu[:-1] < cut)[:, None, None, None], 0.0, states), after)",
        ),
        "the outputs are joined in the wrong order": ("[o_1, o_2]", "[o_2, o_1]"),
    },
    why="""
        Sequences without tokens hand their state on unchanged. That is why kernels must get
        them right, and how a batch is spread over calls, or over GPUs as in chapter 16.
        """,
)
