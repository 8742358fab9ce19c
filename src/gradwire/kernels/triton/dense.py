"""Dense formats: encode with the residual in one pass over the tensor, decode several payloads in one."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment, misc"

import functools
from collections.abc import Sequence
from typing import Any, Final

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from gradwire.kernels.formats import Float8, Format, Half, Integer, Levels, Natural, Sign, Ternary
from gradwire.kernels.law import (
    FLOAT8_LARGEST,
    MSE_ROUNDS,
    MSE_START,
    STREAM_ROUNDING,
    largest_scale,
    reciprocal,
    short_block,
)
from gradwire.kernels.triton.bits import pack
from gradwire.kernels.triton.common import (
    KEY_ARGUMENTS,
    MAGIC,
    MAGIC_BITS,
    MAX32,
    bf16_bits,
    bits_of,
    blank,
    cdiv,
    float_of,
    floored,
    get_scale,
    inverse_of,
    is_finite,
    launch,
    load,
    load_sum,
    nearest,
    philox,
    philox_arguments,
    power_of_two,
    put_scale,
    report,
    round_with,
    store,
    stored_scale,
    uniform,
)
from gradwire.wire import Key

# Elements of a program. With 4 warps 2048 are 16 a thread, few enough registers for many programs at a time.
_FLAT_TILE: Final = 2048
_BLOCKS_TILE: Final = 2048  # in encode_blocks without a float sum; one block if it is longer
_LANES_TILE: Final = 4096  # in encode_blocks with a float sum or random bits; eight blocks if they are longer

_TWO23_BITS = tl.constexpr(0x4B000000)  # of 2.0**23; ORed with an integer below 2**23, of 2**23 plus that integer

# What the codes of a format are; the kernels branch on it when they are compiled.
_INTEGER = tl.constexpr(0)
_MSE = tl.constexpr(1)
_STOCHASTIC = tl.constexpr(2)
_SIGN = tl.constexpr(3)
_LEVELS = tl.constexpr(4)
_TERNARY = tl.constexpr(5)
_NATURAL = tl.constexpr(6)
_E4M3 = tl.constexpr(7)
_E5M2 = tl.constexpr(8)
_FP16 = tl.constexpr(9)
_BF16 = tl.constexpr(10)
_TRUNCATE16 = tl.constexpr(11)

_LANES_ARGUMENTS: Final = [*KEY_ARGUMENTS, "levels", "rounds"]


# Before and after an encode


@triton.jit
def _accumulate_tile(x, residual, e_out, nonfinite, left, decay, TILE: tl.constexpr, FEEDBACK: tl.constexpr,
                     WRITE: tl.constexpr, CUT: tl.constexpr):  # fmt: skip
    offsets = tl.arange(0, TILE)
    e = load_sum(x, residual, decay, offsets, left, FEEDBACK, CUT)
    finite = is_finite(e)
    if WRITE:
        store(e_out, offsets, tl.where(finite, e, 0.0), left, CUT)
    report(nonfinite, tl.sum((finite == 0).to(tl.int32), axis=0))


@triton.jit
def _accumulate_kernel(x, residual, e_out, nonfinite, count, decay, TILE: tl.constexpr, FEEDBACK: tl.constexpr,
                       WRITE: tl.constexpr):  # fmt: skip
    base = tl.program_id(0).to(tl.int64) * TILE
    left = tl.minimum(count - base, TILE).to(tl.int32)
    if left == TILE:
        _accumulate_tile(x + base, residual + base, e_out + base, nonfinite, left, decay, TILE, FEEDBACK, WRITE, False)
    else:
        _accumulate_tile(x + base, residual + base, e_out + base, nonfinite, left, decay, TILE, FEEDBACK, WRITE, True)


def accumulate(x: Tensor, residual: Tensor | None, decay: float) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    e = torch.empty_like(x)
    old = x if residual is None else residual.contiguous()
    nonfinite = torch.zeros((), dtype=torch.int64, device=x.device)
    arguments = (x, old, e, nonfinite, x.numel(), float(decay), _FLAT_TILE, residual is not None, True)
    launch(_accumulate_kernel, cdiv(x.numel(), _FLAT_TILE), x.device, *arguments)
    return e, nonfinite


def count_nonfinite(x: Tensor) -> Tensor:
    x = x.contiguous()
    nonfinite = torch.zeros((), dtype=torch.int64, device=x.device)
    arguments = (x, x, x, nonfinite, x.numel(), 1.0, _FLAT_TILE, False, False)
    launch(_accumulate_kernel, cdiv(x.numel(), _FLAT_TILE), x.device, *arguments)
    return nonfinite


@triton.jit
def _divide_tile(x, nonfinite, left, by, TILE: tl.constexpr, CUT: tl.constexpr):
    offsets = tl.arange(0, TILE)
    quotient = tl.div_rn(load(x, offsets, left, CUT), tl.zeros((TILE,), tl.float32) + by)
    store(x, offsets, quotient, left, CUT)
    report(nonfinite, tl.sum((is_finite(quotient) == 0).to(tl.int32), axis=0))


@triton.jit
def _divide_kernel(x, nonfinite, count, by, TILE: tl.constexpr):
    base = tl.program_id(0).to(tl.int64) * TILE
    left = tl.minimum(count - base, TILE).to(tl.int32)
    if left == TILE:
        _divide_tile(x + base, nonfinite, left, by, TILE, False)
    else:
        _divide_tile(x + base, nonfinite, left, by, TILE, True)


def divide(x: Tensor, by: int) -> Tensor:
    nonfinite = torch.zeros((), dtype=torch.int64, device=x.device)
    launch(_divide_kernel, cdiv(x.numel(), _FLAT_TILE), x.device, x, nonfinite, x.numel(), float(by), _FLAT_TILE)
    return nonfinite


@triton.jit
def _keep_kernel(new, old, nonfinite, count, TILE: tl.constexpr, PROGRAMS: tl.constexpr):
    if tl.load(nonfinite) != 0:
        offsets = tl.arange(0, TILE)
        for tile in range(tl.program_id(0), tl.cdiv(count, TILE), PROGRAMS):
            base = (tl.zeros((), tl.int64) + tile) * TILE
            left = tl.minimum(count - base, TILE).to(tl.int32)
            store(new + base, offsets, load(old + base, offsets, left, True), left, True)


_KEEP_PROGRAMS: Final = 1024  # few: nearly always they return at once


def keep_residual(new: Tensor, old: Tensor, nonfinite: Tensor) -> Tensor:
    new = new.contiguous()
    launch(_keep_kernel, _KEEP_PROGRAMS if new.numel() else 0, new.device, new, old.contiguous(), nonfinite,
            new.numel(), _FLAT_TILE, _KEEP_PROGRAMS)  # fmt: skip
    return new


# Encode: formats whose scale follows the maximum, in tiles of (blocks, block)


@triton.jit
def _float8_code(value, KIND: tl.constexpr):
    """Nearest float8 of a value in its range, by integers; below the least normal one the sum rounds."""
    bits = bits_of(value)
    magnitude = bits & 0x7FFFFFFF
    if KIND == _E4M3:
        normal = (magnitude - 1006632960 + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20  # 120 << 23: the biases' difference
        small = bits_of(float_of(magnitude) + 16384.0) - 1182793728  # 2.0**14 has a last place of 2**-9; its bits
        code = tl.where(magnitude < 1015021568, small, normal)  # 2.0**-6
    else:
        normal = (magnitude - 939524096 + 0xFFFFF + ((magnitude >> 21) & 1)) >> 21  # 112 << 23
        small = bits_of(float_of(magnitude) + 128.0) - 1124073472
        code = tl.where(magnitude < 947912704, small, normal)  # 2.0**-14
    return code | ((bits >> 24) & 0x80)


@triton.jit
def _float8_value(code, KIND: tl.constexpr):
    rest = code & 0x7F
    if KIND == _E4M3:
        magnitude = float_of(rest << 20) * 1.329227995784916e36  # 2**120
        magnitude = tl.where(rest == 0x7F, float("nan"), magnitude)
    else:
        magnitude = float_of(rest << 21) * 5.192296858534828e33  # 2**112
        magnitude = tl.where(rest == 0x7C, float("inf"), tl.where(rest > 0x7C, float("nan"), magnitude))
    return float_of(bits_of(magnitude) | ((code & 0x80) << 24))


@triton.jit
def _put_codes(codes, base, code, offsets, left, TILE: tl.constexpr, BITS: tl.constexpr, CUT: tl.constexpr):
    """Pack the codes of a tile (of any shape) that starts at element ``base``."""
    if CUT:
        code = tl.where(offsets < left, code, 0)
    if BITS == 3:
        groups = tl.reshape(code, (TILE // 8, 8))
        packed = tl.sum(groups << (3 * tl.arange(0, 8))[None, :], axis=1)
        place = 3 * tl.arange(0, TILE // 8)
        codes += base // 8 * 3
        for i in tl.static_range(3):
            store(codes, place + i, (packed >> (8 * i)).to(tl.uint8), (left * 3 + 7) // 8, CUT)
    else:
        GROUP: tl.constexpr = 32 // BITS
        groups = tl.reshape(code, (TILE // GROUP, GROUP))
        words = tl.sum(groups << (BITS * tl.arange(0, GROUP))[None, :], axis=1)
        store(codes + base // GROUP, tl.arange(0, TILE // GROUP), words, (left + GROUP - 1) // GROUP, CUT)


@triton.jit
def _encode_tile(x, residual, rest, codes, scales, nonfinite, base, left, decay, inverse_limit, scale_limit,
                 KIND: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
                 HALF: tl.constexpr, FEEDBACK: tl.constexpr, CUT: tl.constexpr):  # fmt: skip
    row = tl.arange(0, ROWS)
    offsets = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    e = load_sum(x + base, residual + base, decay, offsets, left, FEEDBACK, CUT)
    finite = is_finite(e)
    e = tl.where(finite, e, 0.0)
    report(nonfinite, tl.sum(tl.sum((finite == 0).to(tl.int32), axis=1), axis=0))
    largest = floored(tl.max(tl.abs(e), axis=1))
    scale = stored_scale(largest * inverse_limit, scale_limit, HALF, False)
    put_scale(scales + base // BLOCK, row, scale, (left + BLOCK - 1) // BLOCK, HALF, CUT)
    value = e * inverse_of(scale)[:, None]
    if KIND == _INTEGER:
        LIMIT: tl.constexpr = (1 << (BITS - 1)) - 1
        rounded = nearest(value, LIMIT * 1.0)
        code = bits_of(rounded) - (MAGIC_BITS - LIMIT)
        sent = rounded - MAGIC
    else:
        FLOAT8_LIMIT: tl.constexpr = 448.0 if KIND == _E4M3 else 57344.0
        code = _float8_code(tl.minimum(tl.maximum(value, -FLOAT8_LIMIT), FLOAT8_LIMIT), KIND)
        sent = _float8_value(code, KIND)
    if FEEDBACK:
        store(rest + base, offsets, e - sent * scale[:, None], left, CUT)
    _put_codes(codes, base, code, offsets, left, ROWS * BLOCK, BITS, CUT)


@triton.jit
def _encode_tile_kernel(x, residual, rest, codes, scales, nonfinite, count, decay, inverse_limit, scale_limit,
                        KIND: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
                        HALF: tl.constexpr, FEEDBACK: tl.constexpr):  # fmt: skip
    base = tl.program_id(0).to(tl.int64) * (ROWS * BLOCK)
    left = tl.minimum(count - base, ROWS * BLOCK).to(tl.int32)
    if left == ROWS * BLOCK:
        _encode_tile(x, residual, rest, codes, scales, nonfinite, base, left, decay, inverse_limit, scale_limit,
                     KIND, BITS, BLOCK, ROWS, HALF, FEEDBACK, False)  # fmt: skip
    else:
        _encode_tile(x, residual, rest, codes, scales, nonfinite, base, left, decay, inverse_limit, scale_limit,
                     KIND, BITS, BLOCK, ROWS, HALF, FEEDBACK, True)  # fmt: skip


# Encode: formats with a float sum or random bits, in chunks of (blocks, 16 lanes)


@triton.jit
def _chunk(kept, x, residual, decay, offsets, left, i: tl.constexpr, KEEP: tl.constexpr, FEEDBACK: tl.constexpr,
           CUT: tl.constexpr):  # fmt: skip
    """Sixteen elements of each block: from registers, or once more from memory."""
    if KEEP:
        return kept[i]
    else:
        e = load_sum(x, residual, decay, offsets, left, FEEDBACK, CUT)
        return tl.where(is_finite(e), e, 0.0)


@triton.jit
def _fold(total, ROWS: tl.constexpr):
    """The end of the lane tree. Each of these sums has two terms, so its order does not matter."""
    total = tl.sum(tl.reshape(total, (ROWS, 2, 8)), axis=1)
    total = tl.sum(tl.reshape(total, (ROWS, 2, 4)), axis=1)
    total = tl.sum(tl.reshape(total, (ROWS, 2, 2)), axis=1)
    return tl.sum(total, axis=1)


@triton.jit
def _fold_in_place(total, ROWS: tl.constexpr):
    """The same in every lane, where a sum is used with the chunks again: in the layout that ``_fold`` ends in, each
    thread would hold sixteen lanes of all chunks, which are more registers than there are.
    """
    lane = tl.arange(0, 16)[None, :] + tl.zeros((ROWS, 16), tl.int32)
    total = total + tl.gather(total, lane ^ 8, axis=1)
    total = total + tl.gather(total, lane ^ 4, axis=1)
    total = total + tl.gather(total, lane ^ 2, axis=1)
    total = total + tl.gather(total, lane ^ 1, axis=1)
    return tl.max(total, axis=1)  # of equal values


@triton.jit
def _natural_code(e, top, u):
    """Code of elements, whose block's top level has the biased exponent ``top``."""
    lowest = top - 126
    magnitude = tl.abs(e)
    exponent = bits_of(magnitude) >> 23
    small = exponent < lowest
    fraction = (bits_of(magnitude) & 0x7FFFFF).to(tl.float32) * 1.1920928955078125e-07  # 2**-23
    below = magnitude * power_of_two(tl.minimum(tl.maximum(127 - lowest, -126), 127))
    level = tl.where(small, lowest - 1, exponent) + (u < tl.where(small, below, fraction)).to(tl.int32)
    code = tl.where((level >= lowest) & (exponent > 0) & (top > 0), tl.minimum(level - lowest + 1, 127), 0)
    return tl.where((e < 0) & (code > 0), code + 128, code)


