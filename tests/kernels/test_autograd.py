"""The two passes as operators: autograd, `torch.compile`, autocast, checkpoints, views, memory."""

import sys

import pytest
import torch
from backward_cases import (
    assert_gradients,
    assert_same_gradients,
    gradients,
    leaves_of,
    loss_of,
    oracle_gradients,
)
from cases import NAMES, gapped, small, tokens
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from kda_edu import chunk_kda, fused_recurrent_kda
from kda_edu.kernels import autograd, checks, recurrent
from kda_edu.teach.check import rms_error

fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16
BOTH = pytest.mark.parametrize("kernel", [chunk_kda, fused_recurrent_kda])
ALL = (*NAMES, "initial_state", "A_log", "dt_bias")


def inside(device, HV=1, K=16, **more):
    """Gate, norm and sigmoid in the kernel, with parameters that have gradients."""
    return dict(
        A_log=torch.linspace(-1, 0.5, HV, device=device),
        dt_bias=torch.linspace(-2, 2, HV * K, device=device),
        use_gate_in_kernel=True,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        **more,
    )


def few(device, **changes):
    """One short chunk: an interpreted kernel takes its time."""
    return small(device, **dict(T=3, H=1, HV=1, V=8) | changes)


def squares(o, state):
    return (o**2).sum() + (state**2).sum()


# -- the operators -------------------------------------------------------------------------------


def operator_arguments(device, form):
    """Arguments of the forward operator, by name, in its order.

    Every row that the operator allocates belongs to a chunk, so that every value is defined.
    """
    packed = form == "packed"
    x = few(device, cu_seqlens=[0, 1, 1, 2]) if packed else few(device, B=2, T=2)
    if form == "bare":
        x = x._replace(initial_state=None)
    values = dict.fromkeys(autograd._NAMES) | x._asdict()
    values |= dict(scale=0.3, chunk_size=16, output_final_state=form != "bare", store=packed)
    for name in ("use_qk_l2norm", "use_gate", "use_beta_sigmoid", "state_v_first"):
        values[name] = packed
    values["allow_neg_eigval"] = False
    if packed:
        values["initial_state"] = x.initial_state.transpose(2, 3).contiguous()
        values["cu_seqlens_cpu"] = x.cu_seqlens.cpu()
        values |= {n: inside(device)[n] for n in ("A_log", "dt_bias")}
    if form == "bounded":
        values |= dict(use_gate=True, lower_bound=-5.0)
    if form == "bf16":
        for name in "qkv":
            values[name] = values[name].bfloat16()
        values["store"] = True
    return values


