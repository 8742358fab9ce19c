"""``threshold:tau``: pruning. Values below tau are dropped; how many travel depends on the tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.codecs.base import Codec, Laws, Part
from gradwire.codecs.registry import register
from gradwire.codecs.sparse import Sparse, index_nbytes, pack
from gradwire.errors import WireError
from gradwire.kernels import ops
from gradwire.wire import Key, TensorSpec


@register
@dataclass(frozen=True)
class Threshold(Sparse):
    """Keep every value whose magnitude is at least ``tau``.

    The layout is an upper bound; a payload says how many values it has.

    >>> import gradwire
    >>> gradwire.decode(gradwire.encode(torch.tensor([0.1, -3.0, 2.0, 0.2]), "threshold:1"))
    tensor([ 0., -3.,  2.,  0.])
    """

    id: ClassVar[str] = "threshold"
    tau: float
    _exact = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("tau", self.tau >= 0, "at least 0")

    @classmethod
    def examples(cls) -> tuple[Codec, ...]:
        """Keeps some of a unit-variance tensor; keeps all; keeps almost none."""
        return cls(1.0), cls(0.0), cls(1e20)

    def laws(self, spec: TensorSpec) -> Laws:
        """Everything may be below the threshold."""
        return Laws(contraction=1.0 if self.tau == 0 else 0.0)

    def bound(self, x: Tensor, spec: TensorSpec, key: Key) -> Tensor:
        """Exact from ``tau`` on."""
        magnitude = x.abs()
        return torch.where(magnitude >= torch.tensor(self.tau, dtype=torch.float32, device=x.device), 0.0, magnitude)

    def _count(self, spec: TensorSpec) -> int:
        return spec.numel

    def _structure(self, spec: TensorSpec) -> tuple[Part, ...]:
        bitmap = -(-spec.numel // 8)  # no code of any count is longer
        return Part("count", torch.int64, 1), Part("indices", torch.uint8, bitmap)

    def _select(self, x: Tensor, spec: TensorSpec, key: Key) -> Tensor:
        return ops.select_threshold(x, self.tau)

    def _split(self, x: Tensor, spec: TensorSpec, key: Key) -> tuple[Tensor, tuple[Tensor, ...], Tensor | None]:
        indices = self._select(x, spec, key)
        count = torch.tensor([indices.numel()], dtype=torch.int64, device=x.device)
        return ops.gather(x, indices), (count, pack(indices, spec.numel)), indices

    def _actual_count(self, structure: tuple[Tensor, ...], spec: TensorSpec) -> int:
        counted, indices = structure
        count = int(counted[0]) if counted.numel() else -1
        if not 0 <= count <= spec.numel:
            raise WireError(f"{self} of {spec.numel} elements cannot keep {count}.")
        if indices.numel() != index_nbytes(spec.numel, count):
            needed = index_nbytes(spec.numel, count)
            raise WireError(f"{count} indices below {spec.numel} take {needed} bytes; got {indices.numel()}.")
        return count
