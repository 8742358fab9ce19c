"""``randomk:density``: a random fraction; the indices follow from the key, so only values travel."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.codecs.base import Codec, Laws, Part
from gradwire.codecs.registry import register
from gradwire.codecs.sparse import Scattered, check_density, kept_count
from gradwire.kernels import ops
from gradwire.wire import Key, TensorSpec


@register
@dataclass(frozen=True)
class RandomK(Scattered):
    """Keep one random element of each of k equal stretches of the tensor.

    Ranks that share the key keep the same elements. With ``unbiased`` the values are multiplied by the length of
    their stretch, so that the expectation is the tensor itself; without, it is a contraction, as error feedback wants.

    >>> import gradwire
    >>> gradwire.codec("randomk:0.25").layout(gradwire.TensorSpec((1000,))).body_nbytes
    1000
    """

    id: ClassVar[str] = "randomk"
    density: float
    unbiased: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_density(self, self.density)

    @classmethod
    def examples(cls) -> tuple[Codec, ...]:
        """Biased and unbiased."""
        return cls(0.1), cls(0.1, unbiased=True), cls(0.7, unbiased=True)

    def _longest(self, spec: TensorSpec) -> int:
        return -(-spec.numel // max(1, self._count(spec)))

    def laws(self, spec: TensorSpec) -> Laws:
        """An element is kept with probability 1 / (length of its stretch)."""
        longest = max(1, self._longest(spec))
        if self.unbiased:
            variance = float(longest - 1)
            return Laws(
                unbiased=True,
                contraction=None if variance >= 1 else 1 - variance,
                variance=variance,
                random=True,
            )
        return Laws(contraction=1 / longest, random=True)

    def contractive(self) -> Codec:
        """The biased form."""
        return dataclasses.replace(self, unbiased=False)

    def bound(self, x: Tensor, spec: TensorSpec, key: Key) -> Tensor:
        """Any element may be dropped; an unbiased one may be multiplied."""
        longest = self._longest(spec)
        return x.abs() * max(1.0, (longest - 1.0) * self.unbiased)

    def _count(self, spec: TensorSpec) -> int:
        return kept_count(self.density, spec.numel)

    def _structure(self, spec: TensorSpec) -> tuple[Part, ...]:
        return ()

    def _indices(self, spec: TensorSpec, key: Key, device: torch.device) -> Tensor:
        return ops.select_random(spec.numel, self._count(spec), key, device=device)

    def _split(self, x: Tensor, spec: TensorSpec, key: Key) -> tuple[Tensor, tuple[Tensor, ...], Tensor | None]:
        indices = self._indices(spec, key, x.device)
        return ops.gather(x, indices), (), indices

    def _positions(self, values: Tensor, structure: tuple[Tensor, ...], spec: TensorSpec, key: Key) -> Tensor:
        return self._indices(spec, key, values.device)

    def _scaled(self, values: Tensor, spec: TensorSpec) -> Tensor:
        if not self.unbiased or not values.numel():
            return values
        # Here and not before they travel: in 16 bits the product could overflow.
        each, extra = divmod(spec.numel, values.numel())
        lengths = each + (torch.arange(values.numel(), device=values.device) < extra).to(torch.float32)
        limit = torch.finfo(torch.float32).max
        return (values * lengths).clamp(-limit, limit)
