"""Which bucket travels how: the least time, as far as the gradients allow."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from math import inf
from types import NoneType
from typing import Any, Final, get_args, get_origin, get_type_hints

from torch import Tensor

from gradwire.collectives import AllReduce, PowerSGD, method
from gradwire.collectives.base import ring_bytes
from gradwire.errors import ConfigError
from gradwire.planner.cost import Cost, Link, Machine, Prediction, predict_step, pure_times
from gradwire.planner.probe import Network
from gradwire.planner.trial import Trial, sample_of
from gradwire.reducer import FEW, worth_encoding
from gradwire.wire import TensorSpec

__all__ = ["CANDIDATES", "DENSE", "DOUBT", "Bucket", "Plan", "PlannedBucket", "Situation", "choose", "plan_of", "safer"]

DENSE: Final = "dense"

CANDIDATES: Final = (DENSE, "int8", "int4", "powersgd:16,start=0+int8")
"""What is considered, unless somebody asks for more: what needs about as many steps as float32 does."""

QUALITY: Final = 0.25
"""Relative squared error of what was sent of a layer so far that is allowed. Of the methods measured on the built-in
tasks those below it need at most 1.07 times the steps of float32, and those above it up to six times as many."""

DOUBT: Final = 1.07
"""How much faster than dense a plan must be: steps vary as much, and dense loses nothing."""

_LOW_RANK_STEPS: Final = 0.05  # more steps than float32 needs, as measured: 1.00 and 1.07 times
_LOST_STEPS: Final = 0.25  # of what is lost: int4 loses 2% of a gradient, and needs no percent more steps
_SLOWER: Final = tuple(1 + 0.04 * step for step in range(11))  # times what a short measurement says of a link
_MOST_UNEXPLAINED: Final = 0.25  # of computing
_WORTH: Final = 0.01  # of a step: less is not worth a plan that differs from bucket to bucket


@dataclass(frozen=True)
class Bucket:
    """Gradients that are handed over together."""

    names: tuple[str, ...]  # of the tensors that are worth a codec
    numels: tuple[int, ...]
    small_names: tuple[str, ...] = ()  # of vectors and small tensors, which travel in float32
    small: int = 0  # elements of those

    @classmethod
    def of(cls, names: Sequence[str], parameters: Mapping[str, Tensor]) -> Bucket:
        """The bucket of some parameters."""
        large = tuple(worth_encoding(names, parameters))
        small = tuple(name for name in names if name not in large)
        numels = tuple(parameters[name].numel() for name in large)
        return cls(large, numels, small, sum(parameters[name].numel() for name in small))

    @property
    def numel(self) -> int:
        """Elements of the large tensors."""
        return sum(self.numels)

    @property
    def sample(self) -> list[str]:
        """Those that methods are tried on."""
        return sample_of(dict(zip(self.names, self.numels, strict=True)))


@dataclass(frozen=True)
class Situation:
    """All that a plan follows from. It is the same on every rank, and so is the plan."""

    ranks: int
    buckets: tuple[Bucket, ...]
    ready_s: tuple[float, ...]  # when each bucket is computed, if nothing is sent
    trials: tuple[Mapping[str, Trial], ...]  # by bucket, then method
    network: Network
    machine: Machine
    quality: float = QUALITY
    slower: float = 1.0  # the link between ranks, to messages of trainings, than it is to those that measure it

    @property
    def link(self) -> Link:
        """Between ranks, to messages of trainings."""
        between = self.network.between
        return replace(between, seconds_per_byte=self.slower * between.seconds_per_byte)

    def predict(self, methods: Sequence[Mapping[str, str]]) -> Prediction:
        """A step in which every parameter travels by its method."""
        return predict_step(self.ready_s, self.costs(methods), self.link, self.network.dense, self.machine)

    def calibrated(self, methods: Sequence[Mapping[str, str]], done_s: float) -> Situation:
        """From a situation in which ``ready_s`` and ``done_s`` are those of steps that were taken by these methods.

        Computing took longer than by itself, by what encoding took from it. And a link on which the steps took longer
        than they should is as much slower as explains it, within reason, to messages such as these; what that does not
        explain is computing's, within reason too.
        """
        costs, best, least = self.costs(methods), self, inf
        for slower in _SLOWER if self.network.between.seconds_per_byte else (1.0,):
            there = replace(self, slower=slower)
            pure = pure_times(self.ready_s, costs, there.link, self.network.dense, self.machine)
            there = replace(there, ready_s=pure)
            off = abs(there.predict(methods).seconds - done_s)
            if off < least:
                best, least = there, off
        unexplained = (done_s - best.predict(methods).seconds) / max(1e-9, best.ready_s[-1])
        longer = 1 + min(_MOST_UNEXPLAINED, max(0.0, unexplained))
        return replace(best, ready_s=tuple(longer * each for each in best.ready_s))

    def costs(self, methods: Sequence[Mapping[str, str]]) -> list[list[Cost]]:
        """What each bucket takes."""
        return [self._costs(place, how) for place, how in enumerate(methods)]

    def _costs(self, place: int, methods: Mapping[str, str]) -> list[Cost]:
        bucket, costs = self.buckets[place], []
        for what in sorted(set(methods.values())):
            numel = sum(n for name, n in zip(bucket.names, bucket.numels, strict=True) if methods[name] == what)
            costs.append(_part(self.trials[place][what].cost, numel / max(1, bucket.numel)))
        if place == len(self.buckets) - 1 and any(not cost.dense for cost in costs):
            small = sum(each.small for each in self.buckets)  # they travel with the last
            gathered = small * self.ranks <= FEW
            sent = 4.0 * small * (self.ranks - 1) if gathered else float(ring_bytes(small, self.ranks))
            costs.append(Cost(0.0, sent, 1 if gathered else 2))
        return costs

    def allowed(self, place: int, what: str) -> dict[str, str]:
        """A bucket's layers by a method, or by the next safer one where it would lose too much."""
        bucket = self.buckets[place]
        if not bucket.names:
            return {}
        errors = self.trials[place][what].errors
        typical = sorted(errors.values())[len(errors) // 2] if errors else 0.0
        back = safer(what, list(self.trials[place]))
        poor = [name for name in bucket.names if errors.get(name, typical) > self.quality]
        instead = self.allowed(place, back) if poor and back != what else {}
        return {name: instead.get(name, what) if name in poor else what for name in bucket.names}

    def extra_steps(self, methods: Sequence[Mapping[str, str]]) -> float:
        """The part by which a plan needs more steps than float32, about: what it loses, and what experience adds."""
        total = 0.0
        for place, by_name in enumerate(methods):
            bucket = self.buckets[place]
            for name, numel in zip(bucket.names, bucket.numels, strict=True):
                errors = self.trials[place][by_name[name]].errors
                error = errors.get(name, sorted(errors.values())[len(errors) // 2] if errors else 0.0)
                low_rank = isinstance(method(by_name[name]), PowerSGD)
                total += numel * (_LOST_STEPS * min(error, 1.0) + _LOW_RANK_STEPS * low_rank)
        return total / max(1, sum(bucket.numel for bucket in self.buckets))


def _part(cost: Cost, share: float) -> Cost:
    return replace(cost, processor_s=cost.processor_s * share, sent_bytes=cost.sent_bytes * share)


def safer(what: str, candidates: Sequence[str]) -> str:
    """The candidate that loses the next less: low rank, then fewer bits, then more, then dense.

    >>> [safer(each, CANDIDATES) for each in reversed(CANDIDATES)]
    ['int4', 'int8', 'dense', 'dense']
    """
    ladder = sorted({DENSE, *candidates}, key=_boldness)
    return ladder[max(0, ladder.index(what) - 1)]


def _boldness(what: str) -> tuple[int, float, str]:
    """How much a method takes away, by its kind and then by its bytes."""
    how = method(what)
    if isinstance(how, AllReduce):
        return 0, 0.0, what
    if isinstance(how, PowerSGD):
        return 2, -how.rank, what
    return 1, -how.layout(TensorSpec((1 << 20,))).nbytes, what


@dataclass(frozen=True)
class PlannedBucket:
    """A line of the table."""

    parameters: int
    dense_bytes: float  # that a rank sends of it in a ring all-reduce
    sent_bytes: float
    method: str  # or several, with the share of each
    ready_s: float
    predicted_s: float  # from ready to done
    measured_s: float | None = None


@dataclass(frozen=True)
class Plan:
    """What the planner decided, and why.

    >>> from torch import nn
    >>> from gradwire.planner.simulate import describe_workload, network_of, plan_on_paper
    >>> plan = plan_on_paper(describe_workload(nn.Linear(1024, 1024), step_s=0.1), 8, network_of(1e8, ranks=8))
    >>> plan.predicted_s < plan.alternatives["dense"]
    True
    >>> Plan.from_json(plan.to_json()) == plan
    True
    """

    methods: dict[str, str]  # by parameter
    buckets: tuple[PlannedBucket, ...]
    predicted_s: float  # a step
    computing_s: float
    extra_steps: float
    alternatives: dict[str, float]  # a step in which all buckets travel by one method
    network: Network
    machine: Machine
    measured_s: float | None = None
    reason: str = ""

    @property
    def name(self) -> str:
        """Its methods, in a few words."""
        return " and ".join(dict.fromkeys(bucket.method for bucket in self.buckets)) or DENSE

    def to_json(self) -> str:
        """The plan as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan of a text; :class:`~gradwire.errors.ConfigError` if it is none."""
        try:
            plan: Plan = _built(cls, json.loads(text))
            for what in set(plan.methods.values()):
                method(what)
        except (ArithmeticError, RecursionError, TypeError, ValueError) as error:
            raise ConfigError(f"a plan must be what to_json() made; got {text[:80]!r} ({error!s:.200}).") from None
        return plan


def _built(kind: Any, told: Any) -> Any:
    """A value of a type of :class:`Plan`'s fields out of JSON; TypeError if it is of another."""
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        if not isinstance(told, dict) or not set(told) <= set(hints):
            raise TypeError(f"no {kind.__name__}")
        return kind(**{name: _built(hints[name], each) for name, each in told.items()})
    arguments = get_args(kind)
    if NoneType in arguments:
        return None if told is None else _built(arguments[0], told)
    if get_origin(kind) is tuple and isinstance(told, list):
        return tuple(_built(arguments[0], each) for each in told)
    if get_origin(kind) is dict and isinstance(told, dict):
        return {key: _built(arguments[1], each) for key, each in told.items()}
    if kind is float and type(told) in (int, float):
        return float(told)
    if kind in (int, str) and type(told) is kind:
        return told
    raise TypeError(f"{told!r:.40} is no {kind}")


@dataclass
class _Search:
    """The best found so far."""

    situation: Situation
    methods: list[dict[str, str]] = field(default_factory=list)
    score: float = float("inf")

    def consider(self, methods: list[dict[str, str]], worth: float = 0.0) -> None:
        seconds = self.situation.predict(methods).seconds
        score = seconds * (1 + self.situation.extra_steps(methods))
        if score < self.score * (1 - worth):
            self.methods, self.score = methods, score


def choose(situation: Situation, candidates: Sequence[str] = CANDIDATES, reason: str = "") -> Plan:
    """The plan that takes the least time to a loss, of those within the quality allowed.

    >>> from gradwire.planner.cost import Cost
    >>> int8, dense = Cost(0.01, 1.5e6, 2), Cost(0.0, 6e6, 1, dense=True)
    >>> trials = {"dense": Trial(dense, {"w": 0.0}), "int8": Trial(int8, {"w": 1e-4})}
    >>> bucket = Bucket(("w",), (1_000_000,))
    >>> def plan(mbit):
    ...     link = Link(1e-4, 8 / (mbit * 1e6), 0.0)
    ...     here = Situation(4, (bucket,), (0.1,), (trials,), Network(link, link, None), Machine())
    ...     return choose(here, ("dense", "int8")).name
    >>> plan(100), plan(10_000)
    ('int8', 'dense')
    """
    every = range(len(situation.buckets))
    search, alternatives = _Search(situation), {}
    for what in candidates:
        uniform = [dict.fromkeys(bucket.names, what) for bucket in situation.buckets]
        alternatives[what] = situation.predict(uniform).seconds
        search.consider([situation.allowed(place, what) for place in every])
    for place in every:
        for what in candidates:
            other = list(search.methods)
            other[place] = situation.allowed(place, what)
            search.consider(other, worth=_WORTH)
    return plan_of(situation, search.methods, alternatives, reason)


def plan_of(
    situation: Situation, methods: Sequence[Mapping[str, str]], alternatives: Mapping[str, float], reason: str
) -> Plan:
    """The plan of a decision."""
    predicted = situation.predict(methods)
    rows = []
    for place, (bucket, how) in enumerate(zip(situation.buckets, methods, strict=True)):
        sent = sum(cost.sent_bytes for cost in situation._costs(place, how))
        dense = 8.0 * (bucket.numel + bucket.small) * (situation.ranks - 1) / situation.ranks
        parameters = bucket.numel + bucket.small
        took = predicted.done[place] - predicted.ready[place]
        rows.append(PlannedBucket(parameters, dense, sent, _describe(bucket, how), predicted.ready[place], took))
    return Plan(
        _by_parameter(situation.buckets, methods),
        tuple(rows),
        predicted.seconds,
        predicted.computing_s,
        situation.extra_steps(methods),
        dict(alternatives),
        situation.network,
        situation.machine,
        reason=reason,
    )


def _by_parameter(buckets: Sequence[Bucket], methods: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Small tensors are dense where all of their bucket is, and go with the others in float32 where it is not."""
    all_dense = all(what == DENSE for how in methods for what in how.values())
    assigned: dict[str, str] = {}
    for bucket, how in zip(buckets, methods, strict=True):
        dense = all_dense or (bool(how) and set(how.values()) == {DENSE})
        assigned |= dict.fromkeys(bucket.small_names, DENSE if dense else "none") | dict(how)
    return assigned


def _describe(bucket: Bucket, methods: Mapping[str, str]) -> str:
    counts: dict[str, int] = {}
    for name, numel in zip(bucket.names, bucket.numels, strict=True):
        counts[methods[name]] = counts.get(methods[name], 0) + numel
    if len(counts) <= 1:
        return next(iter(counts), "float32")
    return " + ".join(f"{what} ({numel / bucket.numel:.0%})" for what, numel in counts.items())
