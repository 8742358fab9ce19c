"""One rank of a built-in training, as a process: ``python -m gradwire.tasks.worker SETTINGS``.

Rank, world size and the rendezvous file come from the environment; settings are JSON. Rank 0 prints one JSON object
a line to standard output: an event for each step, and a last one with the result.
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.collectives import Gather
from gradwire.collectives.rank import run_rank
from gradwire.errors import PeerError
from gradwire.reducer import GradientReducer
from gradwire.tasks import TASKS

__all__ = ["Settings", "main"]


@dataclass(frozen=True)
class Settings:
    """What a run is."""

    task: str = "digits"
    codec: str = "int4"
    epochs: int = 4
    batch_size: int = 32
    seed: int = 0
    feedback: bool = True


def main() -> None:
    """Train as the rank the environment says."""
    settings = Settings(**json.loads(sys.argv[1]))
    run_rank(lambda rank, ranks: _train(settings, rank, ranks))


def _train(settings: Settings, rank: int, ranks: int) -> None:
    task = TASKS[settings.task](seed=settings.seed, batch_size=settings.batch_size)
    images, labels, test_images, test_labels = task.data()
    model = task.model()
    optimizer = task.optimizer(model)
    reducer = GradientReducer(
        dict(model.named_parameters()), settings.codec, Gather(), seed=settings.seed, feedback=settings.feedback
    )
    total, step = settings.epochs * task.steps(ranks), 0
    parameters = sum(p.numel() for p in model.parameters())
    _report(rank, event="start", steps=total, ranks=ranks, parameters=parameters, codec=str(reducer.codec))
    started = time.perf_counter()
    for epoch in range(settings.epochs):
        for batch in task.batches(epoch, rank, ranks):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()  # type: ignore[no-untyped-call]
            traffic = reducer.reduce(step)
            optimizer.step()
            step += 1
            _report(rank, event="step", step=step, epoch=epoch, loss=loss.item(), **asdict(traffic))
    seconds = time.perf_counter() - started
    test_loss, accuracy = _evaluate(model, test_images, test_labels)
    _check_replicas(model, ranks)
    _report(rank, event="done", test_loss=test_loss, test_accuracy=accuracy, seconds=seconds)


@torch.no_grad()
def _evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    scores = model(images)
    return float(F.cross_entropy(scores, labels)), float((scores.argmax(dim=1) == labels).float().mean())


def _check_replicas(model: nn.Module, ranks: int) -> None:
    """Every rank must hold the same bits."""
    checksum = 0
    for parameter in model.parameters():
        checksum = zlib.crc32(parameter.detach().numpy().tobytes(), checksum)
    everyone = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
    dist.all_gather(everyone, torch.tensor([checksum]))
    if len({int(c) for c in everyone}) != 1:
        raise PeerError(f"the ranks' parameters differ: checksums {[f'{int(c):08x}' for c in everyone]}.")


def _report(rank: int, **event: Any) -> None:
    if rank == 0:
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
