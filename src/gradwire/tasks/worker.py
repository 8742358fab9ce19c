"""One rank of a built-in training, as a process: ``python -m gradwire.tasks.worker SETTINGS``.

Rank, world size and the rendezvous come from the environment; settings are JSON. Rank 0 prints one JSON object
a line to standard output: an event for each step, and a last one with the result.
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.adapters import compress
from gradwire.adapters.watch import facts
from gradwire.collectives.rank import report, run_rank
from gradwire.errors import PeerError
from gradwire.optim import GradientCompressionOptimizer, OptimizationData, ShardingConfiguration
from gradwire.tasks import TASKS, Task
from gradwire.telemetry import Telemetry

__all__ = ["Settings", "main"]


@dataclass(frozen=True)
class Settings:
    """What a run is."""

    task: str = "digits"
    codec: str = "int4"
    epochs: int = 4
    steps: int | None = None  # instead of epochs
    batch_size: int | None = None  # the task's own
    seed: int = 0
    feedback: bool = True
    timeout_s: float = 60.0
    ratio: float | None = None  # a sharded optimizer that keeps it, instead of DDP with the codec
    stage: int = 1
    checkpoints: str | None = None  # a folder
    checkpoint_every: int = 50
    run_folder: str | None = None  # for telemetry
    about: dict[str, Any] = field(default_factory=dict)  # what else its records say of the run


def main() -> None:
    """Train as the rank the environment says."""
    settings = Settings(**json.loads(sys.argv[1]))
    run_rank(lambda rank, ranks: _train(settings, rank, ranks))


def _train(settings: Settings, rank: int, ranks: int) -> None:
    chosen = {} if settings.batch_size is None else {"batch_size": settings.batch_size}
    task = TASKS[settings.task](seed=settings.seed, **chosen)
    task.load()
    model = task.model()
    total = settings.steps or settings.epochs * task.steps(ranks)
    with Telemetry(*([settings.run_folder] if settings.run_folder else [])) as telemetry:
        codec = f"sharded {settings.ratio}" if settings.ratio is not None else settings.codec
        about = {"settings": {**asdict(settings), **settings.about}, **facts(dict(model.named_parameters()))}
        telemetry.start(rank=rank, ranks=ranks, codec=codec, steps=total, **about)
        started = time.perf_counter()
        train = _with_ddp if settings.ratio is None else _with_sharded_optimizer
        train(settings, task, model, rank, ranks, total, telemetry)
        seconds = time.perf_counter() - started
        reached = task.validate(model)
        telemetry.record("validation", step=total, loss=reached.loss, accuracy=reached.accuracy)
        _check_replicas(model, ranks)
    report(rank, event="done", test_loss=reached.loss, test_accuracy=reached.accuracy, seconds=seconds)


def _start(model: nn.Module, rank: int, ranks: int, total: int, codec: str) -> None:
    """Say what is going to happen."""
    parameters = sum(p.numel() for p in model.parameters())
    report(rank, event="start", steps=total, ranks=ranks, parameters=parameters, codec=codec)


def _with_ddp(
    settings: Settings, task: Task, model: nn.Module, rank: int, ranks: int, total: int, telemetry: Telemetry
) -> None:
    optimizer = task.optimizer(model)
    replica = DistributedDataParallel(model)
    compression = compress(
        replica,
        settings.codec,
        seed=settings.seed,
        feedback=settings.feedback,
        timeout_s=settings.timeout_s,
        telemetry=telemetry,
    )
    _start(model, rank, ranks, total, compression.method)
    told = 0  # of what ``auto`` did
    for step in range(total):
        inputs, targets = task.batch(step, rank, ranks)
        optimizer.zero_grad()
        loss = task.loss(replica, inputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        compression.observe_loss(loss.item())
        traffic = asdict(compression.traffic)
        report(rank, event="step", step=step + 1, epoch=step // task.steps(ranks), loss=loss.item(), **traffic)
        for each in compression.events[told:]:
            report(rank, event="planned", step=each.step, what=each.what)
        told = len(compression.events)
    if compression.plan is not None:
        report(rank, event="plan", plan=compression.plan.to_json())
    compression.settle()


def _with_sharded_optimizer(
    settings: Settings, task: Task, model: nn.Module, rank: int, ranks: int, total: int, telemetry: Telemetry
) -> None:
    assert settings.ratio is not None
    config = ShardingConfiguration(
        stage=settings.stage,  # type: ignore[arg-type]
        seed=settings.seed,
        feedback=settings.feedback,
        timeout_s=settings.timeout_s,
    )
    optimizer = GradientCompressionOptimizer(task.optimizer(model), config, settings.ratio)
    optimizer.stragglers.on_late = lambda what, whose, step: telemetry.record("drop", step=step, rank=whose, what=what)
    _start(model, rank, ranks, total, optimizer.method)
    clock = time.perf_counter()

    def tell(step: int, loss: float) -> None:
        nonlocal clock
        moved, before, clock = optimizer.traffic, clock, time.perf_counter()
        traffic = {
            "sent_bytes": moved.gradient_bytes + moved.weight_bytes,
            "dense_sent_bytes": moved.dense_gradient_bytes + moved.dense_weight_bytes,
        }
        report(rank, event="step", step=step, epoch=(step - 1) // task.steps(ranks), loss=loss, **traffic)
        sent = {"sent": traffic["sent_bytes"], "dense": traffic["dense_sent_bytes"]}
        telemetry.step(step, loss=loss, seconds=round(clock - before, 6), **sent)

    optimizer.optimize(
        OptimizationData(
            model,
            loss=lambda model, batch: task.loss(model, *batch),
            batches=lambda step: task.batch(step, rank, ranks),
            steps=total,
            checkpoints=settings.checkpoints,
            checkpoint_every=settings.checkpoint_every,
            on_step=tell,
            progress=False,
        )
    )


def _check_replicas(model: nn.Module, ranks: int) -> None:
    """Every rank must hold the same bits."""
    checksum = 0
    for parameter in model.parameters():
        checksum = zlib.crc32(parameter.detach().numpy().tobytes(), checksum)
    everyone = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
    dist.all_gather(everyone, torch.tensor([checksum]))
    if len({int(c) for c in everyone}) != 1:
        raise PeerError(f"the ranks' parameters differ: checksums {[f'{int(c):08x}' for c in everyone]}.")


if __name__ == "__main__":
    main()
