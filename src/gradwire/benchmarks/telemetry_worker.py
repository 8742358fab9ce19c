"""One rank of two trainings that take turns, with and without telemetry: ``python -m ...telemetry_worker SETTINGS``.

Rank 0 prints a JSON event a turn: seconds of the clock a step. The last event has what telemetry itself took a step:
on the thread that trains, and on its own.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire.adapters import compress
from gradwire.collectives.rank import report, run_rank
from gradwire.reducer import GradientReducer
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
    trainings, before = {}, 0.0
    for name, watched in (("without", None), ("with", telemetry)):
        model = task.model()
        replica = DistributedDataParallel(model)
        compression = compress(replica, settings.codec, telemetry=watched)
        trainings[name] = (replica, task.optimizer(model), compression)
    clock = _Clock(trainings["with"][2]._reducer)
    for turn in range(settings.turns + _WARM_UP):
        for name, (replica, optimizer, compression) in trainings.items():
            telemetry.flush()  # so that nothing of one is counted to the other
            dist.barrier()
            started = time.perf_counter()
            for step in range(settings.steps):
                inputs, targets = task.batch(turn * settings.steps + step, rank, ranks)
                optimizer.zero_grad()
                loss = task.loss(replica, inputs, targets)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                compression.observe_loss(loss.item())
            seconds = time.perf_counter() - started
            if turn >= _WARM_UP:
                report(rank, event="turn", name=name, seconds=seconds / settings.steps)
        if turn == _WARM_UP - 1:
            telemetry.flush()
            clock.seconds, before = 0.0, telemetry.busy_s
    telemetry.flush()
    steps = settings.turns * settings.steps
    report(rank, event="took", training_s=clock.seconds / steps, beside_s=(telemetry.busy_s - before) / steps)
    telemetry.close()


class _Clock:
    """The processor's time of whatever listens to a reducer, on the thread that trains."""

    def __init__(self, reducer: GradientReducer) -> None:
        self.seconds = 0.0
        reducer.on_step[:] = [self._timed(each) for each in reducer.on_step]
        reducer.onlookers[:] = [self._timed(each) for each in reducer.onlookers]

    def _timed(self, listener: Callable[..., None]) -> Callable[..., None]:
        def listen(*arguments: object) -> None:
            started = time.thread_time()
            listener(*arguments)
            self.seconds += time.thread_time() - started

        return listen


if __name__ == "__main__":
    main()
