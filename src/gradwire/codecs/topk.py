"""``topk:density``: the largest magnitudes of the whole tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.codecs.base import Codec, Laws
from gradwire.codecs.registry import register
from gradwire.codecs.sparse import Sparse, check_density, kept_count
from gradwire.kernels import ops
from gradwire.wire import Key, TensorSpec


@register
@dataclass(frozen=True)
class TopK(Sparse):
    """Keep the largest-magnitude fraction of a tensor.

    Biased: trained with error feedback unless told otherwise. Ties go to the lowest index, so every backend keeps
    the same elements.

    >>> import gradwire
    >>> gradwire.decode(gradwire.encode(torch.tensor([0.1, -3.0, 2.0, 0.2]), "topk:0.5"))
    tensor([ 0., -3.,  2.,  0.])
    """

    id: ClassVar[str] = "topk"
    density: float  # fraction kept; lower is smaller

    def __post_init__(self) -> None:
        super().__post_init__()
        check_density(self, self.density)

    @classmethod
    def examples(cls) -> tuple[Codec, ...]:
        """Sparse, coded indices; dense, a bitmap; everything."""
        return cls(0.01), cls(0.1), cls(0.6), cls(1.0)

    def laws(self, spec: TensorSpec) -> Laws:
        """The largest k of n hold at least k / n of the square sum."""
        return Laws(contraction=self._count(spec) / max(1, spec.numel))

    def bound(self, x: Tensor, spec: TensorSpec, key: Key) -> Tensor:
        """What is larger than the k-th largest magnitude is exact; the rest may be dropped."""
        magnitude = x.abs()
        if not x.numel():
            return magnitude
        kth = magnitude.topk(kept_count(self.density, x.numel())).values[-1]
        return torch.where(magnitude > kth, 0.0, magnitude)

    def _count(self, spec: TensorSpec) -> int:
        return kept_count(self.density, spec.numel)

    def _select(self, x: Tensor, spec: TensorSpec, key: Key) -> Tensor:
        return ops.select_top(x, self._count(spec))
