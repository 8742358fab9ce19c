"""PowerSGD: the mean of matrices by way of thin factors, which travel quantized (Vogels et al., 2019).

Everybody's rank 4 in float32 costs the bytes of rank 16 in int8, which needs far fewer steps to the same loss.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, TypeAlias

import torch
from torch import Tensor

from gradwire.codecs import Codec, State, codec
from gradwire.collectives.base import (
    STAGES,
    Collective,
    Reduced,
    Reduction,
    delivered,
    result_tensor,
    ring_bytes,
    tensor_of,
)
from gradwire.collectives.choose import flat_collective
from gradwire.collectives.peers import Peers
from gradwire.errors import ConfigError
from gradwire.kernels import ops
from gradwire.kernels.law import STREAM_SKETCH
from gradwire.kernels.memory import empty
from gradwire.wire import Key, TensorSpec

__all__ = ["LowRank"]

_INT8: Final = codec("int8")

_FactorReduction: TypeAlias = Generator[None, None, tuple[list[Tensor], Reduced]]


@dataclass(frozen=True)
class LowRank:
    """E = G + e; P = orth(mean(E Q)); Q = mean(Eᵀ P); the mean gradient is P Qᵀ, and e = E - P Qᵀ stays here.

    It reduces the matrices of ``shapes`` in a flat tensor. The means of the factors go through a
    collective themselves, in the codec ``factors``; the residual keeps what that loses too. The first ``start`` steps
    are sent in the codec ``early``, for the subspace and the optimizer to settle. With ``alternate`` a step sends one
    factor only, P and Q in turn (ACP-SGD): half the bytes for more steps. The residual is known before the factor is
    sent then, and what quantizing the factor loses is lost.

    >>> from gradwire.collectives.base import run
    >>> from gradwire.collectives.loopback import Alone
    >>> low_rank = LowRank(Alone(), ((8, 32),), rank=1, factors=codec("none"), start=0)
    >>> x = torch.outer(torch.arange(8.0), torch.ones(32)).view(-1)
    >>> reduced = run(low_rank.reduce(x, low_rank.init(TensorSpec((256,))), Key(), tag=0))
    >>> torch.allclose(reduced.mean, x, atol=1e-5)
    True
    """

    peers: Peers
    shapes: tuple[tuple[int, int], ...]
    places: tuple[int, ...] | None = None  # where each begins; one after another unless given, and zeros between
    rank: int = 16
    factors: Codec = _INT8
    start: int = 10
    early: Codec = _INT8
    alternate: bool = False
    hosts: tuple[int, ...] = ()  # of the ranks, if what travels inside one is to be dense

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= 1024:
            raise ConfigError(f"`rank` must be from 1 to 1024; got {self.rank!r}.")
        if self.start < 0:
            raise ConfigError(f"`start` must not be negative; got {self.start!r}.")

    @functools.cached_property
    def _thin_collective(self) -> Collective:
        return flat_collective(self.peers, self.factors, self.hosts)

    @functools.cached_property
    def _early(self) -> Collective:
        return flat_collective(self.peers, self.early, self.hosts)

    def _ranks(self) -> list[int]:
        return [min(self.rank, *shape) for shape in self.shapes]

    def init(self, spec: TensorSpec, device: torch.device | str | None = None) -> State:
        """A residual of zeros, and factors that every rank draws alike."""
        sizes = [columns * rank for (_, columns), rank in zip(self.shapes, self._ranks(), strict=True)]
        draws = ops.random_bits(Key(), STREAM_SKETCH, sum(sizes), device=torch.device("cpu"))
        q = (draws.to(torch.float32) * 2.0**-31 - 1.0).to(device or "cpu")
        state = {"residual": torch.zeros(spec.shape, device=device), "q": q}
        if self.alternate:
            rows = [rows * rank for (rows, _), rank in zip(self.shapes, self._ranks(), strict=True)]
            state["p"] = torch.zeros(sum(rows), device=device)
        return state

    def by_tensor(self, state: State, sizes: Sequence[int]) -> list[State]:
        """Residual and factors of each matrix; what lies between has a residual of zeros."""
        residuals = torch.split(tensor_of(state, "residual").view(-1), list(sizes))
        states: list[dict[str, Tensor | int]] = [{"residual": residual} for residual in residuals]
        for name, side in self._sides():
            for i, factor in zip(self._members(sizes), self._thin(tensor_of(state, name), side), strict=True):
                states[i][name] = factor.t()
        return list(states)

    def from_tensors(self, states: Sequence[State], sizes: Sequence[int]) -> State:
        """Residuals and factors end to end."""
        state = {"residual": torch.cat([tensor_of(each, "residual").reshape(-1) for each in states])}
        for name, _ in self._sides():
            state[name] = torch.cat([tensor_of(states[i], name).reshape(-1) for i in self._members(sizes)])
        return state

    def _members(self, sizes: Sequence[int]) -> list[int]:
        """Which of the tensors are the matrices."""
        if self.places is None:
            return list(range(len(sizes)))
        starts = list(accumulate(sizes[:-1], initial=0))
        return [starts.index(place) for place in self.places]

    def _sides(self) -> list[tuple[str, int]]:
        return [("q", 1), ("p", 0)] if self.alternate else [("q", 1)]

    def reduce(self, x: Tensor, state: State, key: Key, tag: int, out: Tensor | None = None) -> Reduction:
        """Reduce the matrices of a flat tensor."""
        flat = x.reshape(-1)
        if key.step < self.start:
            early = yield from self._early.reduce(flat, {}, key, tag, out)
            return Reduced(
                early.mean.view(x.shape), state, early.sent_bytes, early.received_bytes, early.dense_sent_bytes
            )
        residual = tensor_of(state, "residual").view(-1)
        e = self._no_gaps(empty(flat.numel(), torch.float32, flat.device))
        matrices = self._matrices(e)
        terms = self._matrices(flat), self._matrices(residual)  # not cleaned of NaN: the factors must show it to all
        if self.alternate:
            return (yield from self._alternating(x, e, matrices, terms, state, key, tag, out))
        wide = _normalized(self._thin(tensor_of(state, "q"), 1))
        p, first = yield from self._mean(ops.thin_products_of_sums(*terms, matrices, wide), key, tag, 0)
        p = ops.orthogonalize(p)
        q_new, second = yield from self._mean(ops.thin_transposed_products(matrices, p), key, tag, 1)
        mean = self._outer(p, q_new, e, result_tensor(out, flat.numel()))
        moved = (first.sent_bytes + second.sent_bytes, first.received_bytes + second.received_bytes)
        after = {"residual": e.view(x.shape), "q": _joined(q_new)}
        return Reduced(delivered(mean, out, x), after, *moved, ring_bytes(flat.numel(), self.peers.size))

    def _alternating(
        self,
        x: Tensor,
        e: Tensor,
        matrices: list[Tensor],
        terms: tuple[list[Tensor], list[Tensor]],
        state: State,
        key: Key,
        tag: int,
        out: Tensor | None,
    ) -> Reduction:
        """One factor a step. The residual is what this rank's own factor leaves, known before the reduce."""
        q, p = tensor_of(state, "q"), tensor_of(state, "p")
        if (key.step - self.start) % 2 == 0:
            right = ops.orthogonalize(self._thin(q, 1))
            mine = ops.thin_products_of_sums(*terms, matrices, right)
            left, moved = yield from self._mean(mine, key, tag, 0)
            self._outer(mine, right, e, empty(e.numel(), torch.float32, e.device))
            mean = self._outer(left, right, None, result_tensor(out, e.numel()))
            p = _joined(left)
        else:
            left = ops.orthogonalize(self._thin(p, 0))
            for x_part, residual, e_part in zip(*terms, matrices, strict=True):
                torch.add(x_part, residual, out=e_part)
            mine = ops.thin_transposed_products(matrices, left)
            right, moved = yield from self._mean(mine, key, tag, 0)
            self._outer(left, mine, e, empty(e.numel(), torch.float32, e.device))
            mean = self._outer(left, right, None, result_tensor(out, e.numel()))
            q = _joined(right)
        after = {"residual": e.view(x.shape), "q": q, "p": p}
        sent = ring_bytes(e.numel(), self.peers.size)
        return Reduced(delivered(mean, out, x), after, moved.sent_bytes, moved.received_bytes, sent)

    def _mean(self, factors: Sequence[Tensor], key: Key, tag: int, which: int) -> _FactorReduction:
        """The mean of thin factors over all ranks, and what that moved."""
        # Column by column, so that a block of a quantizer sees values of one magnitude.
        mine = _joined(factors)
        reduced = yield from self._thin_collective.reduce(mine, {}, key.fold(which), tag + STAGES // 2 * which)
        pieces = torch.split(reduced.mean, [each.numel() for each in factors])
        means = [piece.view(each.shape[1], each.shape[0]).t() for piece, each in zip(pieces, factors, strict=True)]
        return means, reduced

    def _matrices(self, flat: Tensor) -> list[Tensor]:
        sizes = [rows * columns for rows, columns in self.shapes]
        places = self.places if self.places is not None else accumulate(sizes[:-1], initial=0)
        return [
            flat[place : place + size].view(shape)
            for place, size, shape in zip(places, sizes, self.shapes, strict=True)
        ]

    def _no_gaps(self, flat: Tensor) -> Tensor:
        """The tensor, with zeros between the matrices."""
        for gap in self._gaps(flat.numel()):
            flat[gap] = 0
        return flat

    def _gaps(self, numel: int) -> list[slice]:
        if self.places is None:
            return []
        ends = [place + rows * columns for place, (rows, columns) in zip(self.places, self.shapes, strict=True)]
        between = zip([0, *ends], [*self.places, numel], strict=True)
        return [slice(start, stop) for start, stop in between if start < stop]

    def _thin(self, flat: Tensor, side: int) -> list[Tensor]:
        """Factors, each (length, rank), of the rows (side 0) or columns (side 1)."""
        sizes = [(rank, shape[side]) for shape, rank in zip(self.shapes, self._ranks(), strict=True)]
        pieces = torch.split(flat, [rank * length for rank, length in sizes])
        return [piece.view(size).t() for piece, size in zip(pieces, sizes, strict=True)]

    def _outer(self, left: Sequence[Tensor], right: Sequence[Tensor], residual: Tensor | None, into: Tensor) -> Tensor:
        """P Qᵀ of every matrix, which is taken off the residual if there is one; zeros between the matrices."""
        self._no_gaps(into)
        residual = residual if residual is not None else empty(into.numel(), torch.float32, into.device)
        ops.outer_mean(self._matrices(residual), left, right, self._matrices(into))
        return into


def _normalized(factors: Sequence[Tensor]) -> list[Tensor]:
    """Columns of length one: otherwise the products would be squares, and vanish or overflow."""
    return [factor / factor.norm(dim=0, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) for factor in factors]


def _joined(factors: Sequence[Tensor]) -> Tensor:
    """The columns of all factors, one after another."""
    return torch.cat([factor.t().reshape(-1) for factor in factors])
