"""A whole training with a sharded optimizer."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from gradwire.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from gradwire.collectives import agree
from gradwire.collectives.peers import tell
from gradwire.errors import ConfigError

if TYPE_CHECKING:
    from gradwire.optim.sharded_optimizer import ShardedOptimizerBase

__all__ = ["OptimizationData", "OptimizationResult", "optimize"]


@dataclass(frozen=True)
class OptimizationData:
    """What a training is made of, on this rank.

    ``loss(model, batch)`` is what is minimized. ``batches`` are those of this rank: a function of the step, counted
    from 0, or something that can be iterated once an epoch, such as a ``DataLoader``. Give ``steps``, or ``epochs`` of
    an iterable.

    With ``validate``, a function of the model, the training ends early when its value has not fallen for ``patience``
    validations in a row on any rank. With ``checkpoints``, a folder, the training is saved there every
    ``checkpoint_every`` steps, and goes on from the last complete one it finds. ``on_step(step, loss)`` is called after
    every step and may return True to end the training, on all ranks.

    >>> def loss(model, batch):
    ...     return model(batch).square().mean()
    >>> OptimizationData(nn.Linear(2, 1), loss, lambda step: torch.ones(1, 2), steps=3).steps
    3
    """

    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    batches: Callable[[int], Any] | Iterable[Any]
    steps: int | None = None
    epochs: int | None = None
    validate: Callable[[nn.Module], float] | None = None
    validate_every: int = 100
    patience: int | None = None
    checkpoints: str | Path | None = None
    checkpoint_every: int = 100
    on_step: Callable[[int, float], Any] | None = None
    progress: bool = True  # a line on the first rank's terminal

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise ConfigError(f"give either `steps` or `epochs`; got {self.steps!r} and {self.epochs!r}.")
        if self.epochs is not None and callable(self.batches):
            raise ConfigError(
                "`epochs` are of batches that can be iterated; a function of the step has none: give `steps`."
            )
        for name in ("steps", "epochs", "validate_every", "patience", "checkpoint_every"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"`{name}` must be a whole number of at least 1; got {value!r}.")
        if self.patience is not None and self.validate is None:
            raise ConfigError("`patience` needs `validate`.")


@dataclass(frozen=True)
class OptimizationResult:
    """What a training did, on this rank, since it was started or resumed.

    >>> OptimizationResult(4, [3.0, 2.0], [(2, 2.5), (4, 2.1)], 0.1, "steps", 2, 100, 1000).best
    2.1
    """

    steps: int  # of the whole training
    losses: list[float]  # of this rank's batches
    validations: list[tuple[int, float]]
    seconds: float
    ended: Literal["steps", "epochs", "early"]
    resumed_from: int  # the step of a checkpoint, or 0
    sent_bytes: int
    dense_bytes: int  # float32's
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def best(self) -> float | None:
        """The lowest validation."""
        return min((value for _, value in self.validations), default=None)


def optimize(optimizer: ShardedOptimizerBase, data: OptimizationData) -> OptimizationResult:
    """Train; see :meth:`ShardedOptimizerBase.optimize`."""
    if not isinstance(data, OptimizationData):
        raise ConfigError(f"`data` must be an OptimizationData; got {type(data).__name__}.")
    missing = {id(p) for p in optimizer.trained} - {id(p) for p in data.model.parameters()}
    if missing:
        raise ConfigError(f"`model` must be the one whose parameters the optimizer has; {len(missing)} are not its.")
    length = _agreed_length(data, optimizer)
    best, stale, resumed = math.inf, 0, 0
    found = latest_checkpoint(data.checkpoints) if data.checkpoints is not None else None
    if found is not None:
        extra = load_checkpoint(found, optimizer)
        resumed, best, stale = optimizer.rounds, float(extra["best"]), int(extra["stale"])
        torch.set_rng_state(extra["random"])
        for name, buffer in data.model.named_buffers():
            buffer.copy_(extra["buffers"][name])
    losses: list[float] = []
    validations: list[tuple[int, float]] = []
    sent = dense = 0
    started, ended = time.perf_counter(), "steps" if data.steps is not None else "epochs"
    optimizer.train()
    with _Progress(data, optimizer) as progress:
        for batch in _batches(data, optimizer, length):
            optimizer.zero_grad()
            with torch.enable_grad():
                loss = data.loss(data.model, batch)
                loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(float(loss.detach()))
            traffic = optimizer.traffic
            sent += traffic.gradient_bytes + traffic.weight_bytes
            dense += traffic.dense_gradient_bytes + traffic.dense_weight_bytes
            progress.tell(losses[-1])
            stop = data.on_step is not None and data.on_step(optimizer.rounds, losses[-1]) is True
            if data.validate is not None and optimizer.rounds % data.validate_every == 0:
                optimizer.eval()
                with torch.no_grad():
                    value = float(data.validate(data.model))
                optimizer.train()
                validations.append((optimizer.rounds, value))
                best, stale = (value, 0) if value < best else (best, stale + 1)
                stop |= data.patience is not None and stale >= data.patience
            if stop:
                optimizer.request_stop()
            if optimizer.stop_agreed:
                ended = "early"
                break
            if data.checkpoints is not None and optimizer.rounds % data.checkpoint_every == 0:
                buffers = {name: buffer.detach() for name, buffer in data.model.named_buffers()}
                extra = {"best": best, "stale": stale, "random": torch.get_rng_state(), "buffers": buffers}
                save_checkpoint(data.checkpoints, optimizer, extra)
    optimizer.settle()
    return OptimizationResult(
        optimizer.rounds,
        losses,
        validations,
        time.perf_counter() - started,
        ended,  # type: ignore[arg-type]
        resumed,
        sent,
        dense,
        optimizer.metrics(),
    )


def _agreed_length(data: OptimizationData, optimizer: ShardedOptimizerBase) -> int | None:
    """Batches of an epoch, as many as every rank has; None where that is unknown. Ranks must want the same steps."""
    agree(optimizer.peers, f"a run of steps={data.steps}, epochs={data.epochs}", 3)
    known = len(data.batches) if isinstance(data.batches, Sized) else -1
    least = min(int(line) for line in tell(optimizer.peers, str(known), 3, "the comparison of batches"))
    return None if least < 0 else least


def _batches(data: OptimizationData, optimizer: ShardedOptimizerBase, length: int | None) -> Iterator[Any]:
    """From where the optimizer stands. Steps it has taken without this rank, which was late, need no batch of it."""
    if callable(data.batches):
        assert data.steps is not None
        while optimizer.rounds < data.steps:
            yield data.batches(optimizer.rounds)
        return
    ahead, epoch = optimizer.rounds, 0
    while data.epochs is None or epoch < data.epochs:
        empty = True
        for batch in islice(data.batches, length):
            empty = False
            if ahead > 0:
                ahead -= 1  # a resumed training has seen it
                continue
            if data.steps is not None and optimizer.rounds >= data.steps:
                return
            before = optimizer.rounds
            yield batch
            ahead = max(0, optimizer.rounds - before - 1)
        if empty:
            raise ConfigError("`batches` has none: give something that can be iterated again for every epoch.")
        if data.steps is not None and optimizer.rounds >= data.steps:
            return
        epoch += 1


class _Progress:
    """A line on the terminal of the first rank."""

    def __init__(self, data: OptimizationData, optimizer: ShardedOptimizerBase) -> None:
        self.total, self.optimizer, self.last = data.steps, optimizer, 0.0
        self.shown = data.progress and optimizer.exchange.rank == 0 and sys.stderr.isatty()

    def __enter__(self) -> _Progress:
        return self

    def tell(self, loss: float) -> None:
        now = time.monotonic()
        if self.shown and now - self.last > 0.1:
            self.last = now
            of = f" of {self.total}" if self.total is not None else ""
            ratio = self.optimizer.traffic.ratio
            sys.stderr.write(
                f"\r\033[Kstep {self.optimizer.rounds}{of}  loss {loss:.4f}  {ratio:.3f} of float32's bytes"
            )
            sys.stderr.flush()

    def __exit__(self, *error: object) -> None:
        if self.shown:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
