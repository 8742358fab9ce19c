"""``natural``: each value becomes a power of two, at random and unbiased."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from gradwire.codecs.base import Laws
from gradwire.codecs.blocks import Blocks, block_absmax
from gradwire.codecs.registry import register
from gradwire.kernels import formats
from gradwire.kernels.law import FLOOR
from gradwire.wire import Key, TensorSpec


@register
@dataclass(frozen=True)
class Natural(Blocks):
    """Natural compression (Horváth et al., 2019): a sign and 7 bits of exponent below the block's largest.

    Values 2**126 times smaller than their block's maximum become 0 or that smallest level. At the edge of float32
    (2**127 and beyond) values become 2**127.

    >>> import gradwire, torch
    >>> gradwire.decode(gradwire.encode(torch.tensor([4.0, -0.5, 0.0]), "natural"))
    tensor([ 4.0000, -0.5000,  0.0000])
    """

    id: ClassVar[str] = "natural"
    _names = ("tops", "codes")
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

    @property
    def _format(self) -> formats.Format:
        return formats.Natural(self.block)
