"""One rank of ``gradwire bench train``, as a process: ``python -m gradwire.benchmarks.training_worker SETTINGS``.

Rank 0 prints JSON events: ``timed`` for some steps of a method in a round, ``curve`` for a training's losses.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.adapters import Compression, compress
from gradwire.benchmarks import hooks
from gradwire.collectives import PowerSGD, method
from gradwire.collectives.rank import report, run_rank
from gradwire.tasks import TASKS, Task

__all__ = ["COMPUTE", "Settings", "main"]

COMPUTE: Final = "compute only"
"""The method that sends nothing."""


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
    with _replica(task, name, start=None) as (model, replica, _):
        optimizer = task.optimizer(model)
        for step in range(settings.steps):
            loss = _step(task, replica, optimizer, step, rank, ranks)
            event: dict[str, Any] = {
                "event": "curve",
                "method": name,
                "seed": task.seed,
                "step": step + 1,
                "loss": loss,
            }
            if (step + 1) % settings.validate_every == 0 and rank == 0:
                event["validation"] = task.validate(model).loss
            report(rank, **event)


def _timed(settings: Settings, task: Task, name: str, round_number: int, rank: int, ranks: int) -> None:
    # PowerSGD from the first step on, for its own steps are what is timed.
    with _replica(task, name, start=0) as (model, replica, compression):
        optimizer = task.optimizer(model)
        for step in range(settings.warmup):
            _step(task, replica, optimizer, step, rank, ranks)
        dist.barrier()
        before, times = _wire_bytes(settings.interface), []
        counted = compression.wire_bytes if compression else None
        for step in range(settings.warmup, settings.warmup + settings.steps):
            started = time.perf_counter()
            _step(task, replica, optimizer, step, rank, ranks)
            times.append(time.perf_counter() - started)
        dist.barrier()
        wire = (_wire_bytes(settings.interface) - before) / settings.steps
        after = compression.wire_bytes if compression else None
        counted = (after - counted) // settings.steps if after is not None and counted is not None else None
        seconds = torch.tensor(times)
        dist.all_reduce(seconds)  # the mean over ranks of each step
        sent = compression.traffic.sent_bytes if compression else None
        told = {"seconds": (seconds / ranks).tolist(), "wire_bytes": wire, "sent_bytes": sent, "counted_bytes": counted}
        report(rank, event="timed", method=name, round=round_number, **told)


@contextmanager
def _replica(task: Task, name: str, start: int | None) -> Iterator[tuple[nn.Module, nn.Module, Compression | None]]:
    """A fresh model, what is trained of it, and our compression if it is ours."""
    model = task.model()
    if name == COMPUTE:
        yield model, model, None
    elif name in hooks.PEERS:
        replica = DistributedDataParallel(model, bucket_cap_mb=hooks.bucket_cap_mb(name))
        hooks.attach(name, replica, hooks.POWERSGD_START if start is None else start)
        yield model, replica, None
    else:
        how = method(name)
        if isinstance(how, PowerSGD) and start is not None:
            how = PowerSGD(how.rank, how.factors, start, how.alternate)
        replica = DistributedDataParallel(model)
        compression = compress(replica, how, timeout_s=300)
        yield model, replica, compression
        compression.close()


def _step(task: Task, replica: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int, ranks: int) -> float:
    inputs, targets = task.batch(step, rank, ranks)
    optimizer.zero_grad()
    loss = task.loss(replica, inputs, targets)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return float(loss)


def _wire_bytes(interface: str) -> int:
    """Bytes sent with all headers: those of the queue, for the interface counts a long packet's header once."""
    if not interface:
        return 0
    told = subprocess.check_output(["tc", "-s", "-j", "qdisc", "show", "dev", interface])
    return int(json.loads(told)[0]["bytes"])


if __name__ == "__main__":
    main()
