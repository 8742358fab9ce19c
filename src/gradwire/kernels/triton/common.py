"""What the kernels share: how they are launched, and pieces of them."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from contextlib import nullcontext
from typing import Any, Final

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from gradwire.kernels.law import FLOOR
from gradwire.wire import Key

SMALLEST = tl.constexpr(FLOOR)  # below it a block is zeros
MAX32 = tl.constexpr(torch.finfo(torch.float32).max)
MAGIC = tl.constexpr(1.5 * 2.0**23)  # added and subtracted, it rounds half to even
MAGIC_BITS = tl.constexpr(0x4B400000)


def launch(
    kernel: Any, programs: int, device: torch.device, *args: Any, num_warps: int = 4, fuse: bool = False
) -> None:
    """Run a kernel on the current stream of a device. Constexpr arguments are the last ones. ``fuse`` contracts."""
    if programs == 0:
        return
    here = device.type != "cuda" or device.index == torch.cuda.current_device()
    with nullcontext() if here else torch.cuda.device(device):
        kernel[(programs,)](*args, num_warps=num_warps, enable_fp_fusion=fuse)


def blank(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Room for ``count`` items, with whole 16-byte words behind them: kernels may write the last word."""
    return torch.empty(-(-count // 16) * 16, dtype=dtype, device=device)[:count]


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _signed32(word: int) -> int:
    """The same 32 bits as a signed integer: the type of a kernel's argument must not depend on its value."""
    return word - (1 << 32) if word >= 1 << 31 else word


def philox_arguments(key: Key, stream: int) -> tuple[int, ...]:
    mask = 0xFFFFFFFF
    words = (key.bucket, key.step & mask, (key.step >> 32) << 8 | stream, key.seed & mask, key.seed >> 32)
    return tuple(_signed32(word) for word in words)


# Compiled once for all values, not anew for 1 and for multiples of 16.
KEY_ARGUMENTS: Final = ["bucket", "step_low", "step_high", "seed_low", "seed_high"]


# Pieces of kernels


@triton.jit
def load(pointer, offsets, left, CUT: tl.constexpr):
    if CUT:
        return tl.load(pointer + offsets, mask=offsets < left, other=0)
    else:
        return tl.load(pointer + offsets)


@triton.jit
def store(pointer, offsets, value, left, CUT: tl.constexpr):
    if CUT:
        tl.store(pointer + offsets, value, mask=offsets < left)
    else:
        tl.store(pointer + offsets, value)


@triton.jit
def load_sum(x, residual, decay, offsets, left, FEEDBACK: tl.constexpr, CUT: tl.constexpr):
    """Elements of x + decay * residual."""
    e = load(x, offsets, left, CUT)
    if FEEDBACK:
        e = e + load(residual, offsets, left, CUT) * decay
    return e


@triton.jit
def is_finite(e):
    return tl.abs(e) <= MAX32


@triton.jit
def report(nonfinite, bad):
    """Add to the count of elements that are not finite; there are hardly ever any, and then no atomics."""
    if bad > 0:
        tl.atomic_add(nonfinite, bad.to(tl.int64), sem="relaxed")


@triton.jit
def bits_of(value):
    return value.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def bf16_bits(value):
    """Upper 16 bits of the nearest bfloat16, half to even."""
    bits = bits_of(value)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@triton.jit
def power_of_two(exponent):
    return float_of((exponent + 127) << 23)


@triton.jit
def inverse_of(scale):
    return tl.where(scale > 0, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale), 0.0)


@triton.jit
def floored(largest):
    return tl.where(largest < SMALLEST, 0.0, largest)


@triton.jit
def stored_scale(scale, scale_limit, HALF: tl.constexpr, UP: tl.constexpr):
    """Scales as they travel, still float32."""
    scale = tl.minimum(scale, scale_limit)
    if HALF:
        bits = bits_of(scale)
        if UP:
            bits = bits + 0xFFFF
        else:
            bits = bits + 0x7FFF + ((bits >> 16) & 1)
        scale = float_of(bits & -65536)
    return scale


@triton.jit
def put_scale(scales, row, scale, rows_left, HALF: tl.constexpr, CUT: tl.constexpr):
    if HALF:
        store(scales, row, (bits_of(scale) >> 16).to(tl.int16), rows_left, CUT)
    else:
        store(scales, row, scale, rows_left, CUT)


@triton.jit
def get_scale(scales, row, rows_left, HALF: tl.constexpr, CUT: tl.constexpr):
    scale = load(scales, row, rows_left, CUT)
    if HALF:
        scale = float_of(scale.to(tl.int32) << 16)
    return scale


@triton.jit
def nearest(value, limit):
    """Value in [-limit, limit] plus MAGIC: nearest integer once MAGIC is subtracted, or once read as bits."""
    return tl.minimum(tl.maximum(value, -limit), limit) + MAGIC


@triton.jit
def philox(counter, bucket, step_low, step_high, seed_low, seed_high):
    """Four random words a counter (uint32)."""
    c0 = counter
    c1 = tl.zeros_like(counter) + bucket.to(tl.uint32, bitcast=True)
    c2 = tl.zeros_like(counter) + step_low.to(tl.uint32, bitcast=True)
    c3 = tl.zeros_like(counter) + step_high.to(tl.uint32, bitcast=True)
    k0 = seed_low.to(tl.uint32, bitcast=True)
    k1 = seed_high.to(tl.uint32, bitcast=True)
    first = tl.full((1,), 0xD2511F53, tl.uint32)
    second = tl.full((1,), 0xCD9E8D57, tl.uint32)
    weyl0 = tl.full((), 0x9E3779B9, tl.uint32)
    weyl1 = tl.full((), 0xBB67AE85, tl.uint32)
    for _ in tl.static_range(10):
        p, q = c0, c2
        c0 = tl.umulhi(q, second) ^ c1 ^ k0
        c2 = tl.umulhi(p, first) ^ c3 ^ k1
        c1 = q * second
        c3 = p * first
        k0 = k0 + weyl0
        k1 = k1 + weyl1
    return c0, c1, c2, c3


@triton.jit
def uniform(word):
    return (word >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # 2**-24


@triton.jit
def round_with(value, u):
    """Stochastic rounding of magnitudes below 2**22. Not tl.floor: it takes denormals for zeros, -1e-40 for 0."""
    near = value + MAGIC - MAGIC
    down = tl.where(near > value, near - 1.0, near)
    return down + (u < value - down).to(tl.float32)
