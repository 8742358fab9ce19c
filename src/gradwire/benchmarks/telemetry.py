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
    """What was measured: seconds a step of each turn, without and with telemetry.

    >>> report = TelemetryReport(Settings(), {}, {"without": [0.05, 0.06], "with": [0.05, 0.06]},
    ...     {"without": [0.080, 0.090], "with": [0.0801, 0.0901]})
    >>> report.clock_ratio, round(report.added_s, 6)
    (1.0, 0.0001)
    """

    settings: Settings
    machine: dict[str, Any]
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"without": [], "with": []})
    processor_s: dict[str, list[float]] = field(default_factory=lambda: {"without": [], "with": []})

    @property
    def clock_ratio(self) -> float:
        """Times longer a step takes: the median of turns that were next to each other."""
        return statistics.median(
            after / before for before, after in zip(self.seconds["without"], self.seconds["with"], strict=True)
        )

    @property
    def added_s(self) -> float:
        """Seconds of the processor that a step takes more, on all threads: the median of such turns."""
        return statistics.median(
            after - before for before, after in zip(self.processor_s["without"], self.processor_s["with"], strict=True)
        )

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain JSON types."""
        return asdict(self) | {"clock_ratio": self.clock_ratio, "added_s": self.added_s}


def measure(settings: Settings, notify: Notify = lambda _: None) -> TelemetryReport:
    """Train."""
    report = TelemetryReport(settings, machine.describe("cpu"))
    asked = {name: value for name, value in asdict(settings).items() if name != "workers"}
    with tempfile.TemporaryDirectory(prefix="gradwire-") as folder:
        for event in run_workers(telemetry_worker.__name__, {**asked, "folder": folder}, settings.workers):
            report.seconds[event["name"]].append(event["seconds"])
            report.processor_s[event["name"]].append(event["processor_s"])
            notify(f"turn {len(report.seconds['with'])} of {settings.turns}")
    return report
