"""What a dense tensor may become: codes, and where the format has them a scale a block. ``ops`` has the arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

__all__ = ["Float8", "Format", "Half", "Integer", "Levels", "Natural", "Sign", "Ternary"]


@dataclass(frozen=True)
class Format:
    """Codes of a flat float32 tensor in blocks of ``block``, of which the last may be short."""

    code_dtype: ClassVar[torch.dtype] = torch.uint8
    random: ClassVar[bool] = False  # whether the codes depend on the key
    block: int

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return 8

    @property
    def scales(self) -> torch.dtype | None:
        """The dtype of a block's scale; None if there are no scales."""
        return torch.float32

    def code_count(self, count: int) -> int:
        """Items of ``code_dtype`` that ``count`` values take."""
        return -(-count * self.bits // 8)

    def scale_count(self, count: int) -> int:
        """Scales of ``count`` values."""
        return -(-count // self.block) if self.scales else 0


@dataclass(frozen=True)
class Integer(Format):
    """Integers in [-q, q], q = 2**(bits - 1) - 1, stored with q added, packed.

    ``absmax``: scale = max * (1 / q). ``mse``: least squares, by four rounds of codes = nearest(x / scale), scale =
    sum(x * codes) / sum(codes**2), from a start of c * mean|x|; sums are of x over the power of two of its block's
    maximum. ``stochastic``: absmax with stochastic rounding.
    """

    width: int
    scale_dtype: torch.dtype
    scaling: Literal["absmax", "mse", "stochastic"]

    @property
    def bits(self) -> int:
        """2, 3, 4 or 8."""
        return self.width

    @property
    def limit(self) -> int:
        """The largest code."""
        return (1 << (self.width - 1)) - 1

    @property
    def scales(self) -> torch.dtype | None:
        """As asked for."""
        return self.scale_dtype

    @property
    def random(self) -> bool:  # type: ignore[override]
        """Only stochastic rounding."""
        return self.scaling == "stochastic"


@dataclass(frozen=True)
class Float8(Format):
    """One byte an element; a block's maximum becomes the form's largest value."""

    form: Literal["e4m3", "e5m2"]
    scale_dtype: torch.dtype

    @property
    def scales(self) -> torch.dtype | None:
        """As asked for."""
        return self.scale_dtype


@dataclass(frozen=True)
class Sign(Format):
    """One bit an element (1: negative) and the mean magnitude of each block."""

    scale_dtype: torch.dtype

    @property
    def bits(self) -> int:
        """One."""
        return 1

    @property
    def scales(self) -> torch.dtype | None:
        """As asked for."""
        return self.scale_dtype


@dataclass(frozen=True)
class Levels(Format):
    """QSGD: stochastic multiples of norm / levels, the norm of a block being its l2 norm; float32 norms x shrink."""

    random: ClassVar[bool] = True
    levels: int
    shrink: float

    @property
    def bits(self) -> int:
        """Enough for 0 to 2 * levels."""
        return (2 * self.levels).bit_length()


@dataclass(frozen=True)
class Ternary(Format):
    """TernGrad: stochastic {-1, 0, 1} x the block's maximum, five to a byte (base 3); float32 maxima x shrink."""

    random: ClassVar[bool] = True
    shrink: float

    def code_count(self, count: int) -> int:
        """Five values a byte."""
        return -(-count // 5)


@dataclass(frozen=True)
class Natural(Format):
    """Stochastic powers of two: sign and 7 bits below the block's top exponent, which is the scale; 0 is zero."""

    random: ClassVar[bool] = True

    @property
    def scales(self) -> torch.dtype | None:
        """A biased exponent."""
        return torch.uint8


@dataclass(frozen=True)
class Half(Format):
    """Sixteen bits: nearest, saturating at the largest finite value; ``truncate16``: toward zero. No scales.

    The result does not depend on the block: it is what a kernel may take at a time.
    """

    form: Literal["fp16", "bf16", "truncate16"]

    @property
    def code_dtype(self) -> torch.dtype:  # type: ignore[override]
        """``truncate16`` is a bfloat16 too."""
        return torch.float16 if self.form == "fp16" else torch.bfloat16

    @property
    def scales(self) -> torch.dtype | None:
        """None."""
        return None

    def code_count(self, count: int) -> int:
        """One a value."""
        return count
