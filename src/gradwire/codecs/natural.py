"""``natural``: each value becomes a power of two, at random and unbiased."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.codecs.base import Codec, Laws, Part
from gradwire.codecs.blocks import block_absmax
from gradwire.codecs.registry import register
from gradwire.kernels import ops
from gradwire.kernels.law import FLOOR
from gradwire.wire import Key, TensorSpec


@register
@dataclass(frozen=True)
class Natural(Codec):
    """Natural compression (Horváth et al., 2019): a sign and 7 bits of exponent below the block's largest.

    Values 2**126 times smaller than their block's maximum become 0 or that smallest level. At the edge of float32
    (2**127 and beyond) values become 2**127.

    >>> import gradwire
    >>> gradwire.decode(gradwire.encode(torch.tensor([4.0, -0.5, 0.0]), "natural"))
    tensor([ 4.0000, -0.5000,  0.0000])
    """

    id: ClassVar[str] = "natural"
    block: int = field(default=256, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_block(self.block)

    def laws(self, spec: TensorSpec) -> Laws:
        """Variance 1/8, whatever the tensor."""
        return Laws(unbiased=True, contraction=7 / 8, variance=1 / 8, random=True)

    def bound(self, x: Tensor, spec: TensorSpec, key: Key) -> Tensor:
        """Never further than the value itself, or the smallest level."""
        return x.abs() + block_absmax(x, self.block) * 2.0**-124 + FLOOR

    def _parts(self, spec: TensorSpec) -> tuple[Part, ...]:
        blocks = -(-spec.numel // self.block)
        return Part("tops", torch.uint8, blocks), Part("codes", torch.uint8, spec.numel)

    def _encode(self, x: Tensor, spec: TensorSpec, key: Key) -> tuple[Tensor, ...]:
        codes, tops = ops.quantize_natural(x, self.block, key)
        return tops, codes

    def _decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, key: Key) -> Tensor:
        tops, codes = parts
        return ops.dequantize_natural(codes, tops, self.block)
