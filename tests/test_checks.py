"""Bad input is refused before anything is computed, by every entry point, in the same words.

A message names the argument, says what was expected and what came. In the tables below "..." stands
for any text.
"""

import importlib.util
import inspect
import math
import re

import pytest
import torch

from kda_edu import reference
from kda_edu.kernels import checks
from kda_edu.teach.inputs import make_inputs

ENTRIES = {
    "reference.recurrent_kda": reference.recurrent_kda,
    "reference.chunk_kda": reference.chunk_kda,
}
KERNELS = {}
if importlib.util.find_spec("triton") is not None:
    from triton.runtime.jit import KernelInterface

    from kda_edu import chunk_kda, fused_recurrent_kda, fused_recurrent_kda_update

    KERNELS = {
        "chunk_kda": chunk_kda,
        "fused_recurrent_kda": fused_recurrent_kda,
        "fused_recurrent_kda_update": fused_recurrent_kda_update,
    }


class Launched(Exception):
    """A call came as far as the launch of a kernel."""


@pytest.fixture(autouse=True)
def no_launch(monkeypatch):
    def refuse(kernel, grid):
        raise Launched

    if KERNELS:
        monkeypatch.setattr(KernelInterface, "__getitem__", refuse)


def good_inputs(**sizes):
    """float32, HV > H, K != V, a state: every entry point accepts them."""
    return make_inputs(**dict(B=1, T=5, H=2, HV=4, K=16, V=9) | sizes)


def arguments(function, change=None):
    """Those of a good call, changed; None if `function` does not take what is changed."""
    taken = inspect.signature(function).parameters
    x = good_inputs()
    call = {n: value for n, value in x._asdict().items() if n in taken}
    if "state_pool" in taken:
        call |= dict(state_pool=torch.zeros(7, 4, 16, 9), slot_indices=torch.tensor([3]))
    changes = change(x) if change else {}
    if changes.get("initial_state", x) is None and "initial_state" not in taken:
        del changes["initial_state"]
    return call | changes if changes.keys() <= {*taken, "unknown"} else None


# -- the table ---------------------------------------------------------------------------------


def given(**changes):
    return lambda x: changes


def put(name, change):
    """Replace one argument by change(argument)."""
    return lambda x: {name: change(getattr(x, name))}


def cu(values, dtype=torch.int32, **more):
    """Packed sequences, without a state."""
    return lambda x: dict(cu_seqlens=torch.tensor(values, dtype=dtype), initial_state=None) | more


def gate(**changes):
    """The gate inside, right but for the changes."""
    return lambda x: dict(use_gate_in_kernel=True, A_log=torch.zeros(4)) | changes


def tokens(**sizes):
    """q, k, v, g and beta of other sizes."""
    return lambda x: good_inputs(initial_state=False, **sizes)._asdict()


def meta(x):
    return x.to("meta")


ON_META = "expected device cpu (where q is), got meta"
NOWHERE = torch.zeros(2, dtype=torch.int32, device="meta")
LONG = torch.int64
OTHER_LENGTH, OTHER_VALUES = torch.tensor([0, 5]), torch.tensor([0, 3, 5])

