"""``ternary``: -1, 0 or 1 times the block's maximum, at random and unbiased."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradwire.codecs.base import Codec
from gradwire.codecs.blocks import block_absmax
from gradwire.codecs.registry import register
from gradwire.codecs.unbiased import Shrinkable
from gradwire.kernels import formats
from gradwire.kernels.law import FLOOR
from gradwire.wire import Key, TensorSpec


@register
@dataclass(frozen=True)
class Ternary(Shrinkable):
    """TernGrad (Wen et al., 2017), five values to a byte: 1.6 bits a value and a float32 a block.

    >>> import gradwire, torch
    >>> gradwire.decode(gradwire.encode(torch.tensor([2.0, 0.0, -2.0]), "ternary"))
    tensor([ 2.,  0., -2.])
    """

    id: ClassVar[str] = "ternary"

    @classmethod
    def examples(cls) -> tuple[Codec, ...]:
        """Unbiased and contractive."""
        return cls(), cls().contractive()

    def _variance(self) -> float:
        # max|x| ‖x‖₁ / ‖x‖² is largest for one element of m beside others of m / (1 + √block).
        return (math.sqrt(self.block) - 1) / 2

    def bound(self, x: Tensor, spec: TensorSpec, key: Key) -> Tensor:
        """The block's maximum, and what shrinking takes away."""
        return block_absmax(x, self.block) * (1 + 2.0**-20) + FLOOR

    @property
    def _format(self) -> formats.Format:
        return formats.Ternary(self.block, self.shrink)
