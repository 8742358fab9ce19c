"""One rank of ``gradwire bench plan``, as a process: ``python -m gradwire.benchmarks.plans_worker SETTINGS``.

Rank 0 prints JSON events: ``plan`` with what ``auto`` decided, and ``timed`` for some steps of a method in a round.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradwire.adapters import compress
from gradwire.collectives.rank import report, run_rank
from gradwire.planner import Auto
from gradwire.tasks import TASKS, Task

__all__ = ["Settings", "main"]

_WARM_UP: Final = 3  # steps: the first ones of low rank take longer
_PLAN_ONCE: Final = Auto(review_every=1_000_000, patience_s=0)  # of all methods, and not as in an earlier training


@dataclass(frozen=True)
class Settings:
    """What the ranks do."""

    task: str
    batch_size: int
    rounds: int
    steps: int


def main() -> None:
    """Run as the rank the environment says."""
    settings = Settings(**json.loads(sys.argv[1]))
    run_rank(lambda rank, ranks: _run(settings, rank, ranks), timeout_s=600)


def _run(settings: Settings, rank: int, ranks: int) -> None:
    torch.set_num_threads(1)  # as many ranks as hosts share this machine
    task = TASKS[settings.task](batch_size=settings.batch_size)
    task.load()
    for round_number in range(settings.rounds):
        _round(settings, task, round_number, rank, ranks)


def _round(settings: Settings, task: Task, round_number: int, rank: int, ranks: int) -> None:
    """Plan anew, and time what was planned right after."""
    model = task.model()
    replica, optimizer = DistributedDataParallel(model), task.optimizer(model)
    compression = compress(replica, _PLAN_ONCE, timeout_s=300.0)
    done = 0

    def step() -> float:
        nonlocal done
        started = time.perf_counter()
        loss: Tensor = task.loss(replica, *task.batch(done, rank, ranks))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        done += 1
        return time.perf_counter() - started

    while compression.plan is None:
        step()
    plan = compression.plan
    report(rank, event="plan", plan=plan.to_json())
    for what in plan.alternatives:
        compression.hold(what)
        for _ in range(_WARM_UP):
            step()
        seconds = torch.tensor([step() for _ in range(settings.steps)])
        dist.all_reduce(seconds)
        report(rank, event="timed", method=what, round=round_number, seconds=(seconds / ranks).tolist())
    compression.close()


if __name__ == "__main__":
    main()
