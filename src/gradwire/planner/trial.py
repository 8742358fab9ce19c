"""What a method costs and loses: found out by doing it, to gradients of this very training."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor, nn

from gradwire.collectives import AllReduce, Method, Pipeline, PowerSGD, Reduced, Reduction, Trace, method
from gradwire.collectives.base import ring_bytes
from gradwire.collectives.choose import is_elementwise
from gradwire.collectives.loopback import Loopback
from gradwire.planner.cost import Cost
from gradwire.reducer import SMALL, GradientReducer

__all__ = ["Trial", "caches_full", "dense_trial", "sample_of", "trial_work", "try_method"]

_PLAYED: Final = 2  # ranks, which have the same gradients; for more, costs are computed from theirs
_CACHES: Final = 1 << 23  # elements that fill the caches of a processor
_SAMPLE: Final = 1 << 18  # elements of a bucket that are tried, if whole tensors need not be


@dataclass(frozen=True)
class Trial:
    """What came of it."""

    cost: Cost
    errors: dict[str, float]  # by parameter: relative squared error of all that was sent so far

    def among(self, what: str | Method, ranks: int) -> Trial:
        """Of two ranks, what it would be of more: not measured anew, so that numbers of ranks can be compared.

        >>> Trial(Cost(0.5, 1000.0, 1), {}).among("int8", 4).cost
        Cost(processor_s=0.5, sent_bytes=1500.0, rounds=2, dense=False)
        """
        how, crowd, messages = method(what), ranks / _PLAYED, ranks - 1
        if isinstance(how, AllReduce):
            return Trial(replace(self.cost, sent_bytes=self.cost.sent_bytes * messages / crowd), self.errors)
        to_all = not isinstance(how, PowerSGD) and not is_elementwise(how)  # every rank gets every other's payload
        share = messages if to_all else messages / crowd  # to each other rank: a payload, or one of its slices
        processor_s = self.cost.processor_s * (crowd if to_all else 1)
        return Trial(Cost(processor_s, self.cost.sent_bytes * share, _rounds(how, ranks)), self.errors)


def sample_of(numels: Mapping[str, int]) -> list[str]:
    """The parameters of a bucket to try a method on: the first ones, and enough of them.

    >>> sample_of({"a": 200_000, "b": 400_000, "c": 1_000})
    ['a', 'b']
    """
    names: list[str] = []
    for name in numels:
        if sum(numels[each] for each in names) >= _SAMPLE:
            break
        names.append(name)
    return names


def caches_full() -> Tensor:
    """Memory that fills the caches of a processor.

    >>> caches_full().nbytes >> 20
    32
    """
    return torch.zeros(_CACHES)


def dense_trial(names: Iterable[str], numel: int, ranks: int) -> Trial:
    """What is known of the all-reduce without trying.

    >>> dense_trial(["w"], numel=1000, ranks=2).cost.sent_bytes
    4000.0
    """
    return Trial(Cost(0.0, float(ring_bytes(numel, ranks)), 1, dense=True), dict.fromkeys(names, 0.0))


def trial_work(what: str, numels: Sequence[int]) -> float:
    """How long :func:`try_method` takes for tensors of such sizes, about; in no unit.

    >>> trial_work("powersgd:16+int8", [1 << 20]) > trial_work("int8", [1 << 20])
    True
    """
    names = sample_of({str(place): numel for place, numel in enumerate(numels)})
    whole = sum(numels[int(name)] for name in names)
    how = method(what)
    if isinstance(how, AllReduce):
        return 0.0
    return 5.0 * whole if isinstance(how, PowerSGD) or not is_elementwise(how) else float(min(whole, _SAMPLE))


def try_method(
    what: str | Method,
    gradients: Sequence[Mapping[str, Tensor]],
    numel: int,
    ranks: int,
    *,
    known_processor_s: float | None = None,
    caches: Tensor | None = None,
) -> Trial:
    """Reduce gradients of a bucket, those of one step after another, among ranks of this process that take turns.

    ``numel`` is what the whole bucket has of such tensors. Steps after the first are timed for their cost, and the
    last one again if none is known: whatever disturbs a measurement makes it larger, so the least is taken. Memory of
    the second step is as new as that of the first (low rank, on fresh pages: 75 ms, where later steps take 20). Give
    several trials the same :func:`caches_full`: half of a short one is making it.

    >>> steps = [{"w": torch.randn(64, 64)} for _ in range(2)]
    >>> trial = try_method("int8", steps, numel=4096, ranks=2)
    >>> trial.cost.sent_bytes, trial.errors["w"] < 0.001
    (4208.0, True)
    """
    how = method(what)
    if isinstance(how, AllReduce):
        return dense_trial(gradients[0], numel, ranks)
    if not isinstance(how, PowerSGD) and is_elementwise(how):
        gradients = _thinned(gradients)
    played = min(ranks, _PLAYED)
    sample = sum(each.numel() for each in gradients[0].values())
    sums: dict[str, Tensor] = {}
    again = len(gradients) == 1 or known_processor_s is None
    timed = [*gradients, gradients[-1]] if again else gradients
    seconds, actors = list[float](), _actors(how, gradients[0], played)
    other = caches_full() if caches is None else caches
    for number, step in enumerate(timed):
        took = _play(actors, step, other) / played
        if number > 0:
            seconds.append(took)
        if number < len(gradients):
            for name, mean in actors[0].means().items():
                sums[name] = sums[name] + mean if name in sums else mean.clone()
    sents = [actor.reducer.traffic.sent_bytes for actor in actors]
    errors = {name: _relative_error(total, [step[name] for step in gradients]) for name, total in sums.items()}
    larger, sent = numel / sample, statistics.mean(sents)  # slices are not all equal
    measured = Trial(Cost(min(seconds) * larger, sent * larger, _rounds(how, played)), errors)
    trial = measured if played < _PLAYED else measured.among(how, ranks)
    if known_processor_s is None:
        return trial
    return replace(trial, cost=replace(trial.cost, processor_s=min(trial.cost.processor_s, known_processor_s)))


def _thinned(gradients: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Some rows of each tensor, from the first to the last.

    >>> (thin,) = _thinned([{"a": torch.zeros(2048, 256), "b": torch.zeros(1024, 512)}])
    >>> thin["a"].shape, thin["b"].shape
    (torch.Size([512, 256]), torch.Size([256, 512]))
    """
    every = max(1, sum(each.numel() for each in gradients[0].values()) // _SAMPLE)
    few = {name: -(-len(each) // every) * each[0].numel() < SMALL for name, each in gradients[0].items()}
    return [{name: each if few[name] else each[::every] for name, each in step.items()} for step in gradients]


def _rounds(how: Method, ranks: int) -> int:
    factors = how.factors if isinstance(how, PowerSGD) else how
    inner = 2 if ranks > 2 and not isinstance(factors, AllReduce) and is_elementwise(factors) else 1
    return 2 * inner if isinstance(how, PowerSGD) and not how.alternate else inner


class _Lockstep(Pipeline):
    """Reductions of several ranks on one thread: each goes on by one stage, then the next one does."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: deque[tuple[Reduction, Future[Reduced]]] = deque()

    def submit(self, reduction: Reduction, *, here: bool = False, trace: Trace | None = None) -> Future[Reduced]:
        """Nothing happens before :meth:`run`."""
        self._waiting.append((reduction, future := Future[Reduced]()))
        return future

    def run(self) -> None:
        """Until all are done. What a stage waits for has been sent in an earlier one of the other ranks."""
        while self._waiting:
            reduction, future = self._waiting.popleft()
            try:
                next(reduction)
            except StopIteration as stop:
                future.set_result(stop.value)
            except BaseException as error:
                future.set_exception(error)
            else:
                self._waiting.append((reduction, future))


@dataclass(frozen=True)
class _Actor:
    """A rank that is played, with the memory of its gradients end to end, as DDP has it."""

    reducer: GradientReducer
    pipeline: _Lockstep
    flat: Tensor

    def means(self) -> dict[str, Tensor]:
        """Views of that memory: gradients, and after a step their means."""
        parameters = self.reducer.parameters
        pieces = torch.split(self.flat, [each.numel() for each in parameters.values()])
        return {name: piece.view(each.shape) for (name, each), piece in zip(parameters.items(), pieces, strict=True)}


def _actors(how: Method, gradients: Mapping[str, Tensor], played: int) -> list[_Actor]:
    pipeline, numel = _Lockstep(), sum(each.numel() for each in gradients.values())

    def actor(peers: Loopback) -> _Actor:
        parameters = {name: nn.Parameter(each, requires_grad=False) for name, each in gradients.items()}
        return _Actor(GradientReducer(parameters, how, peers, pipeline=pipeline), pipeline, torch.empty(numel))

    with ThreadPoolExecutor(played) as threads:  # they agree on what they do, as ranks would
        return list(threads.map(actor, Loopback.ranks(played)))


def _play(actors: Sequence[_Actor], step: Mapping[str, Tensor], other: Tensor) -> float:
    """A step in which all have the same gradients; seconds of processor of all of them.

    Other memory is used right before it, as backward does: nothing of theirs is in the caches.
    """
    for actor in actors:
        for name, gradient in actor.means().items():
            gradient.copy_(step[name])
    other.add_(1)
    started = time.process_time()
    done = [
        actor.reducer.start(list(step), list(actor.means().values()), last=True, flat=actor.flat) for actor in actors
    ]
    actors[0].pipeline.run()
    took = time.process_time() - started
    for each in done:
        each.result()  # or its error
    return took


def _relative_error(sent: Tensor, steps: Sequence[Tensor]) -> float:
    true = sum(steps[1:], steps[0])
    largest = true.abs().max()  # by which squares neither overflow nor vanish
    if not largest > 0:
        return 0.0
    return float(((sent - true) / largest).norm() / (true / largest).norm()) ** 2
