"""Argument checks shared by every entry point: the reference and the kernels.

Bad input raises `ValueError` (a value or a shape) or `TypeError` (a type or a dtype). The message
names the argument, says what was expected and what came. Nothing is cast or cut silently.
"""

import math
from typing import NamedTuple

import torch

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
REFERENCE_DTYPES = (*KERNEL_DTYPES, torch.float64)
MAX_KEY_DIM = 256  # one program holds all K rows of its columns of the state in registers
CHUNK_SIZES = (16, 32, 64)
SAFE_LOWER_BOUND = -5.0


class Shapes(NamedTuple):
    """Sizes of one call. N is the number of sequences: B, or len(cu_seqlens) - 1."""

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    N: int


def check_kda(
    q,
    k,
    v,
    g,
    beta,
    *,
    A_log=None,
    dt_bias=None,
    scale=None,
    initial_state=None,
    use_gate_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    safe_gate=False,
    lower_bound=None,
    state_v_first=False,
    cu_seqlens=None,
    cu_seqlens_cpu=None,
    chunk_size=64,
    dtypes=KERNEL_DTYPES,
    max_key_dim=MAX_KEY_DIM,
) -> Shapes:
    """Check the arguments of a KDA call and return their sizes. Never reads GPU memory."""
    shapes = check_qkv(q, k, v, dtypes, max_key_dim)
    B, T, _, HV, K, _, _ = shapes
    check_floating("g", g, shape=(B, T, HV, K), device=q.device)
    check_floating("beta", beta, shape=(B, T, HV), device=q.device)
    check_flags(
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        safe_gate=safe_gate,
        state_v_first=state_v_first,
    )
    if cu_seqlens is not None:
        N = check_cu_seqlens(cu_seqlens, shapes.B, shapes.T, q.device, cu_seqlens_cpu)
        shapes = shapes._replace(N=N)
    elif cu_seqlens_cpu is not None:
        raise ValueError("cu_seqlens_cpu: expected cu_seqlens beside it, got cu_seqlens=None")
    if scale is not None:
        check_number("scale", scale)
    _check_gate(shapes, q, A_log, dt_bias, use_gate_in_kernel, safe_gate, lower_bound)
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError(
            "allow_neg_eigval: expected use_beta_sigmoid_in_kernel=True beside it, since it "
            "doubles that sigmoid; got False"
        )
    if initial_state is not None:
        check_state("initial_state", initial_state, shapes, q, state_v_first)
    check_chunk_size(chunk_size)
    return shapes


def check_tensor(name, x, *, shape=None, dtypes=None, device=None):
    """Check that `x` is a tensor with this shape, one of these dtypes, and on this device."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    if shape is not None and tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name}: expected shape {tuple(shape)}, got {tuple(x.shape)}")
    if dtypes is not None and x.dtype not in dtypes:
        expected = ", ".join(str(d) for d in dtypes)
        raise TypeError(f"{name}: expected dtype {expected}, got {x.dtype}")
    if device is not None and x.device != device:
        raise ValueError(f"{name}: expected device {device} (where q is), got {x.device}")


def check_floating(name, x, *, shape=None, device=None):
    """Like `check_tensor`, for any floating-point dtype."""
    check_tensor(name, x, shape=shape, device=device)
    if not x.is_floating_point():
        raise TypeError(f"{name}: expected a floating-point dtype, got {x.dtype}")


def check_number(name, x, *, finite=True):
    """Check for a Python number, finite unless said otherwise. A bool is no number."""
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        raise TypeError(f"{name}: expected a number, got {type(x).__name__}")
    if finite and not math.isfinite(x):
        raise ValueError(f"{name}: expected a finite number, got {x}")


def check_integer(name, x):
    """Check for a Python int."""
    if isinstance(x, bool) or not isinstance(x, int):
        raise TypeError(f"{name}: expected an int, got {type(x).__name__}")


def check_flags(**flags):
    """Check that each is True or False: the string "False", say, would count as True."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name}: expected True or False, got {type(flag).__name__}")


