"""What a caller may pass to the fused recurrence: layouts, dtypes, flags, gradients, mistakes."""

import pytest
import torch
from cases import NAMES, WRONG, assert_same, gapped, small
from recurrent_cases import run

from kda_edu import fused_recurrent_kda, fused_recurrent_kda_update
from kda_edu.kernels._common import as_rows
from kda_edu.teach.check import rms_error

# -- layouts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_strided_view_equals_its_copy(name, device):
    x = small(device, B=2, T=3)
    strided = gapped(getattr(x, name))
    assert not strided.is_contiguous()
    assert_same(run(x._replace(**{name: strided})), run(x))


def test_views_of_one_packed_projection_are_read_in_place(device):
    x = small(device, B=2, T=3, H=4, V=16)
    packed = torch.cat([x.q, x.k, x.v], dim=-1)  # [B, T, H, 2 K + V]
    q, k, v = packed.split([16, 16, 16], dim=-1)
    for view in (q, k, v):
        assert not view.is_contiguous() and as_rows(view).data_ptr() == view.data_ptr()
    assert_same(run(x._replace(q=q, k=k, v=v)), run(x))


@pytest.mark.parametrize("name, axis", [("q", 2), ("v", 1), ("g", 3), ("g", 0), ("beta", 2)])
def test_an_expanded_input_equals_its_copy(name, axis, device):
    x = small(device, B=2, T=3)
    first = getattr(x, name).narrow(axis, 0, 1)
    expanded = first.expand_as(getattr(x, name))
    copied = x._replace(**{name: expanded.contiguous()})
    assert_same(run(x._replace(**{name: expanded})), run(copied))


@pytest.mark.parametrize("stride", [2**31 + 1, 0])
def test_a_meaningless_stride_of_a_size_1_dimension(stride, device):
    x = small(device)
    views = {
        name: getattr(x, name).as_strided(
            getattr(x, name).shape, (stride, *getattr(x, name).stride()[1:])
        )
        for name in NAMES
    }
    assert_same(run(x._replace(**views)), run(x))


@pytest.mark.parametrize(
    "lengths, gap",
    [
        (dict(B=3, T=1), 2**30 + 64),
        (dict(B=1, T=66), 2**25 - 64),
        (dict(cu_seqlens=[0, 65, 66]), 2**25 - 64),
    ],
    ids=["batch", "sequence", "packed"],
)
def test_offsets_beyond_32_bits(lengths, gap, device):
    """Tokens so far apart that the last begins beyond element 2^31, though strides fit 32 bits.

    q, k, v and g share the memory of each token. On a CPU the gaps are never touched, so they cost
    no memory.
    """
    x = small(device, H=1, HV=1, V=8, **lengths)
    x = x._replace(**{n: getattr(x, n).half() for n in ("q", "k", "v", "g")})
    B, T = x.q.shape[:2]
    last = (B * T - 1) * gap
    assert last > 2**31
    memory = torch.empty(last + 64, dtype=torch.float16, device=device)
    far = {}
    for place, name in enumerate(("q", "k", "v", "g")):
        near = getattr(x, name)
        view = memory.as_strided(near.shape, (T * gap, gap, 16, 1), 16 * place)
        far[name] = view.copy_(near)
        assert as_rows(view).data_ptr() == view.data_ptr()
    assert_same(run(x._replace(**far)), run(x))


def test_inputs_and_the_memory_around_them_stay_as_they_are(device, canary):
    x = small(device, cu_seqlens=[0, 2, 2, 5])
    guarded = type(x)(*(canary(value) for value in x))
    options = dict(
        A_log=torch.zeros(4, device=device),
        dt_bias=torch.zeros(4, 16, device=device),
        use_gate_in_kernel=True,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
    )
    guarded_options = {
        name: canary(value) if isinstance(value, torch.Tensor) else value
        for name, value in options.items()
    }
    assert_same(run(guarded, **guarded_options), run(x, **options))
    for before, after in zip(x, guarded, strict=True):
        assert torch.equal(before, after)


