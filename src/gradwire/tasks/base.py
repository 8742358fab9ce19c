"""What a built-in training is, so that a worker need not know which one it runs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import ClassVar, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.errors import ConfigError

__all__ = ["Task", "Validation"]

_SEEDS: Final = 1 << 31


@dataclass(frozen=True)
class Validation:
    """What a model reaches on the held-out examples."""

    loss: float
    accuracy: float | None  # fraction of right answers; None where a task has no right or wrong


@dataclass(frozen=True)
class Task(ABC):
    """A model, its optimizer, its batches and its validation. Equal arguments give equal runs.

    A batch depends on nothing but the arguments, the step and the rank, so runs of any length agree on the steps they
    share. The ranks' batches of a step together are the batch of one rank with as many examples.

    >>> import torch
    >>> from gradwire.tasks import Digits
    >>> task = Digits(batch_size=16)
    >>> (images, labels), (others, _) = task.batch(0, rank=0, ranks=2), task.batch(0, rank=1, ranks=2)
    >>> alone, _ = Digits(batch_size=32).batch(0, rank=0, ranks=1)
    >>> torch.equal(torch.cat([images, others]), alone)
    True
    >>> model = task.model()
    >>> optimizer = task.optimizer(model)
    >>> task.loss(model, images, labels).backward()
    >>> optimizer.step()
    """

    name: ClassVar[str]
    train_examples: ClassVar[int]  # that all ranks of a step share; it bounds the batch
    seed: int = 0
    batch_size: int = 1  # examples of a rank in a step
    learning_rate: float = 0.01

    def __post_init__(self) -> None:
        self._check("seed", 0 <= self.seed < _SEEDS, f"from 0 to {_SEEDS - 1}")
        self._check("batch_size", self.batch_size >= 1, "at least 1")
        self._check("learning_rate", 0 < self.learning_rate < math.inf, "positive and finite")

    def load(self) -> None:
        """Read the data now: what is missing on this machine is said here, not at the first batch."""
        self._held_out()

    def model(self) -> nn.Module:
        """A fresh model; the same on every rank, and nobody else's random numbers change."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)
            return self._network()

    @abstractmethod
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """A fresh optimizer for the model."""

    @abstractmethod
    def steps(self, ranks: int) -> int:
        """Steps of an epoch."""

    def batch(self, step: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a rank in a step, counted from 0 over the whole run, not from the epoch's start."""
        if step < 0:
            raise ConfigError(f"`step` must not be negative; got {step}.")
        if not 0 <= rank < ranks:
            raise ConfigError(f"`rank` must be from 0 to {ranks - 1} with {ranks} ranks; got {rank}.")
        start = rank * self.batch_size
        return self._examples(self._draw(step, self._together(ranks))[start : start + self.batch_size])

    def batches(self, rank: int, ranks: int, *, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """A rank's batches from a step on, without end."""
        return (self.batch(step, rank, ranks) for step in count(start))

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats, to be minimized."""
        return _cross_entropy(model(inputs), targets)

    @torch.no_grad()
    def validate(self, model: nn.Module) -> Validation:
        """Loss and accuracy on held-out examples, the same for every seed."""
        inputs, targets = self._held_out()
        scores = model(inputs)
        right = (scores.argmax(dim=-1) == targets).float().mean()
        return Validation(float(_cross_entropy(scores, targets)), float(right))

    @abstractmethod
    def _network(self) -> nn.Module:
        """A model with weights from torch's own generator, which is seeded."""

    @abstractmethod
    def _draw(self, step: int, examples: int) -> Tensor:
        """Indices of this many training examples: those of all ranks in a step, rank after rank."""

    @abstractmethod
    def _examples(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets of training examples."""

    @abstractmethod
    def _held_out(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets no rank trains on."""

    def _together(self, ranks: int) -> int:
        """Examples of all ranks in a step."""
        if ranks < 1:
            raise ConfigError(f"`ranks` must be at least 1; got {ranks}.")
        most = self.train_examples // ranks
        self._check("batch_size", self.batch_size <= most, f"at most {most} with {ranks} ranks")
        return self.batch_size * ranks

    def _check(self, field: str, right: bool, allowed: str) -> None:
        if not right:
            raise ConfigError(f"`{self.name}({field}=...)` must be {allowed}; got {getattr(self, field)}.")


def _cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    """Of scores with one dimension, the last, more than the targets."""
    return F.cross_entropy(scores.flatten(0, -2), targets.flatten())