def check_sizes(**arguments) -> dict[str, int]:
    """Check that tensors fit together by the letters of their dimensions; return the sizes.

    Each argument is name=(tensor, "B T HV K") or name=(tensor, "B T HV K", dtypes). The first
    tensor with a letter fixes its size, and the first tensor fixes the device.
    """
    sizes, device = {}, None
    for name, (x, letters, *dtypes) in arguments.items():
        check_tensor(name, x, dtypes=dtypes[0] if dtypes else None, device=device)
        check_floating(name, x)
        letters, device = letters.split(), x.device
        if x.ndim == len(letters):
            for letter, size in zip(letters, x.shape, strict=True):
                sizes.setdefault(letter, size)
        expected = [sizes.get(letter, letter) for letter in letters]
        if list(x.shape) != expected:
            raise ValueError(
                f"{name}: expected shape [{', '.join(letters)}] = "
                f"({', '.join(map(str, expected))}), got {tuple(x.shape)}"
            )
    if sizes.get("HV", 0) % max(sizes.get("H", 1), 1) != 0:
        raise ValueError(
            f"HV: expected a multiple of H = {sizes['H']} (value heads), got HV = {sizes['HV']}"
        )
    return sizes


def check_chunk_size(chunk_size):
    """Chunks hold 16, 32 or 64 tokens."""
    check_integer("chunk_size", chunk_size)
    if chunk_size not in CHUNK_SIZES:
        raise ValueError(f"chunk_size: expected one of {CHUNK_SIZES}, got {chunk_size}")


def check_state(name, state, shapes: Shapes, q, state_v_first, slots=None):
    """Check a recurrent state: float32 (float64 too when q is float64), one matrix per head."""
    count = shapes.N if slots is None else slots
    if state_v_first:
        layout, matrix = "[N, HV, V, K] (state_v_first=True)", (shapes.V, shapes.K)
    else:
        layout, matrix = "[N, HV, K, V]", (shapes.K, shapes.V)
    expected = (count, shapes.HV, *matrix)
    check_tensor(name, state, device=q.device)
    if tuple(state.shape) != expected:
        raise ValueError(f"{name}: expected shape {expected} = {layout}, got {tuple(state.shape)}")
    wide = (torch.float32, torch.float64) if q.dtype == torch.float64 else (torch.float32,)
    check_tensor(name, state, dtypes=wide)


def check_cu_seqlens(cu_seqlens, B, T, device, cu_seqlens_cpu=None) -> int:
    """Check cumulative sequence lengths [N + 1] and return N.

    The values are checked when they can be read without waiting for a GPU: when `cu_seqlens` is on
    the CPU, or through its copy `cu_seqlens_cpu`; but not while `torch.compile` traces, where there
    are none. Values that cannot be read are the caller's promise: start at 0, never decrease, end
    at T.
    """
    readable = not torch.compiler.is_compiling()
    if B != 1:
        raise ValueError(
            f"cu_seqlens: expected B = 1 (packed sequences lie end to end along T), got B = {B}"
        )
    for name, cu, place in (
        ("cu_seqlens", cu_seqlens, device),
        ("cu_seqlens_cpu", cu_seqlens_cpu, torch.device("cpu")),
    ):
        if cu is None:
            continue
        check_tensor(name, cu, dtypes=(torch.int32, torch.int64))
        if cu.device != place:
            raise ValueError(f"{name}: expected device {place}, got {cu.device}")
        if cu.ndim != 1 or cu.numel() < 1:
            raise ValueError(f"{name}: expected shape (N + 1,), got {tuple(cu.shape)}")
        if cu.device.type == "cpu" and readable:
            check_cu_values(name, cu.tolist(), T)
    if cu_seqlens_cpu is not None and readable:
        _check_copy(cu_seqlens_cpu, cu_seqlens)
    return cu_seqlens.numel() - 1


def _check_copy(cu_seqlens_cpu, cu_seqlens):
    if cu_seqlens_cpu.shape != cu_seqlens.shape:
        raise ValueError(
            f"cu_seqlens_cpu: expected the shape of cu_seqlens {tuple(cu_seqlens.shape)}, "
            f"got {tuple(cu_seqlens_cpu.shape)}"
        )
    if cu_seqlens.device.type == "cpu" and cu_seqlens.tolist() != cu_seqlens_cpu.tolist():
        raise ValueError(
            f"cu_seqlens_cpu: expected the values of cu_seqlens {cu_seqlens.tolist()}, "
            f"got {cu_seqlens_cpu.tolist()}"
        )


