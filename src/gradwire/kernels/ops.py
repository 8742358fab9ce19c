"""The ops: names, signatures, and the numeric law.

Every backend computes every op here to the same bytes as ``reference``. What makes that possible:

1. Correctly rounded operations only: ``+ - * /``, ``sqrt`` and conversions, in float32. Division by a constant is
   multiplication by the float32 nearest its reciprocal.
2. No contraction: ``a * b + c`` rounds twice. (In torch that rules out ``alpha=`` and ``addcmul``.)
3. Reductions do not depend on order (max, integer sums). A float sum over a block uses the *lane tree*: sixteen
   lanes, lane j adds elements j, j + 16, j + 32, ... of the block in that order, then lanes fold by halves
   (j += j + 8, then + 4, + 2, + 1). The mean of a block is the lane tree of x * (1 / B); that of a short last block
   is then multiplied by B / its length.
4. Rounding is half to even, or stochastic from the counter generator: value v becomes floor(v) + (u < v - floor(v))
   with u the upper 24 bits of the draw over 2**24.
5. Selection is a total order: larger magnitude first, then the lower index.
6. Inputs are finite: the codec replaces NaN and Inf by 0 and reports them. Denormals are kept.

Blocks: an op on blocks of B (a power of two, 16 to 65,536) treats the tensor as flat; the last block may be short.
A block whose largest magnitude is below ``FLOOR`` decodes to zeros, which keeps 1 / scale finite.

Scales: ``scale_dtype`` is float32 or bfloat16, to nearest; with stochastic rounding up, so that no code is cut off,
which would bias it. No scale times its largest code exceeds the float32 range.

Random bits: Philox-4x32-10. Key: the 64-bit seed. Counter: (c, bucket, step mod 2**32, step div 2**32 times 256 +
stream). Element i is word (i mod 64) div 16 of counter c = (i div 64) * 16 + i mod 16, which lets vector code
use whole registers of counters.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from gradwire.kernels.select import op
from gradwire.wire import Key

__all__ = [
    "count_nonfinite",
    "decode_half",
    "dequantize_blocks",
    "dequantize_float8",
    "dequantize_levels",
    "dequantize_natural",
    "dequantize_sign",
    "dequantize_ternary",
    "encode_half",
    "hadamard",
    "pack_bits",
    "pack_indices",
    "quantize_blocks",
    "quantize_float8",
    "quantize_levels",
    "quantize_natural",
    "quantize_sign",
    "quantize_ternary",
    "random_bits",
    "random_signs",
    "select_block_top",
    "select_random",
    "select_threshold",
    "select_top",
    "unpack_bits",
    "unpack_indices",
]

Half = Literal["fp16", "bf16", "truncate16"]
Float8 = Literal["e4m3", "e5m2"]
Scaling = Literal["absmax", "mse", "stochastic"]


@op
def count_nonfinite(x: Tensor) -> Tensor:
    """How many elements are NaN or Inf: a 0-d int64 tensor on the device of ``x``."""
    raise NotImplementedError


@op
def random_bits(key: Key, stream: int, count: int, *, device: torch.device) -> Tensor:
    """``count`` random 32-bit words as int64."""
    raise NotImplementedError


@op
def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Bit stream of unsigned ``bits``-wide codes: code i has bits i * bits and up, lowest bit first, as uint8."""
    raise NotImplementedError


@op
def unpack_bits(data: Tensor, bits: int, count: int) -> Tensor:
    """The first ``count`` codes of a bit stream, as int64."""
    raise NotImplementedError


@op
def encode_half(x: Tensor, form: Half) -> Tensor:
    """Float32 to 16 bits: nearest, saturating at the largest finite value; ``truncate16``: toward zero."""
    raise NotImplementedError


@op
def decode_half(data: Tensor) -> Tensor:
    """16 bits to float32."""
    raise NotImplementedError


@op
def quantize_blocks(
    x: Tensor, bits: int, block: int, scale_dtype: torch.dtype, scaling: Scaling, key: Key
) -> tuple[Tensor, Tensor]:
    """Packed codes and block scales of integers in [-q, q], q = 2**(bits - 1) - 1, stored with q added.

    ``absmax``: scale = max * (1 / q). ``mse``: least squares, by four rounds of codes = nearest(x / scale), scale =
    sum(x * codes) / sum(codes**2), from a start of c * mean|x|; sums are of x over the power of two of its block's
    maximum. ``stochastic``: absmax with stochastic rounding.
    """
    raise NotImplementedError


