"""One rank of ``gradwire bench stragglers``, as a process; one of them stops itself for a while."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import torch

from gradwire.collectives.rank import report, run_rank
from gradwire.optim import GradientCompressionOptimizer, OptimizationData, ShardingConfiguration
from gradwire.sharding import StragglerPolicy
from gradwire.tasks import TASKS

__all__ = ["Settings", "main"]


@dataclass(frozen=True)
class Settings:
    """A training, and who stands still in it when."""

    steps: int
    policy: bool
    task: str = "digits"
    ratio: float = 0.1
    victim: int = -1  # nobody
    at_step: int = 0
    pause_s: float = 5.0
    timeout_s: float = 60.0


def main() -> None:
    """Run as the rank the environment says."""
    settings = Settings(**json.loads(sys.argv[1]))
    run_rank(lambda rank, ranks: _run(settings, rank, ranks))


def _run(settings: Settings, rank: int, ranks: int) -> None:
    torch.set_num_threads(1)
    task = TASKS[settings.task]()
    task.load()
    model = task.model()
    policy = StragglerPolicy() if settings.policy else None
    config = ShardingConfiguration(stragglers=policy, timeout_s=settings.timeout_s)
    optimizer = GradientCompressionOptimizer(task.optimizer(model), config, settings.ratio)

    def batch(step: int) -> Any:
        if rank == settings.victim and step == settings.at_step:
            _stand_still(settings.pause_s)
        return task.batch(step, rank, ranks)

    data = OptimizationData(
        model, lambda model, pair: task.loss(model, *pair), batch, steps=settings.steps, progress=False
    )
    result = optimizer.optimize(data)
    loss = task.validate(model).loss
    report(rank, event="done", seconds=result.seconds, loss=loss, **{k: int(v) for k, v in result.metrics.items()})


def _stand_still(seconds: float) -> None:
    """As a machine that swaps, or a network that is away: no thread of this process runs."""
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    main()