def test_outputs_are_new_contiguous_tensors(device):
    x = small(device, B=2, T=3)
    o, state = run(x)
    assert o.is_contiguous() and state.is_contiguous()
    owned = {value.untyped_storage().data_ptr() for value in x if value is not None}
    assert not owned & {o.untyped_storage().data_ptr(), state.untyped_storage().data_ptr()}
    assert run(x, output_final_state=False)[1] is None


# -- autocast and gradients --------------------------------------------------------------------


def test_autocast_lowers_q_k_v_alone(device):
    x = small(device)
    lowered = x._replace(**{name: getattr(x, name).bfloat16() for name in "qkv"})
    want = run(lowered)
    with torch.autocast(device.type, torch.bfloat16):
        o, state = run(x)
        assert o.dtype == torch.bfloat16
        mixed = x._replace(q=x.q.half(), v=x.v.bfloat16(), k=x.k.bfloat16())
        assert run(mixed)[0].dtype == torch.bfloat16
    assert_same((o, state), want)
    all_lowered = lowered._replace(g=x.g.bfloat16(), beta=x.beta.bfloat16())
    assert rms_error(run(all_lowered)[1], state) > 1e-4  # lowering g and beta would show


def test_a_pool_update_refuses_gradients_too(device):
    x = small(device, T=1)
    pool = torch.zeros(1, 4, 16, 9, device=device)
    tokens = x._asdict()
    del tokens["initial_state"]
    tokens["v"] = x.v.clone().requires_grad_()
    o = fused_recurrent_kda_update(
        **tokens, state_pool=pool, slot_indices=torch.tensor([0], device=device)
    )
    with pytest.raises(NotImplementedError, match="fused_recurrent_kda_update"):
        o.sum().backward()


def test_inputs_without_gradients_give_outputs_without(device):
    assert all(not y.requires_grad and y.grad_fn is None for y in run(small(device, T=1)))


# -- flags and mistakes ------------------------------------------------------------------------


def test_every_flag_changes_the_output(device):
    x = small(device, T=3, HV=2, V=8)
    x = x._replace(q=2 * x.q)
    A_log = torch.linspace(-0.5, 0.5, 2, device=device)
    bias = torch.linspace(-1, 1, 32, device=device)
    gate = dict(use_gate_in_kernel=True, A_log=A_log)
    sigmoid = dict(use_beta_sigmoid_in_kernel=True)
    calls = [
        {},
        dict(scale=1.0),
        dict(use_qk_l2norm_in_kernel=True),
        gate,
        gate | dict(dt_bias=bias),
        gate | dict(lower_bound=-5.0),
        gate | dict(lower_bound=-4.0),
        gate | dict(lower_bound=-5.0, dt_bias=bias),
        dict(use_gate_in_kernel=True, lower_bound=-5.0),
        sigmoid,
        sigmoid | dict(allow_neg_eigval=True),
    ]
    outputs = [run(x, **options)[0] for options in calls]
    for i, a in enumerate(outputs):
        for b in outputs[i + 1 :]:
            assert rms_error(a, b) > 1e-3


@pytest.mark.parametrize("change, error, message", WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_mistakes_are_named(change, error, message):
    """On the CPU, with or without a GPU: checks come before the kernel."""
    x = small("cpu")
    with pytest.raises(error, match=message):
        fused_recurrent_kda(**x._asdict() | change(x))


def test_packed_sequences_need_a_batch_of_1():
    x = small("cpu", B=2, T=4)
    with pytest.raises(ValueError, match="B = 2"):
        run(x._replace(cu_seqlens=torch.tensor([0, 4, 8])))


def test_a_key_dimension_beyond_256_is_refused():
    with pytest.raises(ValueError, match="K <= 256, got K = 257"):
        run(small("cpu", K=257))
