"""``fp8:e4m3`` and ``fp8:e5m2``: one byte a value and a scale a block."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Final, Literal, cast

from torch import Tensor

from gradwire.codecs.base import Codec, Laws
from gradwire.codecs.blocks import SCALE_DTYPES, Blocks, block_absmax, saturation
from gradwire.codecs.registry import register
from gradwire.kernels.formats import Float8, Format
from gradwire.kernels.law import FLOOR
from gradwire.wire import Key, TensorSpec

# Relative error of a normal value, half the spacing of the denormals, and the largest value, by form.
_FORMS: Final = {"e4m3": (2.0**-4, 2.0**-10, 448.0), "e5m2": (2.0**-3, 2.0**-17, 57344.0)}


@register
@dataclass(frozen=True)
class FP8(Blocks):
    """Eight-bit floats; each block is scaled so that its maximum is the format's largest value.

    >>> import gradwire, torch
    >>> gradwire.decode(gradwire.encode(torch.tensor([1e-3, 0.5, -1.0]), "fp8:e4m3"))
    tensor([ 9.7466e-04,  4.9902e-01, -9.9805e-01])
    """

    id: ClassVar[str] = "fp8"
    form: str = "e4m3"
    block: int = field(default=128, kw_only=True)
    scale: str = field(default="bf16", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("form", self.form in _FORMS, " or ".join(_FORMS))
        self._require("scale", self.scale in SCALE_DTYPES, " or ".join(SCALE_DTYPES))
        self._require_block(self.block)

    @classmethod
    def examples(cls) -> tuple[Codec, ...]:
        """Both forms."""
        return cls("e4m3"), cls("e5m2"), cls("e4m3", block=64, scale="fp32")

    @property
    def wants_feedback(self) -> bool:
        """No: with 8 bits the error is far below a gradient's noise."""
        return False

    def laws(self, spec: TensorSpec) -> Laws:
        """Rounds to nearest inside each block."""
        return Laws()

    def bound(self, x: Tensor, spec: TensorSpec, key: Key) -> Tensor:
        """Relative error, and the spacing of denormals in units of the block's scale."""
        relative, smallest, largest = _FORMS[self.form]
        # The scale may be rounded up by 2**-7, which makes the steps near the maximum one binade coarser at most.
        step = block_absmax(x, self.block) / largest * (1 + 2.0**-6)
        return x.abs() * (relative * (1 + 2.0**-6)) + step * smallest + saturation(x, self.block) + FLOOR

    @property
    def _format(self) -> Format:
        return Float8(self.block, cast(Literal["e4m3", "e5m2"], self.form), SCALE_DTYPES[self.scale])