@op
def dequantize_blocks(codes: Tensor, scales: Tensor, bits: int, block: int, count: int) -> Tensor:
    """Float32 values of ``quantize_blocks``."""
    raise NotImplementedError


@op
def quantize_float8(x: Tensor, form: Float8, block: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One byte an element and block scales; a block's maximum becomes the format's largest value."""
    raise NotImplementedError


@op
def dequantize_float8(codes: Tensor, scales: Tensor, form: Float8, block: int) -> Tensor:
    """Float32 values of ``quantize_float8``."""
    raise NotImplementedError


@op
def quantize_sign(x: Tensor, block: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One bit an element (1: negative) and the mean magnitude of each block."""
    raise NotImplementedError


@op
def dequantize_sign(codes: Tensor, scales: Tensor, block: int, count: int) -> Tensor:
    """Float32 values of ``quantize_sign``."""
    raise NotImplementedError


@op
def quantize_levels(x: Tensor, levels: int, block: int, shrink: float, key: Key) -> tuple[Tensor, Tensor]:
    """QSGD: stochastic multiples of norm / levels, the norm of a block being its l2 norm; float32 norms x shrink."""
    raise NotImplementedError


@op
def dequantize_levels(codes: Tensor, norms: Tensor, levels: int, block: int, count: int) -> Tensor:
    """Float32 values of ``quantize_levels``."""
    raise NotImplementedError


@op
def quantize_ternary(x: Tensor, block: int, shrink: float, key: Key) -> tuple[Tensor, Tensor]:
    """TernGrad: stochastic {-1, 0, 1} x the block's maximum, five to a byte (base 3); float32 maxima x shrink."""
    raise NotImplementedError


@op
def dequantize_ternary(codes: Tensor, scales: Tensor, block: int, count: int) -> Tensor:
    """Float32 values of ``quantize_ternary``."""
    raise NotImplementedError


@op
def quantize_natural(x: Tensor, block: int, key: Key) -> tuple[Tensor, Tensor]:
    """Stochastic powers of two: sign and 7 bits below the block's top exponent; 0 is zero."""
    raise NotImplementedError


@op
def dequantize_natural(codes: Tensor, tops: Tensor, block: int) -> Tensor:
    """Float32 values of ``quantize_natural``."""
    raise NotImplementedError


@op
def select_top(x: Tensor, count: int) -> Tensor:
    """Sorted indices (int64) of the ``count`` largest magnitudes, ties to the lower index."""
    raise NotImplementedError


@op
def select_block_top(x: Tensor, each: int, block: int) -> Tensor:
    """The same inside each block of ``block``: ``each`` a block, all of a shorter last one if it has fewer."""
    raise NotImplementedError


@op
def select_threshold(x: Tensor, tau: float) -> Tensor:
    """Sorted indices of all magnitudes of at least ``tau``."""
    raise NotImplementedError


@op
def select_random(total: int, count: int, key: Key, *, device: torch.device) -> Tensor:
    """One index from each of ``count`` equal strata of [0, total) (the project's split rule): sorted, distinct."""
    raise NotImplementedError


@op
def pack_indices(indices: Tensor, total: int, width: int) -> Tensor:
    """Elias-Fano code of k sorted indices below ``total``: upper bits, from the next byte on lower bits.

    With v_i = index_i - i, the lower ``width`` bits of each v go to a bit stream; the upper ones to a bit vector of
    k + ((total - k) >> width) bits with bit (v_i >> width) + i set. Width 0 is the plain bitmap.
    """
    raise NotImplementedError


@op
def unpack_indices(data: Tensor, total: int, count: int, width: int) -> Tensor:
    """Sorted indices of ``pack_indices``; :class:`WireError` if the bits are no such code."""
    raise NotImplementedError


@op
def random_signs(key: Key, count: int, *, device: torch.device) -> Tensor:
    """Float32 ``count`` values of -1 or 1 (lowest bit of the draw set: -1), of the rotation's stream."""
    raise NotImplementedError


@op
def hadamard(x: Tensor, block: int) -> Tensor:
    """Orthonormal Hadamard transform of each block of ``block`` (a power of 4; ``x`` has whole blocks).

    Multiplied by 1 / sqrt(block), an exact power of two, first; then butterflies of distance 1, 2, 4, ...
    """
    raise NotImplementedError
