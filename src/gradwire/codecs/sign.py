"""``sign``: one bit a value, and the mean magnitude of each block."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from gradwire.codecs.base import Codec, Laws
from gradwire.codecs.blocks import SCALE_DTYPES, Blocks, block_mean
from gradwire.codecs.registry import register
from gradwire.kernels import formats
from gradwire.kernels.law import FLOOR
from gradwire.wire import Key, TensorSpec


@register
@dataclass(frozen=True)
class Sign(Blocks):
    """One bit a value. A single 0 decodes to plus the block's mean magnitude; a block of zeros to zeros.

    >>> import gradwire, torch
    >>> gradwire.decode(gradwire.encode(torch.tensor([1.0, -3.0]), "sign"))
    tensor([ 2., -2.])
    """

    id: ClassVar[str] = "sign"
    _names = ("scales", "signs")
    block: int = field(default=128, kw_only=True)
    scale: str = field(default="bf16", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("scale", self.scale in SCALE_DTYPES, " or ".join(SCALE_DTYPES))
        self._require_block(self.block)

    @classmethod
    def examples(cls) -> tuple[Codec, ...]:
        """The default, and with small blocks and exact scales."""
        return cls(), cls(block=32, scale="fp32")

    def laws(self, spec: TensorSpec) -> Laws:
        """‖x - x̂‖² = ‖x‖² - ‖x‖₁² / block, up to the rounding of the scale."""
        return Laws(contraction=0.99 / self.block, keeps_zeros=False)

    def bound(self, x: Tensor, spec: TensorSpec, key: Key) -> Tensor:
        """The element and the mean may have any distance up to their sum."""
        mean = block_mean(x, self.block) * (1 + 2.0**-7)
        return x.abs() + mean + FLOOR

    @property
    def _format(self) -> formats.Format:
        return formats.Sign(self.block, SCALE_DTYPES[self.scale])
