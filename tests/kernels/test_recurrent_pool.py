"""The serving form of the recurrence: a pool of states, updated in place."""

import pytest
import torch
from cases import assert_agree, small
from recurrent_cases import run

from kda_edu import fused_recurrent_kda_update
from kda_edu.kernels import checks

POISON = 1e30


def update(x, pool, slots, **options):
    tokens = x._asdict()
    del tokens["initial_state"]
    slots = torch.as_tensor(slots, device=pool.device)
    return fused_recurrent_kda_update(**tokens, state_pool=pool, slot_indices=slots, **options)


def filled_pool(x, slots, size, state_v_first=False, gap=0):
    """A pool of `size` slots, poison but for the initial states of `x`; `gap` between its slots."""
    state = x.initial_state.transpose(2, 3) if state_v_first else x.initial_state
    shape = state.shape[1:]
    memory = torch.full((size, shape.numel() + gap), POISON, device=state.device)
    pool = memory[:, : shape.numel()].unflatten(1, shape)
    for slot, s in zip(slots, state, strict=True):
        if slot >= 0:
            pool[slot] = s
    return pool, memory


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("gap", [0, 7])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_one_token_per_request(state_v_first, gap, index, device):
    slots = [5, -1, 0, 3]
    x = small(device, B=4, T=1, HV=2)
    pool, memory = filled_pool(x, slots, 7, state_v_first, gap)
    before = memory.clone()
    o = update(x, pool, torch.tensor(slots, dtype=index), state_v_first=state_v_first)

    given = x._replace(initial_state=x.initial_state.transpose(2, 3)) if state_v_first else x
    o_want, state_want = run(given, state_v_first=state_v_first)
    for n, slot in enumerate(slots):
        if slot >= 0:
            assert_agree((o[n], pool[slot]), (o_want[n], state_want[n]))
    assert not o[1].any()  # padding
    untouched = [slot for slot in range(7) if slot not in slots]
    assert torch.equal(memory[untouched], before[untouched])
    numel = pool[0].numel()
    assert torch.equal(memory[:, numel:], before[:, numel:])


def test_packed_sequences(device):
    """Several tokens, none, and padding, in one call."""
    slots = [2, -1, 4, 1]
    x = small(device, cu_seqlens=[0, 2, 4, 4, 5], HV=2)
    pool, memory = filled_pool(x, slots, 6)
    before = memory.clone()
    o = update(x, pool, slots)
    o_want, state_want = run(x)
    assert torch.equal(o[:, :2], o_want[:, :2]) and torch.equal(o[:, 4:], o_want[:, 4:])
    assert not o[:, 2:4].any()
    for n in (0, 2, 3):
        assert torch.equal(pool[slots[n]], state_want[n])
    assert torch.equal(memory[[0, 3, 5]], before[[0, 3, 5]])


def test_steps_over_time_equal_one_run(device):
    """Two requests advance in changing company; each ends as if it had run alone."""
    x = small(device, B=2, T=3, HV=2)
    pool, _ = filled_pool(x, [3, 1], 4)
    outputs = []
    for t in range(3):
        step = x._replace(**{n: getattr(x, n)[:, t : t + 1] for n in ("q", "k", "v", "g", "beta")})
        order = [1, 0] if t == 1 else [0, 1]
        step = step._replace(**{n: getattr(step, n)[order] for n in ("q", "k", "v", "g", "beta")})
        o = update(step, pool, [[3, 1][n] for n in order])
        outputs.append(o[order])
    o_want, state_want = run(x)
    assert torch.equal(torch.cat(outputs, dim=1), o_want)
    assert torch.equal(pool[[3, 1]], state_want)


def test_all_in_kernel_options(device):
    x = small(device, B=2, T=2, HV=2)
    x = x._replace(g=4 * x.g + 1)
    options = dict(
        A_log=torch.tensor([-0.5, 0.5], device=device),
        dt_bias=torch.linspace(-1, 1, 32, device=device),
        lower_bound=-5.0,
        scale=0.5,
        use_gate_in_kernel=True,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=True,
    )
    pool, _ = filled_pool(x, [0, 1], 2)
    o = update(x, pool, [0, 1], **options)
    o_want, state_want = run(x, **options)
    assert torch.equal(o, o_want) and torch.equal(pool, state_want)


