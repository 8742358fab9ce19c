"""Plans on paper: for a model that is not trained yet, and for clusters nobody here has."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradwire.errors import ConfigError
from gradwire.planner.cost import Link, Machine
from gradwire.planner.plan import CANDIDATES, DENSE, DOUBT, Bucket, Plan, Situation, choose, plan_of
from gradwire.planner.probe import Network
from gradwire.planner.trial import Trial, dense_trial, try_method

__all__ = ["Workload", "describe_workload", "network_of", "plan_on_paper", "profile_workload"]

_FIRST_BUCKET: Final = 1 << 20  # bytes, as DDP has it
_BUCKET: Final = 25 << 20
_FORWARD: Final = 1 / 3  # of a step, where nobody has measured it
_STEPS: Final = 4  # that are profiled, after one to warm up

# Measured between hosts of a lab: what headers and waiting leave of a link, for our exchange and for gloo's ring.
_EFFICIENCY: Final = 0.92
_DENSE_EFFICIENCY: Final = 0.9
_PROCESSOR_PER_BYTE: Final = 1.2e-9
_MESSAGE_S: Final = 1e-5  # to hand one more message to the network, in a round of many


@dataclass(frozen=True)
class Workload:
    """What a rank computes in a step, and the gradients that come of it."""

    buckets: tuple[Bucket, ...]
    ready_s: tuple[float, ...]
    gradients: tuple[Mapping[str, Tensor], ...]  # of some layers, in steps one after another; none: nobody has any
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def parameters(self) -> int:
        """Elements of all gradients."""
        return sum(bucket.numel + bucket.small for bucket in self.buckets)


def profile_workload(model: nn.Module, loss_of_step: Callable[[int], Tensor]) -> Workload:
    """Compute a few steps without any exchange, and note when each gradient is ready.

    ``loss_of_step`` may take the optimizer's step for the gradients before, as a training would.

    >>> model = nn.Linear(256, 256)
    >>> workload = profile_workload(model, lambda step: model(torch.randn(8, 256)).square().mean())
    >>> workload.parameters, len(workload.gradients)
    (65792, 2)
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    arrivals: list[dict[str, float]] = []
    gradients: list[dict[str, Tensor]] = []
    started = 0.0
    hooks = [_hook(p, _noting(arrivals, name, lambda: started)) for name, p in named.items()]
    try:
        for step in range(_STEPS + 1):
            started = time.perf_counter()
            arrivals.append({})
            loss = loss_of_step(step)
            model.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            if step > _STEPS - 2:
                gradients.append({name: p.grad.detach().clone() for name, p in named.items() if p.grad is not None})
    finally:
        for hook in hooks:
            hook.remove()
        model.zero_grad()
    order = sorted(arrivals[-1], key=arrivals[-1].__getitem__)
    times = {name: statistics.median(each[name] for each in arrivals[1:] if name in each) for name in order}
    groups = list(_groups(order, {name: 4 * named[name].numel() for name in order}))
    buckets = tuple(Bucket.of(names, named) for names in groups)
    ready = [max(times[name] for name in names) for names in groups]
    sample = {name for bucket in buckets for name in bucket.sample}
    kept = tuple({name: each for name, each in step.items() if name in sample} for step in gradients)
    shapes = {name: tuple(named[name].shape) for name in order}
    return Workload(buckets, tuple(max(ready[: place + 1]) for place in range(len(ready))), kept, shapes)


def _hook(parameter: Tensor, function: Callable[[Tensor], None]) -> RemovableHandle:
    return parameter.register_post_accumulate_grad_hook(function)  # type: ignore[no-untyped-call,no-any-return]


def _noting(arrivals: list[dict[str, float]], name: str, started: Callable[[], float]) -> Callable[[Tensor], None]:
    return lambda _: arrivals[-1].__setitem__(name, time.perf_counter() - started())


