"""Selection: top-k by a sampled threshold and an exact radix select of what passes it, and moving the values.

A bitmap of the elements that pass a threshold is the cheap way to keep them in order: it costs a few instructions an
element, and turning set bits into positions costs a few a word.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import math
from typing import Final

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from gradwire.kernels.law import STREAM_SELECTION
from gradwire.kernels.triton.bits import popcount, random_words
from gradwire.kernels.triton.common import KEY_ARGUMENTS, bits_of, cdiv, launch, load, philox_arguments
from gradwire.wire import Key

_MAP_TILE: Final = 8192  # elements of a program that makes the bitmap
_MAP_TILES: Final = 4  # of these a program that reads it
_SAMPLE: Final = 32768  # elements that the guess of a threshold looks at, in groups of 16
_BINS = tl.constexpr(256)  # of a digit of the radix select, 8 bits
_SHARES: Final = 1024  # programs of the exact passes; each has an equal stretch of the elements
_SHARE_TILE: Final = 2048
_LEAST_TO_SAMPLE: Final = 1 << 20  # elements below which the exact passes alone are as fast


@triton.jit
def _magnitude_bits(value):
    return bits_of(value) & 0x7FFFFFFF


# The bitmap


@triton.jit
def _map_tile(x, words, threshold, left, TILE: tl.constexpr, CUT: tl.constexpr):
    offsets = tl.arange(0, TILE // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    passes = (_magnitude_bits(load(x, offsets, left, CUT)) >= threshold).to(tl.int32)
    if CUT:
        passes = tl.where(offsets < left, passes, 0)
    word = tl.sum(passes << tl.arange(0, 32)[None, :], axis=1)
    tl.store(words + tl.arange(0, TILE // 32), word)
    return tl.sum(popcount(word), axis=0)


@triton.jit
def _map_kernel(x, words, counts, threshold_bits, count, TILE: tl.constexpr):
    """A bit an element, set where its magnitude's bits are at least the threshold, and how many a program."""
    program = tl.program_id(0).to(tl.int64)
    base = program * TILE
    left = tl.minimum(count - base, TILE).to(tl.int32)
    threshold = tl.load(threshold_bits)
    if left == TILE:
        found = _map_tile(x + base, words + base // 32, threshold, left, TILE, False)
    else:
        found = _map_tile(x + base, words + base // 32, threshold, left, TILE, True)
    tl.store(counts + program, found.to(tl.int64))


@triton.jit
def _positions_kernel(x, words, ends, indices, magnitudes, word_count, capacity, TILES: tl.constexpr,
                      TILE: tl.constexpr, GATHER: tl.constexpr):  # fmt: skip
    """Indices of the set bits of TILES tiles of a bitmap, and with GATHER the magnitudes there."""
    program = tl.program_id(0).to(tl.int64)
    place = program * (TILES * TILE // 32) + tl.arange(0, TILES * TILE // 32)
    word = tl.load(words + place, mask=place < word_count, other=0)
    set_bits = popcount(word)
    start = tl.load(ends + program * TILES - 1, mask=program > 0, other=0)
    target = start + tl.cumsum(set_bits, axis=0) - set_bits
    for _ in range(tl.max(set_bits, axis=0)):  # the lowest bit of each word
        lowest = word & -word
        index = place * 32 + popcount(lowest - 1)
        inside = (word != 0) & (target < capacity)
        tl.store(indices + target, index, mask=inside)
        if GATHER:
            tl.store(magnitudes + target, _magnitude_bits(tl.load(x + index, mask=inside, other=0.0)), mask=inside)
        word = word & (word - 1)
        target += 1


# Top-k


@triton.jit
def _guess_kernel(x, guess, stride, rank, SAMPLE: tl.constexpr):
    """Upper 16 bits of the magnitude that ``rank`` elements of a sample reach."""
    group = tl.arange(0, SAMPLE // 16)[:, None].to(tl.int64)
    magnitude = _magnitude_bits(tl.load(x + group * stride + tl.arange(0, 16)[None, :])) >> 15
    found = tl.zeros((), tl.int32)
    for i in range(16):
        candidate = found | (1 << (15 - i))
        reached = tl.sum(tl.sum((magnitude >= candidate).to(tl.int32), axis=1), axis=0)
        found = tl.where(reached >= rank, candidate, found)
    tl.store(guess, found << 15)


@triton.jit
def _source_size(ends, last, wanted, capacity, count, SAMPLED: tl.constexpr):
    """How many candidates there are to select from; 0 if the guess was no good and all elements are."""
    if SAMPLED:
        found = tl.load(ends + last)
        return tl.where((found >= wanted) & (found <= capacity), found, 0)
    else:
        return tl.zeros((), tl.int64)


@triton.jit
def _share(size, program, SHARES: tl.constexpr, TILE: tl.constexpr):
    """Where the stretch of a program begins and ends: whole tiles."""
    each = tl.cdiv(tl.cdiv(size, TILE), SHARES) * TILE
    first = tl.minimum(program * each, size)
    return first, tl.minimum(first + each, size)


@triton.jit
def _read_state(state, histogram, PASS: tl.constexpr, wanted):
    """Leading bits of the k-th largest magnitude, and its rank among those that share them, after PASS passes."""
    if PASS == 0:
        return tl.zeros((), tl.int32), tl.zeros((), tl.int64) + wanted
    else:
        prefix = tl.zeros((), tl.int32)
        rank = tl.zeros((), tl.int64) + wanted
        if PASS > 1:
            prefix = tl.load(state + 2 * (PASS - 1)).to(tl.int32)
            rank = tl.load(state + 2 * (PASS - 1) + 1)
        digit = tl.arange(0, _BINS)
        counts = tl.load(histogram + (PASS - 1) * _BINS + digit)
        below = tl.cumsum(counts, axis=0)
        above = tl.sum(counts, axis=0) - below  # how many have a larger digit
        chosen = tl.sum((above >= rank).to(tl.int32), axis=0)  # they come first: the largest digit with above < rank
        rank -= tl.sum(tl.where(digit == chosen, above, 0), axis=0)
        return (prefix << 8) | chosen, rank


@triton.jit
def _histogram_share(source, histogram, first, last, prefix, PASS: tl.constexpr, TILE: tl.constexpr):
    SHIFT: tl.constexpr = 32 - 8 * (PASS + 1)
    total = tl.zeros((_BINS,), tl.int32)
    for base in range(first, last, TILE):
        offsets = tl.arange(0, TILE)
        left = tl.minimum(last - base, TILE).to(tl.int32)
        magnitude = tl.load(source + base + offsets, mask=offsets < left, other=0) & 0x7FFFFFFF
        counted = offsets < left
        if PASS > 0:
            counted = counted & ((magnitude >> (SHIFT + 8)) == prefix)
        total += tl.histogram((magnitude >> SHIFT) & (_BINS - 1), _BINS, mask=counted)
    digit = tl.arange(0, _BINS)
    tl.atomic_add(histogram + PASS * _BINS + digit, total.to(tl.int64), mask=total > 0, sem="relaxed")


@triton.jit
def _histogram_kernel(x, magnitudes, ends, state, histogram, last_end, count, wanted, capacity, PASS: tl.constexpr,
                      SHARES: tl.constexpr, TILE: tl.constexpr, SAMPLED: tl.constexpr):  # fmt: skip
    """Histogram of the next digit of the magnitudes that begin like the k-th largest."""
    program = tl.program_id(0)
    prefix, rank = _read_state(state, histogram, PASS, wanted)
    if PASS > 0:
        if program == 0:
            tl.store(state + 2 * PASS, prefix.to(tl.int64))
            tl.store(state + 2 * PASS + 1, rank)
    candidates = _source_size(ends, last_end, wanted, capacity, count, SAMPLED)
    if SAMPLED:
        if candidates > 0:
            first, last = _share(candidates, program, SHARES, TILE)
            _histogram_share(magnitudes, histogram, first, last, prefix, PASS, TILE)
    if candidates == 0:
        first, last = _share(tl.zeros((), tl.int64) + count, program, SHARES, TILE)
        _histogram_share(x, histogram, first, last, prefix, PASS, TILE)


@triton.jit
def _count_share(source, counts, program, first, last, threshold, SHARES: tl.constexpr, TILE: tl.constexpr):
    above = tl.zeros((TILE,), tl.int32)
    equal = tl.zeros((TILE,), tl.int32)
    for base in range(first, last, TILE):
        offsets = tl.arange(0, TILE)
        left = tl.minimum(last - base, TILE).to(tl.int32)
        magnitude = tl.load(source + base + offsets, mask=offsets < left, other=0) & 0x7FFFFFFF
        above += ((magnitude > threshold) & (offsets < left)).to(tl.int32)
        equal += ((magnitude == threshold) & (offsets < left)).to(tl.int32)
    tl.store(counts + program, tl.sum(above.to(tl.int64), axis=0))
    tl.store(counts + SHARES + program, tl.sum(equal.to(tl.int64), axis=0))


@triton.jit
def _count_kernel(x, magnitudes, ends, state, histogram, counts, last_end, count, wanted, capacity,
                  PASSES: tl.constexpr, SHARES: tl.constexpr, TILE: tl.constexpr, SAMPLED: tl.constexpr):  # fmt: skip
    """How many magnitudes of each stretch are above the k-th largest, and how many equal it."""
    program = tl.program_id(0)
    threshold, rank = _read_state(state, histogram, PASSES, wanted)
    if program == 0:
        tl.store(state + 2 * PASSES, threshold.to(tl.int64))
        tl.store(state + 2 * PASSES + 1, rank)
    candidates = _source_size(ends, last_end, wanted, capacity, count, SAMPLED)
    if SAMPLED:
        if candidates > 0:
            first, last = _share(candidates, program, SHARES, TILE)
            _count_share(magnitudes, counts, program, first, last, threshold, SHARES, TILE)
    if candidates == 0:
        first, last = _share(tl.zeros((), tl.int64) + count, program, SHARES, TILE)
        _count_share(x, counts, program, first, last, threshold, SHARES, TILE)


@triton.jit
def _write_share(source, positions, selected, first, last, threshold, ties, above, equal, MAPPED: tl.constexpr,
                 TILE: tl.constexpr):  # fmt: skip
    """Write the selected indices of a stretch, before which ``above`` and ``equal`` elements were seen."""
    for base in range(first, last, TILE):
        offsets = tl.arange(0, TILE)
        left = tl.minimum(last - base, TILE).to(tl.int32)
        inside = offsets < left
        magnitude = tl.load(source + base + offsets, mask=inside, other=0) & 0x7FFFFFFF
        larger = ((magnitude > threshold) & inside).to(tl.int32)
        same = ((magnitude == threshold) & inside).to(tl.int32)
        larger_end = tl.cumsum(larger, axis=0)
        same_end = tl.cumsum(same, axis=0)
        chosen = (larger > 0) | ((same > 0) & (equal + same_end <= ties))
        target = above + larger_end - larger + tl.minimum(equal + same_end - same, ties)
        if MAPPED:
            index = tl.load(positions + base + offsets, mask=chosen, other=0)
        else:
            index = base + offsets
        tl.store(selected + target, index.to(tl.int64), mask=chosen)
        above += tl.sum(larger, axis=0)
        equal += tl.sum(same, axis=0)


@triton.jit
def _write_kernel(x, magnitudes, positions, ends, state, counts, selected, last_end, count, wanted, capacity,
                  PASSES: tl.constexpr, SHARES: tl.constexpr, TILE: tl.constexpr, SAMPLED: tl.constexpr):  # fmt: skip
    """The indices above the k-th largest magnitude, and as many of those that equal it as there is room for."""
    program = tl.program_id(0)
    threshold = tl.load(state + 2 * PASSES).to(tl.int32)
    ties = tl.load(state + 2 * PASSES + 1)
    other = tl.arange(0, SHARES)
    above = tl.sum(tl.load(counts + other, mask=other < program, other=0), axis=0)
    equal = tl.sum(tl.load(counts + SHARES + other, mask=other < program, other=0), axis=0)
    candidates = _source_size(ends, last_end, wanted, capacity, count, SAMPLED)
    if SAMPLED:
        if candidates > 0:
            first, last = _share(candidates, program, SHARES, TILE)
            _write_share(magnitudes, positions, selected, first, last, threshold, ties, above, equal, True, TILE)
    if candidates == 0:
        first, last = _share(tl.zeros((), tl.int64) + count, program, SHARES, TILE)
        _write_share(x, positions, selected, first, last, threshold, ties, above, equal, False, TILE)


_PASSES: Final = 4  # digits of 8 bits


def select_top(x: Tensor, count: int) -> Tensor:
    x = x.contiguous()
    total, device = x.numel(), x.device
    selected = torch.empty(count, dtype=torch.int64, device=device)
    if count == 0:
        return selected
    if count == total:
        return torch.arange(total, device=device)
    # Few are wanted of many: guess a threshold that somewhat more pass, and select from those. If the guess is no
    # good, which the device finds out, the same launches select from all.
    sampled = total >= _LEAST_TO_SAMPLE and count <= total // 8
    x_bits = x.view(torch.int32)
    state = torch.zeros(2 * (_PASSES + 1) + (_PASSES << 8), dtype=torch.int64, device=device)
    histogram = state[2 * (_PASSES + 1) :]
    counts = torch.empty(2 * _SHARES, dtype=torch.int64, device=device)
    if sampled:
        capacity = 2 * count + total // 256
        positions, ends, magnitudes = _candidates(x, count, capacity)
    else:
        capacity, positions, ends, magnitudes = 0, counts, counts, x_bits
    last_end = ends.numel() - 1
    sizes = (last_end, total, count, capacity)
    for each in range(_PASSES):
        launch(_histogram_kernel, _SHARES, device, x_bits, magnitudes, ends, state, histogram, *sizes, each, _SHARES,
               _SHARE_TILE, sampled)  # fmt: skip
    shape = (_PASSES, _SHARES, _SHARE_TILE, sampled)
    launch(_count_kernel, _SHARES, device, x_bits, magnitudes, ends, state, histogram, counts, *sizes, *shape)
    launch(_write_kernel, _SHARES, device, x_bits, magnitudes, positions, ends, state, counts, selected, *sizes, *shape)
    return selected


def _candidates(x: Tensor, count: int, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """Indices that pass a guessed threshold, where those of each program end, and magnitudes."""
    expected = count * _SAMPLE / x.numel()
    rank = math.ceil(1.25 * expected + 6 * math.sqrt(expected) + 4)
    guess = torch.empty(1, dtype=torch.int32, device=x.device)
    stride = (x.numel() - 16) // (_SAMPLE // 16 - 1)
    launch(_guess_kernel, 1, x.device, x, guess, stride, rank, _SAMPLE, num_warps=32)
    words, ends = _bitmap(x, guess)
    positions = torch.empty(capacity, dtype=torch.int64, device=x.device)
    magnitudes = torch.empty(capacity, dtype=torch.int32, device=x.device)
    launch(_positions_kernel, cdiv(ends.numel(), _MAP_TILES), x.device, x, words, ends, positions, magnitudes,
           words.numel(), capacity, _MAP_TILES, _MAP_TILE, True)  # fmt: skip
    return positions, ends, magnitudes


def _bitmap(x: Tensor, threshold_bits: Tensor) -> tuple[Tensor, Tensor]:
    """A bit an element, and how many are set up to the end of each tile."""
    programs = cdiv(x.numel(), _MAP_TILE)
    words = torch.empty(programs * (_MAP_TILE // 32), dtype=torch.int32, device=x.device)
    counts = torch.empty(programs, dtype=torch.int64, device=x.device)
    launch(_map_kernel, programs, x.device, x, words, counts, threshold_bits, x.numel(), _MAP_TILE)
    return words, counts.cumsum(0)


def select_threshold(x: Tensor, tau: float) -> Tensor:
    x = x.contiguous()
    if not x.numel():
        return torch.empty(0, dtype=torch.int64, device=x.device)
    bits = int(torch.tensor(max(tau, 0.0), dtype=torch.float32).view(torch.int32))
    words, ends = _bitmap(x, torch.full((1,), bits, dtype=torch.int32, device=x.device))
    indices = torch.empty(int(ends[-1]), dtype=torch.int64, device=x.device)
    launch(_positions_kernel, cdiv(ends.numel(), _MAP_TILES), x.device, x, words, ends, indices, words, words.numel(),
           indices.numel(), _MAP_TILES, _MAP_TILE, False)  # fmt: skip
    return indices


# Top-k of blocks


@triton.jit
def _block_top_kernel(x, selected, count, each, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """The largest of each row: a binary search for the smallest kept magnitude, then ties in order."""
    base = tl.program_id(0).to(tl.int64) * (ROWS * BLOCK)
    left = tl.minimum(count - base, ROWS * BLOCK).to(tl.int32)
    offsets = tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = offsets < left
    magnitude = tl.where(inside, _magnitude_bits(tl.load(x + base + offsets, mask=inside, other=0.0)), -1)
    threshold = tl.zeros((ROWS,), tl.int32)
    for i in range(31):
        candidate = threshold | (1 << (30 - i))
        reached = tl.sum((magnitude >= candidate[:, None]).to(tl.int32), axis=1)
        threshold = tl.where(reached >= each, candidate, threshold)
    larger = magnitude > threshold[:, None]
    same = (magnitude == threshold[:, None]).to(tl.int32)
    missing = each - tl.sum(larger.to(tl.int32), axis=1)
    chosen = larger | ((same > 0) & (tl.cumsum(same, axis=1) <= missing[:, None]))
    target = tl.arange(0, ROWS)[:, None] * each + tl.cumsum(chosen.to(tl.int32), axis=1) - 1
    tl.store(selected + base // BLOCK * each + target, base + offsets, mask=chosen)


def select_block_top(x: Tensor, each: int, block: int) -> Tensor:
    x = x.contiguous()
    blocks, last = divmod(x.numel(), block)
    each = min(each, block)
    selected = torch.empty(blocks * each + min(last, each), dtype=torch.int64, device=x.device)
    if not selected.numel():
        return selected
    rows = max(1, 1024 // block)
    launch(_block_top_kernel, cdiv(x.numel(), rows * block), x.device, x, selected, x.numel(), each, block, rows,
           num_warps=max(1, min(32, rows * block // 256)))  # fmt: skip
    return selected


# One of each stretch


@triton.jit(do_not_specialize=KEY_ARGUMENTS)
def _random_kernel(selected, count, each, extra, bucket, step_low, step_high, seed_low, seed_high, TILE: tl.constexpr):
    base = tl.program_id(0).to(tl.int64) * TILE
    place, word = random_words(base, bucket, step_low, step_high, seed_low, seed_high, TILE)
    place = base + place
    start = place * each + tl.minimum(place, extra)
    length = each + (place < extra).to(tl.int64)
    offset = (word.to(tl.int64) * length) >> 32
    tl.store(selected + place, start + offset, mask=place < count)


def select_random(total: int, count: int, key: Key, *, device: torch.device) -> Tensor:
    device = torch.device(device)
    selected = torch.empty(count, dtype=torch.int64, device=device)
    if count:
        launch(_random_kernel, cdiv(count, 1024), device, selected, count, *divmod(total, count),
               *philox_arguments(key, STREAM_SELECTION), 1024)  # fmt: skip
    return selected


# Values at indices


@triton.jit
def _gather_kernel(x, indices, values, count, TILE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = place < count
    index = tl.load(indices + place, mask=inside, other=0)
    tl.store(values + place, tl.load(x + index, mask=inside), mask=inside)


@triton.jit
def _scatter_kernel(out, indices, values, count, ADD: tl.constexpr, TILE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = place < count
    index = tl.load(indices + place, mask=inside, other=0)
    value = tl.load(values + place, mask=inside)
    if ADD:
        value = tl.load(out + index, mask=inside) + value
    tl.store(out + index, value, mask=inside)


def gather(x: Tensor, indices: Tensor) -> Tensor:
    values = torch.empty(indices.numel(), dtype=x.dtype, device=x.device)
    launch(_gather_kernel, cdiv(indices.numel(), 1024), x.device, x.contiguous(), indices.contiguous(), values,
           indices.numel(), 1024)  # fmt: skip
    return values


def scatter(out: Tensor, indices: Tensor, values: Tensor, add: bool) -> None:
    launch(_scatter_kernel, cdiv(indices.numel(), 1024), out.device, out, indices.contiguous(), values.contiguous(),
           indices.numel(), add, 1024)  # fmt: skip