# fmt: off
# (what is wrong, the change to a good call, the type of the error, its message)
BAD = [
    # types
    ("q a list", put("q", lambda q: q.tolist()), TypeError, "q: expected a torch.Tensor, got list"),
    ("k an array", put("k", lambda k: k.numpy()), TypeError, "k: ... torch.Tensor, got ndarray"),
    ("v None", given(v=None), TypeError, "v: expected a torch.Tensor, got NoneType"),
    ("g a number", given(g=-1.0), TypeError, "g: expected a torch.Tensor, got float"),
    ("beta a number", given(beta=0.5), TypeError, "beta: expected a torch.Tensor, got float"),
    # dtypes
    ("q int", put("q", lambda q: q.int()), TypeError, "q: expected dtype ..., got torch.int32"),
    ("q bool", put("q", lambda q: q > 0), TypeError, "q: expected dtype ..., got torch.bool"),
    ("q complex", put("q", lambda q: q + 0j), TypeError, "q: ... dtype ..., got torch.complex64"),
    ("k of another dtype", put("k", lambda k: k.bfloat16()), TypeError,
     "k: expected dtype torch.float32, got torch.bfloat16"),
    ("v of another dtype", put("v", lambda v: v.half()), TypeError,
     "v: expected dtype torch.float32, got torch.float16"),
    ("g int", put("g", lambda g: g.long()), TypeError,
     "g: expected a floating-point dtype, got torch.int64"),
    ("g complex", put("g", lambda g: g + 0j), TypeError,
     "g: expected a floating-point dtype, got torch.complex64"),
    ("beta bool", put("beta", lambda beta: beta > 0.5), TypeError,
     "beta: expected a floating-point dtype, got torch.bool"),
    # shapes
    ("q without batch", put("q", lambda q: q[0]), ValueError,
     "q: expected shape [B, T, H, K] with H and K at least 1, got (5, 2, 16)"),
    ("no key channel", lambda x: dict(q=x.q[..., :0], k=x.k[..., :0]), ValueError,
     "q: expected shape [B, T, H, K] with H and K at least 1, got (1, 5, 2, 0)"),
    ("k shorter", put("k", lambda k: k[:, :4]), ValueError,
     "k: expected shape (1, 5, 2, 16), got (1, 4, 2, 16)"),
    ("k narrower", put("k", lambda k: k[..., :8]), ValueError,
     "k: expected shape (1, 5, 2, 16), got (1, 5, 2, 8)"),
    ("v of heads first", put("v", lambda v: v.transpose(1, 2)), ValueError,
     "v: expected shape [B, T, HV, V] with B = 1, T = 5, HV and V at least 1, got (1, 4, 5, 9)"),
    ("v without heads", put("v", lambda v: v[:, :, 0]), ValueError,
     "v: expected shape [B, T, HV, V] ..., got (1, 5, 9)"),
    ("no value channel", put("v", lambda v: v[..., :0]), ValueError,
     "v: expected shape [B, T, HV, V] ..., got (1, 5, 4, 0)"),
    ("no value head", put("v", lambda v: v[:, :, :0]), ValueError,
     "v: expected shape [B, T, HV, V] ..., got (1, 5, 0, 9)"),
    ("HV no multiple of H", put("v", lambda v: v[:, :, :3]), ValueError,
     "v: expected HV (value heads) to be a multiple of H = 2, got HV = 3"),
    ("HV below H", put("v", lambda v: v[:, :, :1]), ValueError,
     "v: expected HV (value heads) to be a multiple of H = 2, got HV = 1"),
    ("g of key heads", put("g", lambda g: g[:, :, :2]), ValueError,
     "g: expected shape (1, 5, 4, 16), got (1, 5, 2, 16)"),
    ("g of a head", put("g", lambda g: g[..., 0]), ValueError,
     "g: expected shape (1, 5, 4, 16), got (1, 5, 4)"),
    ("beta of channels", put("beta", lambda beta: beta[..., None]), ValueError,
     "beta: expected shape (1, 5, 4), got (1, 5, 4, 1)"),
    ("beta of key heads", put("beta", lambda beta: beta[..., :2]), ValueError,
     "beta: expected shape (1, 5, 4), got (1, 5, 2)"),
    # devices
    ("k elsewhere", put("k", meta), ValueError, f"k: {ON_META}"),
    ("v elsewhere", put("v", meta), ValueError, f"v: {ON_META}"),
    ("g elsewhere", put("g", meta), ValueError, f"g: {ON_META}"),
    ("beta elsewhere", put("beta", meta), ValueError, f"beta: {ON_META}"),
    ("state elsewhere", put("initial_state", meta), ValueError, f"initial_state: {ON_META}"),
    ("A_log elsewhere", gate(A_log=torch.zeros(4, device="meta")), ValueError, f"A_log: {ON_META}"),
    ("cu_seqlens elsewhere", given(cu_seqlens=NOWHERE), ValueError,
     "cu_seqlens: expected device cpu, got meta"),
    ("cu_seqlens_cpu elsewhere", cu([0, 5], cu_seqlens_cpu=NOWHERE), ValueError,
     "cu_seqlens_cpu: expected device cpu, got meta"),
    # the state
    ("state a list", put("initial_state", lambda s: [s]), TypeError,
     "initial_state: expected a torch.Tensor, got list"),
    ("state transposed", put("initial_state", lambda s: s.transpose(2, 3)), ValueError,
     "initial_state: expected shape (1, 4, 16, 9) = [N, HV, K, V], got (1, 4, 9, 16)"),
    ("state not transposed", given(state_v_first=True), ValueError,
     "...: expected shape (..., 4, 9, 16) = [N, HV, V, K] (...True), got (..., 4, 16, 9)"),
    ("state of one head", put("initial_state", lambda s: s[:, 0]), ValueError,
     "initial_state: expected shape (1, 4, 16, 9) = [N, HV, K, V], got (1, 16, 9)"),
    ("state of key heads", put("initial_state", lambda s: s[:, :2]), ValueError,
     "initial_state: expected shape (1, 4, 16, 9) = [N, HV, K, V], got (1, 2, 16, 9)"),
    ("too few states", lambda x: cu([0, 2, 5])(x) | dict(initial_state=x.initial_state), ValueError,
     "initial_state: expected shape (2, 4, 16, 9) = [N, HV, K, V], got (1, 4, 16, 9)"),
    ("state bfloat16", put("initial_state", lambda s: s.bfloat16()), TypeError,
     "initial_state: expected dtype torch.float32, got torch.bfloat16"),
    ("state float64", put("initial_state", lambda s: s.double()), TypeError,
     "initial_state: expected dtype torch.float32, got torch.float64"),
    ("state bool", put("initial_state", lambda s: s > 0), TypeError,
     "initial_state: expected dtype torch.float32, got torch.bool"),
    # packed sequences
    ("cu_seqlens a list", given(cu_seqlens=[0, 5]), TypeError,
     "cu_seqlens: expected a torch.Tensor, got list"),
    ("cu_seqlens not from 0", cu([1, 5]), ValueError, "cu_seqlens: expected to start at 0, got 1"),
    ("cu_seqlens decreasing", cu([0, 4, 2, 5]), ValueError,
     "cu_seqlens: expected non-decreasing values, got 4 then 2 at position 2"),
    ("cu_seqlens too short", cu([0, 2, 4], LONG), ValueError,
     "cu_seqlens: expected to end at T = 5, got 4"),
    ("cu_seqlens too long", cu([0, 2, 8], LONG), ValueError,
     "cu_seqlens: expected to end at T = 5, got 8"),
    ("cu_seqlens float", cu([0, 5], torch.float32), TypeError,
     "cu_seqlens: expected dtype torch.int32, torch.int64, got torch.float32"),
    ("cu_seqlens int16", cu([0, 5], torch.int16), TypeError,
     "cu_seqlens: expected dtype torch.int32, torch.int64, got torch.int16"),
    ("cu_seqlens bool", cu([False, True], torch.bool), TypeError,
     "cu_seqlens: expected dtype torch.int32, torch.int64, got torch.bool"),
    ("cu_seqlens of two rows", cu([[0, 5]]), ValueError,
     "cu_seqlens: expected shape (N + 1,), got (1, 2)"),
    ("cu_seqlens empty", cu([]), ValueError, "cu_seqlens: expected shape (N + 1,), got (0,)"),
    ("cu_seqlens with a batch", lambda x: tokens(B=2)(x) | cu([0, 5, 10])(x), ValueError,
     "cu_seqlens: expected B = 1 (packed ...), got B = 2"),
    ("cu_seqlens_cpu alone", given(cu_seqlens_cpu=torch.tensor([0, 5])), ValueError,
     "cu_seqlens_cpu: expected cu_seqlens beside it, got cu_seqlens=None"),
    ("cu_seqlens_cpu of other length", cu([0, 2, 5], cu_seqlens_cpu=OTHER_LENGTH), ValueError,
     "cu_seqlens_cpu: expected the shape of cu_seqlens (3,), got (2,)"),
    ("cu_seqlens_cpu of other values", cu([0, 2, 5], cu_seqlens_cpu=OTHER_VALUES), ValueError,
     "cu_seqlens_cpu: expected the values of cu_seqlens [0, 2, 5], got [0, 3, 5]"),
    ("cu_seqlens_cpu wrong", cu([0, 5], cu_seqlens_cpu=torch.tensor([0, 6])), ValueError,
     "cu_seqlens_cpu: expected to end at T = 5, got 6"),
    # the gate
    ("A_log alone", given(A_log=torch.zeros(4)), ValueError,
     "A_log: expected None ...; got Tensor"),
    ("dt_bias alone", given(dt_bias=torch.zeros(64)), ValueError,
     "dt_bias: expected None without use_gate_in_kernel=True, ...; got Tensor"),
    ("no A_log", gate(A_log=None), ValueError, "A_log: expected a tensor, since ..., got None"),
    ("A_log a list", gate(A_log=[0.0] * 4), TypeError, "A_log: ... a torch.Tensor, got list"),
    ("A_log int", gate(A_log=torch.zeros(4, dtype=LONG)), TypeError,
     "A_log: expected a floating-point dtype, got torch.int64"),
    ("A_log of key heads", gate(A_log=torch.zeros(2)), ValueError,
     "A_log: expected shape (4,), got (2,)"),
    ("dt_bias of heads", gate(dt_bias=torch.zeros(4)), ValueError,
     "dt_bias: expected shape (64,) or (4, 16), got (4,)"),
    ("dt_bias transposed", gate(dt_bias=torch.zeros(16, 4)), ValueError,
     "dt_bias: expected shape (64,) or (4, 16), got (16, 4)"),
    ("lower_bound 0", gate(lower_bound=0), ValueError,
     "lower_bound: expected a finite number < 0, got 0"),
    ("lower_bound positive", gate(lower_bound=1.5), ValueError,
     "lower_bound: expected a finite number < 0, got 1.5"),
    ("lower_bound -inf", gate(lower_bound=-math.inf), ValueError,
     "lower_bound: expected a finite number, got -inf"),
    ("lower_bound NaN", gate(lower_bound=math.nan), ValueError,
     "lower_bound: expected a finite number, got nan"),
    ("lower_bound a string", gate(lower_bound="-5"), TypeError,
     "lower_bound: expected a number, got str"),
    ("lower_bound True", gate(lower_bound=True), TypeError,
     "lower_bound: expected a number, got bool"),
    ("lower_bound a tensor", gate(lower_bound=torch.tensor(-5.0)), TypeError,
     "lower_bound: expected a number, got Tensor"),
    ("lower_bound positive, no gate", given(lower_bound=1.0), ValueError,
     "lower_bound: expected a finite number < 0, got 1.0"),
    ("safe_gate below -5", gate(safe_gate=True, lower_bound=-5.1), ValueError,
     "lower_bound: expected -5.0 <= lower_bound < 0 with safe_gate ..., got -5.1"),
    ("safe_gate without bound", gate(safe_gate=True), ValueError,
     "lower_bound: expected -5.0 <= lower_bound < 0 with safe_gate ..., got None"),
    # the rest
    ("allow_neg_eigval alone", given(allow_neg_eigval=True), ValueError,
     "allow_neg_eigval: expected use_beta_sigmoid_in_kernel=True beside it, ...; got False"),
    ("scale a string", given(scale="0.5"), TypeError, "scale: expected a number, got str"),
    ("scale True", given(scale=True), TypeError, "scale: expected a number, got bool"),
    ("scale a tensor", given(scale=torch.tensor(1.0)), TypeError,
     "scale: expected a number, got Tensor"),
    ("scale NaN", given(scale=math.nan), ValueError, "scale: expected a finite number, got nan"),
    ("a flag a string", given(use_gate_in_kernel="no"), TypeError,
     "use_gate_in_kernel: expected True or False, got str"),
    ("a flag None", given(state_v_first=None), TypeError,
     "state_v_first: expected True or False, got NoneType"),
    ("an unknown keyword", given(unknown=1), TypeError,
     "... got an unexpected keyword argument 'unknown'"),
    ("chunk_size None", given(chunk_size=None), TypeError,
     "chunk_size: expected an int, got None..."),
    ("chunk_size 64.0", given(chunk_size=64.0), TypeError,
     "chunk_size: expected an int, got float"),
    ("chunk_size True", given(chunk_size=True), TypeError, "chunk_size: expected an int, got bool"),
    ("chunk_size 0", given(chunk_size=0), ValueError, "chunk_size: expected ..., got 0"),
]
# What the reference accepts and the kernels do not.
BAD_FOR_KERNELS = [
    ("chunk_size 48", given(chunk_size=48), ValueError,
     "chunk_size: expected one of (16, 32, 64), got 48"),
    ("257 key channels", tokens(K=257), ValueError,
     "q: expected a key dimension K <= 256, got K = 257"),
    ("float64", tokens(dtype=torch.float64), TypeError,
     "q: expected dtype torch.float32, torch.float16, torch.bfloat16, got torch.float64"),
]
# fmt: on