@triton.jit
def _natural_value(code, top):
    exponent = tl.minimum(tl.maximum(top - 127 + (code & 127), 0), 254)
    value = float_of((exponent << 23) | ((code >> 7) << 31))  # a minus would turn 0.0 into 0.0, not -0.0
    return tl.where((code & 127) > 0, value, 0.0)


@triton.jit
def _put_chunk(codes, base, code, corner, row, i, left, ROWS: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr,
               CUT: tl.constexpr):  # fmt: skip
    """Store chunk i of each block: packed, or if BITS is 0 as an array of int32."""
    if CUT:
        code = tl.where(corner + i * 16 < left, code, 0)
    if BITS == 0:
        store(codes + base, corner + i * 16, code, left, CUT)
    elif BITS == 3:
        packed = tl.sum(tl.reshape(code, (ROWS, 2, 8)) << (3 * tl.arange(0, 8))[None, None, :], axis=2)
        place = row[:, None] * (BLOCK // 8 * 3) + i * 6 + 3 * tl.arange(0, 2)[None, :]
        for j in tl.static_range(3):
            store(codes + base // 8 * 3, place + j, (packed >> (8 * j)).to(tl.uint8), (left * 3 + 7) // 8, CUT)
    else:
        GROUP: tl.constexpr = 32 // BITS
        WORDS: tl.constexpr = 16 // GROUP
        groups = tl.reshape(code, (ROWS, WORDS, GROUP))
        packed = tl.sum(groups << (BITS * tl.arange(0, GROUP))[None, None, :], axis=2)
        place = row[:, None] * (BLOCK // GROUP) + i * WORDS + tl.arange(0, WORDS)[None, :]
        store(codes + base // GROUP, place, packed, (left + GROUP - 1) // GROUP, CUT)


@triton.jit
def _encode_lanes(x, residual, rest, codes, scales, nonfinite, base, left, decay, inverse_limit, scale_limit, start,
                  short, rounds, levels, shrink, bucket, step_low, step_high, seed_low, seed_high,
                  KIND: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
                  HALF: tl.constexpr, FEEDBACK: tl.constexpr, CUT: tl.constexpr):  # fmt: skip
    """STEP chunks are unrolled; with more than that in a block they are not kept in registers."""
    STEPS: tl.constexpr = BLOCK // 16 // STEP
    KEEP: tl.constexpr = STEPS == 1
    LIMIT: tl.constexpr = (1 << (BITS - 1)) - 1 if BITS else 0
    x += base
    residual += base
    rest += base
    row = tl.arange(0, ROWS)
    lane = tl.arange(0, 16)[None, :]
    corner = row[:, None] * BLOCK + lane

    kept = ()
    bad = tl.zeros((ROWS, 16), tl.int32)
    if KEEP:
        for j in tl.static_range(STEP):
            e = load_sum(x, residual, decay, corner + j * 16, left, FEEDBACK, CUT)
            finite = is_finite(e)
            bad += (finite == 0).to(tl.int32)
            kept = kept + (tl.where(finite, e, 0.0),)

    # First reading: the maximum, and of sign the mean.
    largest = tl.zeros((ROWS, 16), tl.float32)
    total = tl.zeros((ROWS, 16), tl.float32)
    for step in range(STEPS):
        for j in tl.static_range(STEP):
            if KEEP:
                e = kept[j]
            else:
                e = load_sum(x, residual, decay, corner + (step * STEP + j) * 16, left, FEEDBACK, CUT)
                finite = is_finite(e)
                bad += (finite == 0).to(tl.int32)
                e = tl.where(finite, e, 0.0)
            largest = tl.maximum(largest, tl.abs(e))
            if KIND == _SIGN:
                total = total + tl.abs(e) * (1.0 / BLOCK)
    report(nonfinite, tl.sum(tl.sum(bad, axis=1), axis=0))
    largest = floored(tl.max(largest, axis=1))

    # The scale, which may take more readings.
    if KIND == _SIGN:
        scale = _fold(total, ROWS)
        if CUT:
            scale = tl.where((row + 1) * BLOCK > left, scale * short, scale)
        scale = tl.where(largest > 0, scale, 0.0)
    elif KIND == _MSE:
        exponent = tl.minimum(tl.maximum((bits_of(largest) >> 23) - 127, -126), 126)
        factor = power_of_two(-exponent)[:, None]
        for step in range(STEPS):
            for j in tl.static_range(STEP):
                e = _chunk(kept, x, residual, decay, corner + (step * STEP + j) * 16, left, j, KEEP, FEEDBACK, CUT)
                total = total + tl.abs(e) * factor * (1.0 / BLOCK)
        scale = _fold_in_place(total, ROWS)
        if CUT:
            scale = tl.where((row + 1) * BLOCK > left, scale * short, scale)
        scale = scale * start
        for _ in range(rounds):  # a number that the compiler does not know, lest it unrolls for a minute
            inverse = inverse_of(scale)[:, None]
            total = tl.zeros((ROWS, 16), tl.float32)
            weight = tl.zeros((ROWS, 16), tl.float32)
            for step in range(STEPS):
                for j in tl.static_range(STEP):
                    e = _chunk(kept, x, residual, decay, corner + (step * STEP + j) * 16, left, j, KEEP, FEEDBACK, CUT)
                    y = tl.abs(e) * factor
                    code = tl.minimum(y * inverse, LIMIT * 1.0) + MAGIC - MAGIC
                    total = total + y * code
                    weight = weight + code * code
            weights = _fold_in_place(weight, ROWS)
            quotient = tl.div_rn(_fold_in_place(total, ROWS), tl.where(weights > 0, weights, 1.0))
            scale = tl.where(weights > 0, quotient, 0.0)
        scale = tl.where(largest > 0, scale * power_of_two(exponent), 0.0)
    elif KIND == _STOCHASTIC:
        scale = largest * inverse_limit
    elif KIND == _LEVELS:
        inverse = inverse_of(largest)[:, None]
        for step in range(STEPS):
            for j in tl.static_range(STEP):
                e = _chunk(kept, x, residual, decay, corner + (step * STEP + j) * 16, left, j, KEEP, FEEDBACK, CUT)
                ratio = e * inverse
                total = total + ratio * ratio
        norm = tl.minimum(tl.sqrt_rn(_fold(total, ROWS)) * largest, MAX32)
        inverse = inverse_of(norm)[:, None]
        scale = tl.minimum(norm * shrink, MAX32)
    elif KIND == _TERNARY:
        inverse = inverse_of(largest)[:, None]
        scale = largest * shrink
    else:
        top = tl.where(largest > 0, tl.minimum((bits_of(largest) >> 23) + 1, 254), 0)

    rows_left = (left + BLOCK - 1) // BLOCK
    if KIND == _NATURAL:
        store(scales + base // BLOCK, row, top.to(tl.uint8), rows_left, CUT)
    else:
        if KIND == _SIGN or KIND == _MSE or KIND == _STOCHASTIC:
            scale = stored_scale(scale, scale_limit, HALF, KIND == _STOCHASTIC)
            inverse = inverse_of(scale)[:, None]
        put_scale(scales + base // BLOCK, row, scale, rows_left, HALF, CUT)

    # Last reading: codes and what they lose.
    for step in range(STEPS):
        for j in tl.static_range(STEP):
            i = step * STEP + j
            e = _chunk(kept, x, residual, decay, corner + i * 16, left, j, KEEP, FEEDBACK, CUT)
            if KIND != _SIGN and KIND != _MSE:  # random: four chunks share a counter
                if BLOCK < 64:
                    chunk = row[:, None] * (BLOCK // 16) + i + lane * 0
                    counter = (base // 64 + chunk // 4).to(tl.uint32) * 16 + lane.to(tl.uint32)
                    w0, w1, w2, w3 = philox(counter, bucket, step_low, step_high, seed_low, seed_high)
                    word = tl.where(chunk % 4 < 2, tl.where(chunk % 4 == 0, w0, w1), tl.where(chunk % 4 == 2, w2, w3))
                else:
                    if j % 4 == 0:
                        quad = row[:, None] * (BLOCK // 64) + i // 4 + lane * 0
                        counter = (base // 64 + quad).to(tl.uint32) * 16 + lane.to(tl.uint32)
                        w0, w1, w2, w3 = philox(counter, bucket, step_low, step_high, seed_low, seed_high)
                        word = w0
                    elif j % 4 == 1:
                        word = w1
                    elif j % 4 == 2:
                        word = w2
                    else:
                        word = w3
                u = uniform(word)
            if KIND == _SIGN:
                negative = (e < 0).to(tl.int32)
                sent = float_of(bits_of(scale)[:, None] ^ (negative << 31))
                if STEP == 1:
                    word = tl.sum(negative << lane, axis=1).to(tl.int16)
                    store(codes.to(tl.pointer_type(tl.int16)) + base // 16, row, word, (left + 15) // 16, CUT)
                elif j % 2 == 0:
                    pending = negative << lane
                else:
                    word = tl.sum(pending | (negative << (lane + 16)), axis=1)
                    store(codes + base // 32, row * (BLOCK // 32) + i // 2, word, (left + 31) // 32, CUT)
            elif KIND == _MSE:
                rounded = nearest(e * inverse, LIMIT * 1.0)
                code = bits_of(rounded) - (MAGIC_BITS - LIMIT)
                sent = (rounded - MAGIC) * scale[:, None]
            elif KIND == _STOCHASTIC:
                rounded = round_with(e * inverse, u)
                rounded = tl.minimum(tl.maximum(rounded, -LIMIT * 1.0), LIMIT * 1.0)
                code = rounded.to(tl.int32) + LIMIT
                sent = rounded * scale[:, None]
            elif KIND == _LEVELS:
                most = levels.to(tl.float32)
                rounded = round_with(tl.minimum(tl.abs(e) * inverse * most, most), u).to(tl.int32)
                rounded = tl.where(e < 0, -rounded, rounded)
                code = rounded + levels
                sent = rounded.to(tl.float32) * inverse_limit * scale[:, None]
            elif KIND == _TERNARY:
                rounded = tl.minimum(round_with(tl.abs(e) * inverse, u), 1.0).to(tl.int32)
                rounded = tl.where(e < 0, -rounded, rounded)
                code = rounded + 1
                sent = rounded.to(tl.float32) * scale[:, None]
            else:
                code = _natural_code(e, top[:, None], u)
                sent = _natural_value(code, top[:, None])
            if FEEDBACK:
                store(rest, corner + i * 16, e - sent, left, CUT)
            if KIND != _SIGN:
                _put_chunk(codes, base, code, corner, row, i, left, ROWS, BLOCK, BITS, CUT)


@triton.jit(do_not_specialize=_LANES_ARGUMENTS)
def _encode_lanes_kernel(x, residual, rest, codes, scales, nonfinite, count, decay, inverse_limit, scale_limit, start,
                         short, rounds, levels, shrink, bucket, step_low, step_high, seed_low, seed_high,
                         KIND: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
                         STEP: tl.constexpr, HALF: tl.constexpr, FEEDBACK: tl.constexpr):  # fmt: skip
    base = tl.program_id(0).to(tl.int64) * (ROWS * BLOCK)
    left = tl.minimum(count - base, ROWS * BLOCK).to(tl.int32)
    if left == ROWS * BLOCK:
        _encode_lanes(x, residual, rest, codes, scales, nonfinite, base, left, decay, inverse_limit, scale_limit,
                      start, short, rounds, levels, shrink, bucket, step_low, step_high, seed_low, seed_high,
                      KIND, BITS, BLOCK, ROWS, STEP, HALF, FEEDBACK, False)  # fmt: skip
    else:
        _encode_lanes(x, residual, rest, codes, scales, nonfinite, base, left, decay, inverse_limit, scale_limit,
                      start, short, rounds, levels, shrink, bucket, step_low, step_high, seed_low, seed_high,
                      KIND, BITS, BLOCK, ROWS, STEP, HALF, FEEDBACK, True)  # fmt: skip


# Encode: sixteen bits


@triton.jit
def _half_value(code, KIND: tl.constexpr):
    return code.to(tl.float32) if KIND == _FP16 else float_of(code.to(tl.int32) << 16)


@triton.jit
def _encode_half(x, residual, rest, codes, nonfinite, left, decay, limit, KIND: tl.constexpr, TILE: tl.constexpr,
                 FEEDBACK: tl.constexpr, CUT: tl.constexpr):  # fmt: skip
    offsets = tl.arange(0, TILE)
    e = load_sum(x, residual, decay, offsets, left, FEEDBACK, CUT)
    finite = is_finite(e)
    e = tl.where(finite, e, 0.0)
    report(nonfinite, tl.sum((finite == 0).to(tl.int32), axis=0))
    if KIND == _TRUNCATE16:
        code = (bits_of(e) >> 16).to(tl.int16)
    else:
        cut = tl.minimum(tl.maximum(e, -limit), limit)
        code = cut.to(tl.float16) if KIND == _FP16 else bf16_bits(cut).to(tl.int16)
    store(codes, offsets, code, left, CUT)
    if FEEDBACK:
        store(rest, offsets, e - _half_value(code, KIND), left, CUT)


@triton.jit
def _encode_half_kernel(x, residual, rest, codes, nonfinite, count, decay, limit, KIND: tl.constexpr,
                        TILE: tl.constexpr, FEEDBACK: tl.constexpr):  # fmt: skip
    base = tl.program_id(0).to(tl.int64) * TILE
    left = tl.minimum(count - base, TILE).to(tl.int32)
    if left == TILE:
        _encode_half(x + base, residual + base, rest + base, codes + base, nonfinite, left, decay, limit, KIND, TILE,
                     FEEDBACK, False)  # fmt: skip
    else:
        _encode_half(x + base, residual + base, rest + base, codes + base, nonfinite, left, decay, limit, KIND, TILE,
                     FEEDBACK, True)  # fmt: skip


_HALVES: Final = {"fp16": _FP16, "bf16": _BF16, "truncate16": _TRUNCATE16}
_FLOAT8S: Final = {"e4m3": _E4M3, "e5m2": _E5M2}
_SCALINGS: Final = {"absmax": _INTEGER, "mse": _MSE, "stochastic": _STOCHASTIC}
_NO_KEY: Final = (0, 0, 0, 0, 0)


def encode_blocks(
    x: Tensor, form: Format, key: Key, residual: Tensor | None = None, decay: float = 1.0
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    x = x.contiguous()
    count, device = x.numel(), x.device
    old = x if residual is None else residual.contiguous()
    rest = x if residual is None else torch.empty_like(x)
    nonfinite = torch.zeros((), dtype=torch.int64, device=device)
    codes = blank(form.code_count(count), form.code_dtype, device)
    scales = blank(form.scale_count(count), form.scales or torch.float32, device)
    encode = {Half: _launch_half, Float8: _launch_tiles}.get(type(form), _launch_lanes)
    if isinstance(form, Integer) and form.scaling == "absmax":
        encode = _launch_tiles
    if count:
        encode(x, old, rest, codes, scales, nonfinite, float(decay), form, key, residual is not None)
    return codes, scales, nonfinite, None if residual is None else rest


def _words(codes: Tensor) -> Tensor:
    """Codes as the 32-bit words that kernels store; ``blank`` left room for the last one."""
    return codes.as_strided((cdiv(codes.numel(), 16) * 16,), (1,)).view(torch.int32)


def _raw(tensor: Tensor) -> Tensor:
    """Sixteen-bit floats as integers: the kernels round by hand."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


@functools.cache
def _scale_arguments(form: Format) -> tuple[float, float]:
    """1 / largest code, and the largest scale."""
    if isinstance(form, Integer):
        limit = float(form.limit)
    elif isinstance(form, Float8):
        limit = FLOAT8_LARGEST[form.form]
    else:
        limit = float(form.levels) if isinstance(form, Levels) else 1.0
    return reciprocal(limit), largest_scale(limit, form.scales or torch.float32)


def _launch_half(x, old, rest, codes, scales, nonfinite, decay, form, key, feedback):
    limit = torch.finfo(form.code_dtype).max
    arguments = (
        x,
        old,
        rest,
        _raw(codes),
        nonfinite,
        x.numel(),
        decay,
        limit,
        _HALVES[form.form],
        _FLAT_TILE,
        feedback,
    )
    launch(_encode_half_kernel, cdiv(x.numel(), _FLAT_TILE), x.device, *arguments)


def _launch_tiles(x, old, rest, codes, scales, nonfinite, decay, form, key, feedback):
    kind = _FLOAT8S[form.form] if isinstance(form, Float8) else _INTEGER
    rows = max(1, _BLOCKS_TILE // form.block)
    words = codes if form.bits == 3 else _words(codes)
    launch(_encode_tile_kernel, cdiv(x.numel(), rows * form.block), x.device,
            x, old, rest, words, _raw(scales), nonfinite, x.numel(), decay, *_scale_arguments(form),
            kind, form.bits, form.block, rows, form.scales == torch.bfloat16, feedback,
            num_warps=max(4, min(32, rows * form.block // 1024)))  # fmt: skip


def _launch_lanes(x, old, rest, codes, scales, nonfinite, decay, form, key, feedback):
    count, block = x.numel(), form.block
    kinds = {Sign: _SIGN, Levels: _LEVELS, Ternary: _TERNARY, Natural: _NATURAL}
    kind = _SCALINGS[form.scaling] if isinstance(form, Integer) else kinds[type(form)]
    direct = form.bits in (1, 2, 3, 4, 8) and not isinstance(form, Ternary)
    target = codes if form.bits == 3 else _words(codes)
    if not direct:
        target = torch.empty(count, dtype=torch.int32, device=x.device)
    rows, step = max(8, _LANES_TILE // block), block // 16 if block <= 256 else 4
    last = count % block
    short = short_block(block, last) if last else 1.0
    start = MSE_START[form.bits] if kind is _MSE else 1.0
    levels = form.levels if isinstance(form, Levels) else 0
    key_arguments = philox_arguments(key, STREAM_ROUNDING) if form.random else _NO_KEY
    launch(_encode_lanes_kernel, cdiv(count, rows * block), x.device,
            x, old, rest, target, _raw(scales), nonfinite, count, decay, *_scale_arguments(form), start, short,
            MSE_ROUNDS, levels, getattr(form, "shrink", 1.0), *key_arguments,
            kind, form.bits if direct else 0, block, rows, step, form.scales == torch.bfloat16, feedback,
            num_warps=max(1, min(4, rows // 8)))  # fmt: skip
    if isinstance(form, Ternary):
        launch(_pack_ternary_kernel, cdiv(codes.numel(), 1024), x.device, target, codes, count, 1024)
    elif not direct:
        pack(target, codes, form.bits)


@triton.jit
def _pack_ternary_kernel(digits, codes, count, TILE: tl.constexpr):
    base = tl.program_id(0).to(tl.int64) * TILE
    place = base + tl.arange(0, TILE)
    packed = tl.zeros((TILE,), tl.int32)
    for i in tl.static_range(5):
        digit = place * 5 + 4 - i
        packed = packed * 3 + tl.load(digits + digit, mask=digit < count, other=0)
    tl.store(codes + place, packed.to(tl.uint8), mask=place * 5 < count)


# Decode


@triton.jit
def _digit(packed, place):
    """Ternary digit at a place below 5."""
    low = tl.where(place == 0, packed, tl.where(place == 1, packed // 3, packed // 9))
    return tl.where(place < 3, low, tl.where(place == 3, packed // 27, packed // 81)) % 3


@triton.jit
def _get_codes(codes, base, left, bytes_left, KIND: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr,
               COLUMNS: tl.constexpr, CUT: tl.constexpr):  # fmt: skip
    """Codes of a tile as int32 in the shape (ROWS, COLUMNS)."""
    row = tl.arange(0, ROWS)[:, None]
    if KIND == _TERNARY:
        place = row * COLUMNS + tl.arange(0, COLUMNS)[None, :] + (base % 5).to(tl.int32)
        packed = load(codes + base // 5, place // 5, bytes_left, True).to(tl.int32)
        return _digit(packed, place % 5)
    elif BITS == 8:
        offsets = row * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        return load(codes + base, offsets, left, CUT).to(tl.int32)
    elif BITS == 1 or BITS == 2 or BITS == 4:
        EACH: tl.constexpr = 8 // BITS
        offsets = row * (COLUMNS // EACH) + tl.arange(0, COLUMNS // EACH)[None, :]
        packed = load(codes + base // EACH, offsets, (left + EACH - 1) // EACH, CUT).to(tl.int32)
        if KIND == _SIGN:  # to the place of a float's sign, with whatever stands below it
            code = packed[:, :, None] << (31 - tl.arange(0, EACH))[None, None, :]
        else:
            code = (packed[:, :, None] >> (BITS * tl.arange(0, EACH))[None, None, :]) & ((1 << BITS) - 1)
        return tl.reshape(code, (ROWS, COLUMNS))
    else:
        bit = (row * COLUMNS + tl.arange(0, COLUMNS)[None, :]) * BITS
        codes += base // 8 * BITS
        packed = load(codes, bit // 8, bytes_left, True).to(tl.int32)
        packed |= load(codes, bit // 8 + 1, bytes_left, True).to(tl.int32) << 8
        if BITS > 9:
            packed |= load(codes, bit // 8 + 2, bytes_left, True).to(tl.int32) << 16
        return (packed >> (bit % 8)) & ((1 << BITS) - 1)


@triton.jit
def _decode_tile(out, codes, scales, base, left, bytes_left, middle, inverse_levels, COUNT: tl.constexpr,
                 KIND: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
                 COLUMNS: tl.constexpr, HALF: tl.constexpr, ADD: tl.constexpr, CUT: tl.constexpr):  # fmt: skip
    row = tl.arange(0, ROWS)
    offsets = row[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    if ADD:
        total = load(out + base, offsets, left, CUT)
    for i in tl.static_range(COUNT):
        if KIND == _FP16 or KIND == _BF16:
            value = _half_value(load(codes[i] + base, offsets, left, CUT), KIND)
        else:
            code = _get_codes(codes[i], base, left, bytes_left, KIND, BITS, ROWS, COLUMNS, CUT)
            scale = get_scale(scales[i] + base // BLOCK, row, (left + COLUMNS - 1) // COLUMNS, HALF, CUT)[:, None]
            if KIND == _SIGN:
                value = float_of(bits_of(scale) ^ (code & -2147483648))
            elif KIND == _NATURAL:
                value = _natural_value(code, scale.to(tl.int32))
            elif KIND == _E4M3 or KIND == _E5M2:
                value = _float8_value(code, KIND) * scale
            else:
                value = float_of(code | _TWO23_BITS) - middle
                if KIND == _LEVELS:
                    value = value * inverse_levels
                value = value * scale
        if i == 0 and not ADD:
            total = value
        else:
            total = total + value
    store(out + base, offsets, total, left, CUT)


@triton.jit
def _decode_kernel(out, codes, scales, count, code_count, middle, inverse_levels, COUNT: tl.constexpr,
                   KIND: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
                   COLUMNS: tl.constexpr, HALF: tl.constexpr, ADD: tl.constexpr):  # fmt: skip
    base = tl.program_id(0).to(tl.int64) * (ROWS * COLUMNS)
    left = tl.minimum(count - base, ROWS * COLUMNS).to(tl.int32)
    first_byte = base // 5 if KIND == _TERNARY else base * BITS // 8
    bytes_left = tl.minimum(code_count - first_byte, 1 << 30).to(tl.int32)
    if left == ROWS * COLUMNS:
        _decode_tile(out, codes, scales, base, left, bytes_left, middle, inverse_levels,
                     COUNT, KIND, BITS, BLOCK, ROWS, COLUMNS, HALF, ADD, False)  # fmt: skip
    else:
        _decode_tile(out, codes, scales, base, left, bytes_left, middle, inverse_levels,
                     COUNT, KIND, BITS, BLOCK, ROWS, COLUMNS, HALF, ADD, True)  # fmt: skip


@triton.jit
def _word_value(word, scale, j: tl.constexpr, BITS: tl.constexpr):
    """Element j of a word. An integer becomes a float where it stands, by one AND and OR, if that is below bit 23."""
    if BITS == 1:
        return float_of(bits_of(scale) ^ ((word << (31 - j)) & -2147483648))
    else:
        LIMIT: tl.constexpr = (1 << (BITS - 1)) - 1
        HALF_WORD: tl.constexpr = 16 // BITS
        PLACE: tl.constexpr = j % HALF_WORD * BITS
        if j >= HALF_WORD:
            word = word >> 16
        ONE: tl.constexpr = 1 << (23 - PLACE)  # the float whose last bit counts where the code stands
        code = float_of((word & (((1 << BITS) - 1) << PLACE)) | (_TWO23_BITS - (PLACE << 23)))
        return (code - (ONE * 1.0 + LIMIT)) * scale


@triton.jit
def _decode_words_kernel(out, codes, scales, count, code_count, middle, inverse_levels, COUNT: tl.constexpr,
                         KIND: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
                         COLUMNS: tl.constexpr, HALF: tl.constexpr, ADD: tl.constexpr):  # fmt: skip
    """Signs and integers by words: a thread has all elements of a word, and loads it and its scale once."""
    TILE: tl.constexpr = ROWS * COLUMNS
    base = tl.program_id(0).to(tl.int64) * TILE
    left = tl.minimum(count - base, TILE).to(tl.int32)
    if left == TILE:
        EACH: tl.constexpr = 32 // BITS
        # The hint takes away what Triton knows of alignment: it would load four words a thread.
        place = tl.multiple_of(tl.arange(0, TILE // EACH), 1)
        offsets = tl.arange(0, TILE)
        LEVELS: tl.constexpr = 5 if BITS == 1 else 4 if BITS == 2 else 3 if BITS == 4 else 2
        sums = ()
        if ADD:
            sums = (tl.load(out + base + offsets),)
            for level in tl.static_range(LEVELS):
                evens, odds = (), ()
                for j in tl.static_range(1 << level):
                    even, odd = tl.split(tl.reshape(sums[j], (TILE >> (level + 1), 2)))
                    evens, odds = evens + (even,), odds + (odd,)
                sums = evens + odds
        for i in tl.static_range(COUNT):
            word = tl.load(codes[i].to(tl.pointer_type(tl.int32)) + base // EACH + place)
            scale = get_scale(scales[i] + base // BLOCK, place // (BLOCK // EACH), 0, HALF, False)
            new = ()
            for j in tl.static_range(EACH):
                value = _word_value(word, scale, j, BITS)
                new = new + (value if i == 0 and not ADD else sums[j] + value,)
            sums = new
        for level in tl.static_range(LEVELS):
            joined = ()
            for j in tl.static_range(EACH >> (level + 1)):
                both = tl.join(sums[j], sums[j + (EACH >> (level + 1))])
                joined = joined + (tl.reshape(both, (TILE // EACH << (level + 1),)),)
            sums = joined
        tl.store(out + base + offsets, sums[0])
    else:
        _decode_tile(out, codes, scales, base, left, left, middle, inverse_levels,
                     COUNT, KIND, BITS, BLOCK, ROWS, COLUMNS, HALF, ADD, True)  # fmt: skip


_AT_ONCE: Final = 8  # payloads of one pass over the output
# Four elements a thread: with more, Triton would load 16 codes a thread and move them through shared memory.
_DECODE_WARPS: Final = 8
_DECODE_TILE: Final = 4 * 32 * _DECODE_WARPS
_WORDS: Final = {1: (2048, 2), 2: (1024, 2), 4: (1024, 4), 8: (1024, 4)}  # tile and warps by the bits of a code


def decode_blocks(out: Tensor, payloads: Sequence[tuple[Tensor, Tensor]], form: Format, add: bool) -> None:
    if not out.numel():
        return
    kind, middle = _decode_arguments(form)
    inverse_levels = reciprocal(form.levels) if isinstance(form, Levels) else 1.0
    for first in range(0, len(payloads), _AT_ONCE):
        batch = payloads[first : first + _AT_ONCE]
        codes = tuple(_raw(each.contiguous()) for each, _ in batch)
        scales = tuple(_raw(each.contiguous()) for _, each in batch)
        by_words = kind in (_INTEGER, _SIGN) and form.bits in _WORDS and form.block * form.bits >= 32
        if by_words and all(each.data_ptr() % 4 == 0 for each in codes):
            kernel, (tile, warps) = _decode_words_kernel, _WORDS[form.bits]
        else:
            kernel, tile, warps = _decode_kernel, _DECODE_TILE, _DECODE_WARPS
        columns = min(form.block, tile)
        launch(kernel, cdiv(out.numel(), tile), out.device,
               out, codes, scales, out.numel(), codes[0].numel(), middle, inverse_levels, len(batch),
               kind, form.bits, form.block, tile // columns, columns, form.scales == torch.bfloat16, add,
               num_warps=warps)  # fmt: skip
        add = True


def _decode_arguments(form: Format) -> tuple[Any, float]:
    """The kind of codes, and 2**23 plus the code of zero."""
    if isinstance(form, Half):
        return _HALVES["fp16" if form.form == "fp16" else "bf16"], 0.0
    if isinstance(form, Float8):
        return _FLOAT8S[form.form], 0.0
    if isinstance(form, Levels):
        return _LEVELS, 2.0**23 + form.levels
    if isinstance(form, Integer):
        return _INTEGER, 2.0**23 + form.limit
    kinds = {Sign: _SIGN, Ternary: _TERNARY, Natural: _NATURAL}
    return kinds[type(form)], 2.0**23 + 1
