"""Further things that four processes do, each a function of the group of all four."""

import torch
import torch.distributed as dist
from cp_cases import Case, leaves, serial, weights
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from kda_edu import reference
from kda_edu.distributed import (
    context_parallel_kda,
    convolution_state,
    count_bytes,
    find_piece,
    split_lengths,
    split_sequence,
    tokens_before,
)
from kda_edu.distributed.kda import _gradient_of_entering_state, _local_function, fold
from kda_edu.layers import KimiDeltaAttention, ShortConvolution
from kda_edu.teach.check import rms_error
from kda_edu.teach.inputs import make_inputs

EXTRAS = {}
F32, F64 = torch.float32, torch.float64


def extra(name, budget=None):
    """Register a function. With a budget it returns {what: error}."""

    def register(function):
        function.budget = budget
        EXTRAS[name] = function
        return function

    return register


def some_inputs(T=12, dtype=torch.float64, **sizes):
    return make_inputs(**dict(B=1, T=T, H=2, K=4, V=5, initial_state=False, dtype=dtype) | sizes)


def pieces(x, group, lengths=None):
    return [split_sequence(t, group, lengths=lengths) for t in x[:5]]


@extra("bytes at two lengths")
def bytes_at_two_lengths(group):
    found = []
    for T in (12, 240):
        cut = [t.clone().requires_grad_() for t in pieces(some_inputs(T), group)]
        with count_bytes() as sent:
            context_parallel_kda(*cut, group=group)[0].sum().backward()
        found.append(dict(sent))
    return found


@extra("what runs")
def what_runs(group):
    """Which function a rank calls for float32 and for float64."""
    choices = [_local_function(*some_inputs(dtype=dtype)[:3])[0] for dtype in (F32, F64)]
    return [choice is reference.chunk_kda for choice in choices]


