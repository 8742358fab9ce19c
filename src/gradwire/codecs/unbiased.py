"""What unbiased codecs of large variance share: the choice between no bias and a contraction."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from dataclasses import dataclass, field

from gradwire.codecs.base import Codec, Laws
from gradwire.codecs.blocks import Blocks
from gradwire.wire import TensorSpec


@dataclass(frozen=True)
class Shrinkable(Blocks):
    """A codec of x̂ with E[x̂] = x, that sends ``shrink`` times x̂.

    Below 1 that trades the bias for a contraction, which error feedback needs; 1 / (1 + variance) is the best value.
    """

    block: int = field(default=128, kw_only=True)
    shrink: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("shrink", 0 < self.shrink <= 1, "in (0, 1]")
        self._require_block(self.block)

    @abstractmethod
    def _variance(self) -> float:
        """omega with E‖x - x̂‖² <= omega ‖x‖², unshrunk."""

    def laws(self, spec: TensorSpec) -> Laws:
        """E‖x - s x̂‖² = (1 - s)² ‖x‖² + s² E‖x - x̂‖²."""
        omega = self._variance()
        error = (1 - self.shrink) ** 2 + self.shrink**2 * omega
        contraction = 1 - error if error < 1 else None
        if self.shrink < 1:
            return Laws(contraction=contraction, random=True)
        return Laws(unbiased=True, contraction=contraction, variance=omega, random=True)

    def contractive(self) -> Codec:
        """Shrunk by 1 / (1 + variance), unless it already is shrunk."""
        return dataclasses.replace(self, shrink=1 / (1 + self._variance())) if self.shrink == 1 else self
