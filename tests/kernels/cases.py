"""Calls beside the float64 oracle, shared by the tests of both kernels.

What is here fits `fused_recurrent_kda` and `chunk_kda` alike: inputs of a covering set of options,
comparisons, awkward memory layouts, and mistakes.
"""

import itertools

import torch

from kda_edu.reference import recurrent_kda
from kda_edu.teach.check import rms_error
from kda_edu.teach.inputs import make_inputs

NAMES = ("q", "k", "v", "g", "beta")


def small(device, **changes):
    """Inputs of a small ragged call: two heads of q and k, four of v, V in two uneven tiles."""
    sizes = dict(B=1, T=5, H=2, HV=4, K=16, V=9) | changes
    return make_inputs(device=device, **sizes)


def oracle(x, **options):
    """(o, final state) of the reference, in float64 on the CPU."""
    given = x._asdict() | dict(output_final_state=True) | options
    return recurrent_kda(**{name: _wide(value) for name, value in given.items()})


def _wide(value):
    if not isinstance(value, torch.Tensor):
        return value
    return value.cpu().double() if value.is_floating_point() else value.cpu()


def assert_same(got, want, names=("o", "final state")):
    """Bitwise equal."""
    for name, a, b in zip(names, got, want, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), name


def assert_agree(got, want, names=("o", "final state")):
    """Bitwise equal; on a GPU to rounding, since there the width of a load orders its sums."""
    if not got[0].is_cuda:
        return assert_same(got, want, names)
    for name, a, b in zip(names, got, want, strict=True):
        assert a.dtype == b.dtype and rms_error(a, b) < 1e-6, name


def tokens(x, part):
    """The same inputs with `part`, a slice, of the tokens."""
    return x._replace(**{name: getattr(x, name)[:, part] for name in NAMES})


# -- inputs of a covering case -------------------------------------------------------------------


def build(case, device, B=2):
    """(inputs, options) of a case: a dict that names one value of every option.

    dtype, dims (K, V), heads (H, HV), lengths (T, or a tuple: packed sequences), index (dtype of
    cu_seqlens), gate, gate_dtype, beta, l2norm, scale, initial_state, final_state, state_v_first.
    """
    (H, HV), (K, V), lengths = case["heads"], case["dims"], case["lengths"]
    packed = isinstance(lengths, tuple)
    cu = torch.tensor([0, *itertools.accumulate(lengths)]) if packed else None
    x = make_inputs(
        B=B,
        T=0 if packed else lengths,
        H=H,
        HV=HV,
        K=K,
        V=V,
        dtype=case["dtype"],
        initial_state=case["initial_state"],
        cu_seqlens=cu,
        keys="unit" if not case["l2norm"] else "correlated",
    )
    options = dict(
        scale=case["scale"],
        output_final_state=case["final_state"],
        use_qk_l2norm_in_kernel=case["l2norm"],
        state_v_first=case["state_v_first"],
    )
    if cu is not None:
        x = x._replace(cu_seqlens=cu.to(case["index"]))
    if case["l2norm"]:
        x = x._replace(q=x.q * 3, k=x.k * 0.5)
    if case["state_v_first"] and x.initial_state is not None:
        x = x._replace(initial_state=x.initial_state.transpose(-1, -2).contiguous())
    x, options = _with_gate(case, x, options)
    if case["beta"] != "given":
        options["use_beta_sigmoid_in_kernel"] = True
        options["allow_neg_eigval"] = case["beta"] == "2 sigmoid"
        x = x._replace(beta=(4 * x.beta.float() - 2).to(case["dtype"]))
    options = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in options.items()
    }
    return x.to(device), options