def test_nothing_but_padding(device):
    x = small(device, B=2, T=1)
    pool = torch.full((3, 4, 16, 9), POISON, device=device)
    assert not update(x, pool, [-1, -100]).any()
    assert bool((pool == POISON).all())
    assert not update(x, pool[:0], [-1, -1]).any()  # a pool with no slots at all


def test_an_index_beyond_the_pool_is_padding_where_it_cannot_be_read(device, monkeypatch, canary):
    """As on a GPU. The memory after the pool stays as it is."""
    from kda_edu.kernels import pool as pool_file

    monkeypatch.setattr(pool_file, "_check_pool", lambda *arguments: None)
    x = small(device, B=2, T=1)
    pool = canary(torch.full((3, 4, 16, 9), POISON, device=device))
    assert not update(x, pool, [3, 2**31 - 1]).any()
    assert bool((pool == POISON).all())


def test_tokens_after_the_last_sequence_are_zero_even_after_padding(device, monkeypatch):
    monkeypatch.setattr(checks, "check_cu_values", lambda *arguments: None)
    x = small(device, cu_seqlens=[0, 2, 5])
    pool, _ = filled_pool(x, [0, -1], 1)
    o = update(x._replace(cu_seqlens=x.cu_seqlens.new_tensor([0, 2, 3])), pool, [0, -1])
    assert o[:, :2].any() and not o[:, 2:].any()


def test_a_pool_beyond_32_bits(device):
    """Slots 2^30 elements apart: slot 2 begins beyond 2^31, though the stride fits 32 bits.

    On a CPU the gaps are never touched, so they cost no memory.
    """
    x = small(device, B=2, T=1, H=1, HV=1, V=8)
    gap = 2**30 + 64
    memory = torch.empty(2 * gap + 128, device=device)
    pool = memory.as_strided((3, 1, 16, 8), (gap, 128, 8, 1))
    pool[0], pool[2] = x.initial_state[0], x.initial_state[1]
    o = update(x, pool, torch.tensor([0, 2], dtype=torch.int32))
    o_want, state_want = run(x)
    assert torch.equal(o, o_want) and torch.equal(pool[[0, 2]], state_want)


def strided(shape, strides):
    return torch.zeros(4096).as_strided(shape, strides)


SHAPE = (4, 4, 16, 8)
WRONG = [
    (dict(pool=torch.zeros(SHAPE).bfloat16()), TypeError, "state_pool: .*float32.*bfloat16"),
    (dict(pool=torch.zeros(4, 4, 8, 16)), ValueError, "state_pool: .*shape"),
    (dict(pool=torch.zeros(4, 4, 8, 16).transpose(2, 3)), ValueError, "state_pool: .*contig"),
    (dict(pool=torch.zeros(4, 8, 16, 8)[:, ::2]), ValueError, "state_pool: .*contiguous"),
    (dict(pool=torch.zeros(1, 4, 16, 8).expand(SHAPE)), ValueError, "state_pool: .*overlap"),
    (dict(pool=strided(SHAPE, (256, 128, 8, 1))), ValueError, "state_pool: .*overlap"),
    (dict(pool=torch.zeros(4, 16, 8)), ValueError, "state_pool: .*shape"),
    (dict(pool=torch.tensor(0.0)), ValueError, "state_pool: .*shape"),
    (dict(pool=[0]), TypeError, "state_pool: .*list"),
    (dict(slots=torch.tensor([0, 4])), ValueError, "slot_indices: .*below 4.*got 4"),
    (dict(slots=torch.tensor([0, 1, 2])), ValueError, "slot_indices: .*shape"),
    (dict(slots=torch.tensor([0.0, 1.0])), TypeError, "slot_indices: .*dtype"),
    (dict(slots=torch.tensor([0, 1], dtype=torch.int16)), TypeError, "slot_indices: .*dtype"),
]


@pytest.mark.parametrize("given, error, message", WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_mistakes_are_named(given, error, message):
    x = small("cpu", B=2, T=1, V=8)._asdict()
    del x["initial_state"]
    pool = given.get("pool", torch.zeros(SHAPE))
    slots = given.get("slots", torch.tensor([0, 1]))
    with pytest.raises(error, match=message):
        fused_recurrent_kda_update(**x, state_pool=pool, slot_indices=slots)
