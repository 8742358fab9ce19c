"""A link that changes under a training, and how soon the plan follows."""

from __future__ import annotations

import os
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gradwire.benchmarks import machine
from gradwire.benchmarks.training import BATCH_SIZES
from gradwire.clusters import run_workers
from gradwire.errors import ConfigError
from gradwire.extras import require
from gradwire.lab import Lab, parse_rate
from gradwire.tasks import TASKS

__all__ = ["DriftReport", "Settings", "draw", "measure"]


@dataclass(frozen=True)
class Settings:
    """What is measured."""

    task: str = "digits"
    workers: int = 4
    rates: tuple[str, ...] = ("1gbit", "50mbit")  # one after the other
    steps: int = 60  # at each

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ConfigError(f"`--task` must be one of {', '.join(TASKS)}; got {self.task!r}.")
        if not 2 <= self.workers <= 64:
            raise ConfigError(f"`--workers` must be from 2 to 64; got {self.workers}.")
        if len(self.rates) < 2:
            raise ConfigError(f"`--rate` must be given twice or more; got {list(self.rates)}.")
        for rate in self.rates:
            parse_rate(rate, argument="--rate")
        if self.steps < 20:
            raise ConfigError(f"`--steps` must be at least 20: planning takes some; got {self.steps}.")


@dataclass
class DriftReport:
    """What happened."""

    settings: Settings
    machine: dict[str, Any]
    seconds: list[float] = field(default_factory=list)  # of every step
    changes: dict[int, str] = field(default_factory=dict)  # step -> the rate from then on
    planned: list[tuple[int, str]] = field(default_factory=list)  # what ``auto`` did at which step

    def followed(self) -> dict[str, int | None]:
        """Steps from each change of the rate to the plan that answers it; None if none did."""
        result: dict[str, int | None] = {}
        ends = [*list(self.changes)[1:], len(self.seconds) + 1]
        for (change, rate), end in zip(self.changes.items(), ends, strict=True):
            answers = [step for step, what in self.planned if change < step < end and re.search("expected at", what)]
            result[rate] = answers[0] - change if answers else None
        return result

    def medians(self) -> dict[str, tuple[float, float]]:
        """Seconds of a step after each change: of the first five, and of the last ten before the next change."""
        ends = [*list(self.changes)[1:], len(self.seconds)]
        return {
            rate: (
                statistics.median(self.seconds[change + 1 : change + 6]),
                statistics.median(self.seconds[end - 10 : end]),
            )
            for (change, rate), end in zip(self.changes.items(), ends, strict=True)
        }

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain JSON types."""
        return asdict(self) | {"followed_after_steps": self.followed(), "median_s": self.medians()}


def measure(settings: Settings, notify: Callable[[str], None] = lambda _: None) -> DriftReport:
    """Train with ``auto``, and change the rate of all links on the way."""
    report = DriftReport(settings, machine.describe("cpu"))
    first, *later = settings.rates
    steps = settings.steps * len(settings.rates)
    asked = {"task": settings.task, "codec": "auto", "steps": steps, "batch_size": BATCH_SIZES[settings.task]}
    with Lab.up(settings.workers, first, name=f"drift-{os.getpid()}") as lab:
        last = time.perf_counter()
        for event in run_workers("gradwire.tasks.worker", {**asked, "timeout_s": 300.0}, settings.workers, lab):
            if event["event"] == "planned":
                report.planned.append((event["step"], event["what"]))
                notify(f"step {event['step']}: {event['what']}")
            if event["event"] != "step":
                continue
            now = time.perf_counter()
            report.seconds.append(now - last)
            last = now
            if later and event["step"] == settings.steps * (len(settings.rates) - len(later)):
                report.changes[event["step"]] = later[0]
                lab.reshape(later.pop(0))
    return report


def draw(report: DriftReport, file: Path) -> None:
    """Step times, the changes of the link, and the plans."""
    figure_module: Any = require("matplotlib.figure", purpose="`--plot`")
    figure = figure_module.Figure(figsize=(7.5, 4), layout="constrained")
    axis = figure.subplots()
    axis.plot(range(2, len(report.seconds) + 1), [1000 * each for each in report.seconds[1:]], ".-", color="#0b5394",
              linewidth=1, markersize=3)  # fmt: skip
    inside = axis.get_xaxis_transform()  # steps across, the height of the picture upwards
    for step, rate in report.changes.items():
        axis.axvline(step, color="#cc4125", linewidth=1.2)
        axis.text(step, 0.97, f" {rate}", color="#cc4125", va="top", transform=inside)
    for step, what in report.planned:
        if found := re.search(r": (.*) expected at", what):
            axis.axvline(step, color="#0b8043", linewidth=1, linestyle=":")
            axis.text(step, 0.85, f" {found[1].split(':')[0]}", color="#0b8043", va="top", transform=inside)
    axis.set(yscale="log", xlabel="step", ylabel="ms a step")
    axis.set_title(f"{report.settings.task}, {report.settings.workers} workers, {report.settings.rates[0]} at first")
    axis.grid(alpha=0.25)
    figure.savefig(file, dpi=150)
