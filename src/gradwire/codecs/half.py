"""``fp16``, ``bf16``, ``truncate16``: two bytes a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from gradwire.codecs.base import Laws
from gradwire.codecs.blocks import Blocks
from gradwire.codecs.registry import register
from gradwire.kernels import formats
from gradwire.wire import Key, TensorSpec


class _Half(Blocks):
    _names = ("", "values")
    _form: ClassVar[Literal["fp16", "bf16", "truncate16"]]
    _dtype: ClassVar[torch.dtype]
    _relative: ClassVar[float]  # largest relative error of a normal value
    _smallest: ClassVar[float]  # spacing of the denormals

    def laws(self, spec: TensorSpec) -> Laws:
        """Biased, but by so little that training needs no error feedback."""
        return Laws()

    @property
    def wants_feedback(self) -> bool:
        """No: the error is far below a gradient's noise."""
        return False

    def bound(self, x: Tensor, spec: TensorSpec, key: Key) -> Tensor:
        """Relative error, the spacing of denormals, and saturation at the largest value."""
        excess = (x.abs() - torch.finfo(self._dtype).max).clamp(min=0.0)
        return x.abs() * self._relative + self._smallest + excess

    @property
    def _format(self) -> formats.Format:
        return formats.Half(1024, self._form)


@register
@dataclass(frozen=True)
class FP16(_Half):
    """IEEE half precision, to nearest; values beyond 65504 become 65504, never Inf.

    >>> import gradwire
    >>> gradwire.decode(gradwire.encode(torch.tensor([0.1, 1e6]), "fp16"))
    tensor([9.9976e-02, 6.5504e+04])
    """

    id: ClassVar[str] = "fp16"
    _form = "fp16"
    _dtype = torch.float16
    _relative = 2.0**-11
    _smallest = 2.0**-25


@register
@dataclass(frozen=True)
class BF16(_Half):
    """The range of float32 with 8 bits of precision, to nearest.

    >>> import gradwire
    >>> gradwire.decode(gradwire.encode(torch.tensor([0.1, 1e6]), "bf16"))
    tensor([1.0010e-01, 9.9942e+05])
    """

    id: ClassVar[str] = "bf16"
    _form = "bf16"
    _dtype = torch.bfloat16
    _relative = 2.0**-8
    _smallest = 2.0**-134


@register
@dataclass(frozen=True)
class Truncate16(_Half):
    """The upper 16 bits of the float32, cut off toward zero: BigDL's ``"fp16"``, bit for bit.

    >>> import gradwire
    >>> gradwire.decode(gradwire.encode(torch.tensor([1.111111, 5.111111]), "truncate16"))
    tensor([1.1094, 5.0938])
    """

    id: ClassVar[str] = "truncate16"
    _form = "truncate16"
    _dtype = torch.bfloat16
    _relative = 2.0**-7
    _smallest = 2.0**-133
