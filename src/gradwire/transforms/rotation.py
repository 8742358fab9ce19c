"""``rotate(...)``: a randomized Hadamard rotation before quantizing."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.codecs.base import Codec, Laws, Part
from gradwire.codecs.registry import codec, register
from gradwire.kernels import ops
from gradwire.kernels.law import FLOOR
from gradwire.transforms.base import SenderTransform
from gradwire.wire import Key, TensorSpec


@register
@dataclass(frozen=True)
class Rotate(Codec):
    """Flip signs at random and rotate each block, so that every tensor looks Gaussian to the codec inside.

    Spikes and heavy tails, which ruin a block's scale, are spread over the block. The tensor is padded to whole
    blocks (of at most the smallest power of 4 that holds it). Values beyond 3.4e38 / (2 block) are cut there.

    >>> import gradwire, torch
    >>> x = torch.zeros(1024); x[3] = 1.0
    >>> error = lambda c: float((gradwire.decode(gradwire.encode(x, c)) - x).norm())
    >>> error("sign") > 0.9 and error("rotate(sign)") < 0.01
    True
    """

    id: ClassVar[str] = "rotate"
    inner: Codec
    block: int = field(default=1024, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "inner", codec(self.inner))
        super().__post_init__()
        self._require("inner", not isinstance(self.inner, SenderTransform), "a codec, not a training transform")
        self._require("inner", "rotate" not in str(self.inner), "a codec that does not rotate itself")
        power_of_four = 16 <= self.block <= 65536 and self.block & (self.block - 1) == 0 and self.block % 3 == 1
        self._require("block", power_of_four, "a power of 4 from 16 to 65536")

    @classmethod
    def examples(cls) -> tuple[Codec, ...]:
        """Quantizers of several widths, and a sparse codec."""
        strings = (
            "rotate(int3)",
            "rotate(sign)",
            "rotate:block=64(int4:rounding=stochastic)",
            "rotate(topk:0.1)",
        )
        return tuple(codec(s) for s in strings)

    @property
    def wants_feedback(self) -> bool:
        """As the codec inside."""
        return self.inner.wants_feedback

    @property
    def _exact(self) -> bool:  # type: ignore[override]
        return self.inner._exact

    def contractive(self) -> Codec:
        """The inner codec contractive."""
        return dataclasses.replace(self, inner=self.inner.contractive())

    def _block(self, numel: int) -> int:
        """The block used: the smallest power of 4 that holds a small tensor."""
        block = 16
        while block < min(numel, self.block):
            block *= 4
        return block

    def _rotated_spec(self, spec: TensorSpec) -> TensorSpec:
        return TensorSpec((spec.numel + -spec.numel % self._block(spec.numel),))

    def _rotate(self, x: Tensor, key: Key) -> Tensor:
        return ops.rotate(x, key, self._block(x.numel()))

    def laws(self, spec: TensorSpec) -> Laws:
        """A rotation changes no norm but for rounding; zeros among other values do not stay zero."""
        law = self.inner.laws(self._rotated_spec(spec))
        return dataclasses.replace(
            law,
            contraction=None if law.contraction is None else min(law.contraction, 1 - 2.0**-30),
            variance=None if law.variance is None else law.variance + 2.0**-30,
            keeps_zeros=False,
            random=True,
        )

    def bound(self, x: Tensor, spec: TensorSpec, key: Key) -> Tensor:
        """Every error of a block may meet in one element; rounding and the cut at the edge of float32 besides."""
        block = self._block(x.numel())
        y = self._rotate(x, key)
        errors = self.inner.bound(y, self._rotated_spec(spec), key).double().view(-1, block)
        rounding: Tensor = y.double().view(-1, block).norm(dim=1) * (block.bit_length() * 2.0**-22)
        total = (errors.sum(dim=1) / math.isqrt(block) + rounding).repeat_interleave(block)[: x.numel()]
        excess = (x.abs().double() - torch.finfo(torch.float32).max / (2 * block)).clamp(min=0) * (1 + 2.0**-20)
        return total + excess + FLOOR

    def _parts(self, spec: TensorSpec) -> tuple[Part, ...]:
        return self.inner._parts(self._rotated_spec(spec))

    def _encode(self, x: Tensor, spec: TensorSpec, key: Key) -> tuple[Tensor, ...]:
        return self.inner._encode(self._rotate(x, key), self._rotated_spec(spec), key)

    def _decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, key: Key) -> Tensor:
        y = self.inner._decode(parts, self._rotated_spec(spec), key)
        return ops.unrotate(y, key, self._block(spec.numel), spec.numel)
