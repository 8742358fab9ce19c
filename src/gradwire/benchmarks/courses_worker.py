"""One rank of some trainings, as a process: ``python -m gradwire.benchmarks.courses_worker SETTINGS``.

The trainings take turns, a few steps each, so that whatever else the machine does disturbs all of them alike. Rank 0
prints a JSON event a step: seconds of that training so far without validations, bytes on the wire so far, and a
validation where the ranks' parameters have just been brought together.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
import torch.distributed as dist

from gradwire.benchmarks.rigs import Rig, make_rig
from gradwire.benchmarks.training_worker import wire_bytes
from gradwire.collectives.rank import report, run_rank
from gradwire.tasks import TASKS, Task

__all__ = ["BLOCK", "Settings", "main"]

BLOCK: Final = 8
"""Steps of a turn."""


@dataclass(frozen=True)
class Settings:
    """What the ranks do: train by each method, from the first step to the last."""

    task: str
    steps: dict[str, int]  # of each method
    batch_size: int
    seed: int = 0
    validate_every: dict[str, int] = field(default_factory=dict)  # steps at least; others never
    validate_from: int = 0  # step
    interface: str = ""  # whose bytes are counted
    learning_rate: float | None = None  # None: the task's own


def main() -> None:
    """Run as the rank the environment says."""
    settings = Settings(**json.loads(sys.argv[1]))
    run_rank(lambda rank, ranks: _run(settings, rank, ranks), timeout_s=600)


def _run(settings: Settings, rank: int, ranks: int) -> None:
    torch.set_num_threads(1)  # as many ranks as hosts share this machine
    task = TASKS[settings.task](seed=settings.seed, batch_size=settings.batch_size)
    if settings.learning_rate is not None:
        task = replace(task, learning_rate=settings.learning_rate)
    task.load()
    with ExitStack() as stack:
        # What is made first has the best memory, and steps that are 3% shorter: in the next training it is the last.
        names = list(settings.steps)[:: -1 if settings.seed % 2 else 1]
        rigs = {name: stack.enter_context(make_rig(task, name, start=None)) for name in names}
        trainings = [_Training(settings, task, name, rig, rank, ranks) for name, rig in rigs.items()]
        for turn in range(turns := max(training.turns for training in trainings)):
            first = turn % len(trainings)  # nobody always comes after the same one
            for training in trainings[first:] + trainings[:first]:
                training.go_on(BLOCK * -(-training.turns * (turn + 1) // turns))  # those with few are spread out
        for training in trainings:
            training.end()


class _Training:
    def __init__(self, settings: Settings, task: Task, name: str, rig: Rig, rank: int, ranks: int) -> None:
        self.task, self.name, self.rig, self.rank, self.ranks = task, name, rig, rank, ranks
        self.steps, self.interface = settings.steps[name], settings.interface
        self.validate_every, self.validate_from = settings.validate_every.get(name, 0), settings.validate_from
        self.turns = -(-self.steps // BLOCK)
        self.step = self.validated = self.sent = 0
        self.seconds, self.rounds = 0.0, rig.rounds()

    def go_on(self, until: int) -> None:
        """Train up to a step."""
        dist.barrier()
        before = wire_bytes(self.interface) - self.sent
        while self.step < min(until, self.steps):
            started = time.perf_counter()
            inputs, targets = self.task.batch(self.step, self.rank, self.ranks)
            loss = self.task.loss(self.rig.replica, inputs, targets)
            self.rig.step(loss)
            self.seconds += time.perf_counter() - started
            self.step += 1
            event: dict[str, Any] = {"step": self.step, "loss": loss.item(), "seconds": self.seconds}
            together = self.rig.rounds() != self.rounds  # ranks that step by themselves hold models of their own
            due = self.validate_every and self.step >= max(self.validate_from, self.validated + self.validate_every)
            if due and together:
                self.sent = wire_bytes(self.interface) - before
                if self.rank == 0:
                    event |= {"validation": self.task.validate(self.rig.model).loss, "wire_bytes": self.sent}
                self.validated = self.step
                dist.barrier()  # the others wait, and nobody's clock runs
            self.rounds = self.rig.rounds() if together else self.rounds
            report(self.rank, event="step", method=self.name, **event)
        self.sent = wire_bytes(self.interface) - before

    def end(self) -> None:
        """Say what came of it."""
        plan = self.rig.plan()
        told = {"seconds": self.seconds, "wire_bytes": self.sent, "plan": plan.to_json() if plan is not None else ""}
        report(self.rank, event="done", method=self.name, events=[str(each) for each in self.rig.events()], **told)


if __name__ == "__main__":
    main()
