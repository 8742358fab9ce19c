"""One rank of two trainings that take turns, with and without telemetry: ``python -m ...telemetry_worker SETTINGS``.

Rank 0 prints a JSON event a turn: seconds of the clock and of the processor, a step.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire.adapters import compress
from gradwire.collectives.rank import report, run_rank
from gradwire.tasks import TASKS
from gradwire.telemetry import Telemetry

__all__ = ["Settings", "main"]

_WARM_UP = 2  # turns


@dataclass(frozen=True)
class Settings:
    """What the ranks do."""

    task: str
    batch_size: int
    codec: str
    turns: int
    steps: int  # of a turn
    folder: str


def main() -> None:
    """Run as the rank the environment says."""
    settings = Settings(**json.loads(sys.argv[1]))
    run_rank(lambda rank, ranks: _run(settings, rank, ranks))


def _run(settings: Settings, rank: int, ranks: int) -> None:
    torch.set_num_threads(1)
    task = TASKS[settings.task](batch_size=settings.batch_size)
    task.load()
    telemetry = Telemetry(settings.folder)
    trainings = {}
    for name, watched in (("without", None), ("with", telemetry)):
        model = task.model()
        replica = DistributedDataParallel(model)
        compression = compress(replica, settings.codec, telemetry=watched)
        trainings[name] = (replica, task.optimizer(model), compression)
    for turn in range(settings.turns + _WARM_UP):
        for name, (replica, optimizer, compression) in trainings.items():
            telemetry.flush()  # so that nothing of one is counted to the other
            dist.barrier()
            clock, processor = time.perf_counter(), time.process_time()
            for step in range(settings.steps):
                inputs, targets = task.batch(turn * settings.steps + step, rank, ranks)
                optimizer.zero_grad()
                loss = task.loss(replica, inputs, targets)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                compression.observe_loss(loss.item())
            seconds = time.perf_counter() - clock
            telemetry.flush()
            used = time.process_time() - processor
            if turn >= _WARM_UP:
                each = {"seconds": seconds / settings.steps, "processor_s": used / settings.steps}
                report(rank, event="turn", name=name, **each)
    telemetry.close()


if __name__ == "__main__":
    main()
