"""CUDA kernels in Triton, equal to ``reference`` to the byte; ``ops`` says what each op does.

How: contraction is off in every launch, divisions and roots are the rounded ones, integers are rounded by hand, and
float sums follow the lane tree. Only ``lowrank``, which has a tolerance instead, does without. No op waits for the
device unless its result has a size or an error that only the device knows: ``select_threshold`` and ``unpack_indices``.

A program handles a tile of whole blocks. Its base is a 64-bit number, offsets within it are 32 bits wide. Each body is
compiled twice, for whole tiles and for the cut last one: masks would split 16-byte accesses into 4-byte ones.
"""

from gradwire.kernels.triton.bits import pack_bits, pack_indices, random_bits, unpack_bits, unpack_indices
from gradwire.kernels.triton.dense import (
    accumulate,
    count_nonfinite,
    decode_blocks,
    divide,
    encode_blocks,
    keep_residual,
)
from gradwire.kernels.triton.lowrank import outer_residual, thin_products, thin_transposed_products
from gradwire.kernels.triton.rotation import rotate, unrotate
from gradwire.kernels.triton.selection import (
    gather,
    scatter,
    select_block_top,
    select_random,
    select_threshold,
    select_top,
)

__all__ = [
    "accumulate",
    "count_nonfinite",
    "decode_blocks",
    "divide",
    "encode_blocks",
    "gather",
    "keep_residual",
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
    "thin_transposed_products",
    "unpack_bits",
    "unpack_indices",
    "unrotate",
]
