"""Training over real links: step times, bytes and losses of ours and of what people use today, on the same work.

Losses against steps do not depend on the link, so they are taken once. Step times are taken under each link in short
runs, interleaved round after round; the product is the time to a loss.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from gradwire.benchmarks import hooks, machine
from gradwire.benchmarks.rigs import COMPUTE, check_method, powersgd_of
from gradwire.benchmarks.timing import Timing
from gradwire.clusters import run_workers
from gradwire.errors import ConfigError
from gradwire.lab import Lab, parse_rate
from gradwire.tasks import TASKS

__all__ = ["BATCH_SIZES", "LOOPBACK", "OURS", "Settings", "TrainingReport", "earlier_report", "measure"]

OURS: Final = ("int8", "int4", "powersgd:16+int8")
"""Our methods, unless others are asked for."""

BATCH_SIZES: Final = {"digits": 16, "charlm": 4}
"""Examples a worker, small as the models are: the ratio of computing to sending is what makes a benchmark."""

_SMOOTHED: Final = 3  # validations that are averaged
LOOPBACK: Final = "loopback"
"""A rate that is none: the machine's own loopback, which needs no lab."""

Notify = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """What is measured."""

    task: str = "digits"
    workers: int = 4
    rates: tuple[str, ...] = ("100mbit", "1gbit", "none")  # or ("loopback",), which needs no root
    methods: tuple[str, ...] = (*hooks.PEERS, *OURS)
    rounds: int = 3
    steps: int = 6  # that are timed, of a method in a round
    curve_steps: int = 0  # steps of each training for its losses
    seeds: int = 1
    target_steps: int = 0  # after which plain DDP's loss is the one to reach; 0: all of them
    batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ConfigError(f"`--task` must be one of {', '.join(TASKS)}; got {self.task!r}.")
        if not 1 <= self.workers <= 64:
            raise ConfigError(f"`--workers` must be from 1 to 64; got {self.workers}.")
        for name in ("rounds", "steps", "seeds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"`--{name}` must be at least 1; got {getattr(self, name)}.")
        if self.curve_steps < 0:
            raise ConfigError(f"`--curve-steps` must not be negative; got {self.curve_steps}.")
        if self.target_steps < 0:
            raise ConfigError(f"`--target-steps` must not be negative; got {self.target_steps}.")
        for rate in self.rates:
            if rate != LOOPBACK:
                parse_rate(rate, argument="--rate")
        for name in self.methods:
            check_method(name)


@dataclass(frozen=True)
class Steps:
    """Steps of a method under a link."""

    step: Timing
    over_compute: float  # times the step that sends nothing
    wire_bytes: float | None  # a step and rank, with all headers; None where nobody counts
    sent_bytes: int | None  # a step and rank, as our telemetry has it
    first: tuple[float, float] = (0, 0.0)  # steps before the timed ones, of ``auto`` those to a plan; and their seconds
    plans: tuple[str, ...] = ()  # of ``auto``, in each round, as text

    @property
    def bytes_a_step(self) -> float:
        """That a rank sends, as well as it is known."""
        return self.wire_bytes or self.sent_bytes or 0


@dataclass(frozen=True)
class TrainingReport:
    """What was measured."""

    settings: Settings
    machine: dict[str, Any]
    links: dict[str, dict[str, Steps]]  # by rate, then method
    # By method, then seed: training loss of every step, and (step, loss) of every validation.
    losses: dict[str, list[list[float]]] = field(default_factory=dict)
    validations: dict[str, list[list[tuple[int, float]]]] = field(default_factory=dict)

    def curve(self, name: str, most: int | None = None) -> list[tuple[int, float]]:
        """(step, validation loss) of a method: the mean of all seeds, or ``most`` of them, and the last validations."""
        seeds = self.validations.get(name, [])[:most]
        steps = [step for step, _ in min(seeds, key=len, default=[])]
        losses = [statistics.mean(seed[i][1] for seed in seeds) for i in range(len(steps))]
        recent = [losses[max(0, i + 1 - _SMOOTHED) : i + 1] for i in range(len(steps))]
        return [(step, statistics.mean(some)) for step, some in zip(steps, recent, strict=True)]

    def loss_at(self, name: str, most: int | None = None) -> float | None:
        """The loss of a method after the steps that set plain DDP's target; None if it was not trained."""
        steps = self.settings.target_steps or self.settings.curve_steps
        losses = [loss for step, loss in self.curve(name, most) if step <= steps]
        return losses[-1] if losses else None

    def steps_to(self, name: str) -> float | None:
        """Steps a method takes to the validation loss that plain DDP reaches; None if it does not."""
        target = self.loss_at("ddp", len(self.validations.get(name, [])))  # on the same seeds
        if target is None:
            return None
        return next((float(step) for step, loss in self.curve(name) if loss <= target), None)

    def seconds_to(self, name: str, rate: str) -> float | None:
        """Seconds to that loss."""
        steps = self.steps_to(name)
        return None if steps is None else self.seconds_of(name, rate, steps)

    def seconds_of(self, name: str, rate: str, steps: float) -> float:
        """Seconds of so many steps; the first ones, which are slower, as long as they took."""
        there, (early, start) = self.links[rate], self._began(name, rate, steps)
        if start:
            return self.seconds_of(early, rate, start) + (steps - start) * there[name].step.median_s
        first, seconds = there[name].first
        counted = min(steps, first)
        return seconds * counted / max(1, first) + (steps - counted) * there[name].step.median_s

    def bytes_of(self, name: str, steps: float) -> float:
        """Bytes a rank sends in so many steps."""
        rate, there = next(iter(self.links.items()))
        early, start = self._began(name, rate, steps)
        return (self.bytes_of(early, start) if start else 0.0) + (steps - start) * there[name].bytes_a_step

    def _began(self, name: str, rate: str, steps: float) -> tuple[str, float]:
        """What the first steps of PowerSGD are sent as, and how many of them, if that was timed."""
        early, start = _start(name)
        return early, min(steps, start) if early in self.links[rate] else 0

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain JSON types."""
        to_loss = {
            rate: {name: self._to_loss(name, rate) for name in self.validations}
            for rate in self.links
            if self.validations
        }
        links = {rate: {name: asdict(steps) for name, steps in there.items()} for rate, there in self.links.items()}
        return {
            "machine": self.machine,
            "settings": asdict(self.settings),
            "links": links,
            "losses": self.losses,
            "validations": self.validations,
            "to_the_loss_of_ddp": to_loss,
        }

    def _to_loss(self, name: str, rate: str) -> dict[str, float | None]:
        mine, theirs = self.seconds_to(name, rate), self.seconds_to("ddp", rate)
        sooner = theirs / mine if mine and theirs else None
        return {"steps": self.steps_to(name), "seconds": mine, "times_sooner_than_ddp": sooner}


def measure(
    settings: Settings, notify: Notify = lambda _: None, earlier: Mapping[str, Any] | None = None
) -> TrainingReport:
    """Measure: the losses first, unless an ``earlier`` report of the same task has them; then every link."""
    batch_size = settings.batch_size or BATCH_SIZES.get(settings.task)
    common = {"task": settings.task, "batch_size": batch_size}
    report = TrainingReport(settings, machine.describe("cpu"), {})
    if earlier is not None:
        _take_losses(report, earlier)
    elif settings.curve_steps:
        for seed in range(settings.seeds):
            asked = {**common, "seed": seed, "methods": list(settings.methods), "curves": True}
            asked |= {"steps": settings.curve_steps, "validate_every": max(1, min(10, settings.curve_steps // 3))}
            for name in settings.methods:
                report.losses.setdefault(name, []).append([])
                report.validations.setdefault(name, []).append([])
            for event in run_workers("gradwire.benchmarks.training_worker", asked, settings.workers):
                report.losses[event["method"]][-1].append(event["loss"])
                if "validation" in event:
                    report.validations[event["method"]][-1].append((event["step"], event["validation"]))
                notify(f"seed {seed}, {event['method']}: step {event['step']}, loss {event['loss']:.4f}")
    for rate in settings.rates:
        report.links[rate] = _under(rate, settings, common, notify)
    return report


def _under(rate: str, settings: Settings, common: Mapping[str, Any], notify: Notify) -> dict[str, Steps]:
    """Step times under one link."""
    names = [COMPUTE, *settings.methods]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    wire: dict[str, list[float]] = {name: [] for name in names}
    sent: dict[str, int | None] = {}
    first: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    plans: dict[str, list[str]] = {name: [] for name in names}
    with _links(rate, settings.workers) as lab:
        asked = {**common, "methods": names, "rounds": settings.rounds, "steps": settings.steps}
        asked["interface"] = lab.hosts[0].interface if lab else ""
        for event in run_workers("gradwire.benchmarks.training_worker", asked, settings.workers, lab):
            seconds[event["method"]] += event["seconds"]
            wire[event["method"]].append(event["wire_bytes"])
            sent[event["method"]] = event["sent_bytes"]
            first[event["method"]].append(tuple(event["first"]))
            plans[event["method"]] += event["plans"]
            notify(f"{rate}, round {event['round'] + 1}: {event['method']}")
    compute = statistics.median(seconds[COMPUTE])
    return {
        name: Steps(
            Timing.of(seconds[name]),
            statistics.median(seconds[name]) / compute,
            statistics.median(wire[name]) if lab else None,
            sent[name],
            sorted(first[name])[len(first[name]) // 2],
            tuple(plans[name]),
        )
        for name in names
    }


@contextmanager
def _links(rate: str, workers: int) -> Iterator[Lab | None]:
    if rate == LOOPBACK:
        yield None
        return
    with Lab.up(workers, rate, name=f"bench-{os.getpid()}") as lab:
        yield lab


def earlier_report(file: Path, settings: Settings) -> dict[str, Any]:
    """The report of an earlier run, for its losses."""
    try:
        told = json.loads(file.read_text())
        task, steps = told["settings"]["task"], int(told["settings"]["curve_steps"])
        curves = {
            name: [[(int(s), float(v)) for s, v in seed] for seed in told["validations"][name]]
            for name in told["losses"]
        }
    except OSError as error:
        raise ConfigError(f"`--curves` must name a file that can be read; {file}: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"`--curves` must name the --json of an earlier run with losses; {file} is none.") from None
    if task != settings.task or not steps:
        raise ConfigError(
            f"`--curves` must name losses of the task {settings.task!r}; {file} has {task!r}, {steps} steps."
        )
    return {"losses": told["losses"], "validations": curves, "curve_steps": steps}


def _take_losses(report: TrainingReport, earlier: Mapping[str, Any]) -> None:
    for name in report.settings.methods:
        if name in earlier["losses"]:
            report.losses[name] = earlier["losses"][name]
            report.validations[name] = earlier["validations"][name]


def _start(name: str) -> tuple[str, float]:
    """What a method sends as at first, and for how many steps."""
    if name.startswith("ddp powersgd"):
        return "ddp", hooks.POWERSGD_START
    how = powersgd_of(name)
    return ("int8", how.start) if how is not None else ("", 0)
