"""What a caller may pass to the chunk pipeline: layouts, dtypes, flags, gradients, CUDA's rules.

Wrong arguments are in tests/test_checks.py, for every entry point.
"""

import pytest
import torch
from cases import NAMES, assert_same, gapped, small
from chunk_cases import run
from triton.runtime.jit import KernelInterface

from kda_edu import chunk_kda
from kda_edu.kernels._common import as_rows
from kda_edu.teach.check import rms_error

fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16
SHORT = dict(T=3, H=1, HV=2, V=9)  # one chunk: an interpreted kernel takes its time


def gate_parameters(device, HV=2, K=16):
    return dict(
        A_log=torch.linspace(-1, 1, HV, device=device),
        dt_bias=torch.linspace(-2, 2, HV * K, device=device),
        use_gate_in_kernel=True,
    )


# -- layouts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bounded", [False, True])
def test_strided_views_equal_their_copies(bounded, device):
    x = small(device, **SHORT | dict(B=2, HV=1))
    options = dict(chunk_size=16)
    if bounded:
        options |= gate_parameters(device, HV=1) | dict(lower_bound=-5.0)
    want = run(x, **options)
    strided = {n: gapped(getattr(x, n)) for n in (*NAMES, "initial_state")}
    assert not any(view.is_contiguous() for view in strided.values())
    assert_same(run(x._replace(**strided), **options), want)


def test_strided_gate_parameters_and_lengths(device):
    x = small(device, **SHORT | dict(T=0), cu_seqlens=[0, 1, 3])
    options = gate_parameters(device) | dict(chunk_size=16)
    want = run(x, **options)
    wide = {n: torch.stack([options[n], -options[n]], dim=1) for n in ("A_log", "dt_bias")}
    views = {n: both[:, 0] for n, both in wide.items()}
    assert_same(run(x, **options | views), want)
    matrix = dict(dt_bias=options["dt_bias"].reshape(2, 16))
    assert_same(run(x, **options | matrix), want)
    cu = torch.stack([x.cu_seqlens, x.cu_seqlens + 7], dim=1)[:, 0]
    assert_same(run(x._replace(cu_seqlens=cu), **options), want)


def test_views_of_one_packed_projection_are_read_in_place(device):
    x = small(device, **SHORT | dict(B=2, HV=1, V=16))
    packed = torch.cat([x.q, x.k, x.v], dim=-1)  # [B, T, H, 2 K + V]
    q, k, v = packed.split([16, 16, 16], dim=-1)
    for view in (q, k, v):
        assert not view.is_contiguous() and as_rows(view).data_ptr() == view.data_ptr()
    assert_same(run(x._replace(q=q, k=k, v=v), chunk_size=16), run(x, chunk_size=16))


def test_expanded_inputs_equal_their_copies(device):
    x = small(device, **SHORT | dict(H=2))
    axes = dict(q=2, k=1, v=1, g=3, beta=2)
    expanded = {
        name: getattr(x, name).narrow(axis, 0, 1).expand_as(getattr(x, name))
        for name, axis in axes.items()
    }
    copied = {name: view.contiguous() for name, view in expanded.items()}
    got, want = (run(x._replace(**y), chunk_size=16) for y in (expanded, copied))
    assert_same(got, want)


def test_a_meaningless_stride_of_a_size_1_dimension(device):
    x = small(device, **SHORT)
    want = run(x, chunk_size=16)
    for stride in (2**31 + 1, 0):
        views = {
            n: getattr(x, n).as_strided(getattr(x, n).shape, (stride, *getattr(x, n).stride()[1:]))
            for n in NAMES
        }
        assert_same(run(x._replace(**views), chunk_size=16), want)


@pytest.mark.parametrize("layout", ["token", "head"])
def test_offsets_beyond_32_bits(layout, device):
    """q, k and v in one buffer, whose last token or last head begins beyond element 2^31.

    Each stride fits 32 bits. On a CPU the gaps are never touched, so they cost no memory.
    """
    T, heads = (130, 1) if layout == "token" else (2, 3)
    x = small(device, T=T, H=heads, HV=heads, V=16, dtype=fp16)
    gap = 2**24 + 64 if layout == "token" else 2**30 + 64
    memory = torch.empty(max(T - 1, 2 if heads == 3 else 0) * gap + 128, dtype=fp16, device=device)
    strides = (0, gap, 48, 1) if layout == "token" else (0, 48, gap, 1)
    far = {}
    for n, name in enumerate("qkv"):
        near = getattr(x, name)
        far[name] = memory[16 * n :].as_strided(near.shape, strides).copy_(near)
        assert as_rows(far[name]).data_ptr() == far[name].data_ptr()
    want = run(x, chunk_size=16)
    assert_same(run(x._replace(**far), chunk_size=16), want)


