"""Bit streams, random bits and packed indices."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from typing import Final

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from gradwire.errors import WireError
from gradwire.kernels.triton.common import KEY_ARGUMENTS, cdiv, launch, philox, philox_arguments
from gradwire.wire import Key

_SPAN: Final = 1024  # items of a program


# Random bits


@triton.jit
def random_words(base, bucket, step_low, step_high, seed_low, seed_high, TILE: tl.constexpr):
    """Words of the elements from ``base``, a multiple of 64: offsets and words, in the same shape but not in order."""
    GROUPS: tl.constexpr = TILE // 64
    group = tl.arange(0, GROUPS)[:, None]
    lane = tl.arange(0, 16)[None, :]
    counter = (base // 64 + group + lane * 0).to(tl.uint32) * 16 + lane.to(tl.uint32)
    w0, w1, w2, w3 = philox(counter, bucket, step_low, step_high, seed_low, seed_high)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    pair = tl.arange(0, 2)
    which = pair[None, None, :, None] * 2 + pair[None, None, None, :]
    offsets = group[:, :, None, None] * 64 + which * 16 + lane[:, :, None, None]
    return offsets, words


@triton.jit(do_not_specialize=KEY_ARGUMENTS)
def _random_kernel(out, count, bucket, step_low, step_high, seed_low, seed_high, TILE: tl.constexpr):
    base = tl.program_id(0).to(tl.int64) * TILE
    offsets, words = random_words(base, bucket, step_low, step_high, seed_low, seed_high, TILE)
    tl.store(out + base + offsets, words.to(tl.int64), mask=base + offsets < count)


def random_bits(key: Key, stream: int, count: int, *, device: torch.device) -> Tensor:
    device = torch.device(device)
    out = torch.empty(count, dtype=torch.int64, device=device)
    launch(_random_kernel, cdiv(count, _SPAN), device, out, count, *philox_arguments(key, stream), _SPAN)
    return out


# Bit streams


@triton.jit
def popcount(word):
    """Set bits of 32-bit words."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24) & 0xFF