def check_cu_values(name, values, T):
    """Check the values of cumulative sequence lengths, a list: 0, never decreasing, T."""
    if values[0] != 0:
        raise ValueError(f"{name}: expected to start at 0, got {values[0]}")
    for n, (a, b) in enumerate(zip(values, values[1:], strict=False)):
        if b < a:
            raise ValueError(
                f"{name}: expected non-decreasing values, got {a} then {b} at position {n + 1}"
            )
    if values[-1] != T:
        raise ValueError(f"{name}: expected to end at T = {T}, got {values[-1]}")


def check_qkv(q, k, v, dtypes=KERNEL_DTYPES, max_key_dim=MAX_KEY_DIM) -> Shapes:
    """Check the token tensors q, k [B, T, H, K] and v [B, T, HV, V]; N is B."""
    check_tensor("q", q, dtypes=dtypes)
    if q.ndim != 4 or 0 in q.shape[2:]:
        raise ValueError(
            f"q: expected shape [B, T, H, K] with H and K at least 1, got {tuple(q.shape)}"
        )
    B, T, H, K = q.shape
    check_tensor("k", k, shape=q.shape, dtypes=(q.dtype,), device=q.device)
    check_tensor("v", v, dtypes=(q.dtype,), device=q.device)
    if v.ndim != 4 or tuple(v.shape[:2]) != (B, T) or 0 in v.shape[2:]:
        raise ValueError(
            f"v: expected shape [B, T, HV, V] with B = {B}, T = {T}, HV and V at least 1, "
            f"got {tuple(v.shape)}"
        )
    HV, V = v.shape[2:]
    if HV % H != 0:
        raise ValueError(f"v: expected HV (value heads) to be a multiple of H = {H}, got HV = {HV}")
    if max_key_dim is not None and K > max_key_dim:
        raise ValueError(f"q: expected a key dimension K <= {max_key_dim}, got K = {K}")
    return Shapes(B, T, H, HV, K, V, B)


def check_lower_bound(lower_bound):
    """The bound of the lower-bound gate: a finite negative number (natural log of a decay)."""
    check_number("lower_bound", lower_bound)
    if not lower_bound < 0:
        raise ValueError(f"lower_bound: expected a finite number < 0, got {lower_bound}")


def check_softplus(beta, threshold):
    """The parameters of log(1 + exp(beta x)) / beta, which is x once beta x > threshold."""
    check_number("beta", beta)
    if not beta > 0:
        raise ValueError(f"beta: expected a finite number > 0, got {beta}")
    check_number("threshold", threshold, finite=False)
    if not threshold >= 0:
        raise ValueError(f"threshold: expected a number >= 0, got {threshold}")


def check_gate_parameters(HV, K, device, A_log, dt_bias, lower_bound):
    """A_log: HV numbers, optional with a lower bound; dt_bias: HV * K numbers, optional.

    Extra dimensions of size 1 are allowed; a dt_bias [K, HV] is not.
    """
    if A_log is None and lower_bound is None:
        raise ValueError("A_log: expected a tensor, since no lower_bound is given, got None")
    for name, x, shapes in (
        ("A_log", A_log, [(HV,)]),
        ("dt_bias", dt_bias, [(HV * K,), (HV, K)]),
    ):
        if x is None:
            continue
        check_floating(name, x, device=device)
        if _without_ones(x.shape) not in map(_without_ones, shapes):
            expected = " or ".join(map(str, shapes))
            raise ValueError(f"{name}: expected shape {expected}, got {tuple(x.shape)}")


def _without_ones(shape):
    return tuple(n for n in shape if n != 1)


def _check_gate(shapes, q, A_log, dt_bias, use_gate_in_kernel, safe_gate, lower_bound):
    if lower_bound is not None:
        check_lower_bound(lower_bound)
    if use_gate_in_kernel:
        check_gate_parameters(shapes.HV, shapes.K, q.device, A_log, dt_bias, lower_bound)
        if safe_gate and (lower_bound is None or lower_bound < SAFE_LOWER_BOUND):
            raise ValueError(
                f"lower_bound: expected {SAFE_LOWER_BOUND} <= lower_bound < 0 with safe_gate and "
                f"use_gate_in_kernel, got {lower_bound}"
            )
        return
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        if x is not None:
            raise ValueError(
                f"{name}: expected None without use_gate_in_kernel=True, where g is already the "
                f"log decay; got {type(x).__name__}"
            )
