"""Low rank: a matrix times a thin one, and minus a product of thin ones. To a tolerance, so contraction stays on.

A program goes through its part of the matrix tile by tile, and keeps the sums of up to ``_RANKS`` ranks in registers.
More ranks are taken in groups; the programs of one part run side by side, so that all but the first of them find its
tiles in the cache. If results are few, their sums are split over several programs, and the parts added afterwards.
The split follows from the shape alone, and nothing depends on which program comes first: results are reproducible.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment"

from collections.abc import Sequence
from typing import Final

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from gradwire.kernels.triton.common import cdiv, launch

_RANKS: Final = 8  # of one program; each takes registers
_WARPS: Final = 4  # of a product
_PROGRAMS: Final = 512  # of a product, if it can be split into so many
_LEAST_STEPS: Final = 4  # tiles of a program that is one of several for the same results

# Tiles (rows, columns) of M @ Q. Fewer columns mean fewer lanes to add up in the end, more rows fewer loads of Q.
_ROWS_TILE: Final = (32, 64)
_ROWS_STAGES: Final = 4  # tiles under way
# Of M.T @ P. With at least as many rows as threads, each thread fetches one element of P to shared memory; with fewer,
# Triton would have every thread fetch all that it needs.
_COLUMNS_TILE: Final = (128, 64)
_COLUMNS_STAGES: Final = 3
# Of M - P @ Q.T. Here both sides are shorter than the threads are many: factors go straight to where they are needed.
_OUTER_TILE: Final = (32, 128)
_OUTER_WARPS: Final = 8

# Compiled once for all values, not anew for 1 and for multiples of 16.
_SIZES: Final = ["rows", "columns", "rank", "groups", "splits", "steps", "along", "between"]


@triton.jit
def _plain(columns, ALIGNED: tl.constexpr):
    """The same number; the compiler sees if it is a multiple of 4, and then accesses rows 16 bytes at a time."""
    if ALIGNED:
        columns = columns // 4 * 4
    return columns


@triton.jit
def _zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr, COUNT: tl.constexpr):
    zeros = ()
    for _ in tl.static_range(COUNT):
        zeros = zeros + (tl.zeros((ROWS, COLUMNS), tl.float32),)
    return zeros


@triton.jit
def _part(rank, groups, splits, steps, RANK: tl.constexpr):
    """What is a program's: the first rank, the results' tile, the split, and its first step along the sums."""
    program = tl.program_id(0)
    first = tl.minimum(program % groups * RANK, rank - RANK)  # the last group may repeat ranks of the one before
    split = (program // groups % splits).to(tl.int64)
    return first.to(tl.int64), (program // groups // splits).to(tl.int64), split, split * steps


@triton.jit(do_not_specialize=_SIZES)
def _rows_kernel(m, thin, sums_out, rows, columns, rank, groups, splits, steps, RANK: tl.constexpr, ROWS: tl.constexpr,
                 COLUMNS: tl.constexpr, STAGES: tl.constexpr, ALIGNED: tl.constexpr):  # fmt: skip
    """Sums along rows, of a matrix and of ``thin`` (rank x columns), to (splits x rank x rows)."""
    first, tile, split, start = _part(rank, groups, splits, steps, RANK)
    columns = _plain(columns, ALIGNED)
    row = tile * ROWS + tl.arange(0, ROWS)
    start = start * COLUMNS
    m += row[:, None] * columns
    thin += first * columns
    FOLD: tl.constexpr = 4 if ALIGNED else 1  # neighbours in one thread, added at once
    sums = _zeros(ROWS, COLUMNS // FOLD, RANK)
    todo = tl.minimum(tl.cdiv(columns - start, COLUMNS), steps).to(tl.int32)
    for step in tl.range(todo, num_stages=STAGES):
        column = start + step * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < columns
        values = tl.load(m + column[None, :], mask=(row < rows)[:, None] & inside[None, :], other=0.0)
        new = ()
        for r in tl.static_range(RANK):
            factor = tl.load(thin + r * columns + column, mask=inside, other=0.0)
            products = tl.reshape(values * factor[None, :], (ROWS, COLUMNS // FOLD, FOLD))
            new = new + (sums[r] + tl.sum(products, axis=2),)
        sums = new
    sums_out += (split * rank + first) * rows
    for r in tl.static_range(RANK):
        tl.store(sums_out + tl.full((), r, tl.int64) * rows + row, tl.sum(sums[r], axis=1), mask=row < rows)


@triton.jit(do_not_specialize=_SIZES)
def _columns_kernel(m, thin, sums_out, rows, columns, rank, groups, splits, steps, along, between, RANK: tl.constexpr,
                    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, ALIGNED: tl.constexpr,
                    HELD: tl.constexpr):  # fmt: skip
    """Sums along columns, of a matrix and of ``thin`` (rows x rank, with strides), to (splits x rank x columns)."""
    first, tile, split, start = _part(rank, groups, splits, steps, RANK)
    columns = _plain(columns, ALIGNED)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    start = start * ROWS
    row = tl.arange(0, ROWS)
    place = row.to(tl.int64)[:, None] * columns + column[None, :]
    m += start * columns
    thin += start * along + first * between
    sums = _zeros(HELD, COLUMNS, RANK)  # all rows of a thread are added at once
    todo = tl.minimum(tl.cdiv(rows - start, ROWS), steps).to(tl.int32)
    for step in tl.range(todo, num_stages=STAGES):
        before = (tl.zeros((), tl.int64) + step) * ROWS
        within = row < rows - start - before
        values = tl.load(m + before * columns + place, mask=within[:, None] & inside[None, :], other=0.0)
        new = ()
        for r in tl.static_range(RANK):
            factor = tl.load(thin + r * between + (before + row) * along, mask=within, other=0.0)
            products = tl.reshape(values * factor[:, None], (ROWS // HELD, HELD, COLUMNS))
            new = new + (sums[r] + tl.sum(products, axis=0),)
        sums = new
    sums_out += (split * rank + first) * columns
    for r in tl.static_range(RANK):
        tl.store(sums_out + tl.full((), r, tl.int64) * columns + column, tl.sum(sums[r], axis=0), mask=inside)


@triton.jit(do_not_specialize=_SIZES)
def _outer_kernel(m, left, right, out, rows, columns, rank, groups, along, between, RANK: tl.constexpr,
                  ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr):  # fmt: skip
    """M - P @ Q.T: ``left`` is P (rows x rank, with strides), ``right`` is Q.T (rank x columns)."""
    program = tl.program_id(0)
    tiles = tl.cdiv(columns, COLUMNS)
    columns = _plain(columns, ALIGNED)
    row = (program // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (program % tiles).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    within, inside = row < rows, column < columns
    place = row[:, None] * columns + column[None, :]
    mask = within[:, None] & inside[None, :]
    values = tl.load(m + place, mask=mask, other=0.0)
    left += row * along
    right += column
    for group in range(groups):
        for i in tl.static_range(RANK):
            r = tl.zeros((), tl.int64) + group * RANK + i
            p = tl.load(left + r * between, mask=within & (r < rank), other=0.0)
            q = tl.load(right + r * columns, mask=inside & (r < rank), other=0.0)
            values -= p[:, None] * q[None, :]
    tl.store(out + place, values, mask=mask)


def _groups(rank: int) -> tuple[int, int]:
    """How many groups of ranks there are, and the ranks of each."""
    groups = cdiv(rank, _RANKS)
    return groups, cdiv(rank, groups)


def _is_aligned(*tensors: Tensor) -> bool:
    """Whether every row begins at a multiple of 16 bytes."""
    return all(each.shape[1] % 4 == 0 and each.data_ptr() % 16 == 0 for each in tensors)


def _product(m: Tensor, thin: Tensor, *, transposed: bool) -> Tensor:
    """M @ thin or M.T @ thin. In memory the result lies rank by rank, which both kernels prefer for a next factor."""
    (rows, columns), rank = m.shape, thin.shape[1]
    length = columns if transposed else rows
    if not (m.numel() and rank):
        return m.new_zeros((rank, length)).t()
    m = m.contiguous()
    groups, each = _groups(rank)
    if transposed:
        (deep, wide) = tile = _COLUMNS_TILE
    else:
        (wide, deep) = tile = _ROWS_TILE
        thin = thin.t().contiguous()
    tiles, steps = cdiv(length, wide), cdiv(m.numel() // length, deep)
    splits = max(1, min(cdiv(_PROGRAMS, tiles * groups), steps // _LEAST_STEPS))
    steps = cdiv(steps, splits)
    splits = cdiv(m.numel() // length, steps * deep)  # none without work
    sums = torch.empty((splits, rank, length), dtype=torch.float32, device=m.device)
    sizes = (rows, columns, rank, groups, splits, steps)
    programs = tiles * splits * groups
    if transposed:
        held = _WARPS * 32 * 4 // wide  # rows of a tile that the threads have an element of, 16 bytes wide
        launch(_columns_kernel, programs, m.device, m, thin, sums, *sizes, *thin.stride(),
               each, *tile, _COLUMNS_STAGES, _is_aligned(m), held, num_warps=_WARPS, fuse=True)  # fmt: skip
    else:
        launch(_rows_kernel, programs, m.device, m, thin, sums, *sizes,
               each, *tile, _ROWS_STAGES, _is_aligned(m, thin), num_warps=_WARPS, fuse=True)  # fmt: skip
    return (sums[0] if splits == 1 else sums.sum(dim=0)).t()


def thin_products(matrices: Sequence[Tensor], thin: Sequence[Tensor]) -> list[Tensor]:
    return [_product(m, q, transposed=False) for m, q in zip(matrices, thin, strict=True)]


def thin_transposed_products(matrices: Sequence[Tensor], thin: Sequence[Tensor]) -> list[Tensor]:
    return [_product(m, p, transposed=True) for m, p in zip(matrices, thin, strict=True)]


def _outer(m: Tensor, left: Tensor, right: Tensor) -> Tensor:
    (rows, columns), rank = m.shape, left.shape[1]
    if not (m.numel() and rank):
        return m.clone()
    m, right, out = m.contiguous(), right.t().contiguous(), torch.empty_like(m, memory_format=torch.contiguous_format)
    groups, each = _groups(rank)
    programs = cdiv(rows, _OUTER_TILE[0]) * cdiv(columns, _OUTER_TILE[1])
    launch(_outer_kernel, programs, m.device, m, left, right, out, rows, columns, rank, groups, *left.stride(),
           each, *_OUTER_TILE, _is_aligned(m, right), num_warps=_OUTER_WARPS, fuse=True)  # fmt: skip
    return out


def outer_residual(matrices: Sequence[Tensor], left: Sequence[Tensor], right: Sequence[Tensor]) -> list[Tensor]:
    return [_outer(m, p, q) for m, p, q in zip(matrices, left, right, strict=True)]
