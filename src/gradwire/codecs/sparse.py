"""What sparse codecs share: values at sorted indices, and the indices packed.

Indices are Elias-Fano coded (``ops.pack_indices``): their size depends on the counts alone, lies within 10% of
log2 C(n, k) bits at densities from 0.1% to 10% (of 50,000 elements and more; below, rounding to bytes shows), and at
width 0 the code *is* the bitmap, so choosing the width of fewest bytes chooses the cheaper of the two as well.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.codecs.base import Carrier, Part
from gradwire.errors import ConfigError
from gradwire.kernels import ops
from gradwire.kernels.memory import zeros
from gradwire.wire import Key, Payload, TensorSpec


def kept_count(density: float, total: int) -> int:
    """How many of ``total`` a density keeps: at least one, if there are any.

    >>> kept_count(0.01, 1000), kept_count(0.01, 3), kept_count(0.01, 0)
    (10, 1, 0)
    """
    return min(total, max(1, round(density * total)))


@functools.lru_cache(maxsize=4096)
def index_width(total: int, count: int) -> int:
    """Width of the lower part that makes the code shortest."""
    return min(range(max(total, 1).bit_length()), key=lambda width: _coded_nbytes(total, count, width))


def index_nbytes(total: int, count: int) -> int:
    """Exact bytes of ``count`` packed indices below ``total``; none or all of them need no bytes.

    >>> index_nbytes(1_000_000, 10_000), index_nbytes(1_000_000, 900_000)
    (10684, 125000)
    """
    return 0 if count in (0, total) else _coded_nbytes(total, count, index_width(total, count))


def _coded_nbytes(total: int, count: int, width: int) -> int:
    return -(-(count + ((total - count) >> width)) // 8) + -(-count * width // 8)


def check_density(codec: Carrier, density: float) -> None:
    """Raise unless the density is one."""
    if not 0 < density <= 1:
        raise ConfigError(f"`{codec.id}(density=...)` must be in (0, 1]; got {density}.")


class Scattered(Carrier):
    """A carrier of single elements; a subclass says where they are."""

    @abstractmethod
    def _positions(self, values: Tensor, structure: tuple[Tensor, ...], spec: TensorSpec, key: Key) -> Tensor:
        """Sorted indices of values that came with a structure."""

    def _scaled(self, values: Tensor, spec: TensorSpec) -> Tensor:
        """What values become when they are put in their places: themselves, for most."""
        return values

    def _join(self, values: Tensor, structure: tuple[Tensor, ...], spec: TensorSpec, key: Key) -> Tensor:
        out = zeros(spec.numel, values.device)
        indices = self._positions(values, structure, spec, key)
        ops.scatter(out, indices, self._scaled(values, spec), add=False)
        return out

    def _leave(
        self, e: Tensor, values: Tensor, sent: Tensor, places: Tensor | None, spec: TensorSpec, key: Key
    ) -> Tensor:
        assert places is not None
        ops.scatter(e, places, values - self._scaled(sent, spec), add=False)
        return e

    def _sum_into(self, payloads: Sequence[Payload], out: Tensor, *, add: bool) -> None:
        received = [self._checked_values(self._checked_parts(payload), payload.spec) for payload in payloads]
        self._scatter_into(payloads, received, out, add=add)

    def _scatter_into(
        self,
        payloads: Sequence[Payload],
        received: Sequence[tuple[Tensor, tuple[Tensor, ...]]],
        out: Tensor,
        *,
        add: bool,
    ) -> None:
        """Put or add the values and structures received with payloads; before the first, all places are checked."""
        placed = []
        for payload, (values, structure) in zip(payloads, received, strict=True):
            places = self._positions(values, structure, payload.spec, payload.key)
            placed.append((places, self._scaled(values.to(torch.float32), payload.spec)))
        if not add:
            out.zero_()
        for places, values in placed:
            ops.scatter(out, places, values, add=add)
            add = True


class Sparse(Scattered):
    """A carrier that sends where its elements are; a subclass says which they are."""

    @abstractmethod
    def _select(self, x: Tensor, spec: TensorSpec, key: Key) -> Tensor:
        """Sorted indices of the kept elements."""

    def _structure(self, spec: TensorSpec) -> tuple[Part, ...]:
        return (Part("indices", torch.uint8, index_nbytes(spec.numel, self._count(spec))),)

    def _split(self, x: Tensor, spec: TensorSpec, key: Key) -> tuple[Tensor, tuple[Tensor, ...], Tensor | None]:
        indices = self._select(x, spec, key)
        return ops.gather(x, indices), (pack(indices, spec.numel),), indices

    def _positions(self, values: Tensor, structure: tuple[Tensor, ...], spec: TensorSpec, key: Key) -> Tensor:
        return unpack(structure[-1], spec.numel, values.numel())


def pack(indices: Tensor, total: int) -> Tensor:
    """Packed indices; ``index_nbytes`` bytes."""
    count = indices.numel()
    if count in (0, total):
        return torch.empty(0, dtype=torch.uint8, device=indices.device)
    return ops.pack_indices(indices, total, index_width(total, count))


def unpack(data: Tensor, total: int, count: int) -> Tensor:
    """Indices of packed ones."""
    if count in (0, total):
        return torch.arange(count, device=data.device)
    return ops.unpack_indices(data, total, count, index_width(total, count))