def test_inputs_and_the_memory_around_them_stay_as_they_are(device, canary):
    x = small(device, H=1, HV=1, cu_seqlens=[0, 2, 2, 19])
    options = gate_parameters(device, HV=1) | dict(
        use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, chunk_size=16
    )
    guarded = type(x)(*(canary(value) for value in x))
    guarded_options = {
        name: canary(value) if isinstance(value, torch.Tensor) else value
        for name, value in options.items()
    }
    assert_same(run(guarded, **guarded_options), run(x, **options))
    for before, after in zip(x, guarded, strict=True):
        assert torch.equal(before, after)
    for name in ("A_log", "dt_bias"):
        assert torch.equal(options[name], guarded_options[name])


def test_outputs_are_new_contiguous_tensors(device):
    x = small(device, **SHORT)
    o, state = run(x, chunk_size=16)
    assert o.is_contiguous() and state.is_contiguous()
    owned = {value.untyped_storage().data_ptr() for value in x if value is not None}
    assert not owned & {o.untyped_storage().data_ptr(), state.untyped_storage().data_ptr()}
    assert run(x, output_final_state=False, chunk_size=16)[1] is None


# -- autocast and gradients ----------------------------------------------------------------------


def test_autocast_lowers_q_k_v_alone(device):
    x = small(device, **SHORT)
    lowered = x._replace(**{name: getattr(x, name).bfloat16() for name in "qkv"})
    want = run(lowered, chunk_size=16)
    with torch.autocast(device.type, bf16):
        o, state = run(x, chunk_size=16)
        assert o.dtype == bf16
        mixed = x._replace(q=lowered.q.half(), v=lowered.v, k=x.k)
        assert run(mixed, chunk_size=16)[0].dtype == bf16
    assert_same((o, state), want)
    all_lowered = lowered._replace(g=x.g.bfloat16(), beta=x.beta.bfloat16())
    assert rms_error(run(all_lowered, chunk_size=16)[1], state) > 1e-4  # lowering them would show


# -- flags ---------------------------------------------------------------------------------------


def test_every_flag_changes_the_output(device):
    x = small(device, T=3, H=1, HV=1, V=8)
    x = x._replace(q=2 * x.q)
    gate = dict(use_gate_in_kernel=True, A_log=torch.full((1,), 0.5, device=device))
    bias = dict(dt_bias=torch.linspace(-1, 1, 16, device=device))
    sigmoid = dict(use_beta_sigmoid_in_kernel=True)
    calls = [
        {},
        dict(scale=1.0),
        dict(use_qk_l2norm_in_kernel=True),
        gate,
        gate | bias,
        gate | dict(lower_bound=-5.0),
        gate | dict(lower_bound=-4.0),
        gate | bias | dict(lower_bound=-5.0),
        dict(use_gate_in_kernel=True, lower_bound=-5.0),
        sigmoid,
        sigmoid | dict(allow_neg_eigval=True),
    ]
    outputs = [run(x, **options, chunk_size=16)[0] for options in calls]
    for i, a in enumerate(outputs):
        for b in outputs[i + 1 :]:
            assert rms_error(a, b) > 1e-3
    # flags of another implementation, accepted because they change nothing here
    for options in (dict(safe_gate=True), dict(disable_recompute=True)):
        assert torch.equal(run(x, **options, chunk_size=16)[0], outputs[0])
    with_gate = calls[5] | dict(safe_gate=True)
    assert torch.equal(run(x, **with_gate, chunk_size=16)[0], outputs[5])


def test_arguments_in_the_order_of_fla(device):
    """fla's positional order; what follows is given by name there too."""
    x = small(device, **SHORT)
    by_name = run(x, scale=0.5, use_qk_l2norm_in_kernel=True)
    assert_same(chunk_kda(*x[:5], 0.5, x.initial_state, True, True), by_name)
    with pytest.raises(TypeError, match="use_l2norm"):
        run(x, use_l2norm=True)


# -- no waiting for the GPU ----------------------------------------------------------------------


@pytest.mark.parametrize("given", ["a batch", "cu_seqlens", "cu_seqlens and its copy"])
def test_no_value_is_read_on_the_host(given, poison, monkeypatch):
    """So that a CUDA graph can be captured. Tensors without values take the place of the GPU's, so
    whatever would wait for a value fails. Launches are counted, and left out.
    """
    launched = []
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device_type: False)
    monkeypatch.setattr(
        KernelInterface, "__getitem__", lambda kernel, grid: lambda *a, **b: launched.append(kernel)
    )
    lengths = [0, 3, 3, 20]
    x = small("cpu", H=1, HV=2, **(dict(T=20) if given == "a batch" else dict(cu_seqlens=lengths)))
    options = gate_parameters("meta") | dict(
        use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, lower_bound=-7.0
    )
    if given == "cu_seqlens and its copy":
        options["cu_seqlens_cpu"] = torch.tensor(lengths, dtype=torch.int32)
    o, state, h = run(x.to("meta"), **options, return_intermediate_states=True)
    assert o.is_meta and state.is_meta and len(launched) >= 6
    chunks = {"a batch": 1, "cu_seqlens": 3, "cu_seqlens and its copy": 2}[given]
    assert h.shape == (1, chunks, 2, 16, 9)
    poison.buffers[:] = [buffer for buffer in poison.buffers if not buffer.is_meta]
