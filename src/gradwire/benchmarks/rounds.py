"""Training that talks less often, over a slow link, from the first step to the loss that plain DDP reaches."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from gradwire.benchmarks import machine
from gradwire.benchmarks.courses import Course, run_course
from gradwire.benchmarks.rigs import check_method
from gradwire.benchmarks.training import Notify
from gradwire.errors import ConfigError
from gradwire.extras import require
from gradwire.lab import Lab, parse_rate
from gradwire.tasks import TASKS

__all__ = ["RoundsReport", "Settings", "draw", "measure"]

DDP: Final = "ddp"


@dataclass(frozen=True)
class Settings:
    """What is measured."""

    task: str = "charlm"
    workers: int = 4
    rate: str = "10mbit"
    methods: tuple[str, ...] = ("localsgd:every=20,codec=int4", "diloco:every=20,codec=int4")
    steps: int = 240  # of each of them
    target_steps: int = 150  # of plain DDP, whose loss is to be reached
    ddp_steps: int = 3  # that are timed over the link, the first one not
    seed: int = 0

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ConfigError(f"`--task` must be one of {', '.join(TASKS)}; got {self.task!r}.")
        if not 2 <= self.workers <= 64:
            raise ConfigError(f"`--workers` must be from 2 to 64; got {self.workers}.")
        parse_rate(self.rate, argument="--rate")
        for name in self.methods:
            check_method(name)
        for name, least in (("steps", 1), ("target_steps", 1), ("ddp_steps", 2)):
            if getattr(self, name) < least:
                raise ConfigError(f"`--{name.replace('_', '-')}` must be at least {least}; got {getattr(self, name)}.")


@dataclass
class RoundsReport:
    """What was measured."""

    settings: Settings
    machine: dict[str, Any]
    target: float  # the loss to reach
    ddp_validations: list[tuple[int, float]]  # over loopback: losses do not depend on the link
    ddp_step_s: float  # over the link
    ddp_step_bytes: float
    courses: dict[str, Course]

    @property
    def ddp_seconds(self) -> float:
        """Of plain DDP to the target: step time times steps."""
        return self.ddp_step_s * self.settings.target_steps

    @property
    def ddp_bytes(self) -> float:
        """That rank 0 sends on the way."""
        return self.ddp_step_bytes * self.settings.target_steps

    def against_ddp(self, name: str) -> dict[str, float] | None:
        """How much sooner, and with how many times fewer bytes, a method reached the target; None if it did not."""
        reached = self.courses[name].first_below(self.target)
        if reached is None:
            return None
        step, seconds, sent = reached
        times = {"times_sooner": self.ddp_seconds / seconds, "times_fewer_bytes": self.ddp_bytes / max(1, sent)}
        return {"steps": step, "seconds": seconds, "bytes": sent, **times}

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain JSON types."""
        against = {name: self.against_ddp(name) for name in self.courses}
        return asdict(self) | {"ddp_seconds": self.ddp_seconds, "ddp_bytes": self.ddp_bytes, "against_ddp": against}


def measure(settings: Settings, notify: Notify = lambda _: None) -> RoundsReport:
    """Plain DDP's losses over loopback and its steps over the link; then every method over the link, whole."""
    losses = _course(settings, DDP, settings.target_steps, None, notify)
    validations = [(step, loss) for step, loss, _ in losses.validations]
    target = validations[-1][1]  # as it is, since the others' are not smoothed either
    with Lab.up(settings.workers, settings.rate, name=f"rounds-{os.getpid()}") as lab:
        timed = _course(settings, DDP, settings.ddp_steps, lab, notify)
        step_s = (timed.seconds[-1] - timed.seconds[0]) / (settings.ddp_steps - 1)
        step_bytes = timed.validations[-1][2] / settings.ddp_steps
        courses = {name: _course(settings, name, settings.steps, lab, notify) for name in settings.methods}
    about = machine.describe("cpu")
    return RoundsReport(settings, about, target, validations, step_s, step_bytes, courses)


def _course(settings: Settings, name: str, steps: int, lab: Lab | None, notify: Notify) -> Course:
    return run_course(settings.task, name, settings.workers, steps, lab, notify, seed=settings.seed)


def draw(report: RoundsReport, file: Path) -> None:
    """Losses against seconds and against bytes."""
    figure_module: Any = require("matplotlib.figure", purpose="`--plot`")
    figure = figure_module.Figure(figsize=(9, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    steps, losses = zip(*report.ddp_validations, strict=True)
    for axis, each in zip(panels, (report.ddp_step_s, report.ddp_step_bytes / 1e6), strict=True):
        axis.plot([each * step for step in steps], losses, "--", color="#222222", label="plain DDP")
        axis.axhline(report.target, color="#8f8f8f", linewidth=0.8)
    for colour, (name, course) in zip(
        ("#0b5394", "#0b8043", "#e69138", "#674ea7", "#cc4125"), report.courses.items(), strict=False
    ):
        seconds = [course.seconds[step - 1] for step, _, _ in course.validations]
        reached = [loss for _, loss, _ in course.validations]
        panels[0].plot(seconds, reached, ".-", color=colour, label=name, linewidth=1.2, markersize=3)
        sent = [nbytes / 1e6 for _, _, nbytes in course.validations]
        panels[1].plot(sent, reached, ".-", color=colour, label=name, linewidth=1.2, markersize=3)
    panels[0].set(xscale="log", xlabel=f"seconds, {report.settings.rate}", ylabel="validation loss")
    panels[1].set(xscale="log", xlabel="MB sent by a rank")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=8
    )
    for axis in panels:
        axis.grid(alpha=0.25)
    figure.savefig(file, dpi=150)