def describe_workload(model: nn.Module, step_s: float) -> Workload:
    """A model that is only known by its shapes, and by how long a step of it takes.

    >>> describe_workload(nn.Linear(1024, 1024), step_s=0.3).ready_s
    (0.3,)
    """
    if not 0 < step_s < inf:
        raise ConfigError(f"`step_s` must be more than 0, and finite; got {step_s!r}.")
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not named:
        raise ConfigError("`model` must have parameters that are trained; it has none.")
    groups = list(_groups(list(reversed(named)), {name: 4 * p.numel() for name, p in named.items()}))
    buckets = tuple(Bucket.of(names, named) for names in groups)
    total, so_far, ready = sum(p.numel() for p in named.values()), 0, []
    for bucket in buckets:
        so_far += bucket.numel + bucket.small
        ready.append(step_s * (_FORWARD + (1 - _FORWARD) * so_far / total))
    shapes = {name: tuple(p.shape) for name, p in named.items()}
    return Workload(buckets, tuple(ready), (), shapes)


def _groups(order: Iterable[str], nbytes: Mapping[str, int]) -> Iterable[tuple[str, ...]]:
    """Buckets as DDP makes them: full ones, the first of them small."""
    names: list[str] = []
    limit = _FIRST_BUCKET
    for name in order:
        names.append(name)
        if sum(nbytes[each] for each in names) >= limit:
            yield tuple(names)
            names, limit = [], _BUCKET
    if names:
        yield tuple(names)


def network_of(bits_per_s: float | None, ranks: int, latency_s: float = 1e-4) -> Network:
    """What a link of a rate makes of the exchanges; None: what one machine does by itself.

    >>> network_of(1e8, ranks=4).between.bits_per_s / 1e6
    92.0
    """
    wire = 8 / bits_per_s if bits_per_s is not None else 0.0
    between = Link(latency_s + (ranks - 1) * _MESSAGE_S, wire / _EFFICIENCY, _PROCESSOR_PER_BYTE)
    dense = Link(2 * (ranks - 1) * latency_s, wire / _DENSE_EFFICIENCY, _PROCESSOR_PER_BYTE)
    return Network(between, dense, None)


def plan_on_paper(
    workload: Workload,
    ranks: int,
    network: Network,
    *,
    candidates: Sequence[str] = CANDIDATES,
    machine: Machine | None = None,
    trials: Sequence[Mapping[str, Trial]] | None = None,
) -> Plan:
    """The plan for so many ranks, one a host, that are as fast as this machine.

    >>> workload = describe_workload(nn.Linear(1024, 1024), step_s=0.1)
    >>> plan_on_paper(workload, 8, network_of(1e8, 8), candidates=("dense", "int4")).name
    'int4'
    """
    tried = trials if trials is not None else try_on_workload(workload, ranks, candidates)
    here = Situation(
        ranks, workload.buckets, workload.ready_s, tuple(tried), network, machine if machine is not None else Machine()
    )
    best = choose(here, candidates, reason := f"{ranks} ranks on paper")
    dense = [dict.fromkeys(bucket.names, DENSE) for bucket in here.buckets]
    if here.predict(dense).seconds <= DOUBT * best.predicted_s * (1 + best.extra_steps):
        return plan_of(here, dense, best.alternatives, reason)
    return best


def trials_among(trials: Sequence[Mapping[str, Trial]], ranks: int) -> list[dict[str, Trial]]:
    """What was found of two ranks, for another number of them.

    >>> workload = describe_workload(nn.Linear(1024, 1024), step_s=0.1)
    >>> trials_among(try_on_workload(workload, 2, ["int8"]), 4)[0]["dense"].cost.sent_bytes / 2**20
    6.0
    """
    return [{what: trial.among(what, ranks) for what, trial in each.items()} for each in trials]


def try_on_workload(workload: Workload, ranks: int, candidates: Sequence[str] = CANDIDATES) -> list[dict[str, Trial]]:
    """Every method on every bucket: on its gradients, or on zeros, of which no error can be told.

    >>> workload = describe_workload(nn.Linear(1024, 1024), step_s=0.1)
    >>> sorted(try_on_workload(workload, 4, ["int8"])[0])
    ['dense', 'int8']
    """
    trials = []
    for bucket in workload.buckets:
        found = {DENSE: dense_trial(bucket.names, bucket.numel, ranks)}
        sample = bucket.sample
        steps = [{name: each[name] for name in sample} for each in workload.gradients]
        steps = steps or [{name: torch.zeros(workload.shapes[name]) for name in sample}]
        for what in candidates if sample else ():
            if what != DENSE:
                found[what] = try_method(what, steps, bucket.numel, ranks)
        trials.append(found)
    return trials
