"""The random rotation: signs, and the Hadamard transform of each block.

A block of up to ``_PIECE`` is transformed by one program. In a longer one a first kernel does the distances within
pieces of that length, a second one those between pieces.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import math
from typing import Final

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from gradwire.kernels.law import STREAM_ROTATION
from gradwire.kernels.triton.bits import random_words
from gradwire.kernels.triton.common import KEY_ARGUMENTS, bits_of, cdiv, float_of, launch, philox, philox_arguments
from gradwire.wire import Key

_PIECE: Final = 4096
_COLUMNS: Final = 256  # of each piece that a program of the second kernel handles


@triton.jit
def _butterfly(values, SIZE: tl.constexpr, DISTANCE: tl.constexpr):
    a, b = tl.split(tl.permute(tl.reshape(values, (SIZE // (2 * DISTANCE), 2, DISTANCE)), (0, 2, 1)))
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (SIZE,))


@triton.jit
def _butterflies(values, SIZE: tl.constexpr, LEVELS: tl.constexpr, DISTANCE: tl.constexpr):
    """Butterflies of LEVELS distances, each twice the one before."""
    for level in tl.static_range(LEVELS):
        values = _butterfly(values, SIZE, DISTANCE << level)
    return values


@triton.jit
def _flip(values, draws):
    """The sign of each value flipped where the lowest bit of its draw is set."""
    return float_of(bits_of(values) ^ ((draws & 1).to(tl.int32) << 31))


@triton.jit(do_not_specialize=KEY_ARGUMENTS)
def _near_kernel(x, out, count, out_count, limit, factor, bucket, step_low, step_high, seed_low, seed_high,
                 LEVELS: tl.constexpr, TILE: tl.constexpr, FLIP_BEFORE: tl.constexpr,
                 FLIP_AFTER: tl.constexpr):  # fmt: skip
    base = tl.program_id(0).to(tl.int64) * TILE
    offsets = tl.arange(0, TILE)
    values = tl.load(x + base + offsets, mask=base + offsets < count, other=0.0)
    if FLIP_BEFORE or FLIP_AFTER:
        _, words = random_words(base, bucket, step_low, step_high, seed_low, seed_high, TILE)
        draws = tl.reshape(tl.permute(words, (0, 2, 3, 1)), (TILE,))
    if FLIP_BEFORE:
        values = _flip(tl.minimum(tl.maximum(values, -limit), limit), draws)
    values = _butterflies(values * factor, TILE, LEVELS, 1)
    if FLIP_AFTER:
        values = _flip(values, draws)
    tl.store(out + base + offsets, values, mask=base + offsets < out_count)


@triton.jit(do_not_specialize=KEY_ARGUMENTS)
def _far_kernel(x, out, out_count, bucket, step_low, step_high, seed_low, seed_high,
                PIECE: tl.constexpr, PIECES: tl.constexpr, LEVELS: tl.constexpr, COLUMNS: tl.constexpr,
                FLIP_AFTER: tl.constexpr):  # fmt: skip
    GROUPS: tl.constexpr = PIECE // COLUMNS
    program = tl.program_id(0)
    base = (program // GROUPS).to(tl.int64) * (PIECE * PIECES) + (program % GROUPS) * COLUMNS
    place = tl.arange(0, PIECES * COLUMNS)
    index = base + place // COLUMNS * PIECE + place % COLUMNS
    values = _butterflies(tl.load(x + index), PIECES * COLUMNS, LEVELS, COLUMNS)
    if FLIP_AFTER:
        counter = (index // 64).to(tl.uint32) * 16 + (index % 16).to(tl.uint32)
        w0, w1, w2, w3 = philox(counter, bucket, step_low, step_high, seed_low, seed_high)
        which = index // 16 % 4
        values = _flip(values, tl.where(which < 2, tl.where(which == 0, w0, w1), tl.where(which == 2, w2, w3)))
    tl.store(out + index, values, mask=index < out_count)


def _transform(x: Tensor, out_count: int, key: Key, block: int, *, inverse: bool) -> Tensor:
    """Whole blocks of x, padded with zeros, of which ``out_count`` values are kept."""
    padded = cdiv(x.numel(), block) * block
    out = torch.empty(out_count, dtype=torch.float32, device=x.device)
    if not padded:
        return out
    length = min(block, _PIECE)
    pieces = block // length
    key_arguments = philox_arguments(key, STREAM_ROTATION)
    near = out if pieces == 1 else torch.empty(padded, dtype=torch.float32, device=x.device)
    limit = torch.finfo(torch.float32).max / (2 * block)
    tile = max(length, 1024)
    launch(_near_kernel, cdiv(padded, tile), x.device, x.contiguous(), near, x.numel(), near.numel(), limit,
           1.0 / math.isqrt(block), *key_arguments, length.bit_length() - 1, tile, not inverse,
           inverse and pieces == 1, num_warps=max(1, tile // 512))  # fmt: skip
    if pieces > 1:
        launch(_far_kernel, padded // (pieces * _COLUMNS), x.device, near, out, out_count, *key_arguments,
               length, pieces, pieces.bit_length() - 1, _COLUMNS, inverse, num_warps=4)  # fmt: skip
    return out


def rotate(x: Tensor, key: Key, block: int) -> Tensor:
    return _transform(x, cdiv(x.numel(), block) * block, key, block, inverse=False)


def unrotate(x: Tensor, key: Key, block: int, count: int) -> Tensor:
    return _transform(x, count, key, block, inverse=True)