CASES = [
    pytest.param(function, row, id=f"{name}-{row[0]}")
    for functions, rows in ((ENTRIES, BAD), (KERNELS, BAD + BAD_FOR_KERNELS))
    for name, function in functions.items()
    for row in rows
    if arguments(function, row[1]) is not None
]


def assert_refused(function, call, row):
    what, _, error, message = row
    with pytest.raises((ValueError, TypeError)) as caught:
        function(**call)
    said = str(caught.value)
    assert type(caught.value) is error, said
    assert re.fullmatch(".*".join(re.escape(part) for part in message.split("...")), said), said


@pytest.mark.parametrize("function, row", CASES)
def test_bad_input_is_refused(function, row):
    assert_refused(function, arguments(function, row[1]), row)


def test_the_table_is_large_and_its_messages_are_whole():
    assert len({row[0] for row in BAD}) == len(BAD) >= 80
    for what, _, _, message in BAD + BAD_FOR_KERNELS:
        if what != "an unknown keyword":
            assert re.match(r"(\w+|\.\.\.): (expected|\.\.\.) .*\bgot \S", message), message


@pytest.mark.parametrize("name", ENTRIES)
def test_the_good_call_is_accepted_by_the_reference(name):
    o, _ = ENTRIES[name](**arguments(ENTRIES[name]))
    assert o.shape == (1, 5, 4, 9) and o.isfinite().all()


