"""What the cost model expects of a step, and what the clock says."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from gradwire.benchmarks import machine, plans_worker
from gradwire.benchmarks.training import BATCH_SIZES, Notify
from gradwire.clusters import run_workers
from gradwire.errors import ConfigError
from gradwire.lab import Lab, parse_rate
from gradwire.planner import Plan
from gradwire.tasks import TASKS

__all__ = ["Cell", "PlansReport", "Settings", "measure"]


@dataclass(frozen=True)
class Settings:
    """What is measured."""

    tasks: tuple[str, ...] = ("digits", "charlm")
    workers: tuple[int, ...] = (2, 4, 8)
    rates: tuple[str, ...] = ("100mbit", "300mbit", "1gbit", "none")
    rounds: int = 3
    steps: int = 3

    def __post_init__(self) -> None:
        for task in self.tasks:
            if task not in TASKS:
                raise ConfigError(f"`--task` must be one of {', '.join(TASKS)}; got {task!r}.")
        for workers in self.workers:
            if not 2 <= workers <= 64:
                raise ConfigError(f"`--workers` must be from 2 to 64; got {workers}.")
        for rate in self.rates:
            parse_rate(rate, argument="--rate")
        for name in ("rounds", "steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"`--{name}` must be at least 1; got {getattr(self, name)}.")


@dataclass(frozen=True)
class Cell:
    """A method under a link, in several rounds: a plan, and what was planned timed right after.

    >>> Cell("digits", 4, "1gbit", "int8", [0.11, 0.22, 0.12], [0.10, 0.20, 0.12], chosen=False).off
    0.1
    """

    task: str
    workers: int
    rate: str
    method: str
    predictions_s: list[float]  # of each round
    measurements_s: list[float]
    chosen: bool  # by ``auto``

    @property
    def predicted_s(self) -> float:
        """The median of all rounds."""
        return statistics.median(self.predictions_s)

    @property
    def measured_s(self) -> float:
        """The median of all rounds."""
        return statistics.median(self.measurements_s)

    @property
    def above(self) -> float:
        """The part by which the prediction is above the measured time, in the median round.

        Machines that others use too are faster in one minute and slower in the next: a round is compared with itself.
        """
        rounds = zip(self.predictions_s, self.measurements_s, strict=True)
        return round(statistics.median(predicted / measured for predicted, measured in rounds) - 1, 4)

    @property
    def off(self) -> float:
        """By which part of the measured time the prediction is wrong."""
        return abs(self.above)

    def __str__(self) -> str:
        times = f"expected {1000 * self.predicted_s:.0f} ms, measured {1000 * self.measured_s:.0f}"
        return f"{self.task}, {self.workers} workers, {self.rate}, {self.method}: {times}"


@dataclass(frozen=True)
class PlansReport:
    """What was measured."""

    settings: Settings
    machine: dict[str, Any]
    cells: list[Cell]
    plans: dict[str, list[str]]  # by task, workers and rate: of every round, as text

    def within(self, part: float) -> float:
        """The share of cells whose prediction is wrong by at most this part."""
        return sum(cell.off <= part for cell in self.cells) / len(self.cells)

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain JSON types."""
        names = ("predicted_s", "measured_s", "above", "off")
        cells = [asdict(cell) | {name: getattr(cell, name) for name in names} for cell in self.cells]
        shares = {"within_15_percent": self.within(0.15), "within_30_percent": self.within(0.3)}
        about = {"machine": self.machine, "settings": asdict(self.settings)}
        return {**about, **shares, "cells": cells, "plans": self.plans}


def measure(
    settings: Settings, notify: Notify = lambda _: None, tell: Callable[[Cell], None] = lambda _: None
) -> PlansReport:
    """Predict and time every method in every cell, one process group a cell, several times; in the median of rounds.

    A cell is told when it is done.
    """
    report = PlansReport(settings, machine.describe("cpu"), [], {})
    for task in settings.tasks:
        for workers in settings.workers:
            for rate in settings.rates:
                for cell in _cells(report, task, workers, rate, notify):
                    report.cells.append(cell)
                    tell(cell)
    return report


def _cells(report: PlansReport, task: str, workers: int, rate: str, notify: Notify) -> Iterator[Cell]:
    asked = {"task": task, "batch_size": BATCH_SIZES[task]}
    asked |= {"rounds": report.settings.rounds, "steps": report.settings.steps}
    where, seconds = f"{task}, {workers} workers, {rate}", dict[str, list[float]]()
    plans = list[Plan]()
    notify(where)
    with Lab.up(workers, rate, name=f"plans-{os.getpid()}") as lab:
        for event in run_workers(plans_worker.__name__, asked, workers, lab):
            if event["event"] == "plan":
                plans.append(Plan.from_json(event["plan"]))
                report.plans.setdefault(where, []).append(event["plan"])
            else:
                seconds.setdefault(event["method"], []).append(statistics.median(event["seconds"]))
                notify(f"{where}: {event['method']}")
    for name in plans[0].alternatives:
        chosen = sum(plan.name == name for plan in plans) > len(plans) / 2
        yield Cell(task, workers, rate, name, [plan.alternatives[name] for plan in plans], seconds[name], chosen)
