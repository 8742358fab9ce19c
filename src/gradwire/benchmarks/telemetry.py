"""What telemetry costs: two trainings that are equal but for it take turns in the same processes."""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import asdict, dataclass, field
from typing import Any

from gradwire.benchmarks import machine, telemetry_worker
from gradwire.benchmarks.training import Notify
from gradwire.clusters import run_workers
from gradwire.errors import ConfigError
from gradwire.tasks import TASKS

__all__ = ["Settings", "TelemetryReport", "measure"]


@dataclass(frozen=True)
class Settings:
    """What is measured: every step recorded to a file of each rank, buckets, layers and all."""

    task: str = "digits"
    batch_size: int = 32
    codec: str = "int4"
    workers: int = 2
    turns: int = 30
    steps: int = 10  # of a turn

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ConfigError(f"`--task` must be one of {', '.join(TASKS)}; got {self.task!r}.")
        for name, least in (("batch_size", 1), ("workers", 1), ("turns", 2), ("steps", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"`--{name.replace('_', '-')}` must be at least {least}; got {getattr(self, name)}.")


@dataclass
class TelemetryReport:
    """What was measured: seconds a step of each turn, and what telemetry took of the processor, a step.

    >>> report = TelemetryReport(Settings(), {}, {"without": [0.05, 0.06], "with": [0.05, 0.06]}, 0.0001, 0.0002)
    >>> report.clock_ratio, round(report.added_s, 6)
    (1.0, 0.0003)
    """

    settings: Settings
    machine: dict[str, Any]
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"without": [], "with": []})
    training_s: float = 0.0  # on the thread that trains
    beside_s: float = 0.0  # on its own thread

    @property
    def clock_ratio(self) -> float:
        """Times longer a step takes: the median of turns that were next to each other."""
        return statistics.median(
            after / before for before, after in zip(self.seconds["without"], self.seconds["with"], strict=True)
        )

    @property
    def added_s(self) -> float:
        """Of the processor, on both threads."""
        return self.training_s + self.beside_s

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain JSON types."""
        return asdict(self) | {"clock_ratio": self.clock_ratio, "added_s": self.added_s}


def measure(settings: Settings, notify: Notify = lambda _: None) -> TelemetryReport:
    """Train."""
    report = TelemetryReport(settings, machine.describe("cpu"))
    asked = {name: value for name, value in asdict(settings).items() if name != "workers"}
    with tempfile.TemporaryDirectory(prefix="gradwire-") as folder:
        for event in run_workers(telemetry_worker.__name__, {**asked, "folder": folder}, settings.workers):
            if event["event"] == "took":
                report.training_s, report.beside_s = event["training_s"], event["beside_s"]
                continue
            report.seconds[event["name"]].append(event["seconds"])
            notify(f"turn {len(report.seconds['with'])} of {settings.turns}")
    return report