@pytest.mark.parametrize("name", KERNELS)
def test_the_good_call_comes_as_far_as_a_launch(name):
    with pytest.raises(Launched):
        KERNELS[name](**arguments(KERNELS[name]))


# -- what is allowed ---------------------------------------------------------------------------

ALLOWED = {
    "int64 cu_seqlens": cu([0, 0, 2, 5, 5], LONG),
    "cu_seqlens_cpu of another dtype": cu([0, 2, 5], cu_seqlens_cpu=torch.tensor([0, 2, 5])),
    "A_log with dimensions of size 1": gate(A_log=torch.zeros(1, 1, 4, 1)),
    "dt_bias by head": gate(dt_bias=torch.zeros(4, 16)),
    "dt_bias flat": gate(dt_bias=torch.zeros(64)),
    "a bound needs no A_log": gate(A_log=None, lower_bound=-5),
    "safe_gate at its limit": gate(safe_gate=True, lower_bound=-5.0),
    "safe_gate without a gate": given(safe_gate=True),
    "scale 0": given(scale=0),
    "scale negative": given(scale=-1.5),
    "gate and beta of other dtypes": lambda x: dict(g=x.g.half(), beta=x.beta.double()),
    "no token": tokens(T=0),
    "no batch": lambda x: {n: value[:0] for n, value in x._asdict().items() if value is not None},
    "256 key channels": tokens(K=256),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_is_allowed_is_accepted(name):
    shapes = checks.check_kda(**arguments(checks.check_kda, ALLOWED[name]))
    assert shapes[2:4] == (2, 4)


def test_no_sequence_at_all():
    call = arguments(checks.check_kda, tokens(T=0)) | dict(cu_seqlens=torch.tensor([0]))
    assert checks.check_kda(**call).N == 0


def test_the_state_may_be_as_wide_as_q():
    call = arguments(checks.check_kda, lambda x: x.double()._asdict())
    assert checks.check_kda(**call, dtypes=checks.REFERENCE_DTYPES).N == 1


def test_nothing_on_a_device_is_read():
    """A meta tensor has no values: it stands for one on a GPU, which must not be waited for."""
    x = good_inputs(cu_seqlens=[0, 2, 5]).to("meta")
    parameters = dict(A_log=NOWHERE.new_zeros(4).float(), use_gate_in_kernel=True)
    copy = torch.tensor([0, 2, 5])
    for more in ({}, dict(cu_seqlens_cpu=copy)):
        assert checks.check_kda(**x._asdict(), **parameters, **more).N == 2
    with pytest.raises(ValueError, match="cu_seqlens_cpu: expected to end at T = 5, got 6"):
        checks.check_kda(**x._asdict(), cu_seqlens_cpu=torch.tensor([0, 2, 6]))


# -- single steps ------------------------------------------------------------------------------


def sizes_of(**changes):
    """What a step of the pipeline asks of its tensors, in small."""
    x = good_inputs()
    x = dict(q=x.q, g=x.g) | {n: change(getattr(x, n)) for n, change in changes.items()}
    half = (torch.float32, torch.float16)
    return checks.check_sizes(q=(x["q"], "B T H K", half), g=(x["g"], "B T HV K"))


STEPS = [
    (dict(q=lambda q: q[0]), ValueError,
     "q: expected shape [B, T, H, K] = (B, T, H, K), got (5, 2, 16)"),
    (dict(g=lambda g: g[:, :4]), ValueError,
     "g: expected shape [B, T, HV, K] = (1, 5, 4, 16), got (1, 4, 4, 16)"),
    (dict(g=lambda g: g[:, :, :3]), ValueError,
     "HV: expected a multiple of H = 2 (value heads), got HV = 3"),
    (dict(q=lambda q: q.tolist()), TypeError, "q: expected a torch.Tensor, got list"),
    (dict(q=lambda q: q.bfloat16()), TypeError,
     "q: expected dtype torch.float32, torch.float16, got torch.bfloat16"),
    (dict(g=lambda g: g < 0), TypeError, "g: expected a floating-point dtype, got torch.bool"),
    (dict(g=meta), ValueError, f"g: {ON_META}"),
]  # fmt: skip


def test_sizes_are_those_of_the_letters():
    assert sizes_of() == dict(B=1, T=5, H=2, HV=4, K=16)


@pytest.mark.parametrize("changes, error, message", STEPS)
def test_a_step_refuses_tensors_that_do_not_fit(changes, error, message):
    assert_refused(sizes_of, changes, (None, None, error, message))


@pytest.mark.parametrize("size", [16, 32, 64])
def test_the_sizes_of_a_chunk(size):
    checks.check_chunk_size(size)
    with pytest.raises(ValueError, match=r"chunk_size: expected one of \(16, 32, 64\), got"):
        checks.check_chunk_size(size + 1)
    with pytest.raises(TypeError, match="chunk_size: expected an int, got float"):
        checks.check_chunk_size(float(size))


# -- the other functions of the reference ------------------------------------------------------


def special(function, **changes):
    """A call of one of the special cases, changed."""
    call = good_inputs()._asdict()
    if function is reference.gated_delta_net:
        call["g"] = call["g"][..., 0]
    taken = inspect.signature(function).parameters
    return {n: value for n, value in call.items() if n in taken} | changes


SPECIAL = [reference.linear_attention, reference.delta_net, reference.gated_delta_net]


@pytest.mark.parametrize("function", SPECIAL)
def test_special_cases_refuse_bad_input(function):
    x = good_inputs()
    rows = [
        (dict(q=x.q.tolist()), TypeError, "q: expected a torch.Tensor, got list"),
        (dict(q=x.q[0]), ValueError, "q: expected shape [B, T, H, K] ..., got (5, 2, 16)"),
        (dict(k=x.k[..., :8]), ValueError, "k: expected shape (1, 5, 2, 16), got (1, 5, 2, 8)"),
        (dict(v=None), TypeError, "v: expected a torch.Tensor, got NoneType"),
        (dict(v=x.v[:, :, 0]), ValueError, "v: expected shape [B, T, HV, V] ..., got (1, 5, 9)"),
        (dict(scale="1"), TypeError, "scale: expected a number, got str"),
        (dict(unknown=1), TypeError, "...unexpected keyword argument 'unknown'"),
    ]
    for changes, error, message in rows:
        assert_refused(function, special(function, **changes), (None, None, error, message))


OTHERS = [
    (reference.delta_net, special(reference.delta_net, use_gate_in_kernel=True), ValueError,
     "use_gate_in_kernel: expected False, since DeltaNet has no gate, got True"),
    (reference.gated_delta_net, special(reference.gated_delta_net, g=good_inputs().g), ValueError,
     "g: expected shape (1, 5, 4), got (1, 5, 4, 16)"),
    (reference.linear_attention, special(reference.linear_attention, g=good_inputs().beta),
     ValueError, "g: expected shape (1, 5, 4, 16), got (1, 5, 4)"),
    (reference.l2norm, dict(x=[1.0]), TypeError, "x: expected a torch.Tensor, got list"),
    (reference.l2norm, dict(x=torch.ones(2, dtype=LONG)), TypeError,
     "x: expected a floating-point dtype, got torch.int64"),
    (reference.kda_gate, dict(x=torch.ones(4)), ValueError,
     "x: expected shape [..., HV, K], HV and K at least 1, got (4,)"),
    (reference.kda_gate, dict(x=torch.ones(2, 3)), ValueError,
     "A_log: expected a tensor, since no lower_bound is given, got None"),
    (reference.kda_gate, dict(x=torch.ones(2, 3), lower_bound=0.5), ValueError,
     "lower_bound: expected a finite number < 0, got 0.5"),
    (reference.kda_gate, dict(x=torch.ones(2, 3), lower_bound=-5.0, beta=0), ValueError,
     "beta: expected a finite number > 0, got 0"),
    (reference.kda_gate, dict(x=torch.ones(2, 3), lower_bound=-5.0, threshold=-1), ValueError,
     "threshold: expected a number >= 0, got -1"),
    (reference.kda_gate, dict(x=torch.ones(2, 3), lower_bound=-5.0, threshold="20"), TypeError,
     "threshold: expected a number, got str"),
]  # fmt: skip


@pytest.mark.parametrize("function, call, error, message", OTHERS)
def test_the_rest_of_the_reference_refuses_bad_input(function, call, error, message):
    assert_refused(function, call, (None, None, error, message))
