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

KERNELS = importlib.util.find_spec("triton") is not None
if KERNELS:
    import triton

    from kda_edu import chunk_kda, fused_recurrent_kda, fused_recurrent_kda_update

    ENTRIES = {
        "reference.recurrent_kda": reference.recurrent_kda,
        "reference.chunk_kda": reference.chunk_kda,
        "chunk_kda": chunk_kda,
        "fused_recurrent_kda": fused_recurrent_kda,
        "fused_recurrent_kda_update": fused_recurrent_kda_update,
    }
else:
    ENTRIES = {
        "reference.recurrent_kda": reference.recurrent_kda,
        "reference.chunk_kda": reference.chunk_kda,
    }


class Launched(Exception):
    """A call came as far as the launch of a kernel."""


@pytest.fixture(autouse=True)
def no_launch(monkeypatch):
    def refuse(kernel, grid):
        raise Launched

    if KERNELS:
        monkeypatch.setattr(triton.runtime.jit.KernelInterface, "__getitem__", refuse)


def good_call(**sizes):
    """The arguments of a call that every entry point accepts: float32, HV > H, a state."""
    return make_inputs(**dict(B=1, T=5, H=2, HV=4, K=16, V=9) | sizes)


def arguments(function, x, changes):
    """Those of `x` that `function` takes, with the changes made; None if it lacks one of these."""
    taken = inspect.signature(function).parameters
    given = {n: value for n, value in x._asdict().items() if n in taken and value is not None}
    if "state_pool" in taken:
        given["state_pool"] = torch.zeros(7, *x.v.shape[2:3], x.q.shape[3], x.v.shape[3])
        N = x.q.shape[0]
        given["slot_indices"] = torch.arange(N)
    known = all(n in taken or n.startswith("unknown") for n in changes)
    return given | changes if known else None


def pattern(message):
    return "^" + ".*".join(re.escape(part) for part in message.split("...")) + "$"


# -- the table ---------------------------------------------------------------------------------


def put(name, change):
    """Replace one argument by change(argument)."""
    return lambda x: {name: change(getattr(x, name))}


def given(**changes):
    return lambda x: changes


def cu(values, dtype=torch.int32, **more):
    return lambda x: dict(cu_seqlens=torch.tensor(values, dtype=dtype), initial_state=None) | more


def gate(**changes):
    """A call with the gate inside, right but for the changes."""
    return lambda x: dict(use_gate_in_kernel=True, A_log=torch.zeros(4)) | changes


def meta(x):
    return x.to("meta")


ON_META = "expected device cpu (where q is), got meta"
LONG = torch.int64

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
    ("cu_seqlens elsewhere", given(cu_seqlens=torch.zeros(2, dtype=torch.int32, device="meta")), ValueError,
     "cu_seqlens: expected device cpu, got meta"),
    ("cu_seqlens_cpu elsewhere", cu([0, 5], cu_seqlens_cpu=torch.zeros(2, dtype=torch.int32, device="meta")), ValueError,
     "cu_seqlens_cpu: expected device cpu, got meta"),
    # the state
    ("state a list", put("initial_state", lambda s: [s]), TypeError,
     "initial_state: expected a torch.Tensor, got list"),
    ("state transposed", put("initial_state", lambda s: s.transpose(2, 3)), ValueError,
     "initial_state: expected shape (1, 4, 16, 9) = [N, HV, K, V], got (1, 4, 9, 16)"),
    ("state not transposed", given(state_v_first=True), ValueError,
     "...: expected shape (..., 4, 9, 16) = [N, HV, V, K] (state_v_first=True), " "got (..., 4, 16, 9)"),
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
    ("cu_seqlens with a batch", lambda x: good_call(B=2)._asdict() | cu([0, 5, 10])(x), ValueError,
     "cu_seqlens: packed sequences need B = 1 (concatenate along T), got B = 2"),
    ("cu_seqlens_cpu alone", given(cu_seqlens_cpu=torch.tensor([0, 5])), ValueError,
     "cu_seqlens_cpu: expected cu_seqlens beside it, got cu_seqlens=None"),
    ("cu_seqlens_cpu of other length", cu([0, 2, 5], cu_seqlens_cpu=torch.tensor([0, 5])), ValueError,
     "cu_seqlens_cpu: expected the shape of cu_seqlens (3,), got (2,)"),
    ("cu_seqlens_cpu of other values", cu([0, 2, 5], cu_seqlens_cpu=torch.tensor([0, 3, 5])), ValueError,
     "cu_seqlens_cpu: expected the values of cu_seqlens [0, 2, 5], got [0, 3, 5]"),
    ("cu_seqlens_cpu wrong", cu([0, 5], cu_seqlens_cpu=torch.tensor([0, 6])), ValueError,
     "cu_seqlens_cpu: expected to end at T = 5, got 6"),
    # the gate
    ("A_log alone", given(A_log=torch.zeros(4)), ValueError,
     "A_log: expected None ...; got Tensor"),
    ("dt_bias alone", given(dt_bias=torch.zeros(64)), ValueError,
     "dt_bias: expected None without use_gate_in_kernel=True, where g is already the log " "decay; got Tensor"),
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
@@STAR@@
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
    ("257 key channels", lambda x: good_call(K=257)._asdict(), ValueError,
     "q: expected a key dimension K <= 256, got K = 257"),
    ("float64", lambda x: good_call(dtype=torch.float64)._asdict(), TypeError,
     "q: expected dtype torch.float32, torch.float16, torch.bfloat16, got torch.float64"),
]
