"""``auto`` against every fixed method: trainings over the link that take turns, to the loss of plain DDP.

Two trainings of the same kind, one after the other, may differ by a tenth on a machine that others use too. Those of a
cell take turns of a few steps in the same processes, and what is compared was disturbed alike.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from math import inf, log
from pathlib import Path
from typing import Any, Final

from gradwire.benchmarks import machine
from gradwire.benchmarks.courses import BLOCK, Course, run_course, run_courses
from gradwire.benchmarks.rigs import AGAIN, AUTO, check_method
from gradwire.benchmarks.training import Notify
from gradwire.errors import ConfigError
from gradwire.extras import require
from gradwire.lab import Lab, parse_rate
from gradwire.planner import Plan
from gradwire.tasks import TASKS

__all__ = ["AutoReport", "Cell", "Settings", "draw", "measure"]

DDP: Final = "ddp"
_VALIDATED: Final = 0.75  # of plain DDP's steps: nobody is near its loss before
_MORE: Final = 1.2  # times plain DDP's steps, in which ``auto`` is to reach its loss
_BETWEEN_TICKS: Final = 0.045  # of an axis, or labels run into each other
_CACHE: Final = "XDG_CACHE_HOME"


@dataclass(frozen=True)
class Settings:
    """What is measured."""

    task: str = "digits"
    workers: tuple[int, ...] = (2, 4)
    rates: tuple[str, ...] = ("100mbit", "1gbit", "none")
    methods: tuple[str, ...] = ("int8", "int4", "powersgd:16+int8")
    target_steps: int = 60  # of plain DDP, whose loss is to be reached
    timed_steps: int = 60  # of each fixed method; its steps after that take what the last of these did
    repeats: int = 3  # with another seed each
    learning_rate: float | None = None  # None: the task's own

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ConfigError(f"`--task` must be one of {', '.join(TASKS)}; got {self.task!r}.")
        for workers in self.workers:
            if not 2 <= workers <= 64:
                raise ConfigError(f"`--workers` must be from 2 to 64; got {workers}.")
        for rate in self.rates:
            parse_rate(rate, argument="--rate")
        for name in self.methods:
            check_method(name)
        if self.learning_rate is not None and not 0 < self.learning_rate < inf:
            raise ConfigError(f"`--learning-rate` must be positive and finite; got {self.learning_rate}.")
        for name, least in (("target_steps", 10), ("timed_steps", 6), ("repeats", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"`--{name.replace('_', '-')}` must be at least {least}; got {getattr(self, name)}.")


@dataclass
class Cell:
    """A number of workers and a link.

    >>> fixed = {"ddp": [10.0, 10.0, 12.0], "int4": [5.0, 5.0, 6.0]}
    >>> cell = Cell(4, "1gbit", fixed, [6.0, 5.1, 6.3], [6.0, 5.0, None], [0.03, 0.0, 0.03])
    >>> cell.best, cell.first, round(cell.later, 3), cell.to_loss, round(cell.loss, 3)
    ('int4', 1.2, 1.035, 1.2, 0.02)
    >>> print(str(cell).partition("; ")[2])
    auto 1.20 of the best at first, then 1.04, 0.53 of plain DDP; loss +2.0%, 0% stolen
    """

    workers: int
    rate: str
    fixed: dict[str, list[float]] = field(default_factory=dict)  # seconds of plain DDP's steps, in each repeat
    auto: list[float] = field(default_factory=list)  # seconds of as many steps
    reached: list[float | None] = field(default_factory=list)  # seconds of auto to plain DDP's loss
    losses: list[float] = field(default_factory=list)  # of auto after as many steps: the part above plain DDP's
    plans: list[str] = field(default_factory=list)  # in a few words
    events: list[list[str]] = field(default_factory=list)  # of each training: what auto did, and why
    stolen: float = 0.0  # share of the processor time that went to other machines

    def seconds(self, name: str) -> float:
        """Of a fixed method: the median of all repeats."""
        return statistics.median(self.fixed[name])

    @property
    def best(self) -> str:
        """The fixed method that takes the least time, plain DDP included."""
        return min((name for name in self.fixed if not name.endswith(AGAIN)), key=self.seconds)

    def over(self, name: str) -> list[float]:
        """Seconds of auto over those of a fixed method that took turns with it, in each repeat."""
        return [mine / other for mine, other in zip(self.auto, self.fixed[name], strict=True)]

    @property
    def first(self) -> float:
        """Times the best fixed method, in the first training there was of this model over this link."""
        return self.over(self.best)[0]

    @property
    def later(self) -> float:
        """The same, in the trainings after it."""
        every = self.over(self.best)
        return statistics.median(every[1:] or every)

    @property
    def to_loss(self) -> float | None:
        """Seconds to plain DDP's loss over those of the best fixed method's steps; None: most do not get there."""
        pairs = zip(self.reached, self.fixed[self.best], strict=True)
        middle = statistics.median(inf if mine is None else mine / other for mine, other in pairs)
        return None if middle == inf else middle

    @property
    def against_ddp(self) -> float:
        """Times plain DDP, in all trainings."""
        return statistics.median(self.over(DDP))

    @property
    def loss(self) -> float:
        """The part by which the loss after as many steps is above plain DDP's: the mean of all trainings."""
        return statistics.mean(self.losses)

    def __str__(self) -> str:
        seconds = ", ".join(f"{name} {self.seconds(name):.1f}" for name in self.fixed)
        ratios = f"{self.first:.2f} of the best at first, then {self.later:.2f}, {self.against_ddp:.2f} of plain DDP"
        rest = f"loss {self.loss:+.1%}, {self.stolen:.0%} stolen"
        return f"{self.workers} workers, {self.rate}: {seconds} s; auto {ratios}; {rest}"


