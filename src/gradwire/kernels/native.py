"""The ops in C++ (``csrc/``), for tensors on the CPU: checks, memory for the results, and the call.

The native core sees addresses only. What makes that safe is here: every tensor is contiguous, of the type and size the
kernel assumes, and alive while it runs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from gradwire import _native
from gradwire.errors import WireError
from gradwire.kernels import law
from gradwire.kernels.formats import Float8, Format, Half, Integer, Levels, Natural, Sign, Ternary
from gradwire.kernels.memory import empty
from gradwire.wire import Key

_CPU: Final = torch.device("cpu")
_NONE: Final = torch.zeros((), dtype=torch.int64, device=_CPU)  # is not finite, mostly; nobody writes to it
_KINDS: Final = {Integer: 0, Float8: 1, Sign: 2, Levels: 3, Ternary: 4, Natural: 5, Half: 6}
_SCALE_TYPES: Final = {None: 0, torch.float32: 1, torch.bfloat16: 2, torch.uint8: 3}
_SCALINGS: Final = {"absmax": 0, "mse": 1, "stochastic": 2}


def _address(x: Tensor | None, dtype: torch.dtype = torch.float32, count: int | None = None) -> int:
    if x is None:
        return 0
    fits = x.dtype == dtype and x.is_contiguous() and x.device.type == "cpu"
    if not fits or (count is not None and x.numel() != count):
        raise ValueError(
            f"a kernel takes {'' if count is None else count} contiguous values of {dtype} on the CPU; "
            f"got {x.numel()} of {x.dtype} on {x.device} with strides {x.stride()}."
        )
    return x.data_ptr()


def _aligned(x: Tensor) -> Tensor:
    """The tensor where its items may be read: parts of a received frame can lie anywhere."""
    x = x.contiguous()
    return x if x.data_ptr() % x.dtype.itemsize == 0 else x.clone()


def _nonfinite(count: int) -> Tensor:
    return torch.tensor(count, dtype=torch.int64, device=_CPU) if count else _NONE


def _key(key: Key, stream: int) -> Any:
    return _native.RandomKey(key.seed, key.step, key.bucket, stream)


@functools.lru_cache(maxsize=256)
def _format(form: Format) -> Any:
    limit, largest_scale, mantissa, start = 0.0, 0.0, 0, 0.0
    scaling, shrink = "absmax", 1.0
    match form:
        case Integer():
            limit, scaling, start = float(form.limit), form.scaling, law.MSE_START.get(form.bits, 0.0)
            largest_scale = law.largest_scale(form.limit, form.scale_dtype)
        case Float8():
            limit, mantissa = law.FLOAT8_LARGEST[form.form], {"e4m3": 3, "e5m2": 2}[form.form]
            largest_scale = law.largest_scale(limit, form.scale_dtype)
        case Sign():
            largest_scale = law.largest_scale(1.0, form.scale_dtype)
        case Levels():
            limit, shrink = float(form.levels), form.shrink
        case Ternary():
            shrink = form.shrink
        case Half():
            limit, mantissa = torch.finfo(form.code_dtype).max, {"fp16": 10, "bf16": 7, "truncate16": -1}[form.form]
    return _native.Format(
        kind=_KINDS[type(form)],
        scale_type=_SCALE_TYPES[form.scales],
        scaling=_SCALINGS[scaling],
        bits=form.bits,
        mantissa=mantissa,
        block=form.block,
        limit=limit,
        reciprocal=law.reciprocal(limit) if limit else 0.0,
        largest_scale=largest_scale,
        start=start,
        rounds=law.MSE_ROUNDS,
        shrink=shrink,
        floor=law.FLOOR,
    )


def count_nonfinite(x: Tensor) -> Tensor:
    flat = x if x.dtype == torch.float32 and x.is_contiguous() else x.to(torch.float32).contiguous()
    return _nonfinite(_native.accumulate(_address(flat), 0, 1.0, 0, flat.numel(), torch.get_num_threads()))


def is_finite(x: Tensor) -> bool:
    """Whether all values are: no op, for those who ask so often that the tensor which an op returns costs as much."""
    return not _native.accumulate(_address(x), 0, 1.0, 0, x.numel(), torch.get_num_threads())


def accumulate(x: Tensor, residual: Tensor | None, decay: float) -> tuple[Tensor, Tensor]:
    count, e = x.numel(), None if residual is None else empty(x.numel(), torch.float32, _CPU)
    threads = torch.get_num_threads()
    bad = _native.accumulate(_address(x), _address(residual, count=count), decay, _address(e), count, threads)
    if bad:
        source = x if e is None else e
        e = empty(count, torch.float32, _CPU) if e is None else e
        _native.clean(_address(source), _address(e), count)
    return x if e is None else e, _nonfinite(bad)


def divide(x: Tensor, by: int) -> Tensor:
    return _nonfinite(_native.divide(_address(x), float(by), x.numel(), torch.get_num_threads()))


def keep_residual(new: Tensor, old: Tensor, nonfinite: Tensor) -> Tensor:
    return old if int(nonfinite) else new


def encode_blocks(
    x: Tensor, form: Format, key: Key, residual: Tensor | None = None, decay: float = 1.0
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    count = x.numel()
    codes = empty(form.code_count(count), form.code_dtype, _CPU)
    scales = empty(form.scale_count(count), form.scales or torch.float32, _CPU)
    rest = None if residual is None else empty(count, torch.float32, _CPU)
    bad = _native.encode_blocks(
        _format(form),
        _key(key, law.STREAM_ROUNDING),
        _address(x),
        _address(residual, count=count),
        decay,
        count,
        codes.data_ptr(),
        scales.data_ptr(),
        _address(rest),
        torch.get_num_threads(),
    )
    return codes, scales, _nonfinite(bad), rest


def encode_frame(
    x: Tensor,
    form: Format,
    key: Key,
    residual: Tensor | None,
    decay: float,
    rest: Tensor | None,
    frame: Tensor,
    header: bytes,
    codes_at: int,
    scales_at: int,
) -> int:
    """Encode into the places of a frame, and seal it; how many values are not finite."""
    count = x.numel()
    nonfinite: int = _native.encode_frame(
        _format(form),
        _key(key, law.STREAM_ROUNDING),
        _address(x),
        _address(residual, count=count),
        decay,
        count,
        _address(frame, torch.uint8),
        frame.numel(),
        header,
        codes_at,
        scales_at,
        _address(rest, count=count if rest is not None else None),
        torch.get_num_threads(),
    )
    return nonfinite


def decode_frames(
    out: Tensor, frames: Sequence[Tensor], form: Format, codes_at: int, scales_at: int, *, add: bool
) -> None:
    """Decode frames that :func:`check_frame` has seen."""
    count = out.numel()
    pairs = [(start + codes_at, start + scales_at) for start in map(Tensor.data_ptr, frames)]
    nbytes = form.code_count(count) * form.code_dtype.itemsize
    _native.decode_blocks(_format(form), pairs, nbytes, _address(out), count, add, torch.get_num_threads())


def check_frame(frame: Tensor, nbytes: int, header: bytes) -> bool | None:
    """Whether a sound frame with this header, but for the seed, holds NaN or Inf; None if it is something else."""
    found: int = _native.check_frame(_address(frame, torch.uint8), nbytes, header)
    return bool(found) if found < 2 else None


def decode_blocks(out: Tensor, payloads: Sequence[tuple[Tensor, Tensor]], form: Format, add: bool) -> None:
    count = out.numel()
    kept, pairs = [], []
    for codes, scales in payloads:
        codes, scales = _aligned(codes), _aligned(scales)
        kept.append((codes, scales))
        scale_address = _address(scales, form.scales, form.scale_count(count)) if form.scales else 0
        pairs.append((_address(codes, form.code_dtype, form.code_count(count)), scale_address))
    nbytes = form.code_count(count) * form.code_dtype.itemsize
    _native.decode_blocks(_format(form), pairs, nbytes, _address(out), count, add, torch.get_num_threads())


def random_bits(key: Key, stream: int, count: int, *, device: torch.device) -> Tensor:
    out = empty(count, torch.int64, _CPU)
    _native.random_bits(_key(key, stream), out.data_ptr(), count, torch.get_num_threads())
    return out


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    _check_width(bits)
    flat = codes.to(torch.int64).contiguous()
    out = empty(-(-flat.numel() * bits // 8), torch.uint8, _CPU)
    _native.pack_bits(flat.data_ptr(), bits, flat.numel(), out.data_ptr())
    return out


def _check_width(bits: int) -> None:
    if not 0 <= bits <= 32:
        raise ValueError(f"codes have 0 to 32 bits; got {bits}.")


def unpack_bits(data: Tensor, bits: int, count: int) -> Tensor:
    _check_width(bits)
    data = data.contiguous()
    out = empty(count, torch.int64, _CPU)
    _native.unpack_bits(_address(data, torch.uint8), data.numel(), bits, count, out.data_ptr())
    return out


def select_top(x: Tensor, count: int) -> Tensor:
    if not 0 <= count <= x.numel():
        raise ValueError(f"cannot select {count} of {x.numel()}.")
    out = empty(count, torch.int64, _CPU)
    _native.select_top(_address(x), x.numel(), count, out.data_ptr(), torch.get_num_threads())
    return out


def select_block_top(x: Tensor, each: int, block: int) -> Tensor:
    blocks, rest = divmod(x.numel(), block)
    out = empty(blocks * min(each, block) + min(rest, each), torch.int64, _CPU)
    _native.select_block_top(_address(x), x.numel(), min(each, block), block, out.data_ptr(), torch.get_num_threads())
    return out


def select_threshold(x: Tensor, tau: float) -> Tensor:
    found: Tensor = _native.select_at_least(_address(x), x.numel(), tau, torch.get_num_threads())
    return found


def select_random(total: int, count: int, key: Key, *, device: torch.device) -> Tensor:
    out = empty(count, torch.int64, _CPU)
    if count:
        draws = _key(key, law.STREAM_SELECTION)
        _native.select_random(draws, total, count, out.data_ptr(), torch.get_num_threads())
    return out


def scatter(out: Tensor, indices: Tensor, values: Tensor, add: bool) -> None:
    n, values = indices.numel(), values.contiguous()
    _native.scatter(
        _address(out), out.numel(), _address(indices, torch.int64), _address(values, torch.float32, n), n, add
    )


def gather(x: Tensor, indices: Tensor) -> Tensor:
    values = empty(indices.numel(), torch.float32, _CPU)
    _native.gather(_address(x), x.numel(), _address(indices, torch.int64), values.data_ptr(), indices.numel())
    return values


def pack_indices(indices: Tensor, total: int, width: int) -> Tensor:
    _check_width(width)
    n = indices.numel()
    out = empty(-(-(n + ((total - n) >> width)) // 8) + -(-n * width // 8), torch.uint8, _CPU)
    _native.pack_indices(_address(indices, torch.int64), n, total, width, out.data_ptr())
    return out


def unpack_indices(data: Tensor, total: int, count: int, width: int) -> Tensor:
    _check_width(width)
    data = data.contiguous()
    nbytes = -(-(count + ((total - count) >> width)) // 8) + -(-count * width // 8)
    out = empty(count, torch.int64, _CPU)
    found = _native.unpack_indices(_address(data, torch.uint8, nbytes), total, count, width, out.data_ptr())
    if found < 0:
        raise WireError(f"corrupt indices: they are not sorted, distinct and below {total}.")
    if found != count:
        raise WireError(f"corrupt indices: {found} bits are set where {count} indices were declared.")
    return out


def rotate(x: Tensor, key: Key, block: int) -> Tensor:
    out = empty(x.numel() + -x.numel() % block, torch.float32, _CPU)
    _rotate(x, key, block, x.numel(), out, inverse=False)
    return out


def unrotate(x: Tensor, key: Key, block: int, count: int) -> Tensor:
    if x.numel() != count + -count % block:
        raise ValueError(f"{x.numel()} are not the whole blocks of {block} that hold {count}.")
    out = empty(count, torch.float32, _CPU)
    _rotate(x, key, block, count, out, inverse=True)
    return out


def _rotate(x: Tensor, key: Key, block: int, count: int, out: Tensor, *, inverse: bool) -> None:
    limit, factor = torch.finfo(torch.float32).max / (2 * block), 1.0 / math.isqrt(block)
    draws = _key(key, law.STREAM_ROTATION)
    _native.rotate(draws, _address(x), count, block, inverse, limit, factor, out.data_ptr(), torch.get_num_threads())


# Low rank. The kernels want the right-hand factors transposed, which are small.


def thin_products(matrices: Sequence[Tensor], thin: Sequence[Tensor]) -> list[Tensor]:
    rows = [m.shape[0] for m in matrices]
    ranks = [q.shape[1] for q in thin]
    outs = [empty(n * r, torch.float32, _CPU).view(n, r) for n, r in zip(rows, ranks, strict=True)]
    _products(_native.thin_products, matrices, [None] * len(rows), thin, outs)
    return outs


def thin_products_of_sums(
    xs: Sequence[Tensor], residuals: Sequence[Tensor], sums: Sequence[Tensor], thin: Sequence[Tensor]
) -> list[Tensor]:
    sizes = [(m.shape[0], q.shape[1]) for m, q in zip(sums, thin, strict=True)]
    outs = [empty(n * r, torch.float32, _CPU).view(n, r) for n, r in sizes]
    terms = [
        (_address(x, count=m.numel()), _address(residual, count=m.numel()))
        for x, residual, m in zip(xs, residuals, sums, strict=True)
    ]

    def call(arguments: Any, threads: int) -> None:
        _native.thin_products_of_sums(arguments, terms, threads)

    for m in sums:
        _address(m)
    _products(call, sums, [None] * len(sizes), thin, outs)
    return outs


def thin_transposed_products(matrices: Sequence[Tensor], thin: Sequence[Tensor]) -> list[Tensor]:
    sizes = [(p.shape[1], m.shape[1]) for m, p in zip(matrices, thin, strict=True)]
    outs = [empty(r * m, torch.float32, _CPU).view(r, m) for r, m in sizes]
    _products(_native.thin_transposed_products, matrices, thin, [None] * len(sizes), outs)
    return [out.t() for out in outs]


def outer_residual(matrices: Sequence[Tensor], left: Sequence[Tensor], right: Sequence[Tensor]) -> list[Tensor]:
    outs = [empty(m.numel(), torch.float32, _CPU).view(m.shape) for m in matrices]
    _products(_native.outer_residual, matrices, left, right, outs)
    return outs


def outer_mean(
    residuals: Sequence[Tensor], left: Sequence[Tensor], right: Sequence[Tensor], outs: Sequence[Tensor]
) -> None:
    for e, out in zip(residuals, outs, strict=True):
        _address(e), _address(out, count=e.numel())
    _products(_native.outer_mean, residuals, left, right, outs)


def orthogonalize(factors: Sequence[Tensor]) -> list[Tensor]:
    wide = [factor.to(torch.float32).contiguous() for factor in factors]
    outs = [torch.empty_like(factor) for factor in wide]
    pairs = zip(wide, outs, strict=True)
    arguments = [(_address(factor), out.data_ptr(), *factor.shape) for factor, out in pairs]
    _native.orthogonalize(arguments, law.ORTHOGONAL_SHIFT, law.ORTHOGONAL_LEAST)
    return outs


def _products(
    call: Any,
    matrices: Sequence[Tensor],
    left: Sequence[Tensor | None],
    right: Sequence[Tensor | None],
    outs: Sequence[Tensor],
) -> None:
    kept, arguments = [], []
    for m, p, q, out in zip(matrices, left, right, outs, strict=True):
        (rows, columns), rank = m.shape, (q if p is None else p).shape[1]  # type: ignore[union-attr]
        m, p = m.contiguous(), None if p is None else p.contiguous()
        q = None if q is None else q.t().contiguous()
        if rank == 0:
            out.zero_() if out.shape != m.shape else out.copy_(m)
            continue
        kept.append((m, p, q))
        factors = _address(p, count=rows * rank), _address(q, count=rank * columns)
        arguments.append((_address(m), *factors, out.data_ptr(), rows, columns, rank))
    call(arguments, torch.get_num_threads())
