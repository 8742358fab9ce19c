"""Which parameters travel together, in which codec, so that a ratio is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from gradwire.codecs import Codec, codec
from gradwire.errors import ConfigError
from gradwire.partition import partition
from gradwire.planner import best_codec, relative_error
from gradwire.transforms import for_training
from gradwire.wire import TensorSpec

__all__ = ["BucketPlan", "Plan", "make_plan"]

_SMALL: Final = 4096  # elements; smaller tensors, and vectors, travel as they are if that costs little
_LITTLE: Final = 0.05
_AS_GOOD: Final = 1.05  # as the best: then the one with more buckets, which are sent earlier
_FOR_SMALL: Final = ("none", "bf16", "int8")


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
                if other != rank:
                    gradients += _payload_bytes(each.gradients, where) + each.note_bytes + 1
                else:
                    weights += (len(each.slices) - 1) * _payload_bytes(each.weights, where)
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
        """Whether no rank sends more than that part of float32's bytes: of gradients, and of weights.

        A rank that owns every element sends flags instead of gradients, where float32 would send nothing: these bytes
        count with its weights.
        """
        for rank in range(len(self.buckets[0].slices)):
            (sent, sent_back), (dense, dense_back) = self.sent_bytes(rank), self.dense_bytes(rank)
            if not dense:
                sent, sent_back = 0, sent_back + (sent if gradients else 0)
            if (gradients and sent > ratio * dense) or (weights and sent_back > ratio * dense_back):
                return False
        return True

    def error(self) -> float:
        """What encoding loses of all elements, on average."""
        total = lost = 0.0
        for each in self.buckets:
            size = each.slices[-1].stop
            total += size
            lost += size * (relative_error(str(each.gradients)) + relative_error(str(each.weights)))
        return lost / max(1.0, total)


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
    (['ef(int3)'], True)
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

    for told in (gradients, weights):
        if told is not None:
            codec(told)  # which says what is wrong with it
    sizes = [_numel(shape) for shape in shapes]
    small = [place for place, shape in enumerate(shapes) if len(shape) < 2 or sizes[place] < _SMALL]
    large = [place for place in range(len(shapes)) if place not in set(small)]
    bound = None if ratio is None or not (quantize or sparsify) else ratio

    def planned(groups: Sequence[Sequence[int]], small_codec: str | None, target: float | None) -> Plan:
        """With ``small_codec`` the last group travels in that."""
        made, loads = [], [0] * ranks
        for number, places in enumerate(groups):
            order, slices = _divided(places, sizes, loads, whole)
            longest = max(where.stop - where.start for where in slices)
            told = small_codec if small_codec is not None and number == len(groups) - 1 else None
            inner = chosen(target, longest, told or gradients)
            made.append(
                BucketPlan(
                    tuple(order),
                    slices,
                    for_training(inner) if feedback else inner,
                    chosen(target, longest, told or weights),
                )
            )
        return Plan(tuple(made))

    together = _buckets(range(len(shapes)), sizes, bucket_bytes)
    if bound is None:
        return planned(together, None, None)
    apart = [*_buckets(large, sizes, bucket_bytes), small]
    little = 4 * sum(sizes[place] for place in small) <= _LITTLE * bound * 4 * sum(sizes)
    ways: list[tuple[list[list[int]], str | None]] = [(together, None), ([list(range(len(shapes)))], None)]
    if small and large and little:
        ways = [*((apart, codec_of_small) for codec_of_small in _FOR_SMALL), *ways]
    fitting = [plan for groups, told in ways if (plan := _largest(planned, groups, told, bound, gradients, weights))]
    if not fitting:
        raise ConfigError(
            f"`compression_ratio` must be larger for a model of {sum(sizes)} parameters on {ranks} ranks: headers "
            f"alone take more than {bound:g} of its bytes."
        )
    least = min(plan.error() for plan in fitting)
    return next(plan for plan in fitting if plan.error() <= _AS_GOOD * least)


def _payload_bytes(what: Codec, where: slice) -> int:
    """Of a slice; an empty one is not encoded."""
    return what.layout(TensorSpec((where.stop - where.start,))).nbytes if where.stop > where.start else 0


def _largest(
    planned: Callable[[list[list[int]], str | None, float], Plan],
    groups: list[list[int]],
    small_codec: str | None,
    bound: float,
    gradients: str | None,
    weights: str | None,
) -> Plan | None:
    """The plan with the best codecs that keep the bound, headers included."""
    target = bound
    while target > bound / 4:
        try:
            plan = planned(groups, small_codec, target)
        except ConfigError:
            return None
        if plan.keeps(bound, gradients=gradients is None, weights=weights is None):
            return plan
        target *= 0.99
    return None


def _buckets(places: Sequence[int], sizes: Sequence[int], nbytes: int) -> list[list[int]]:
    """Parameters in the order backward reaches them, in buckets of about so many bytes."""
    found: list[list[int]] = []
    full = nbytes
    for place in reversed(places):
        if not found or full + 4 * sizes[place] > nbytes:
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