@dataclass
class AutoReport:
    """What was measured."""

    settings: Settings
    machine: dict[str, Any]
    cells: list[Cell] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain JSON types."""
        return asdict(self) | {"cells": [_plain(cell) for cell in self.cells]}


def _plain(cell: Cell) -> dict[str, Any]:
    names = ("best", "first", "later", "to_loss", "against_ddp", "loss")
    return asdict(cell) | {name: getattr(cell, name) for name in names}


def measure(
    settings: Settings, notify: Notify = lambda _: None, tell: Callable[[Cell], None] = lambda _: None
) -> AutoReport:
    """Every cell, which is told when it is done.

    What ``auto`` remembers from one training to the next is forgotten before a cell, and after it.
    """
    report = AutoReport(settings, machine.describe("cpu"))
    for workers in settings.workers:
        targets = [_target(settings, workers, seed, notify) for seed in range(settings.repeats)]
        for rate in settings.rates:
            with _empty_cache(), Lab.up(workers, rate, name=f"auto-{os.getpid()}") as lab:
                cell = Cell(workers, rate)
                stolen = machine.Stolen()
                for seed, target in enumerate(targets):
                    _repeat(settings, cell, lab, seed, target, notify)
                cell.stolen = stolen.share
                report.cells.append(cell)
                tell(cell)
    return report


def _target(settings: Settings, workers: int, seed: int, notify: Notify) -> float:
    steps = settings.target_steps
    alone = run_course(settings.task, DDP, workers, steps, None, notify, **_options(settings, seed))
    return alone.loss_after(steps)


def _options(settings: Settings, seed: int) -> dict[str, Any]:
    first = int(_VALIDATED * settings.target_steps) - 2 * BLOCK  # three validations are one loss
    every = {"validate_every": BLOCK, "validate_from": max(0, first)}
    return {"seed": seed, "learning_rate": settings.learning_rate, **every}


def _repeat(settings: Settings, cell: Cell, lab: Lab, seed: int, target: float, notify: Notify) -> None:
    task, workers, steps = settings.task, cell.workers, settings.target_steps
    notify(f"{workers} workers, {cell.rate}, training {seed + 1}")
    names, timed = (DDP, *settings.methods), min(steps, settings.timed_steps)
    each = dict.fromkeys(names, timed) | {AUTO: int(_MORE * steps)}
    courses = run_courses(task, each, workers, lab, notify, validated=(AUTO,), **_options(settings, seed))
    for name in names:
        cell.fixed.setdefault(name, []).append(_extended(courses[name], steps))
    course = courses[AUTO]
    cell.auto.append(course.seconds[steps - 1])
    cell.reached.append(course.seconds_to(target))
    cell.losses.append(course.loss_after(steps) / target - 1)
    cell.plans.append(Plan.from_json(course.plan).name if course.plan else "none yet")
    cell.events.append(course.events)


def _extended(course: Course, steps: int) -> float:
    """Seconds of so many steps, of which the first were timed: the others take what the last of these did.

    Low rank begins after some steps of another method, which are not to be extended.

    >>> _extended(Course([9.0, 10.0, 11.0, 12.0, 13.0, 14.0]), 10)
    18.0
    """
    timed = len(course.seconds)
    last = course.seconds[-1 - max(1, timed // 3) :]
    return course.seconds[-1] + (steps - timed) * (last[-1] - last[0]) / (len(last) - 1)


@contextmanager
def _empty_cache() -> Iterator[None]:
    before = os.environ.get(_CACHE)
    with tempfile.TemporaryDirectory(prefix="gradwire-") as folder:
        os.environ[_CACHE] = folder
        try:
            yield
        finally:
            del os.environ[_CACHE]
            if before is not None:
                os.environ[_CACHE] = before


def draw(report: AutoReport, file: Path) -> None:
    """Seconds of every method over those of the best fixed one, a row a cell."""
    figure_module: Any = require("matplotlib.figure", purpose="`--plot`")
    cells = report.cells
    figure = figure_module.Figure(figsize=(8, 1.6 + 0.45 * len(cells)), layout="constrained")
    axis = figure.subplots()
    names, rows = [DDP, *report.settings.methods], range(len(cells))
    for colour, name in zip(("#222222", "#45b3e0", "#0b5394", "#0b8043", "#674ea7"), names, strict=False):
        places = [cell.seconds(name) / cell.seconds(cell.best) for cell in cells]
        axis.plot(places, rows, "o", color=colour, label="plain DDP" if name == DDP else name)
    axis.plot([cell.first for cell in cells], rows, "D", color="#e69138", label="auto, first training")
    if report.settings.repeats > 1:
        axis.plot([cell.later for cell in cells], rows, "D", color="#cc4125", label="auto, later trainings")
    axis.axvspan(0.5, 1.1, color="#8f8f8f", alpha=0.15, linewidth=0)
    axis.set_yticks(rows, [f"{cell.workers} workers, {cell.rate}" for cell in cells])
    axis.invert_yaxis()
    axis.set(
        xscale="log",
        xlim=(0.95 * min(0.85, *(each for cell in cells for each in (cell.first, cell.later))), None),
        xlabel=f"seconds of {report.settings.target_steps} steps, over those of the best fixed method",
    )
    least, most = axis.get_xlim()
    ticks, between = list[float](), _BETWEEN_TICKS * log(most / least)
    for tick in (1, 0.5, 0.7, 0.85, 1.1, 1.25, 1.5, 2, 3, 5, 8, 12, 20):
        if least <= tick <= most and all(abs(log(tick / each)) > between for each in ticks):
            ticks.append(tick)
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_xticks([], minor=True)
    axis.grid(alpha=0.25)
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False, fontsize=8)
    axis.set_title(report.settings.task, fontsize=10)
    figure.savefig(file, dpi=150)