def message_of(function, *args, **options):
    try:
        function(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


@extra("ranks that differ")
def ranks_that_differ(group):
    odd = dist.get_rank(group) == 2
    cut = pieces(some_inputs(), group)
    one_head = pieces(some_inputs(H=1, HV=2), group)
    single = pieces(some_inputs(dtype=torch.float32), group)
    learned = [t.clone().requires_grad_() for t in cut]
    states = torch.zeros(2, 2, 4, 5, dtype=torch.float64)
    two = pieces(some_inputs(B=2), group)
    cu = torch.tensor([0, 5 + odd, 12])
    calls = {
        "heads": (one_head if odd else cut, {}),
        "dtype": (single if odd else cut, {}),
        "scale": (cut, dict(scale=1.0 + odd)),
        "states": (two, dict(initial_state=states if odd else None)),
        "gradients": (learned if odd else cut, {}),
        "packing": (cut, dict(cu_seqlens=cu)),
        "lengths": (cut, dict(lengths=[3, 3, 3, 4])),
        "end": (cut, dict(cu_seqlens=torch.tensor([0, 13]))),
    }
    if dist.get_rank(group) == 3:
        calls["lengths"] = cut, dict(lengths=[3, 3, 3, 3])
    return {
        name: message_of(context_parallel_kda, *args, group=group, **options)
        for name, (args, options) in calls.items()
    }


@extra("a refused argument")
def a_refused_argument(group):
    q, k, v, g, beta = pieces(some_inputs(), group)
    if dist.get_rank(group) == 2:
        beta = torch.cat([beta, beta[..., :1]], dim=-1)
    return message_of(context_parallel_kda, q, k, v, g, beta, group=group)


@extra("what is no group")
def what_is_no_group(group):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    tokens = torch.zeros(1, 5)
    return [
        message_of(split_sequence, tokens, mesh),
        message_of(split_sequence, tokens, dist.GroupMember.NON_GROUP_MEMBER),
        message_of(split_sequence, tokens, "cp"),
        message_of(split_sequence, tokens, group, lengths=[1, 2, 3]),
        message_of(split_sequence, tokens, group, lengths=[1, 2, 3, 4]),
        message_of(tokens_before, tokens, -1, group),
        message_of(tokens_before, tokens, 3, group, lengths=[7, 7, 7, 7]),
    ]


@extra("an infinite sequence")
def an_infinite_sequence(group):
    """Sequence 0 lies on ranks 0 and 1 and is full of infinities; sequence 1 on ranks 1 to 3."""
    x = some_inputs(initial_state=True, cu_seqlens=[0, 5, 12])
    x.v[:, :5] = torch.inf
    want, want_S = reference.chunk_kda(**x._asdict(), output_final_state=True)
    options = dict(initial_state=x.initial_state, cu_seqlens=x.cu_seqlens)
    o, S = context_parallel_kda(*pieces(x, group), **options, output_final_state=True, group=group)
    same = torch.allclose(o[:, -1:], split_sequence(want, group)[:, -1:], equal_nan=True)
    bad = int((~S[0].isfinite()).sum())
    good = int((~S[1].isfinite()).sum()) + (not same) + (not torch.allclose(S[1], want_S[1]))
    return bad, good


@extra("an autocast keeps states exact", budget=1e-6)
def an_autocast(group):
    draw = torch.Generator().manual_seed(0)
    maps = torch.randn(5, 1, 2, 8, 12, generator=draw) / 4
    state = torch.randn(1, 2, 8, 4, generator=draw)
    P, d_o = torch.randn(1, 7, 2, 8, generator=draw), torch.randn(1, 7, 2, 4, generator=draw)
    piece = find_piece(1, [5, 7, 0])
    arguments = d_o, state, P, maps[0, ..., :8]  # the state stands for a gradient
    with torch.autocast("cpu", torch.bfloat16):
        got = fold(maps, state), _gradient_of_entering_state(piece, *arguments)
    assert got[0].dtype == got[1].dtype == torch.float32
    want = fold(maps.double(), state.double())
    d_want = _gradient_of_entering_state(piece, *(t.double() for t in arguments))
    return {"state": rms_error(got[0], want), "gradient": rms_error(got[1], d_want)}


class Layer(torch.nn.Module):
    """A small KDA layer: projections, the gate's parameters, and a convolution over 4 tokens."""

    def __init__(self):
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        self.H, self.K = 2, 4
        wide = self.H * self.K
        self.project = parameter(draw, 6, 4 * wide + self.H)
        self.filter = parameter(draw, 4, 6)
        self.A_log, self.dt_bias = parameter(draw, self.H), parameter(draw, wide)
        self.back = parameter(draw, wide, 6)

    def forward(self, x, group=None, lengths=None):
        """x [B, T, 6] -> [B, T, 6]; with a group, x is this rank's piece."""
        before = x.new_zeros(x.shape[0], 3, x.shape[2])
        if group is not None:
            before = tokens_before(x, 3, group, lengths=lengths)
        longer = torch.cat([before, x], dim=1)
        x = sum(longer[:, i : i + x.shape[1]] * self.filter[i] for i in range(4))
        *qkvg, beta = (x @ self.project).split([8, 8, 8, 8, 2], dim=-1)
        q, k, v, g = (t.unflatten(-1, (self.H, self.K)) for t in qkvg)
        options = dict(A_log=self.A_log, dt_bias=self.dt_bias, use_gate_in_kernel=True)
        options |= dict(use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True)
        if group is None:
            o, _ = reference.chunk_kda(q, k, v, g, beta, **options)
        else:
            options |= dict(group=group, lengths=lengths)
            o, _ = context_parallel_kda(q, k, v, g, beta, **options)
        return o.flatten(2) @ self.back


def parameter(draw, *shape):
    return torch.nn.Parameter(torch.randn(*shape, generator=draw, dtype=torch.float64))


def layer_losses(wrap, group, lengths):
    """(serial layer, wrapped layer), both after backward of one and the same loss."""
    draw = torch.Generator().manual_seed(4)
    x = torch.randn(2, sum(lengths), 6, generator=draw, dtype=torch.float64)
    alone, split = Layer(), wrap(Layer())
    o = alone(x)
    w = weights(o, o.shape, 5)
    (o * w).sum().backward()
    mine = [split_sequence(t, group, lengths=lengths) for t in (x, w)]
    (split(mine[0], group, lengths) * mine[1]).sum().backward()
    return alone, split


@extra("DistributedDataParallel", budget=1e-12)
def data_parallel(group):
    """Its parameters' gradients are means over the ranks, so R times them is the serial gradient;
    one rank has no token."""
    wrap = lambda layer: DistributedDataParallel(layer, process_group=group)  # noqa: E731
    alone, split = layer_losses(wrap, group, [9, 0, 2, 13])
    pairs = zip(alone.named_parameters(), split.parameters(), strict=True)
    return {name: rms_error(4 * b.grad, a.grad) for (name, a), b in pairs}


@extra("FSDP2", budget=1e-12)
def fsdp2(group):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    wrap = lambda layer: fully_shard(layer, mesh=mesh)  # noqa: E731
    alone, split = layer_losses(wrap, group, [9, 0, 2, 13])
    pairs = zip(alone.named_parameters(), split.parameters(), strict=True)
    return {name: rms_error(4 * b.grad.full_tensor(), a.grad) for (name, a), b in pairs}


@extra("the library's layer", budget=1e-5)
def whole_layer(group):
    """Its convolutions look across borders; once rectangular, once packed. Norms are float32."""
    found = {}
    for kind, cu in (("rows", None), ("packed", torch.tensor([0, 5, 5, 17, 24]))):
        torch.manual_seed(6)
        layer = KimiDeltaAttention(6, head_dim=4, num_heads=2, num_v_heads=4).double()
        x = torch.randn(1 if cu is not None else 2, 24, 6, dtype=torch.float64)
        o, _, _ = layer(x, cu_seqlens=cu)
        w = weights(o, o.shape, 5)
        (o * w).sum().backward()
        want = {name: p.grad.clone() for name, p in layer.named_parameters()}
        layer.zero_grad()
        lengths = [9, 0, 2, 13]
        x, w, o = (split_sequence(t, group, lengths=lengths) for t in (x, w, o.detach()))
        got, _, _ = layer(x, cu_seqlens=cu, cp_group=group, cp_lengths=lengths)
        (got * w).sum().backward()
        if o.numel():
            found[f"o, {kind}"] = rms_error(got.detach(), o)
        for name, p in layer.named_parameters():
            share = torch.zeros_like(p) if p.grad is None else p.grad  # a rank has no token
            dist.all_reduce(share, group=group)
            found[f"d {name}, {kind}"] = rms_error(share, want[name])
    return found


@extra("tensor parallelism over heads", budget=1e-12)
def heads_and_tokens(group):
    """Two ranks for the tokens times two for the heads, by a DeviceMesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    case = Case(2, [11, 13], options=dict(use_qk_l2norm_in_kernel=True), final_state=False)
    x = make_inputs(B=2, T=24, H=2, HV=4, K=6, V=5, seed=2, dtype=torch.float64)
    want, _, grads = serial(case)
    tp, cp = mesh["tp"].get_local_rank(), mesh["cp"]
    given = leaves(x, {})
    names = ("q", "k", "v", "g", "beta")
    cut = {n: split_sequence(given[n], cp, lengths=case.lengths).chunk(2, 2)[tp] for n in names}
    state = given["initial_state"].chunk(2, 1)[tp]
    o, _ = context_parallel_kda(**cut, **case.options, initial_state=state, group=cp)
    o_want, w = (
        split_sequence(t, cp, lengths=case.lengths).chunk(2, 2)[tp]
        for t in (want, weights(want, want.shape, 1))
    )
    (o * w).sum().backward()
    found = {"o": rms_error(o.detach(), o_want)}
    for name in (*names, "initial_state"):
        dist.all_reduce(given[name].grad, group=group)
        found[f"d {name}"] = rms_error(given[name].grad, grads[name])
    return found


@extra("activation checkpointing", budget=1e-12)
def checkpointing(group):
    lengths = split_lengths(15, 4)
    found = []
    for through in (lambda f, *a: f(*a), torch.utils.checkpoint.checkpoint):
        options = dict(use_reentrant=False) if len(found) else {}
        cut = [t.clone().requires_grad_() for t in pieces(some_inputs(15), group, lengths)]
        run = lambda *a: context_parallel_kda(*a, group=group)[0]  # noqa: E731
        through(run, *cut, **options).square().sum().backward()
        found.append([t.grad for t in cut])
    return {str(i): rms_error(a, b) for i, (a, b) in enumerate(zip(*found, strict=True))}


@extra("a short convolution", budget=1e-12)
def short_convolution(group):
    """The layer's convolution over pieces, with and without packed sequences, and its gradients."""
    found = {}
    for lengths in ([5, 4, 6, 3], [2, 1, 0, 9], [0, 0, 12, 0]):
        T = sum(lengths)
        for cu in (None, torch.tensor([0, 0, 3, T - 5, T - 5, T])):
            if cu is None and 0 in lengths:
                continue  # torch's own conv1d takes no input shorter than its kernel
            torch.manual_seed(5)
            alone, split = (ShortConvolution(6).double() for _ in range(2))
            split.load_state_dict(alone.state_dict())
            x = torch.randn(1 if cu is not None else 2, T, 6, dtype=torch.float64)
            w = weights(x, x.shape, 6)
            y, _ = alone(x, None, cu)
            (y * w).sum().backward()
            mine, w, want = (split_sequence(t, group, lengths=lengths) for t in (x, w, y.detach()))
            mine = mine.clone().requires_grad_()
            state, local = convolution_state(mine, 3, group, cu_seqlens=cu, lengths=lengths)
            y, _ = split(mine, state, local)
            (y * w).sum().backward()
            gradient = split.weight.grad
            dist.all_reduce(gradient, group=group)
            name = f"{lengths}, {'packed' if cu is not None else 'batch'}"
            found[name] = rms_error(y.detach(), want)
            found[f"d weight, {name}"] = rms_error(gradient, alone.weight.grad)
    return found


@extra("tokens before", budget=0.0)
def tokens_before_a_piece(group):
    """Values and gradients of the halo, for pieces shorter than it and packed sequences."""
    found = {}
    rank = dist.get_rank(group)
    for count in (0, 1, 3):
        for lengths in ([5, 4, 6, 3], [2, 1, 0, 9], [0, 0, 7, 1], [0, 0, 0, 0]):
            for cu in (None, "inside", "at a border"):
                T = sum(lengths)
                starts = [0, min(2, T), min(sum(lengths[:2]) + (cu == "inside"), T), T]
                packed = None if cu is None else torch.tensor(sorted(starts))
                whole = torch.arange(1.0, T * 2 + 1).view(1, T, 2)
                want, d_want = halo_by_hand(whole, count, lengths, rank, packed)
                x = whole.clone().requires_grad_()
                mine = split_sequence(x, group, lengths=lengths)
                got = tokens_before(mine, count, group, cu_seqlens=packed)
                (got * (rank + 1)).sum().backward()
                gradient = torch.zeros_like(whole) if x.grad is None else x.grad
                dist.all_reduce(gradient, group=group)
                dist.all_reduce(d_want, group=group)
                name = f"{count}, {lengths}, {cu}"
                assert got.shape == want.shape
                off = (got.detach() - want).abs().sum() + (gradient - d_want).abs().sum()
                found[name] = float(off)
    return found


def halo_by_hand(whole, count, lengths, rank, cu):
    """Token by token: what this rank sees before its piece, and the gradient that it sends back."""
    start, want, gradient = sum(lengths[:rank]), [], torch.zeros_like(whole)
    starts = [0] if cu is None else [c for c in cu.tolist() if c <= start]
    for t in range(start - count, start):
        known = t >= max(starts)
        want.append(whole[:, t] if known else torch.zeros(1, 2))
        if known:
            gradient[:, t] += rank + 1
    return torch.stack(want, 1) if want else torch.zeros(1, 0, 2), gradient