def asking(value):
    """A leaf that asks for a gradient, where the value can have one."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().clone().requires_grad_()
    return value


@pytest.fixture
def plain_memory(poison, monkeypatch):
    """NaN in fresh memory, but no guards: a guarded tensor is a view, which operators set apart."""
    monkeypatch.undo()
    empty, empty_like = torch.empty, torch.empty_like

    def filled(x):
        ours = sys._getframe(2).f_globals.get("__name__", "").startswith("kda_edu")
        poison = float("nan") if x.is_floating_point() else -1
        return x.fill_(poison) if ours else x

    monkeypatch.setattr(torch, "empty", lambda *a, **b: filled(empty(*a, **b)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **b: filled(empty_like(*a, **b)))


@pytest.mark.parametrize("form", ["packed", "bare", "bf16"])
def test_opcheck_of_the_forward(form, device, plain_memory):
    """Schema, fake implementation, gradient registration, ahead-of-time dispatch, all of them."""
    values = operator_arguments(device, form)
    assert list(values) == autograd._NAMES
    arguments = tuple(map(asking, values.values()))
    done = torch.library.opcheck(autograd.chunk_kda_op, arguments)
    assert set(done.values()) == {"SUCCESS"} and len(done) == 4


@pytest.mark.parametrize("form", ["packed", "bounded"])
def test_opcheck_of_the_backward(form, device, plain_memory):
    values = operator_arguments(device, form)
    outputs = autograd.chunk_kda_op(*values.values())
    do, d_state = (torch.ones_like(y) for y in outputs[:2])
    d_state = None if form == "bounded" else d_state
    tensors = [values[name] for name in autograd._TENSORS]
    options = [values[name] for name in autograd._OF_BACKWARD]
    arguments = (*tensors, do, d_state, list(outputs[2:]), *options)
    done = torch.library.opcheck(autograd.chunk_kda_bwd_op, arguments)
    assert set(done.values()) == {"SUCCESS"} and len(done) == 4


@pytest.mark.parametrize("form", ["packed", "bare"])
def test_opcheck_of_the_recurrence(form, device, plain_memory):
    values = operator_arguments(device, form)
    del values["cu_seqlens_cpu"], values["chunk_size"], values["store"]
    arguments = tuple(map(asking, values.values()))
    done = torch.library.opcheck(recurrent.fused_recurrent_kda_op, arguments)
    assert set(done.values()) == {"SUCCESS"} and len(done) == 4


# -- torch.compile -------------------------------------------------------------------------------


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def model(kernel, q, k, v, g, beta, initial_state, A_log, dt_bias, cu_seqlens, **options):
    """What surrounds a call in a layer, so that there is something to compile."""
    o, state = kernel(
        q * 1.5, k, torch.tanh(v), g, beta, initial_state=initial_state, A_log=A_log,
        dt_bias=dt_bias, cu_seqlens=cu_seqlens, output_final_state=True, **options,
    )  # fmt: skip
    return (o.sin() * o).sum() + (state**2).sum()


@pytest.mark.parametrize(
    "kernel, packed", [(chunk_kda, False), (chunk_kda, True), (fused_recurrent_kda, False)]
)
def test_compiled_equals_eager(kernel, packed, device, fresh_compiler):
    """One graph for any length and any number of sequences, forward and backward.

    (The backward of the recurrence takes chunks of 16 or 64: one graph for lengths up to 16, and
    another for longer ones.)
    """
    options = inside(device)
    parameters = {n: options.pop(n) for n in ("A_log", "dt_bias")}
    counter = CompileCounterWithBackend("aot_eager")

    def call(**arguments):
        return model(kernel, **arguments, **options)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    for T, cu in ((5, [0, 2, 5]), (7, [0, 2, 2, 7])):
        x = few(device, **(dict(cu_seqlens=cu) if packed else dict(T=T)))
        if packed and kernel is chunk_kda:
            parameters["cu_seqlens_cpu"] = x.cu_seqlens.cpu()
        results = []
        for function in (call, compiled):
            leaves, arguments = leaves_of(x, dict(parameters))
            function(**arguments).backward()
            results.append({name: leaf.grad for name, leaf in leaves.items()})
        assert set(results[0]) == set(ALL)
        for name, gradient in results[0].items():
            assert gradient.dtype == results[1][name].dtype
            assert rms_error(results[1][name], gradient) < 1e-6, name
    assert counter.frame_count == 1


def test_compiled_without_gradients(device, fresh_compiler):
    x = few(device)

    def call(q, **rest):
        return chunk_kda(q, **rest, output_final_state=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for a, b in zip(compiled(**x._asdict()), call(**x._asdict()), strict=True):
            assert torch.equal(a, b) and not a.requires_grad


# -- a second time -------------------------------------------------------------------------------


@BOTH
def test_a_second_derivative_is_refused(kernel, device):
    leaves, arguments = leaves_of(few(device), {})
    o, _ = kernel(**arguments)
    first = torch.autograd.grad((o**2).sum(), list(leaves.values()), create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiated once.*reference"):
        first[0].sum().backward()


def test_intermediate_states_have_no_gradient(device):
    """Asked for together with gradients, o says so in backward(); the states have no graph."""
    _, arguments = leaves_of(few(device), {})
    options = dict(output_final_state=True, return_intermediate_states=True, chunk_size=16)
    o, state, h = chunk_kda(**arguments, **options)
    assert o.requires_grad and state.requires_grad and not h.requires_grad
    for y in (o, state):
        with pytest.raises(NotImplementedError, match="return_intermediate_states.*no backward"):
            y.sum().backward()


@BOTH
def test_a_graph_kept_gives_the_same_again(kernel, device):
    leaves, arguments = leaves_of(few(device), inside(device))
    total = squares(*kernel(**arguments, output_final_state=True))
    seen = []
    hook = leaves["q"].register_hook(lambda gradient: seen.append(gradient.clone()))
    first = torch.autograd.grad(total, list(leaves.values()), retain_graph=True)
    second = torch.autograd.grad(total, list(leaves.values()))
    hook.remove()
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    assert len(seen) == 2 and torch.equal(seen[0], first[0])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(total, list(leaves.values()))


def test_gradients_add_up_over_calls(device):
    leaves, arguments = leaves_of(few(device), {})
    for _ in range(2):
        squares(*chunk_kda(**arguments, output_final_state=True, chunk_size=16)).backward()
    want = gradients(chunk_kda, few(device), squares, chunk_size=16)
    got = {name: leaf.grad for name, leaf in leaves.items()}
    assert_same_gradients(got, {name: 2 * gradient for name, gradient in want.items()})


@BOTH
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_no_bit(kernel, use_reentrant, device):
    def call(*values):
        arguments = dict(zip(names, values, strict=True))
        return kernel(**arguments, **switches, output_final_state=True)

    options = inside(device)
    switches = {n: y for n, y in options.items() if not isinstance(y, torch.Tensor)}
    parameters = {n: options[n] for n in ("A_log", "dt_bias")}
    results = []
    for outer in (
        lambda *y: call(*y),
        lambda *y: checkpoint(call, *y, use_reentrant=use_reentrant),
    ):  # noqa: E501
        leaves, _ = leaves_of(few(device), parameters)
        names = list(leaves)
        squares(*outer(*leaves.values())).backward()
        results.append({name: leaf.grad for name, leaf in leaves.items()})
    assert_same_gradients(*results, exact=True)


# -- which gradients -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kernel, names", [(chunk_kda, ALL), (fused_recurrent_kda, ("k", "initial_state"))]
)
def test_only_what_asks_gets_a_gradient(kernel, names, device):
    """Each input alone: its gradient is that of asking for all, and nothing else has one."""
    options = inside(device)
    want = gradients(kernel, few(device, T=2), squares, **options)
    assert set(want) == set(ALL)
    for name in names:
        arguments = few(device, T=2)._asdict() | options
        arguments[name] = arguments[name].clone().requires_grad_()
        squares(*kernel(**arguments, output_final_state=True)).backward()
        assert torch.equal(arguments[name].grad, want[name]), name
        others = [y for n, y in arguments.items() if n != name and isinstance(y, torch.Tensor)]
        assert all(y.grad is None for y in others)


@BOTH
def test_without_gradients_there_is_no_graph(kernel, device):
    _, arguments = leaves_of(few(device), inside(device))
    with torch.no_grad():
        plain = kernel(**arguments, output_final_state=True)
    with torch.inference_mode():
        inferred = kernel(**arguments, output_final_state=True)
    recorded = kernel(**arguments, output_final_state=True)
    for a, b, c in zip(plain, inferred, recorded, strict=True):
        assert not a.requires_grad and b.is_inference() and c.requires_grad
        assert torch.equal(a, b) and torch.equal(a, c)


@BOTH
def test_an_output_that_is_not_used(kernel, device):
    """A loss on one output is that of both with a weight of zero on the other."""
    x = few(device)
    for part in (0, 1):
        alone = gradients(kernel, x, lambda *y, part=part: (y[part] ** 2).sum())
        both = gradients(kernel, x, lambda o, s, part=part: squares(o * (1 - part), s * part))
        assert_same_gradients(alone, both)


def test_gradients_in_the_dtype_of_each_input(device):
    """q bfloat16, gate float16, beta float32, A_log bfloat16, dt_bias float16."""
    x = few(device, dtype=bf16, T=5, HV=2)
    x = x._replace(g=x.g.half(), beta=x.beta.float())
    options = inside(device, HV=2)
    options["A_log"], options["dt_bias"] = options["A_log"].bfloat16(), options["dt_bias"].half()
    for kernel in (chunk_kda, fused_recurrent_kda):
        got = gradients(kernel, x, **options)
        wanted = dict(q=bf16, k=bf16, v=bf16, g=fp16, beta=fp32, initial_state=fp32)
        wanted |= dict(A_log=bf16, dt_bias=fp16)
        assert {name: gradient.dtype for name, gradient in got.items()} == wanted
        assert_gradients(got, oracle_gradients(x, **options), bf16)


def test_the_shapes_of_the_gate_parameters(device):
    x, options = few(device, HV=2), inside(device, HV=2)
    want = gradients(chunk_kda, x, **options, chunk_size=16)
    options["A_log"] = options["A_log"].reshape(1, 1, 2, 1)
    options["dt_bias"] = options["dt_bias"].reshape(2, 16)
    got = gradients(chunk_kda, x, **options, chunk_size=16)
    assert got["A_log"].shape == (1, 1, 2, 1) and got["dt_bias"].shape == (2, 16)
    for name in ("A_log", "dt_bias"):
        assert torch.equal(got[name].flatten(), want[name])


# -- autocast ------------------------------------------------------------------------------------


@BOTH
def test_autocast_gives_gradients_in_the_dtype_of_the_leaf(kernel, device):
    """q, k and v are cast inside; what they receive is the bfloat16 gradient, cast back."""
    x = few(device)
    leaves, arguments = leaves_of(x, inside(device))
    with torch.autocast(device.type, bf16):
        o, state = kernel(**arguments, output_final_state=True)
    assert o.dtype == bf16 and state.dtype == fp32
    loss_of(o, state, "both", bf16).backward()
    got = {name: leaf.grad for name, leaf in leaves.items()}
    assert all(gradient.dtype == fp32 for gradient in got.values())
    rounded = x._replace(**{name: getattr(x, name).bfloat16() for name in "qkv"})
    want = gradients(kernel, rounded, **inside(device))
    assert_same_gradients(got, {name: gradient.float() for name, gradient in want.items()})


def test_backward_within_autocast(device):
    x = few(device, dtype=bf16)
    want = gradients(chunk_kda, x, squares, chunk_size=16)
    with torch.autocast(device.type, bf16):
        got = gradients(chunk_kda, x, squares, chunk_size=16)
    assert_same_gradients(got, want)


# -- views ---------------------------------------------------------------------------------------


UPSTREAM = {
    "expanded": lambda o, s: o.sum() + s.sum(),
    "transposed": lambda o, s: (
        (o.transpose(1, 3) @ o.transpose(1, 3).mT).sum() + s.mT.cumsum(2).sum()
    ),  # noqa: E501
    "strided": lambda o, s: (o[..., ::2] ** 2).sum() + (s[:, :, ::3] ** 2).sum(),
    "from a wider tensor": lambda o, s: (
        torch.cat([o, o], -1).tanh().sum() + torch.cat([s, s], -1).tanh().sum()
    ),
}


@BOTH
@pytest.mark.parametrize("loss", UPSTREAM.values(), ids=UPSTREAM)
def test_upstream_gradients_need_not_be_contiguous(kernel, loss, device):
    x = few(device, B=2, T=3)
    assert_gradients(gradients(kernel, x, loss), oracle_gradients(x, loss), fp32)


@BOTH
def test_upstream_gradients_in_gaps_of_nan(kernel, device):
    x = few(device, B=2, T=3)

    def found(change):
        leaves, arguments = leaves_of(x, {})
        outputs = kernel(**arguments, output_final_state=True)
        upstream = [change(y.detach().sin()) for y in outputs]
        return dict(
            zip(leaves, torch.autograd.grad(outputs, list(leaves.values()), upstream), strict=True)
        )

    assert_same_gradients(found(gapped), found(lambda y: y))


@BOTH
def test_strided_inputs(kernel, device):
    x = few(device, B=2, T=3)
    options = inside(device)
    want = gradients(kernel, x, squares, **options)
    got = gradients(kernel, x, squares, copy=lambda y: gapped(y.detach()), **options)
    assert_same_gradients(got, want)


@BOTH
def test_expanded_inputs(kernel, device):
    """Autograd sums the gradient of an expanded input over what it was expanded over."""
    x = few(device, H=2, HV=2)
    axes = dict(q=2, k=1, v=1, g=3, beta=2)
    narrow = {n: getattr(x, n).narrow(axis, 0, 1) for n, axis in axes.items()}
    whole = x._replace(**{n: y.expand_as(getattr(x, n)) for n, y in narrow.items()})
    want = gradients(kernel, whole._replace(**{n: getattr(whole, n).contiguous() for n in axes}))
    got = gradients(kernel, whole, copy=lambda y: y.detach())
    assert_same_gradients(got, want)


def test_one_packed_projection(device):
    x = few(device, B=2, T=3, HV=1, V=16)
    packed = torch.cat([x.q, x.k, x.v], dim=-1).requires_grad_()
    q, k, v = packed.split([16, 16, 16], dim=-1)
    squares(*chunk_kda(q, k, v, x.g, x.beta, output_final_state=True, chunk_size=16)).backward()
    want = gradients(chunk_kda, x._replace(initial_state=None), squares, chunk_size=16)
    got = dict(zip("qkv", packed.grad.split([16, 16, 16], dim=-1), strict=True))
    assert_same_gradients(got, {name: want[name] for name in "qkv"})


# -- memory --------------------------------------------------------------------------------------


@BOTH
def test_two_runs_give_the_same_bits(kernel, device):
    for sizes, options in ((dict(dtype=bf16), inside(device)), (dict(cu_seqlens=[0, 2, 5]), {})):
        x = few(device, **sizes)
        assert_same_gradients(*(gradients(kernel, x, **options) for _ in range(2)), exact=True)


@BOTH
@pytest.mark.parametrize("name", NAMES)
def test_an_input_changed_before_the_backward_is_noticed(kernel, name, device):
    _, arguments = leaves_of(few(device, T=1), {})
    changed = arguments[name] * 1.0
    o, _ = kernel(**arguments | {name: changed})
    changed.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_the_output_may_be_changed_in_place(device, plain_memory):
    x = few(device)
    got = gradients(chunk_kda, x, lambda o, s: (o.mul_(2.0) ** 2).sum() + s.add_(1.0).sum())
    want = gradients(chunk_kda, x, lambda o, s: ((2.0 * o) ** 2).sum() + (s + 1.0).sum())
    assert_same_gradients(got, want)


def test_inputs_stay_as_they_are(device, canary):
    x = few(device, cu_seqlens=[0, 2, 2, 5])
    before = [None if y is None else y.clone() for y in x]
    options = inside(device)
    for kernel in (chunk_kda, fused_recurrent_kda):
        gradients(kernel, x, copy=lambda y: y.detach(), **options)
    gradients(chunk_kda, x, copy=canary, **options, disable_recompute=True)
    for a, b in zip(x, before, strict=True):
        assert torch.equal(a, b)
    for name in ("A_log", "dt_bias"):
        assert torch.equal(options[name], inside(device)[name])


@pytest.fixture
def unread(monkeypatch):
    """As on a GPU, where the values of cu_seqlens are not read."""
    monkeypatch.setattr(checks, "check_cu_values", lambda *arguments: None)


@pytest.mark.parametrize(
    "kernel, end", [(chunk_kda, 21), (chunk_kda, 0), (fused_recurrent_kda, 21)]
)
def test_rows_that_belong_to_no_sequence(kernel, end, device, unread):
    """Zero gradients there; and NaN there, in inputs and upstream, reaches nothing."""
    x = small(device, H=1, HV=1, V=8, cu_seqlens=[0, 4, 40 if end else 20])
    cu = x.cu_seqlens.new_tensor([0, min(4, end), end])
    options = inside(device, HV=1)

    def loss(o, state, rows):
        return o.tanh()[:, :rows].sum() + (state**2).sum()

    want = gradients(
        kernel, tokens(x, slice(0, end))._replace(cu_seqlens=cu),
        lambda *y: loss(*y, end), **options,
    )  # fmt: skip
    for name in NAMES:
        getattr(x, name)[:, end:] = float("nan")
    leaves, arguments = leaves_of(x._replace(cu_seqlens=cu), options)
    o, state = kernel(**arguments, output_final_state=True)
    upstream = 1 - o.detach().tanh() ** 2
    upstream[:, end:] = torch.nan
    found = torch.autograd.grad((o, state), list(leaves.values()), (upstream, 2 * state.detach()))
    for name, gradient in zip(leaves, found, strict=True):
        if name in NAMES:
            assert not gradient[:, end:].any(), name
            gradient = gradient[:, :end]
        assert gradient.isfinite().all() and rms_error(gradient, want[name]) < 1e-6, name


# -- nothing at all ------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("cu", [None, [0, 0, 0], [0]])
def test_no_tokens(kernel, cu, device):
    """Gradients of the gate's parameters are zero; that of the state is the final one's."""
    N = 2 if cu is None else len(cu) - 1
    x = small(device, T=0, B=2 if cu is None else 1, H=1, HV=2, V=8)
    x = x._replace(initial_state=torch.ones(N, 2, 16, 8, device=device))
    if cu is not None:
        x = x._replace(cu_seqlens=torch.tensor(cu, device=device))
    got = gradients(kernel, x, lambda o, s: o.sum() + (s**2).sum(), **inside(device, HV=2))
    assert got["q"].shape == x.q.shape and got["beta"].shape == x.beta.shape
    assert torch.equal(got["initial_state"], 2 * x.initial_state)
    assert not got["A_log"].any() and not got["dt_bias"].any()


def test_absent_inputs(device):
    """One gradient per input, whichever are None."""
    x = few(device)
    for state, A_log, bias in ((0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0)):
        y = x if state else x._replace(initial_state=None)
        options = {n: inside(device)[n] for n, on in (("A_log", A_log), ("dt_bias", bias)) if on}
        got = gradients(
            chunk_kda, y, "output", **options, use_gate_in_kernel=True, lower_bound=-5.0
        )
        assert len(got) == 5 + state + A_log + bias
        want = oracle_gradients(y, "output", **options, use_gate_in_kernel=True, lower_bound=-5.0)
        assert_gradients(got, want, fp32)
