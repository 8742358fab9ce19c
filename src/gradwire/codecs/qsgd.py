"""``qsgd:levels``: stochastic multiples of a fraction of the block's l2 norm."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.codecs.base import Codec
from gradwire.codecs.registry import register
from gradwire.codecs.unbiased import Shrinkable
from gradwire.kernels.formats import Format, Levels
from gradwire.wire import Key, TensorSpec


@register
@dataclass(frozen=True)
class QSGD(Shrinkable):
    """Unbiased quantization to ``levels`` steps of each sign (Alistarh et al., 2017).

    ``shrink`` below 1 trades the bias for a contraction: ``contractive()`` sets it to 1 / (1 + variance).

    >>> import gradwire
    >>> gradwire.codec("qsgd:4").contractive()
    QSGD(block=128, shrink=0.26120..., levels=4)
    """

    id: ClassVar[str] = "qsgd"
    _names = ("norms", "codes")
    levels: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("levels", 1 <= self.levels <= 32767, "from 1 to 32767")

    @classmethod
    def examples(cls) -> tuple[Codec, ...]:
        """Coarse, middling and fine levels, and the contractive form."""
        return cls(), cls(1), cls(127), cls(4).contractive()

    def _variance(self) -> float:
        return min(self.block / self.levels**2, math.sqrt(self.block) / self.levels)

    def bound(self, x: Tensor, spec: TensorSpec, key: Key) -> Tensor:
        """One step, and what shrinking takes away."""
        rows = torch.nn.functional.pad(x.double(), (0, -x.numel() % self.block)).view(-1, self.block)
        norm: Tensor = rows.norm(dim=1).repeat_interleave(self.block)[: x.numel()]
        step = norm / self.levels * (1 + 1e-6) * self.shrink
        saturated = (norm - torch.finfo(torch.float32).max).clamp(min=0)
        return step + (1 - self.shrink) * x.abs() + x.abs() * 1e-6 + saturated + 1e-30

    @property
    def _format(self) -> Format:
        return Levels(self.block, self.levels, self.shrink)
