"""One rank of a built-in training, as a process: ``python -m gradwire.tasks.worker SETTINGS``.

Rank, world size and the rendezvous come from the environment; settings are JSON. Rank 0 prints one JSON object
a line to standard output: an event for each step, and a last one with the result.
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.adapters import compress
from gradwire.collectives.rank import report, run_rank
from gradwire.errors import PeerError
from gradwire.tasks import TASKS

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


def main() -> None:
    """Train as the rank the environment says."""
    settings = Settings(**json.loads(sys.argv[1]))
    run_rank(lambda rank, ranks: _train(settings, rank, ranks))


def _train(settings: Settings, rank: int, ranks: int) -> None:
    chosen = {} if settings.batch_size is None else {"batch_size": settings.batch_size}
    task = TASKS[settings.task](seed=settings.seed, **chosen)
    task.load()
    model = task.model()
    optimizer = task.optimizer(model)
    replica = DistributedDataParallel(model)
    compression = compress(
        replica, settings.codec, seed=settings.seed, feedback=settings.feedback, timeout_s=settings.timeout_s
    )
    epoch_steps = task.steps(ranks)
    total = settings.steps or settings.epochs * epoch_steps
    parameters = sum(p.numel() for p in model.parameters())
    report(rank, event="start", steps=total, ranks=ranks, parameters=parameters, codec=compression.method)
    started = time.perf_counter()
    for step in range(total):
        inputs, targets = task.batch(step, rank, ranks)
        optimizer.zero_grad()
        loss = task.loss(replica, inputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        traffic = asdict(compression.traffic)
        report(rank, event="step", step=step + 1, epoch=step // epoch_steps, loss=loss.item(), **traffic)
    seconds = time.perf_counter() - started
    reached = task.validate(model)
    _check_replicas(model, ranks)
    report(rank, event="done", test_loss=reached.loss, test_accuracy=reached.accuracy, seconds=seconds)


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
