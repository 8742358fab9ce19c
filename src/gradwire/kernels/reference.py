"""The definition of correct: every op in plain torch, on any device. Read ``ops`` for what each one does."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from gradwire.errors import WireError
from gradwire.kernels.formats import Float8, Format, Half, Integer, Levels, Natural, Sign, Ternary
from gradwire.kernels.law import (
    FLOOR,
    LANES,
    MSE_ROUNDS,
    MSE_START,
    ORTHOGONAL_LEAST,
    ORTHOGONAL_SHIFT,
    STREAM_ROTATION,
    STREAM_ROUNDING,
    STREAM_SELECTION,
    largest_scale,
    reciprocal,
    short_block,
)
from gradwire.wire import Key

_MAX32: Final = torch.finfo(torch.float32).max
_FLOAT8: Final = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


# Before and after an encode


def count_nonfinite(x: Tensor) -> Tensor:
    return x.numel() - torch.isfinite(x).sum()


def accumulate(x: Tensor, residual: Tensor | None, decay: float) -> tuple[Tensor, Tensor]:
    e = x if residual is None else x + (residual if decay == 1.0 else residual * decay)
    nonfinite = count_nonfinite(e)
    if e.device.type != "cpu" or int(nonfinite):  # elsewhere than on the CPU, to look would be to wait
        e = torch.nan_to_num(e, nan=0.0, posinf=0.0, neginf=0.0)
    return e, nonfinite


def divide(x: Tensor, by: int) -> Tensor:
    return count_nonfinite(x.div_(x.new_full((1,), by)))  # by a number, torch on CUDA multiplies with its reciprocal


def keep_residual(new: Tensor, old: Tensor, nonfinite: Tensor) -> Tensor:
    return torch.where(nonfinite > 0, old, new)


# Random bits


def random_bits(key: Key, stream: int, count: int, *, device: torch.device) -> Tensor:
    groups = -(-count // 64)
    mask = 0xFFFFFFFF
    c0 = torch.arange(groups * LANES, device=device, dtype=torch.int64) & mask
    c1, c2 = torch.full_like(c0, key.bucket), torch.full_like(c0, key.step & mask)
    c3 = torch.full_like(c0, (key.step >> 32) << 8 | stream)
    k0, k1 = key.seed & mask, key.seed >> 32
    for _ in range(10):
        (hi0, lo0), (hi1, lo1) = _multiply(0xD2511F53, c0), _multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    words = torch.stack([c.view(groups, LANES) for c in (c0, c1, c2, c3)], dim=1)
    return words.view(-1)[:count]


def _multiply(m: int, c: Tensor) -> tuple[Tensor, Tensor]:
    """Upper and lower 32 bits of a 32 x 32 bit product, without leaving signed 64 bits."""
    low, high = m * (c & 0xFFFF), m * (c >> 16)
    return (high + (low >> 16)) >> 16, (low + (high << 16)) & 0xFFFFFFFF


def _uniform(key: Key, stream: int, count: int, device: torch.device) -> Tensor:
    return (random_bits(key, stream, count, device=device) >> 8).to(torch.float32) * 2.0**-24


def _round(v: Tensor, key: Key, count: int) -> Tensor:
    """Stochastic rounding of the first ``count`` elements of ``v``; the padding behind them is zero."""
    u = F.pad(_uniform(key, STREAM_ROUNDING, count, v.device), (0, v.numel() - count)).view_as(v)
    down = torch.floor(v)
    return down + (u < v - down)


# Bits


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    size = -(-codes.numel() * bits // 8)
    if bits == 8:
        return codes.to(torch.uint8)
    groups = F.pad(codes.to(torch.int64), (0, -codes.numel() % 8)).view(-1, 8)  # 8 codes fill `bits` bytes
    columns = []
    for byte in range(bits):
        first, last = 8 * byte // bits, (8 * byte + 7) // bits
        column = torch.zeros_like(groups[:, 0])
        for i in range(first, last + 1):
            shift = i * bits - 8 * byte
            column |= groups[:, i] << shift if shift >= 0 else groups[:, i] >> -shift
        columns.append((column & 0xFF).to(torch.uint8))
    if not columns:
        return torch.empty(0, dtype=torch.uint8, device=codes.device)
    return torch.stack(columns, dim=1).view(-1)[:size]


def unpack_bits(data: Tensor, bits: int, count: int) -> Tensor:
    if bits == 0:
        return torch.zeros(count, dtype=torch.int64, device=data.device)
    groups = -(-count // 8)
    rows = F.pad(data, (0, groups * bits - data.numel())).view(groups, bits).to(torch.int64)
    columns = []
    for i in range(8):
        first, last = i * bits // 8, (i * bits + bits - 1) // 8
        column = torch.zeros_like(rows[:, 0])
        for byte in range(first, last + 1):
            shift = 8 * byte - i * bits
            column |= rows[:, byte] << shift if shift >= 0 else rows[:, byte] >> -shift
        columns.append(column & ((1 << bits) - 1))
    return torch.stack(columns, dim=1).view(-1)[:count]


# Blocks


def _blocks(x: Tensor, block: int) -> Tensor:
    return F.pad(x, (0, -x.numel() % block)).view(-1, block)


def _absmax(rows: Tensor) -> Tensor:
    largest = rows.abs().amax(dim=1)
    return torch.where(largest < FLOOR, 0.0, largest)


def _lane_tree(rows: Tensor) -> Tensor:
    lanes = rows.view(rows.shape[0], rows.shape[1] // LANES, LANES)
    total = torch.zeros_like(lanes[:, 0])
    for i in range(lanes.shape[1]):
        total = total + lanes[:, i]
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total[:, 0]


def _means(rows: Tensor, count: int) -> Tensor:
    """Mean of each block, ``count`` elements in all: lane tree of x / block, the last one times block / its length."""
    block = rows.shape[1]
    means = _lane_tree(rows * (1.0 / block))  # divided first: a sum of huge values would overflow
    if count % block:
        means[-1] *= short_block(block, count % block)
    return means


def _store_scale(scale: Tensor, dtype: torch.dtype, largest_code: float, *, up: bool) -> Tensor:
    """Scales as they travel: rounded up or to nearest, and small enough for scale x largest code to be finite."""
    scale = scale.clamp(max=largest_scale(largest_code, dtype))
    if dtype == torch.float32:
        return scale
    bits = scale.view(torch.int32)
    rounding = 0xFFFF if up else 0x7FFF + ((bits >> 16) & 1)
    return ((bits + rounding) & ~0xFFFF).view(torch.float32).to(dtype)


def _sqrt(x: Tensor) -> Tensor:
    """Correctly rounded, which torch.sqrt of float32 is not on every CPU (0.6% of values are off by one bit)."""
    return torch.sqrt(x.double()).to(torch.float32)


def _power_of_two(exponent: Tensor) -> Tensor:
    """Exactly 2**exponent, for exponents in [-126, 127]."""
    return ((exponent + 127) << 23).view(torch.float32)


def _inverse(scale: Tensor) -> Tensor:
    """1 / scale as a column; 0 for the scale 0, so that its block gets the code 0."""
    scale = scale.to(torch.float32)
    return torch.where(scale > 0, 1.0 / scale, 0.0)[:, None]


def encode_blocks(
    x: Tensor, form: Format, key: Key, residual: Tensor | None = None, decay: float = 1.0
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    e, nonfinite = accumulate(x, residual, decay)
    codes, scales = _FORMATS[type(form)][0](e, form, key)
    if residual is None:
        return codes, scales, nonfinite, None
    return codes, scales, nonfinite, e - _decode(codes, scales, form, x.numel())


def decode_blocks(out: Tensor, payloads: Sequence[tuple[Tensor, Tensor]], form: Format, add: bool) -> None:
    for codes, scales in payloads:
        values = _decode(codes, scales, form, out.numel())
        out.copy_(out + values if add else values)
        add = True


def _decode(codes: Tensor, scales: Tensor, form: Format, count: int) -> Tensor:
    values: Tensor = _FORMATS[type(form)][1](codes, scales, form, count)
    return values


def _encode_integer(x: Tensor, form: Integer, key: Key) -> tuple[Tensor, Tensor]:
    limit, rows = form.limit, _blocks(x, form.block)
    if form.scaling == "mse":
        scale = _mse_scale(rows, form.bits, limit, x.numel())
    else:
        scale = _absmax(rows) * reciprocal(limit)
    stored = _store_scale(scale, form.scale_dtype, limit, up=form.random)
    codes = rows * _inverse(stored)
    codes = _round(codes, key, x.numel()) if form.random else torch.round(codes)
    codes = codes.clamp(-limit, limit) + limit
    return pack_bits(codes.view(-1)[: x.numel()].to(torch.uint8), form.bits), stored


def _mse_scale(rows: Tensor, bits: int, limit: int, count: int) -> Tensor:
    largest = _absmax(rows)
    # Work in (-4, 4): sums of huge or tiny values would overflow or vanish. The factor is an exact power of two.
    exponent = ((largest.view(torch.int32) >> 23) - 127).clamp(-126, 126)
    y = rows.abs() * _power_of_two(-exponent)[:, None]
    scale = _means(y, count) * MSE_START[bits]
    for _ in range(MSE_ROUNDS):
        codes = torch.round(y * _inverse(scale)).clamp(max=limit)
        weight = _lane_tree(codes * codes)  # 0 only for a block of zeros: the largest element never rounds to 0
        scale = torch.where(weight > 0, _lane_tree(y * codes) / weight, 0.0)
    return torch.where(largest > 0, scale * _power_of_two(exponent), 0.0)


def _decode_integer(codes: Tensor, scales: Tensor, form: Integer, count: int) -> Tensor:
    values = (unpack_bits(codes, form.bits, count) - form.limit).to(torch.float32)
    return _times_scale(values, scales, form.block)


def _times_scale(values: Tensor, scales: Tensor, block: int) -> Tensor:
    return (_blocks(values, block) * scales.to(torch.float32)[:, None]).view(-1)[: values.numel()]


def _encode_float8(x: Tensor, form: Float8, key: Key) -> tuple[Tensor, Tensor]:
    dtype = _FLOAT8[form.form]
    limit = torch.finfo(dtype).max
    rows = _blocks(x, form.block)
    stored = _store_scale(_absmax(rows) * reciprocal(limit), form.scale_dtype, limit, up=False)
    codes = (rows * _inverse(stored)).clamp(-limit, limit).to(dtype)
    return codes.view(torch.uint8).view(-1)[: x.numel()], stored


def _decode_float8(codes: Tensor, scales: Tensor, form: Float8, count: int) -> Tensor:
    return _times_scale(codes.contiguous().view(_FLOAT8[form.form]).to(torch.float32), scales, form.block)


def _encode_sign(x: Tensor, form: Sign, key: Key) -> tuple[Tensor, Tensor]:
    rows = _blocks(x, form.block)
    mean = torch.where(_absmax(rows) > 0, _means(rows.abs(), x.numel()), 0.0)
    return pack_bits((x < 0).to(torch.uint8), 1), _store_scale(mean, form.scale_dtype, 1.0, up=False)


def _decode_sign(codes: Tensor, scales: Tensor, form: Sign, count: int) -> Tensor:
    return _times_scale(1.0 - 2.0 * unpack_bits(codes, 1, count).to(torch.float32), scales, form.block)


def _encode_levels(x: Tensor, form: Levels, key: Key) -> tuple[Tensor, Tensor]:
    levels, rows = form.levels, _blocks(x, form.block)
    # Squares are taken of x over its block's maximum, so that they neither overflow nor vanish.
    largest = _absmax(rows)
    ratio = rows * _inverse(largest)
    norm = _sqrt(_lane_tree(ratio * ratio)) * largest
    norm = norm.clamp(max=_MAX32)
    magnitude = (rows.abs() * _inverse(norm) * float(levels)).clamp(max=float(levels))
    codes = torch.copysign(_round(magnitude, key, x.numel()), rows) + float(levels)
    stored = (norm * form.shrink).clamp(max=_MAX32)
    return pack_bits(codes.view(-1)[: x.numel()].to(torch.int64), form.bits), stored


def _decode_levels(codes: Tensor, norms: Tensor, form: Levels, count: int) -> Tensor:
    values = (unpack_bits(codes, form.bits, count) - form.levels).to(torch.float32)
    return _times_scale(values * reciprocal(form.levels), norms, form.block)


def _encode_ternary(x: Tensor, form: Ternary, key: Key) -> tuple[Tensor, Tensor]:
    rows = _blocks(x, form.block)
    scale = _absmax(rows)
    codes = torch.copysign(_round(rows.abs() * _inverse(scale), key, x.numel()).clamp(max=1.0), rows) + 1.0
    digits = _blocks(codes.view(-1)[: x.numel()].to(torch.int64), 5)
    return (digits * _powers(3, 5, x.device)).sum(dim=1).to(torch.uint8), scale * form.shrink


def _decode_ternary(codes: Tensor, scales: Tensor, form: Ternary, count: int) -> Tensor:
    digits = (codes.to(torch.int64)[:, None] // _powers(3, 5, codes.device)) % 3
    return _times_scale(digits.view(-1)[:count].to(torch.float32) - 1.0, scales, form.block)


def _powers(base: int, count: int, device: torch.device) -> Tensor:
    return torch.tensor([base**i for i in range(count)], device=device)


def _encode_natural(x: Tensor, form: Natural, key: Key) -> tuple[Tensor, Tensor]:
    rows = _blocks(x, form.block)
    largest = _absmax(rows)
    # Biased exponent of the block's top level: one above its maximum, and no level is 2**128.
    top = torch.where(largest > 0, ((largest.view(torch.int32) >> 23) + 1).clamp(max=254), 0)
    lowest = (top - 126)[:, None]
    magnitude = rows.abs()
    exponent = magnitude.view(torch.int32) >> 23
    u = F.pad(_uniform(key, STREAM_ROUNDING, x.numel(), x.device), (0, rows.numel() - x.numel())).view_as(rows)
    # A value 2**e (1 + f) goes up with probability f; one below the lowest level 2**l goes to it with x / 2**l.
    fraction = (magnitude.view(torch.int32) & 0x7FFFFF).to(torch.float32) * 2.0**-23
    small = exponent < lowest
    fraction = torch.where(small, magnitude * _power_of_two((127 - lowest).clamp(-126, 127)), fraction)
    level = torch.where(small, lowest - 1, exponent) + (u < fraction).to(torch.int32)
    code = torch.where((level >= lowest) & (exponent > 0) & (top > 0)[:, None], (level - lowest + 1).clamp(max=127), 0)
    code = torch.where((rows < 0) & (code > 0), code + 128, code)
    return code.view(-1)[: x.numel()].to(torch.uint8), top.to(torch.uint8)


def _decode_natural(codes: Tensor, tops: Tensor, form: Natural, count: int) -> Tensor:
    code = _blocks(codes, form.block).to(torch.int32)
    exponent = tops.to(torch.int32)[:, None] - 127 + (code & 127)
    value = (exponent.clamp(0, 254) << 23).view(torch.float32)
    value = torch.where(code >= 128, -value, value)
    return torch.where((code & 127) > 0, value, 0.0).view(-1)[: codes.numel()]


def _encode_half(x: Tensor, form: Half, key: Key) -> tuple[Tensor, Tensor]:
    none = torch.empty(0, device=x.device)
    if form.form == "truncate16":
        return (x.view(torch.int32) & ~0xFFFF).view(torch.float32).to(torch.bfloat16), none
    limit = torch.finfo(form.code_dtype).max
    return x.clamp(-limit, limit).to(form.code_dtype), none


def _decode_half(codes: Tensor, scales: Tensor, form: Half, count: int) -> Tensor:
    return codes.to(torch.float32)


_FORMATS: Final[dict[type[Format], tuple[Callable[..., Any], Callable[..., Any]]]] = {
    Integer: (_encode_integer, _decode_integer),
    Float8: (_encode_float8, _decode_float8),
    Sign: (_encode_sign, _decode_sign),
    Levels: (_encode_levels, _decode_levels),
    Ternary: (_encode_ternary, _decode_ternary),
    Natural: (_encode_natural, _decode_natural),
    Half: (_encode_half, _decode_half),
}


# Selection


def _order(x: Tensor) -> Tensor:
    """Magnitudes as integers: their order is that of the floats, and sorting them has no special values."""
    return x.view(torch.int32) & 0x7FFFFFFF


def select_top(x: Tensor, count: int) -> Tensor:
    return _top_rows(_order(x)[None], count).nonzero()[:, 1]


def select_block_top(x: Tensor, each: int, block: int) -> Tensor:
    magnitudes = F.pad(_order(x), (0, -x.numel() % block), value=-1).view(-1, block)  # padding loses to everything
    kept = _top_rows(magnitudes, each).view(-1)[: x.numel()]
    return kept.nonzero()[:, 0]


def _top_rows(magnitudes: Tensor, count: int) -> Tensor:
    """Mask of the ``count`` largest of each row: all above the smallest of them, then the first that equal it."""
    if count == 0 or not magnitudes.numel():
        return torch.zeros_like(magnitudes, dtype=torch.bool)
    smallest = magnitudes.topk(count, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    above, equal = magnitudes > smallest, magnitudes == smallest
    missing = count - above.sum(dim=1, keepdim=True)
    return above | (equal & (equal.cumsum(dim=1) <= missing))


def select_threshold(x: Tensor, tau: float) -> Tensor:
    return (x.abs() >= torch.tensor(tau, dtype=torch.float32, device=x.device)).nonzero()[:, 0]


def select_random(total: int, count: int, key: Key, *, device: torch.device) -> Tensor:
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=device)
    each, extra = divmod(total, count)
    p = torch.arange(count, device=device)
    start, length = p * each + p.clamp(max=extra), each + (p < extra).to(torch.int64)
    return start + ((random_bits(key, STREAM_SELECTION, count, device=device) * length) >> 32)


def pack_indices(indices: Tensor, total: int, width: int) -> Tensor:
    count = indices.numel()
    rank = torch.arange(count, device=indices.device)
    v = indices - rank
    vector = torch.zeros(count + ((total - count) >> width), dtype=torch.uint8, device=indices.device)
    vector[(v >> width) + rank] = 1
    return torch.cat([pack_bits(vector, 1), pack_bits(v & ((1 << width) - 1), width)])


def unpack_indices(data: Tensor, total: int, count: int, width: int) -> Tensor:
    length = count + ((total - count) >> width)
    upper, lower = data[: -(-length // 8)], data[-(-length // 8) :]
    set_bits = unpack_bits(upper, 1, length).nonzero()[:, 0]
    if set_bits.numel() != count:
        raise WireError(f"corrupt indices: {set_bits.numel()} bits are set where {count} indices were declared.")
    rank = torch.arange(count, device=data.device)
    v = ((set_bits - rank) << width) | unpack_bits(lower, width, count)
    if count and (int(v[-1]) > total - count or bool((v[1:] < v[:-1]).any())):
        raise WireError(f"corrupt indices: they are not sorted, distinct and below {total}.")
    return v + rank


def gather(x: Tensor, indices: Tensor) -> Tensor:
    return x[indices]


def scatter(out: Tensor, indices: Tensor, values: Tensor, add: bool) -> None:
    out[indices] = out[indices] + values if add else values


# Rotation


def rotate(x: Tensor, key: Key, block: int) -> Tensor:
    limit = _MAX32 / (2 * block)
    padded = F.pad(x.clamp(-limit, limit), (0, -x.numel() % block))
    return _hadamard(padded * _signs(key, padded), block)


def unrotate(x: Tensor, key: Key, block: int, count: int) -> Tensor:
    return (_hadamard(x, block) * _signs(key, x))[:count]


def _signs(key: Key, x: Tensor) -> Tensor:
    return 1.0 - 2.0 * (random_bits(key, STREAM_ROTATION, x.numel(), device=x.device) & 1).to(torch.float32)


def _hadamard(x: Tensor, block: int) -> Tensor:
    rows = (x * (1.0 / math.isqrt(block))).view(-1, block)
    distance = 1
    while distance < block:
        pairs = rows.view(-1, block // (2 * distance), 2, distance)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        rows = torch.stack([a + b, a - b], dim=2).view(-1, block)
        distance *= 2
    return rows.view(-1)


# Low rank


def thin_products(matrices: Sequence[Tensor], thin: Sequence[Tensor]) -> list[Tensor]:
    return [m @ q for m, q in zip(matrices, thin, strict=True)]


def thin_products_of_sums(
    xs: Sequence[Tensor], residuals: Sequence[Tensor], sums: Sequence[Tensor], thin: Sequence[Tensor]
) -> list[Tensor]:
    for x, residual, out in zip(xs, residuals, sums, strict=True):
        torch.add(x, residual, out=out)
    return thin_products(sums, thin)


def thin_transposed_products(matrices: Sequence[Tensor], thin: Sequence[Tensor]) -> list[Tensor]:
    return [m.T @ p for m, p in zip(matrices, thin, strict=True)]


def outer_residual(matrices: Sequence[Tensor], left: Sequence[Tensor], right: Sequence[Tensor]) -> list[Tensor]:
    return [m - p @ q.T for m, p, q in zip(matrices, left, right, strict=True)]


def outer_mean(
    residuals: Sequence[Tensor], left: Sequence[Tensor], right: Sequence[Tensor], outs: Sequence[Tensor]
) -> None:
    for e, p, q, out in zip(residuals, left, right, outs, strict=True):
        torch.mm(p, q.T, out=out)
        e.sub_(out)


def orthogonalize(factors: Sequence[Tensor]) -> list[Tensor]:
    wide = [factor.to(torch.float64) for factor in factors]
    by_rank: dict[int, list[int]] = {}
    for i, factor in enumerate(wide):
        by_rank.setdefault(factor.shape[1], []).append(i)
    for rank, members in by_rank.items():
        unit = torch.eye(rank, dtype=torch.float64, device=wide[0].device)
        for _ in range(2):
            gram = torch.stack([wide[i].t() @ wide[i] for i in members])
            trace = gram.diagonal(dim1=1, dim2=2).sum(dim=1)
            lower, _ = torch.linalg.cholesky_ex(
                gram + (ORTHOGONAL_SHIFT * trace + ORTHOGONAL_LEAST)[:, None, None] * unit
            )
            inverse = torch.linalg.solve_triangular(lower, unit.expand_as(lower), upper=False)
            for i, each in zip(members, inverse, strict=True):
                wide[i] = wide[i] @ each.t()
    return [factor.to(torch.float32) for factor in wide]
