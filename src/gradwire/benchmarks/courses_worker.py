"""One rank of a training, as a process: ``python -m gradwire.benchmarks.courses_worker SETTINGS``.

Rank 0 prints a JSON event a step: seconds of training so far without validations, bytes on the wire so far, and a
validation where the ranks' parameters have just been brought together.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gradwire.benchmarks.rigs import Rig, make_rig
from gradwire.benchmarks.training_worker import wire_bytes
from gradwire.collectives.rank import report, run_rank
from gradwire.tasks import TASKS, Task

__all__ = ["Settings", "main"]


@dataclass(frozen=True)
class Settings:
    """What the ranks do: train by one method, from the first step to the last."""

    task: str
    method: str
    steps: int
    batch_size: int
    seed: int = 0
    validate_every: int = 10  # steps at least; 0: never
    interface: str = ""  # whose bytes are counted


def main() -> None:
    """Run as the rank the environment says."""
    settings = Settings(**json.loads(sys.argv[1]))
    run_rank(lambda rank, ranks: _run(settings, rank, ranks), timeout_s=600)


def _run(settings: Settings, rank: int, ranks: int) -> None:
    torch.set_num_threads(1)  # as many ranks as hosts share this machine
    task = TASKS[settings.task](seed=settings.seed, batch_size=settings.batch_size)
    task.load()
    with make_rig(task, settings.method, start=None) as rig:
        _train(settings, task, rig, rank, ranks)


def _train(settings: Settings, task: Task, rig: Rig, rank: int, ranks: int) -> None:
    dist.barrier()
    before, seconds, validated, rounds = wire_bytes(settings.interface), 0.0, 0, rig.rounds()
    for step in range(settings.steps):
        started = time.perf_counter()
        inputs, targets = task.batch(step, rank, ranks)
        loss = task.loss(rig.replica, inputs, targets)
        rig.step(loss)
        seconds += time.perf_counter() - started
        event: dict[str, Any] = {"event": "step", "step": step + 1, "loss": loss.item(), "seconds": seconds}
        together = rig.rounds() != rounds  # ranks that step by themselves hold models of their own in between
        if settings.validate_every and together and step + 1 - validated >= settings.validate_every:
            sent = wire_bytes(settings.interface) - before
            if rank == 0:
                event |= {"validation": task.validate(rig.model).loss, "wire_bytes": sent}
            validated = step + 1
            dist.barrier()  # the others wait, and nobody's clock runs
        rounds = rig.rounds() if together else rounds
        report(rank, **event)
    plan = rig.plan()
    sent = wire_bytes(settings.interface) - before
    report(rank, event="done", seconds=seconds, wire_bytes=sent, plan=plan.to_json() if plan is not None else "")


if __name__ == "__main__":
    main()
