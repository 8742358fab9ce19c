"""``none``: the tensor as it is. The baseline is a codec like any other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.codecs.base import Codec, Laws, Part, saturating
from gradwire.codecs.registry import register
from gradwire.wire import Key, TensorSpec


@register
@dataclass(frozen=True)
class NoCompression(Codec):
    """Send every value in the tensor's own dtype.

    >>> import gradwire
    >>> gradwire.decode(gradwire.encode(torch.tensor([1.5, -2.0]), "none"))
    tensor([ 1.5000, -2.0000])
    """

    id: ClassVar[str] = "none"

    def laws(self, spec: TensorSpec) -> Laws:
        """Lossless."""
        return Laws(unbiased=True, contraction=1.0, variance=0.0)

    def bound(self, x: Tensor, spec: TensorSpec, key: Key) -> Tensor:
        """Zero."""
        return torch.zeros_like(x)

    def _parts(self, spec: TensorSpec) -> tuple[Part, ...]:
        return (Part("values", spec.dtype, spec.numel),)

    def _encode(self, x: Tensor, spec: TensorSpec, key: Key) -> tuple[Tensor, ...]:
        return (saturating(x, spec.dtype),)

    def _decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, key: Key) -> Tensor:
        return parts[0].to(torch.float32)