def _with_gate(case, x, options):
    HV, K = x.g.shape[2:]
    draw = torch.Generator().manual_seed(1)
    if case["gate"] != "given":
        x = x._replace(g=2 * torch.randn(x.g.shape, generator=draw))
        options["use_gate_in_kernel"] = True
        if "no A_log" not in case["gate"]:
            options["A_log"] = torch.linspace(-1, 1, HV)
        if "bias" in case["gate"]:
            options["dt_bias"] = torch.randn(HV * K, generator=draw)
        if "bounded" in case["gate"]:
            options["lower_bound"] = -5.0
    return x._replace(g=x.g.to(case["gate_dtype"])), options


def assert_every_pair(cases, options, largest=9):
    """Every value of each option occurs, and every pair of values of any two short options."""
    for (a, values_a), (b, values_b) in itertools.combinations(options.items(), 2):
        if len(values_a) * len(values_b) <= largest:
            met = {(case[a], case[b]) for case in cases}
            assert met == set(itertools.product(values_a, values_b)), (a, b)
    for name, values in options.items():
        assert {case[name] for case in cases} == set(values)


# -- layouts and mistakes ------------------------------------------------------------------------


def gapped(x):
    """The same numbers as a view of a wider tensor: every dimension strided, the last contiguous.

    The gaps hold NaN.
    """
    wide = torch.full([2 * n for n in x.shape[:-1]] + [x.shape[-1] + 5], float("nan"))
    view = wide.to(x)[..., : x.shape[-1]]
    for axis, n in enumerate(x.shape[:-1]):
        view = view.narrow(axis, 1, n) if axis else view[:n]
    return view.copy_(x)


def broken(name, change):
    """Change one argument of a valid call."""
    return lambda x: {name: change(getattr(x, name))}


# Changes to a valid call small("cpu"), and the error that each must raise.
WRONG = [
    (lambda x: dict(q=x.q[0]), ValueError, "q:"),
    (lambda x: dict(q=x.q.numpy()), TypeError, "q:"),
    (broken("q", lambda q: q.double()), TypeError, "q:"),
    (broken("k", lambda k: k.half()), TypeError, "k:"),
    (broken("k", lambda k: k[..., :8]), ValueError, "k:"),
    (broken("v", lambda v: v[:, :2]), ValueError, "v:"),
    (broken("v", lambda v: v[:, :, :3]), ValueError, "v:"),
    (broken("g", lambda g: g[:, :, :2]), ValueError, "g:"),
    (broken("g", lambda g: g.int()), TypeError, "g:"),
    (broken("beta", lambda beta: beta[..., None]), ValueError, "beta:"),
    (broken("initial_state", lambda s: s.half()), TypeError, "initial_state:"),
    (broken("initial_state", lambda s: s.transpose(2, 3)), ValueError, "initial_state:"),
    (lambda x: dict(state_v_first=True), ValueError, "initial_state:"),
    (lambda x: dict(cu_seqlens=torch.tensor([0, 2.0, 5.0])), TypeError, "cu_seqlens:"),
    (lambda x: dict(cu_seqlens=torch.tensor([1, 5])), ValueError, "cu_seqlens:"),
    (lambda x: dict(cu_seqlens=torch.tensor([0, 3, 2, 5])), ValueError, "cu_seqlens:"),
    (lambda x: dict(cu_seqlens=torch.tensor([0, 4])), ValueError, "cu_seqlens:"),
    (lambda x: dict(cu_seqlens=torch.tensor([0, 2, 5])), ValueError, "initial_state:"),
    (lambda x: dict(scale="1"), TypeError, "scale:"),
    (lambda x: dict(A_log=torch.zeros(4)), ValueError, "A_log:"),
    (lambda x: dict(use_gate_in_kernel=True), ValueError, "A_log:"),
    (lambda x: dict(use_gate_in_kernel=True, A_log=torch.zeros(3)), ValueError, "A_log:"),
    (lambda x: dict(use_gate_in_kernel=True, lower_bound=1.0), ValueError, "lower_bound:"),
    (lambda x: dict(allow_neg_eigval=True), ValueError, "allow_neg_eigval:"),
    (lambda x: dict(use_l2norm=True), TypeError, "use_l2norm"),
]
