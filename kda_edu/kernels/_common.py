"""What several kernels share: constants, strided access, launch rules, the gate formula."""

import contextlib
import functools

import torch
import triton
import triton.language as tl

from .checks import KERNEL_DTYPES

FAR = 2**25  # elements between tokens from which on a tensor is copied
RCP_LN2 = 1.4426950408889634  # 1 / ln 2: natural-log gates times this feed exp2


def next_power_of_2(n: int) -> int:
    """The smallest power of two >= n >= 1; tile sides must be powers of two.

    Like `cdiv`, in plain Python: Triton's functions of that name also work inside a kernel, and
    take several microseconds a call on the host.
    """
    return 1 << (n - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def key_tile(K: int) -> int:
    """Tile side that holds a whole row of K channels; tl.dot needs at least 16."""
    return max(16, next_power_of_2(K))


def channel_tile(D: int, dtype: torch.dtype) -> int:
    """Tile side for D channels visited in turn; float32 products need more registers."""
    return min(key_tile(D), 32 if dtype == torch.float32 else 64)


def dot_precision(dtype: torch.dtype) -> str:
    """Precision of `tl.dot` on float32 operands: float32 for float32 inputs, tf32 for 16-bit ones.

    tf32 keeps 10 mantissa bits, more than bfloat16 (7) and as many as float16, without float16's
    small exponent range. On NVIDIA chips float32 is three tf32 products (an error near 2^-22):
    true float32 products have no tensor core, and their tiles spill thousands of bytes.
    """
    if dtype != torch.float32:
        return "tf32"
    return "tf32x3" if _backend() == "cuda" else "ieee"


def _backend() -> str:
    if triton.knobs.runtime.interpret:
        return "interpreter"
    return triton.runtime.driver.active.get_current_target().backend


def is_nvidia() -> bool:
    return _backend() == "cuda"


def tile_budget() -> int:
    """Bytes of shared memory that the tiles of a pipelined loop may take on this chip.

    The smallest limit per program is 64 KB (AMD CDNA 3) and 99 KB (NVIDIA consumer chips), against
    163 KB (A100) and 227 KB (H100 and later); the rest of a kernel needs some of it.
    """
    if _backend() != "cuda":
        return 48 * 1024
    arch = triton.runtime.driver.active.get_current_target().arch
    return {80: 120, 90: 160, 100: 160, 103: 160}.get(arch, 72) * 1024


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """`x` [B, T, heads, D] such that token (b, t) lies at (b * T + t) * x.stride(1).

    Views of a packed projection are taken as they are; anything else is copied.
    """
    B, T, heads, D = x.shape
    contiguous_row = D == 1 or x.stride(3) == 1
    near = T == 1 or x.stride(1) < FAR  # 64 rows within 32-bit offsets
    one_stride = B == 1 or T == 1 or x.stride(0) == T * x.stride(1)
    if contiguous_row and near and one_stride and B * T * heads > 0:
        return x
    return x.contiguous()


def row_strides(x: torch.Tensor) -> tuple[int, int]:
    """(elements between tokens, elements between heads) of a tensor from `as_rows`.

    The stride of a dimension of size 1 means nothing and may be huge, so it is not used.
    """
    B, T, heads, D = x.shape
    head = x.stride(2) if heads > 1 else D
    if T > 1:
        return x.stride(1), head
    return (x.stride(0) if B > 1 else heads * D), head


def on_device_of_first_argument(function):
    """Launch on the GPU that holds the first tensor, whatever the current device is."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        given = (*args, *kwargs.values())
        x = next((x for x in given if isinstance(x, torch.Tensor)), None)
        on_gpu = x is not None and x.device.type == "cuda"
        with torch.cuda.device(x.device) if on_gpu else contextlib.nullcontext():
            return function(*args, **kwargs)

    return wrapper


def autocast(*tensors):
    """The tensors in the dtype of the enclosing `torch.autocast`; as they are where there is none.

    Meant for q, k and v. The gate, beta, the state and the gate's parameters keep their dtype.
    """
    device_type = tensors[0].device.type if isinstance(tensors[0], torch.Tensor) else "cpu"
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(x.to(dtype) if getattr(x, "dtype", None) in KERNEL_DTYPES else x for x in tensors)


def forward_only(name, outputs, inputs):
    """`outputs`, in a graph whose backward raises: a missing gradient is never silent.

    outputs: a tuple of tensors or None, made by a kernel that has no backward.
    inputs: the tensors (or None) that they were made from.
    """
    inputs = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    if not (torch.is_grad_enabled() and inputs):
        return outputs
    made = [x for x in outputs if x is not None]
    made = iter(_ForwardOnly.apply(name, len(made), *made, *inputs))
    return tuple(None if x is None else next(made) for x in outputs)


class _ForwardOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, name, count, *tensors):
        ctx.name = name
        return tensors[:count]

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError(
            f"{ctx.name} has no backward. For gradients use the function of the same formula in "
            "kda_edu.reference, which is plain PyTorch; for none, call it under torch.no_grad()."
        )


@triton.jit
def accurate_exp(x):
    """e^x to 2^-22 for any x <= 0. exp2(x / ln 2) alone loses as many bits as x / ln 2 has digits
    before the point; the fused multiply-add recovers what the product rounded away.
    """
    t = x * 1.4426950408889634
    lost = tl.fma(x, tl.full(x.shape, 1.4426950408889634, tl.float32), -t)
    return tl.exp2(t) * (1.0 + lost * 0.6931471805599453)


@triton.jit
def softplus(x, beta, threshold):
    """log(1 + exp(beta x)) / beta, and x once beta x > threshold; accurate in both tails.

    log(1 + e) loses everything below e = 6e-8. Dividing by the rounded (1 + e) - 1 repairs it.
    """
    y = beta * x
    e = accurate_exp(-tl.abs(y))
    u = 1.0 + e
    log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(y > threshold, x, (tl.maximum(y, 0.0) + log1p) / beta)


@triton.jit
def gate_rate(A_log, i_h):
    """exp(A_log) of a head, 1 without A_log. Finite, so that it times a softplus of 0 is 0."""
    if A_log is None:
        rate = 1.0
    else:
        rate = tl.minimum(tl.exp(tl.load(A_log + i_h).to(tl.float32)), 1e37)
    return rate


@triton.jit
def log_decay(x, rate, lower_bound, beta, threshold, USE_LOWER_BOUND: tl.constexpr):
    """Natural log of the decay from the gate input x (dt_bias already added), rate = exp(A_log).

    -rate softplus(x), or lower_bound sigmoid(rate x).
    """
    if USE_LOWER_BOUND:
        g = lower_bound * tl.sigmoid(rate * x)
    else:
        g = -rate * softplus(x, beta, threshold)
    return g


@triton.jit
def decay_factor(log2_decay):
    """2^x, accurate where it multiplies a state again and again.

    The fast exp2 of a GPU errs by about 2^-22, always in the same direction at one x. Near 1, where
    a state lives for thousands of tokens, that adds up, so the Taylor series takes over.
    """
    y = log2_decay * 0.6931471805599453
    near_one = 1.0 + y * (1.0 + y * (0.5 + y * (1.0 / 6.0 + y * (1.0 / 24.0))))
    return tl.where(tl.abs(log2_decay) < 0.02, near_one, tl.exp2(log2_decay))


@triton.jit
def operand(x, PRECISION: tl.constexpr):
    """A float32 factor of a product in tf32, rounded to the 10 bits that it reads.

    The product itself would cut the other 13 off: twice the error, and all of one sign.
    """
    if PRECISION == "tf32" and x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True)
        rounded = ((bits + 4096) & -8192).to(tl.float32, bitcast=True)
        x = tl.where(x == x, rounded, x)  # the bits of a NaN would carry into the sign
    return x


@triton.jit
def locate_chunk(i_t, i_b, chunks, T, C: tl.constexpr, PACKED: tl.constexpr):
    """(first token on the flattened B * T axis as int64, number of tokens) of chunk i_t."""
    if PACKED:
        start = tl.load(chunks + 2 * i_t).to(tl.int64)
        count = tl.load(chunks + 2 * i_t + 1)
    else:
        start = i_b.to(tl.int64) * T + i_t * C
        count = tl.minimum(T - i_t * C, C)
    return start, count


@triton.jit
def write_strength(beta, SIGMOID: tl.constexpr, NEG_EIGVAL: tl.constexpr):
    """beta itself, or sigmoid of its logit, or twice that."""
    if SIGMOID:
        beta = tl.sigmoid(beta)
        if NEG_EIGVAL:
            beta = 2.0 * beta
    return beta
