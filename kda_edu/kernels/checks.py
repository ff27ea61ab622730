"""Argument checks shared by every entry point: the reference and the kernels.

Bad input raises `ValueError` (a value or a shape) or `TypeError` (a type or a dtype). The message
names the argument, says what was expected and what came. Nothing is cast or cut silently.
"""

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
    chunk_size=None,
    dtypes=KERNEL_DTYPES,
    max_key_dim=MAX_KEY_DIM,
) -> Shapes:
    """Check the arguments of a KDA call and return their sizes. Never reads GPU memory."""
    shapes = _check_tokens(q, k, v, g, beta, dtypes, max_key_dim)
    if cu_seqlens is not None:
        N = check_cu_seqlens(cu_seqlens, shapes.B, shapes.T, q.device, cu_seqlens_cpu)
        shapes = shapes._replace(N=N)
    elif cu_seqlens_cpu is not None:
        raise ValueError("cu_seqlens_cpu: given without cu_seqlens; give both")
    _check_scale(scale)
    _check_gate(shapes, q, A_log, dt_bias, use_gate_in_kernel, safe_gate, lower_bound)
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError(
            "allow_neg_eigval: doubles the sigmoid of beta, so it needs "
            "use_beta_sigmoid_in_kernel=True; got False"
        )
    if initial_state is not None:
        check_state("initial_state", initial_state, shapes, q, state_v_first)
    if chunk_size is not None and chunk_size not in CHUNK_SIZES:
        raise ValueError(f"chunk_size: expected one of {CHUNK_SIZES}, got {chunk_size!r}")
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


def check_state(name, state, shapes: Shapes, q, state_v_first, slots=None):
    """Check a recurrent state: float32 (float64 too when q is float64), one matrix per head."""
    N, HV, K, V = shapes.N if slots is None else slots, shapes.HV, shapes.K, shapes.V
    layout = "[N, HV, V, K] (state_v_first=True)" if state_v_first else "[N, HV, K, V]"
    expected = (N, HV, V, K) if state_v_first else (N, HV, K, V)
    check_tensor(name, state, device=q.device)
    if tuple(state.shape) != expected:
        raise ValueError(f"{name}: expected shape {expected} = {layout}, got {tuple(state.shape)}")
    wide = (torch.float32, torch.float64) if q.dtype == torch.float64 else (torch.float32,)
    check_tensor(name, state, dtypes=wide)


def check_cu_seqlens(cu_seqlens, B, T, device, cu_seqlens_cpu=None) -> int:
    """Check cumulative sequence lengths [N + 1] and return N.

    The values are checked when they can be read without waiting for a GPU: when `cu_seqlens` is on
    the CPU, or through its copy `cu_seqlens_cpu`. Values that cannot be read are the caller's
    promise: start at 0, never decrease, end at T.
    """
    if B != 1:
        raise ValueError(
            f"cu_seqlens: packed sequences need B = 1 (concatenate along T), got B = {B}"
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
        if cu.device.type == "cpu":
            _check_cu_values(name, cu.tolist(), T)
    if cu_seqlens_cpu is not None and cu_seqlens_cpu.shape != cu_seqlens.shape:
        raise ValueError(
            f"cu_seqlens_cpu: expected the shape of cu_seqlens {tuple(cu_seqlens.shape)}, "
            f"got {tuple(cu_seqlens_cpu.shape)}"
        )
    return cu_seqlens.numel() - 1


def _check_cu_values(name, values, T):
    if values[0] != 0:
        raise ValueError(f"{name}: expected to start at 0, got {values[0]}")
    for n, (a, b) in enumerate(zip(values, values[1:], strict=False)):
        if b < a:
            raise ValueError(
                f"{name}: expected non-decreasing values, got {a} then {b} at position {n + 1}"
            )
    if values[-1] != T:
        raise ValueError(f"{name}: expected to end at T = {T}, got {values[-1]}")


def _check_tokens(q, k, v, g, beta, dtypes, max_key_dim) -> Shapes:
    check_tensor("q", q, dtypes=dtypes)
    if q.ndim != 4:
        raise ValueError(f"q: expected shape [B, T, H, K], got {tuple(q.shape)}")
    B, T, H, K = q.shape
    check_tensor("k", k, shape=q.shape, dtypes=(q.dtype,), device=q.device)
    check_tensor("v", v, dtypes=(q.dtype,), device=q.device)
    if v.ndim != 4 or tuple(v.shape[:2]) != (B, T):
        raise ValueError(
            f"v: expected shape [B, T, HV, V] with B = {B}, T = {T}, got {tuple(v.shape)}"
        )
    HV, V = v.shape[2:]
    if H < 1 or K < 1 or V < 1 or HV < 1:
        raise ValueError(
            f"q, v: H, K, HV and V must be at least 1, got q {tuple(q.shape)}, v {tuple(v.shape)}"
        )
    if HV % H != 0:
        raise ValueError(f"v: expected HV (value heads) to be a multiple of H = {H}, got HV = {HV}")
    if max_key_dim is not None and K > max_key_dim:
        raise ValueError(f"q: expected a key dimension K <= {max_key_dim}, got K = {K}")
    check_floating("g", g, shape=(B, T, HV, K), device=q.device)
    check_floating("beta", beta, shape=(B, T, HV), device=q.device)
    return Shapes(B, T, H, HV, K, V, B)


def _check_scale(scale):
    if scale is not None and not isinstance(scale, (int, float)):
        raise TypeError(f"scale: expected a number or None, got {type(scale).__name__}")


def check_lower_bound(lower_bound):
    """The bound of the lower-bound gate: a finite negative number (natural log of a decay)."""
    if not isinstance(lower_bound, (int, float)):
        raise TypeError(f"lower_bound: expected a number, got {type(lower_bound).__name__}")
    if not -float("inf") < lower_bound < 0:
        raise ValueError(f"lower_bound: expected a finite number < 0, got {lower_bound}")


def check_gate_parameters(HV, K, device, A_log, dt_bias, lower_bound):
    """A_log: HV numbers, optional with a lower bound; dt_bias: HV * K numbers, optional."""
    if A_log is None and lower_bound is None:
        raise ValueError("A_log: required by the softplus gate (no lower_bound given), got None")
    for name, x, count in (("A_log", A_log, HV), ("dt_bias", dt_bias, HV * K)):
        if x is None:
            continue
        check_floating(name, x, device=device)
        if x.numel() != count:
            what = f"HV = {HV}" if name == "A_log" else f"HV * K = {HV * K}"
            raise ValueError(f"{name}: expected {what} numbers, got shape {tuple(x.shape)}")


def _check_gate(shapes, q, A_log, dt_bias, use_gate_in_kernel, safe_gate, lower_bound):
    if lower_bound is not None:
        check_lower_bound(lower_bound)
    if use_gate_in_kernel:
        check_gate_parameters(shapes.HV, shapes.K, q.device, A_log, dt_bias, lower_bound)
        if safe_gate and (lower_bound is None or lower_bound < SAFE_LOWER_BOUND):
            raise ValueError(
                f"lower_bound: safe_gate with use_gate_in_kernel expects "
                f"{SAFE_LOWER_BOUND} <= lower_bound < 0, got {lower_bound}"
            )
        return
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        if x is not None:
            raise ValueError(
                f"{name}: only used with use_gate_in_kernel=True; got it with False, where g is "
                "already the log decay"
            )
