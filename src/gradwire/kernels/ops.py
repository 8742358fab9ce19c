"""The ops: names, signatures, and the numeric law.

Every backend computes every op here to the same bytes as ``reference``, but for the products of low rank, which state
a tolerance. What makes that possible:

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

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.kernels.formats import Format
from gradwire.kernels.select import op
from gradwire.wire import Key

__all__ = [
    "accumulate",
    "count_nonfinite",
    "decode_blocks",
    "divide",
    "encode_blocks",
    "gather",
    "keep_residual",
    "orthogonalize",
    "outer_mean",
    "outer_residual",
    "pack_bits",
    "pack_indices",
    "random_bits",
    "rotate",
    "scatter",
    "select_block_top",
    "select_random",
    "select_threshold",
    "select_top",
    "thin_products",
    "thin_products_of_sums",
    "thin_transposed_products",
    "unpack_bits",
    "unpack_indices",
    "unrotate",
]


# Before and after an encode


@op
def count_nonfinite(x: Tensor) -> Tensor:
    """How many elements are NaN or Inf: a 0-d int64 tensor on the device of ``x``."""
    raise NotImplementedError


@op
def accumulate(x: Tensor, residual: Tensor | None, decay: float) -> tuple[Tensor, Tensor]:
    """e = x + decay * residual with NaN and Inf replaced by 0, and how many there were (0-d int64).

    A new tensor if there is a residual; without one it may be ``x`` itself.
    """
    raise NotImplementedError


@op
def divide(x: Tensor, by: int) -> Tensor:
    """Divide a flat float32 tensor by a whole number of at least 1, where it lies; how many are NaN or Inf (0-d int64).

    Rounded once, so that the sum of equal values becomes that value.
    """
    raise NotImplementedError


@op
def keep_residual(new: Tensor, old: Tensor, nonfinite: Tensor) -> Tensor:
    """``new``, or what ``old`` holds if ``nonfinite`` is not 0; ``new`` may be overwritten to become that."""
    raise NotImplementedError


# Dense formats


@op
def encode_blocks(
    x: Tensor, form: Format, key: Key, residual: Tensor | None = None, decay: float = 1.0
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Encode e = x + decay * residual: codes, scales (empty if the format has none), nonfinite count, e - decoded.

    Elements of e that are NaN or Inf are encoded as 0. Without a residual the last result is None.
    """
    raise NotImplementedError


@op
def decode_blocks(out: Tensor, payloads: Sequence[tuple[Tensor, Tensor]], form: Format, add: bool) -> None:
    """Write to ``out`` the sum of payloads (codes, scales), in their order; with ``add``, on top of what is there."""
    raise NotImplementedError


# Bits and random bits


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


# Selection


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
def gather(x: Tensor, indices: Tensor) -> Tensor:
    """The values at indices of a flat tensor."""
    raise NotImplementedError


@op
def scatter(out: Tensor, indices: Tensor, values: Tensor, add: bool) -> None:
    """Put values at distinct indices of ``out``, or add them there."""
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


# Rotation


@op
def rotate(x: Tensor, key: Key, block: int) -> Tensor:
    """Signs flipped at random, then the orthonormal Hadamard transform of each block, a power of 4.

    Padded with zeros to whole blocks; values are cut at 3.4e38 / (2 * block) first. A sign is flipped where the lowest
    bit of the draw of the rotation's stream is set. The transform multiplies by 1 / sqrt(block), an exact power of
    two, first; then come butterflies (a + b, a - b) of distance 1, 2, 4, ...
    """
    raise NotImplementedError


@op
def unrotate(x: Tensor, key: Key, block: int, count: int) -> Tensor:
    """The first ``count`` values of the inverse: the same transform, then the same signs. ``x`` has whole blocks."""
    raise NotImplementedError


# Low rank: not to the byte. A sum of n products differs from the exact one by at most n * 2**-23 times the sum of
# their magnitudes, which holds for any order of summation.


@op
def thin_products(matrices: Sequence[Tensor], thin: Sequence[Tensor]) -> list[Tensor]:
    """M @ Q of each matrix (n x m) with its thin one (m x r)."""
    raise NotImplementedError


@op
def thin_products_of_sums(
    xs: Sequence[Tensor], residuals: Sequence[Tensor], sums: Sequence[Tensor], thin: Sequence[Tensor]
) -> list[Tensor]:
    """x + residual of each pair into ``sums``, and the product of that (n x m) with its thin one (m x r), r > 0."""
    raise NotImplementedError


@op
def thin_transposed_products(matrices: Sequence[Tensor], thin: Sequence[Tensor]) -> list[Tensor]:
    """M.T @ P of each matrix (n x m) with its thin one (n x r)."""
    raise NotImplementedError


@op
def outer_residual(matrices: Sequence[Tensor], left: Sequence[Tensor], right: Sequence[Tensor]) -> list[Tensor]:
    """M - P @ Q.T of each matrix (n x m), P (n x r) and Q (m x r)."""
    raise NotImplementedError


@op
def outer_mean(
    residuals: Sequence[Tensor], left: Sequence[Tensor], right: Sequence[Tensor], outs: Sequence[Tensor]
) -> None:
    """P @ Q.T of each P (n x r) and Q (m x r) into ``outs``, and off ``residuals``, both n x m."""
    raise NotImplementedError


@op
def orthogonalize(factors: Sequence[Tensor]) -> list[Tensor]:
    """Orthonormal columns that span those of each factor (n x r). What has no direction stays zero or small, never NaN.

    By Cholesky's decomposition, twice, in float64.
    """
    raise NotImplementedError