@triton.jit
def _pack_kernel(codes, packed, count, bits, nbytes, TILE: tl.constexpr):
    """A byte each: the codes that have bits in it."""
    byte = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    first = byte * 8 // bits
    value = tl.zeros((TILE,), tl.int64)
    for i in range((bits + 6) // bits + 1):
        code = tl.load(codes + first + i, mask=first + i < count, other=0).to(tl.int64)
        shift = (first + i) * bits - byte * 8
        value |= (code << tl.minimum(tl.maximum(shift, 0), 8)) >> tl.maximum(-shift, 0)
    tl.store(packed + byte, value.to(tl.uint8), mask=byte < nbytes)


def pack(codes: Tensor, packed: Tensor, bits: int) -> None:
    """Write the bit stream of ``pack_bits``."""
    launch(
        _pack_kernel,
        cdiv(packed.numel(), _SPAN),
        codes.device,
        codes,
        packed,
        codes.numel(),
        bits,
        packed.numel(),
        _SPAN,
    )


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    packed = torch.empty(cdiv(codes.numel() * bits, 8), dtype=torch.uint8, device=codes.device)
    pack(codes.contiguous(), packed, bits)
    return packed


@triton.jit
def _code_at(data, index, bits, nbytes, live):
    """Codes at indices of a bit stream of that many bytes."""
    bit = index * bits
    byte = bit // 8
    value = bit * 0
    for i in range((bits + 14) // 8):
        part = tl.load(data + byte + i, mask=live & (byte + i < nbytes), other=0).to(tl.int64)
        value |= part << (8 * i)
    return (value >> (bit % 8)) & ((tl.full((), 1, tl.int64) << bits) - 1)


@triton.jit
def _unpack_kernel(data, codes, count, bits, nbytes, TILE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    tl.store(codes + place, _code_at(data, place, bits, nbytes, place < count), mask=place < count)


def unpack_bits(data: Tensor, bits: int, count: int) -> Tensor:
    if bits == 0:
        return torch.zeros(count, dtype=torch.int64, device=data.device)
    codes = torch.empty(count, dtype=torch.int64, device=data.device)
    data = data.contiguous()
    launch(_unpack_kernel, cdiv(count, _SPAN), data.device, data, codes, count, bits, data.numel(), _SPAN)
    return codes


# Packed indices


@triton.jit
def _upper_kernel(indices, words, count, width, TILE: tl.constexpr):
    """Set the bit (v >> width) + rank of each index; no two are the same."""
    rank = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    value = tl.load(indices + rank, mask=rank < count, other=0) - rank
    bit = (value >> width) + rank
    one = tl.full((TILE,), 1, tl.int32)
    tl.atomic_or(words + bit // 32, one << (bit % 32).to(tl.int32), mask=rank < count, sem="relaxed")


@triton.jit
def _lower_kernel(indices, packed, count, width, nbytes, TILE: tl.constexpr):
    """A byte each, as in _pack_kernel, of the lower bits of index - rank."""
    byte = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    first = byte * 8 // width
    value = tl.zeros((TILE,), tl.int64)
    lower = (tl.full((), 1, tl.int64) << width) - 1
    for i in range((width + 6) // width + 1):
        rank = first + i
        code = (tl.load(indices + rank, mask=rank < count, other=0) - rank) & lower
        code = tl.where(rank < count, code, 0)
        shift = rank * width - byte * 8
        value |= (code << tl.minimum(tl.maximum(shift, 0), 8)) >> tl.maximum(-shift, 0)
    tl.store(packed + byte, value.to(tl.uint8), mask=byte < nbytes)


def pack_indices(indices: Tensor, total: int, width: int) -> Tensor:
    count, device = indices.numel(), indices.device
    indices = indices.contiguous()
    upper_nbytes = cdiv(count + ((total - count) >> width), 8)
    lower_nbytes = cdiv(count * width, 8)
    # Whole words, because bits are set by atomics on words; zeros, because they are only ever set.
    data = torch.zeros(cdiv(upper_nbytes + lower_nbytes, 4) * 4, dtype=torch.uint8, device=device)
    launch(_upper_kernel, cdiv(count, _SPAN), device, indices, data.view(torch.int32), count, width, _SPAN)
    lower = data[upper_nbytes : upper_nbytes + lower_nbytes]
    launch(_lower_kernel, cdiv(lower_nbytes, _SPAN), device, indices, lower, count, width, lower_nbytes, _SPAN)
    return data[: upper_nbytes + lower_nbytes]


_UPPER_WORDS: Final = 256  # 32-bit words of the upper bits that a program reads


@triton.jit
def _load_upper(data, first_word, length, WORDS: tl.constexpr):
    """Words of the upper bits; they lie at any address, so they are put together of bytes."""
    offsets = tl.arange(0, WORDS)[:, None] * 4 + tl.arange(0, 4)[None, :]
    byte = first_word * 4 + offsets
    parts = tl.load(data + byte, mask=byte * 8 < length, other=0).to(tl.int32)
    word = tl.sum(parts << (8 * tl.arange(0, 4))[None, :], axis=1)
    valid = length - (first_word + tl.arange(0, WORDS)) * 32
    kept = tl.minimum(tl.maximum(valid, 0), 31).to(tl.int32)
    return tl.where(valid >= 32, word, word & ((1 << kept) - 1))


@triton.jit
def _count_upper_kernel(data, counts, length, WORDS: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    word = _load_upper(data, program * WORDS, length, WORDS)
    tl.store(counts + program, tl.sum(popcount(word), axis=0).to(tl.int64))


@triton.jit
def _expand_kernel(data, lower, ends, indices, length, count, width, lower_nbytes, WORDS: tl.constexpr):
    """Each set bit and the lower bits of its rank make an index."""
    program = tl.program_id(0).to(tl.int64)
    place = program * WORDS + tl.arange(0, WORDS)
    word = _load_upper(data, program * WORDS, length, WORDS)
    set_bits = popcount(word)
    rank = tl.load(ends + program) - tl.sum(set_bits, axis=0) + tl.cumsum(set_bits, axis=0) - set_bits
    for _ in range(tl.max(set_bits, axis=0)):
        bit = place * 32 + popcount((word & -word) - 1)
        live = (word != 0) & (rank < count)
        value = ((bit - rank) << width) | _code_at(lower, rank, width, lower_nbytes, live)
        tl.store(indices + rank, value + rank, mask=live)
        word = word & (word - 1)
        rank += 1


@triton.jit
def _check_kernel(indices, ends, report, last_end, total, count, TILE: tl.constexpr):
    """Whether the indices are sorted, distinct and in range; and how many bits were set."""
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    index = tl.load(indices + place, mask=place < count, other=0)
    before = tl.load(indices + place - 1, mask=(place < count) & (place > 0), other=-1)
    wrong = (place < count) & ((index <= before) | (index >= total))
    if tl.sum(wrong.to(tl.int32), axis=0) > 0:
        tl.store(report + 1, 1)
    if tl.program_id(0) == 0:
        tl.store(report, tl.load(ends + last_end))


def unpack_indices(data: Tensor, total: int, count: int, width: int) -> Tensor:
    device, data = data.device, data.contiguous()
    length = count + ((total - count) >> width)
    indices = torch.empty(count, dtype=torch.int64, device=device)
    if length == 0:
        return indices
    lower = data[cdiv(length, 8) :]
    counts = torch.empty(cdiv(length, 32 * _UPPER_WORDS), dtype=torch.int64, device=device)
    launch(_count_upper_kernel, counts.numel(), device, data, counts, length, _UPPER_WORDS)
    ends = counts.cumsum(0)
    launch(_expand_kernel, counts.numel(), device, data, lower, ends, indices, length, count, width, lower.numel(),
           _UPPER_WORDS)  # fmt: skip
    report = torch.zeros(2, dtype=torch.int64, device=device)
    launch(_check_kernel, max(1, cdiv(count, _SPAN)), device, indices, ends, report, ends.numel() - 1, total, count,
           _SPAN)  # fmt: skip
    found, wrong = report.tolist()
    if found != count:
        raise WireError(f"corrupt indices: {found} bits are set where {count} indices were declared.")
    if wrong:
        raise WireError(f"corrupt indices: they are not sorted, distinct and below {total}.")
    return indices
