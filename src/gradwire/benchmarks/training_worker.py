"""One rank of ``gradwire bench train``, as a process: ``python -m gradwire.benchmarks.training_worker SETTINGS``.

Rank 0 prints JSON events: ``timed`` for some steps of a method in a round, ``curve`` for a training's losses.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from gradwire.benchmarks.rigs import AUTO, Rig, make_rig
from gradwire.collectives.rank import report, run_rank
from gradwire.tasks import TASKS, Task

__all__ = ["Settings", "main", "wire_bytes"]

_MOST_STEPS_TO_A_PLAN: Final = 60


@dataclass(frozen=True)
class Settings:
    """What the ranks do: time some steps of each method, round after round, or train each for its losses."""

    task: str
    methods: list[str]
    seed: int = 0
    batch_size: int | None = None
    rounds: int = 0  # of timing
    warmup: int = 2  # steps before the timed ones
    steps: int = 6  # that are timed, or trained
    curves: bool = False
    validate_every: int = 10
    interface: str = ""  # whose bytes are counted


def main() -> None:
    """Run as the rank the environment says."""
    settings = Settings(**json.loads(sys.argv[1]))
    run_rank(lambda rank, ranks: _run(settings, rank, ranks), timeout_s=600)


def _run(settings: Settings, rank: int, ranks: int) -> None:
    torch.set_num_threads(1)  # as many ranks as hosts share this machine
    chosen = {} if settings.batch_size is None else {"batch_size": settings.batch_size}
    task = TASKS[settings.task](seed=settings.seed, **chosen)
    task.load()
    if settings.curves:
        for name in settings.methods:
            _curve(settings, task, name, rank, ranks)
    for round_number in range(settings.rounds):
        for name in settings.methods:
            _timed(settings, task, name, round_number, rank, ranks)


def _curve(settings: Settings, task: Task, name: str, rank: int, ranks: int) -> None:
    with make_rig(task, name, start=None) as rig:
        for step in range(settings.steps):
            loss = _step(task, rig, step, rank, ranks)
            event: dict[str, Any] = {
                "event": "curve",
                "method": name,
                "seed": task.seed,
                "step": step + 1,
                "loss": loss,
            }
            if (step + 1) % settings.validate_every == 0 and rank == 0:
                event["validation"] = task.validate(rig.model).loss
            report(rank, **event)


def _timed(settings: Settings, task: Task, name: str, round_number: int, rank: int, ranks: int) -> None:
    # PowerSGD from the first step on, for its own steps are what is timed.
    with make_rig(task, name, start=0) as rig:
        first, began = 0, time.perf_counter()
        while first < settings.warmup or (name == AUTO and not _settled(rig) and first < _MOST_STEPS_TO_A_PLAN):
            _step(task, rig, first, rank, ranks)
            first += 1
        taken = [first, time.perf_counter() - began]
        dist.barrier()
        before, times = wire_bytes(settings.interface), []
        counted = rig.wire_bytes()
        for step in range(first, first + settings.steps):
            started = time.perf_counter()
            _step(task, rig, step, rank, ranks)
            times.append(time.perf_counter() - started)
        dist.barrier()
        wire = (wire_bytes(settings.interface) - before) / settings.steps
        after = rig.wire_bytes()
        counted = (after - counted) // settings.steps if after is not None and counted is not None else None
        seconds = torch.tensor(times)
        dist.all_reduce(seconds)  # the mean over ranks of each step
        sent = rig.sent_bytes()
        told = {"seconds": (seconds / ranks).tolist(), "wire_bytes": wire, "sent_bytes": sent, "counted_bytes": counted}
        plans = [plan.to_json()] if (plan := rig.plan()) is not None else []
        report(rank, event="timed", method=name, round=round_number, first=taken, plans=plans, **told)


def _settled(rig: Rig) -> bool:
    """Whether ``auto`` has a plan whose steps it has timed."""
    plan = rig.plan()
    return plan is not None and plan.measured_s is not None


def _step(task: Task, rig: Rig, step: int, rank: int, ranks: int) -> float:
    inputs, targets = task.batch(step, rank, ranks)
    loss = task.loss(rig.replica, inputs, targets)
    rig.step(loss)
    return loss.item()


def wire_bytes(interface: str) -> int:
    """Bytes sent with all headers: those of the queue, for the interface counts a long packet's header once."""
    if not interface:
        return 0
    told = subprocess.check_output(["tc", "-s", "-j", "qdisc", "show", "dev", interface])
    return int(json.loads(told)[0]["bytes"])


if __name__ == "__main__":
    main()
