"""Which parameters travel together, in which codec, so that a ratio is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from gradwire.codecs import Codec, codec
from gradwire.errors import ConfigError
from gradwire.partition import partition
from gradwire.planner import best_codec
from gradwire.transforms import for_training
from gradwire.wire import TensorSpec

__all__ = ["BucketPlan", "Plan", "make_plan"]

_SMALL: Final = 4096  # elements; smaller tensors, and vectors, travel as they are if that costs little
_LITTLE: Final = 0.05
_LEAST: Final = 1e-9


@dataclass(frozen=True)
class BucketPlan:
    """Parameters that travel end to end."""

    places: tuple[int, ...]  # of parameters
    slices: tuple[slice, ...]  # of each rank
    gradients: Codec
    weights: Codec

    @property
    def note_bytes(self) -> int:
        """Which of the parameters have a gradient, a bit each."""
        return -(-len(self.places) // 8)


@dataclass(frozen=True)
class Plan:
    """All buckets, in the order in which they are sent: the last parameters first."""

    buckets: tuple[BucketPlan, ...]

    def sent_bytes(self, rank: int) -> tuple[int, int]:
        """Of gradients and of weights, in a step."""
        gradients = weights = 0
        for each in self.buckets:
            for other, where in enumerate(each.slices):
                spec = TensorSpec((where.stop - where.start,))
                if other != rank:
                    gradients += each.gradients.layout(spec).nbytes + each.note_bytes + 1
                else:
                    weights += (len(each.slices) - 1) * each.weights.layout(spec).nbytes
        return gradients, weights

    def dense_bytes(self, rank: int) -> tuple[int, int]:
        """What float32 would take."""
        gradients = weights = 0
        for each in self.buckets:
            own = each.slices[rank].stop - each.slices[rank].start
            gradients += 4 * (each.slices[-1].stop - own)
            weights += 4 * own * (len(each.slices) - 1)
        return gradients, weights

    def keeps(self, ratio: float, *, gradients: bool = True, weights: bool = True) -> bool:
        """Whether no rank sends more than that part of float32's bytes: of gradients, and of weights."""
        return all(
            sent <= ratio * dense
            for rank in range(len(self.buckets[0].slices))
            for asked, sent, dense in zip(
                (gradients, weights), self.sent_bytes(rank), self.dense_bytes(rank), strict=True
            )
            if asked
        )


def make_plan(
    shapes: Sequence[tuple[int, ...]],
    ranks: int,
    *,
    ratio: float | None,
    quantize: bool = True,
    sparsify: bool = False,
    gradients: str | None = None,
    weights: str | None = None,
    feedback: bool = True,
    whole: bool = False,
    bucket_bytes: int = 8 << 20,
) -> Plan:
    """The plan for parameters of these shapes; without a ratio nothing is compressed but what is named.

    ``whole``: no parameter may be divided.

    >>> plan = make_plan([(256, 256), (256,)], ranks=4, ratio=0.1)
    >>> [str(bucket.gradients) for bucket in plan.buckets], plan.keeps(0.1)
    (['ef(int2)', 'none'], True)
    """

    def chosen(target: float | None, numel: int, told: str | None) -> Codec:
        if told is not None:
            return codec(told)
        if target is None or not (quantize or sparsify):
            return codec("none")
        spec = TensorSpec((max(1, numel),))
        try:
            return best_codec(spec, target, quantize=quantize, sparsify=sparsify)
        except ConfigError:
            return best_codec(spec, target)  # fewer bits than one an element: only some elements can travel

    sizes = [_numel(shape) for shape in shapes]
    small = [place for place, shape in enumerate(shapes) if len(shape) < 2 or sizes[place] < _SMALL]
    large = [place for place in range(len(shapes)) if place not in set(small)]
    bound = None if ratio is None or not (quantize or sparsify) else ratio

    def planned(groups: Sequence[Sequence[int]], raw: Sequence[bool], target: float | None) -> Plan:
        made, loads = [], [0] * ranks
        for places, as_is in zip(groups, raw, strict=True):
            order, slices = _divided(places, sizes, loads, whole)
            longest = max(where.stop - where.start for where in slices)
            goal = None if as_is else target
            inner = chosen(goal, longest, None if as_is else gradients)
            made.append(
                BucketPlan(
                    tuple(order),
                    slices,
                    for_training(inner) if feedback else inner,
                    chosen(goal, longest, None if as_is else weights),
                )
            )
        return Plan(tuple(made))

    apart = [*_buckets(large, sizes, bucket_bytes), *([small] if small else [])]
    together = _buckets(range(len(shapes)), sizes, bucket_bytes)
    if bound is None:
        return planned(together, [False] * len(together), None)
    little = 4 * sum(sizes[place] for place in small) <= _LITTLE * bound * 4 * sum(sizes)
    ways = [(apart, [*[False] * (len(apart) - 1), True])] if small and large and little else []
    ways += [(together, [False] * len(together)), ([list(range(len(shapes)))], [False])]
    for groups, raw in ways:
        target = bound
        while target > bound / 4:
            try:
                plan = planned(groups, raw, target)
            except ConfigError:
                break
            if plan.keeps(bound, gradients=gradients is None, weights=weights is None):
                return plan
            target *= 0.97
    raise ConfigError(
        f"`compression_ratio` must be larger for a model of {sum(sizes)} parameters on {ranks} ranks: headers alone take "
        f"more than {bound:g} of its bytes."
    )


def _buckets(places: Sequence[int], sizes: Sequence[int], nbytes: int) -> list[list[int]]:
    """Parameters in the order backward reaches them, in buckets of about so many bytes."""
    found: list[list[int]] = []
    full = nbytes
    for place in reversed(places):
        if full + 4 * sizes[place] > nbytes:
            found.append([])
            full = 0
        found[-1].append(place)
        full += 4 * sizes[place]
    return [sorted(each) for each in found]


def _divided(
    places: Sequence[int], sizes: Sequence[int], loads: list[int], whole: bool
) -> tuple[list[int], tuple[slice, ...]]:
    """The order of a bucket's parameters, and each rank's slice of it; ``loads``: what ranks own already."""
    if not whole:
        return list(places), partition(sum(sizes[place] for place in places), len(loads))
    owned: list[list[int]] = [[] for _ in loads]
    for place in sorted(places, key=lambda each: -sizes[each]):  # the largest first, to whoever has least
        rank = loads.index(min(loads))
        owned[rank].append(place)
        loads[rank] += sizes[place]
    edges = [0, *accumulate(sum(sizes[place] for place in each) for each in owned)]
    return [place for each in owned for place in sorted(each)], tuple(map(slice, edges, edges[1:]))


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for each in shape:
        total *= each
    return total
