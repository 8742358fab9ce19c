"""Handwritten digits: a convolutional network of 2.0 million parameters on scikit-learn's 1,797 images."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.extras import require
from gradwire.tasks.base import Task

__all__ = ["Digits", "DigitsCNN"]

_TRAIN_IMAGES: Final = 1437


class DigitsCNN(nn.Module):
    """Five convolutions and two linear layers, for 32 x 32 images of one channel.

    >>> sum(p.numel() for p in DigitsCNN().parameters())
    2030058
    """

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for channels, out, stride in ((1, 32, 2), (32, 64, 1), (64, 128, 2), (128, 256, 2), (256, 256, 1)):
            convolution = nn.Conv2d(channels, out, kernel_size=3, stride=stride, padding=1, bias=False)
            layers += [convolution, nn.GroupNorm(8, out), nn.ReLU()]
        layers += [nn.Flatten(), nn.Linear(4096, 256), nn.ReLU(), nn.Linear(256, 10)]
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        """Scores of the ten digits."""
        scores: Tensor = self.layers(images)
        return scores


@dataclass(frozen=True)
class Digits(Task):
    """Which digit is it? Ranks share a shuffle of the images for each epoch and take turns in it.

    >>> images, labels = Digits().batch(0, rank=0, ranks=2)
    >>> images.shape, labels.shape
    (torch.Size([32, 1, 32, 32]), torch.Size([32]))
    >>> Digits().steps(ranks=2)
    22
    """

    name: ClassVar[str] = "digits"
    train_examples: ClassVar[int] = _TRAIN_IMAGES
    batch_size: int = 32
    learning_rate: float = 0.02

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(model.parameters(), lr=self.learning_rate, momentum=0.9)

    def steps(self, ranks: int) -> int:
        """Steps of an epoch: every rank has whole batches of its own."""
        return _TRAIN_IMAGES // self._together(ranks)

    def _network(self) -> nn.Module:
        return DigitsCNN()

    def _draw(self, step: int, examples: int) -> Tensor:
        epoch, turn = divmod(step, _TRAIN_IMAGES // examples)
        order = torch.randperm(_TRAIN_IMAGES, generator=torch.Generator().manual_seed(self.seed * 10_007 + epoch))
        return order[turn * examples : (turn + 1) * examples]

    def _examples(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        images, labels, _, _ = _data()
        return images[indices], labels[indices]

    def _held_out(self) -> tuple[Tensor, Tensor]:
        _, _, images, labels = _data()
        return images, labels


@cache
def _data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, test images and labels; the split does not depend on the seed."""
    digits = require("sklearn.datasets", purpose="the digits task").load_digits()
    small = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    images, labels = F.interpolate(small, scale_factor=4), torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    train, test = order[:_TRAIN_IMAGES], order[_TRAIN_IMAGES:]
    return images[train], labels[train], images[test], labels[test]
