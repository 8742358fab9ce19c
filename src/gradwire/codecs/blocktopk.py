"""``blocktopk:density``: the largest magnitudes of each block."""

from __future__ import annotations

from dataclasses import dataclass, field
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
class BlockTopK(Sparse):
    """Keep the largest-magnitude fraction of every block: cheaper than a global top-k, and no layer is starved.

    >>> import gradwire
    >>> x = torch.cat([torch.full((16,), 9.0), torch.linspace(0, 1, 16)])
    >>> gradwire.decode(gradwire.encode(x, "blocktopk:0.0625,block=16")).nonzero().flatten()
    tensor([ 0, 31])
    """

    id: ClassVar[str] = "blocktopk"
    density: float  # fraction of each block that is kept, at least one element
    block: int = field(default=4096, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_density(self, self.density)
        self._require_block(self.block)

    @classmethod
    def examples(cls) -> tuple[Codec, ...]:
        """A default block, and one of 64."""
        return cls(0.01), cls(0.05, block=64)

    @property
    def _each(self) -> int:
        return kept_count(self.density, self.block)

    def laws(self, spec: TensorSpec) -> Laws:
        """The share of each block."""
        return Laws(contraction=self._each / self.block)

    def bound(self, x: Tensor, spec: TensorSpec, key: Key) -> Tensor:
        """What is larger than the smallest kept magnitude of its block is exact; the rest may be dropped."""
        magnitude = x.abs()
        rows = torch.nn.functional.pad(magnitude, (0, -x.numel() % self.block), value=-1.0).view(-1, self.block)
        smallest = rows.topk(self._each, dim=1).values[:, -1].repeat_interleave(self.block)[: x.numel()]
        return torch.where(magnitude > smallest, 0.0, magnitude)

    def _count(self, spec: TensorSpec) -> int:
        blocks, rest = divmod(spec.numel, self.block)
        return blocks * self._each + min(rest, self._each)

    def _select(self, x: Tensor, spec: TensorSpec, key: Key) -> Tensor:
        return ops.select_block_top(x, self._each, self.block)
