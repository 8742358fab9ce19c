"""``int8``, ``int4``, ``int3``, ``int2``: integers with a scale a block."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import ClassVar, Final, Literal

from torch import Tensor

from gradwire.codecs.base import Codec, Laws
from gradwire.codecs.blocks import SCALE_DTYPES, Blocks, block_absmax, saturation
from gradwire.codecs.registry import register
from gradwire.kernels.formats import Format, Integer
from gradwire.kernels.law import FLOOR
from gradwire.wire import Key, TensorSpec

_ROUNDINGS: Final = ("nearest", "stochastic")
_ANY: Final = TensorSpec((1,))  # the laws of integers are the same for all tensors


@dataclass(frozen=True)
class _Integer(Blocks):
    """Integers in [-q, q], q = 2**(bits - 1) - 1, times a scale a block.

    The scale follows the block's maximum. At 3 bits and fewer, rounding to nearest, it minimizes the squared error
    instead, which clips the few largest values but halves the error. Stochastic rounding is unbiased.
    """

    _bits: ClassVar[int]
    block: int = field(default=128, kw_only=True)
    scale: str = field(default="bf16", kw_only=True)
    rounding: str = field(default="nearest", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("scale", self.scale in SCALE_DTYPES, " or ".join(SCALE_DTYPES))
        self._require("rounding", self.rounding in _ROUNDINGS, " or ".join(_ROUNDINGS))
        self._require_block(self.block)

    @classmethod
    def examples(cls) -> tuple[Codec, ...]:
        """The default, unbiased, and with small blocks and exact scales."""
        return cls(), cls(rounding="stochastic"), cls(block=32, scale="fp32")

    @property
    def _limit(self) -> int:
        return (1 << (self._bits - 1)) - 1

    @property
    def _scaling(self) -> Literal["absmax", "mse", "stochastic"]:
        if self.rounding == "stochastic":
            return "stochastic"
        return "mse" if self._bits <= 3 else "absmax"

    @property
    def wants_feedback(self) -> bool:
        """Only at 3 bits and fewer: with 4 and more, training is as good without (measured)."""
        return self._scaling == "mse"

    def laws(self, spec: TensorSpec) -> Laws:
        """An error of half a step (stochastic: a step) an element, of which no block has more than ``block``."""
        step = (1 + 2.0**-7) / self._limit
        error = self.block * step**2 / 4  # the variance of stochastic rounding is at most step**2 / 4 too
        if self._scaling == "mse":
            return Laws()
        contraction = 1 - error if error < 1 else (None if self.rounding == "stochastic" else 0.0)
        if self.rounding == "stochastic":
            return Laws(unbiased=True, contraction=contraction, variance=error, random=True)
        return Laws(contraction=contraction)

    def contractive(self) -> Codec:
        """Rounding to nearest, where so few levels make the stochastic error larger than the tensor."""
        return self if self.laws(_ANY).contraction is not None else dataclasses.replace(self, rounding="nearest")

    def bound(self, x: Tensor, spec: TensorSpec, key: Key) -> Tensor:
        """Half a step, or a step; with the least-squares scale no element moves by more than itself."""
        if self._scaling == "mse":
            return x.abs()
        step = block_absmax(x, self.block) / self._limit * (1 + 2.0**-7 + 2.0**-20)
        step = step if self.rounding == "stochastic" else step / 2
        return step + saturation(x, self.block) + FLOOR

    @functools.cached_property
    def _format(self) -> Format:
        return Integer(self.block, self._bits, SCALE_DTYPES[self.scale], self._scaling)


@register
@dataclass(frozen=True)
class Int8(_Integer):
    """Eight bits a value: as good as float32 in training, at a quarter of its bytes.

    >>> import gradwire, torch
    >>> gradwire.decode(gradwire.encode(torch.tensor([0.1, -1.0, 0.0]), "int8"))
    tensor([ 0.1024, -0.9999,  0.0000])
    """

    id: ClassVar[str] = "int8"
    _bits = 8
    block: int = field(default=256, kw_only=True)


@register
@dataclass(frozen=True)
class Int4(_Integer):
    """Four bits a value: still as good as float32 with Adam, without error feedback.

    >>> import gradwire, torch
    >>> len(gradwire.encode(torch.ones(128_000), "int4")) / (4 * 128_000)
    0.1290625
    """

    id: ClassVar[str] = "int4"
    _bits = 4


@register
@dataclass(frozen=True)
class Int3(_Integer):
    """Three bits a value, with the block scale of least squared error.

    >>> import gradwire, torch
    >>> gradwire.codec("int3").wants_feedback
    True
    """

    id: ClassVar[str] = "int3"
    _bits = 3


@register
@dataclass(frozen=True)
class Int2(_Integer):
    """Two bits a value: -1, 0 or 1 times the block scale of least squared error.

    >>> import gradwire, torch
    >>> gradwire.decode(gradwire.encode(torch.tensor([0.9, -1.1, 0.1]), "int2"))
    tensor([ 1., -1.,  0.])
    """

    id: ClassVar[str] = "int2"
    _bits = 2
