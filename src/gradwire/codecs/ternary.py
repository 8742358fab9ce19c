"""``ternary``: -1, 0 or 1 times the block's maximum, at random and unbiased."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.codecs.base import Codec, Part
from gradwire.codecs.blocks import block_absmax
from gradwire.codecs.registry import register
from gradwire.codecs.unbiased import Shrinkable
from gradwire.kernels import ops
from gradwire.kernels.law import FLOOR
from gradwire.wire import Key, TensorSpec


@register
@dataclass(frozen=True)
class Ternary(Shrinkable):
    """TernGrad (Wen et al., 2017), five values to a byte: 1.6 bits a value and a float32 a block.

    >>> import gradwire
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

    def _parts(self, spec: TensorSpec) -> tuple[Part, ...]:
        blocks = -(-spec.numel // self.block)
        return Part("scales", torch.float32, blocks), Part("codes", torch.uint8, -(-spec.numel // 5))

    def _encode(self, x: Tensor, spec: TensorSpec, key: Key) -> tuple[Tensor, ...]:
        codes, scales = ops.quantize_ternary(x, self.block, self.shrink, key)
        return scales, codes

    def _decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, key: Key) -> Tensor:
        scales, codes = parts
        return ops.dequantize_ternary(codes, scales, self.block, spec.numel)
