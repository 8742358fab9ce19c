"""What a rank that stands still for a while costs, with and without the policy that leaves it out."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass

from gradwire.benchmarks import straggler_worker
from gradwire.clusters import run_workers
from gradwire.errors import ConfigError

__all__ = ["Outcome", "Settings", "measure"]


@dataclass(frozen=True)
class Settings:
    """What is run, and how often."""

    workers: int = 4
    steps: int = 300
    pause_s: float = 5.0
    rounds: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.workers <= 64:
            raise ConfigError(f"`--workers` must be from 2 to 64; got {self.workers}.")
        for name, least in (("steps", 50), ("rounds", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"`--{name}` must be at least {least}; got {getattr(self, name)}.")
        if not 0 < self.pause_s <= 30:
            raise ConfigError(f"`--pause` must be above 0 and at most 30; got {self.pause_s}.")


@dataclass(frozen=True)
class Outcome:
    """Medians over the rounds."""

    seconds: float
    over_undisturbed: float
    dropped: float  # gradients left out, as rank 0 counts them
    loss: float


def measure(settings: Settings, notify: Callable[[str], None] = lambda text: None) -> dict[str, Outcome]:
    """All ways, round after round. Who stands still, and when, is drawn anew for each: never rank 0, who counts."""
    draw = random.Random(settings.seed)
    runs: dict[str, list[dict[str, float]]] = {}
    for number in range(settings.rounds):
        victim = draw.randrange(1, settings.workers)
        at_step = draw.randrange(settings.steps // 10, settings.steps // 3)
        for name, policy, disturbed in (
            ("undisturbed", False, False),
            ("undisturbed, policy", True, False),
            ("paused, policy", True, True),
            ("paused, waited for", False, True),
        ):
            notify(f"round {number + 1}: {name}")
            asked = straggler_worker.Settings(
                settings.steps, policy, victim=victim if disturbed else -1, at_step=at_step, pause_s=settings.pause_s
            )
            for event in run_workers("gradwire.benchmarks.straggler_worker", asdict(asked), settings.workers):
                runs.setdefault(name, []).append(event)
    base = statistics.median(run["seconds"] for run in runs["undisturbed"])
    return {
        name: Outcome(
            seconds := statistics.median(run["seconds"] for run in found),
            seconds / base,
            statistics.median(run["dropped"] for run in found),
            statistics.median(run["loss"] for run in found),
        )
        for name, found in runs.items()
    }
