"""What block-scaled codecs share: the dtypes of a scale, and blocks in their bounds."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from gradwire.codecs.base import Codec, Part
from gradwire.kernels import ops
from gradwire.kernels.formats import Format
from gradwire.kernels.memory import empty
from gradwire.wire import Key, Payload, TensorSpec


class Blocks(Codec):
    """A codec that is one :class:`Format`: codes, and a scale a block."""

    _names: ClassVar[tuple[str, str]] = ("scales", "codes")

    @property
    @abstractmethod
    def _format(self) -> Format:
        """What the kernels are told."""

    def _parts(self, spec: TensorSpec) -> tuple[Part, ...]:
        form, (scales, codes) = self._format, self._names
        values = Part(codes, form.code_dtype, form.code_count(spec.numel))
        return (Part(scales, form.scales, form.scale_count(spec.numel)), values) if form.scales else (values,)

    def _encode(self, x: Tensor, spec: TensorSpec, key: Key) -> tuple[Tensor, ...]:
        return self._encode_with(x, None, 1.0, spec, key)[0]

    def _encode_with(
        self, x: Tensor, residual: Tensor | None, decay: float, spec: TensorSpec, key: Key
    ) -> tuple[tuple[Tensor, ...], Tensor, Tensor | None]:
        form = self._format
        codes, scales, nonfinite, rest = ops.encode_blocks(x, form, key, residual, decay)
        return (scales, codes) if form.scales else (codes,), nonfinite, rest

    def _decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, key: Key) -> Tensor:
        out = empty(spec.numel, torch.float32, parts[-1].device)
        ops.decode_blocks(out, [(parts[-1], parts[0])], self._format, add=False)
        return out

    def _sum_into(self, payloads: Sequence[Payload], out: Tensor, *, add: bool) -> None:
        parts = [self._checked_parts(payload) for payload in payloads]
        ops.decode_blocks(out, [(each[-1], each[0]) for each in parts], self._format, add=add)


SCALE_DTYPES: Final = {"bf16": torch.bfloat16, "fp32": torch.float32}


def block_absmax(x: Tensor, block: int) -> Tensor:
    """For each element of a flat tensor, the largest magnitude of its block."""
    return _per_block(x, block, lambda rows: rows.abs().amax(dim=1))


def block_mean(x: Tensor, block: int) -> Tensor:
    """For each element of a flat tensor, the mean magnitude of its block, in float64."""
    counted = _per_block(torch.ones_like(x, dtype=torch.float64), block, lambda rows: rows.sum(dim=1))
    return _per_block(x.double(), block, lambda rows: rows.abs().sum(dim=1)) / counted


def saturation(x: Tensor, block: int) -> Tensor:
    """Extra error at the edge of float32, where a scale is cut so that its largest product stays finite."""
    largest = block_absmax(x, block)
    return torch.where(largest > 2.0**127, largest * 2.0**-6, 0.0)


def _per_block(x: Tensor, block: int, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    rows = F.pad(x, (0, -x.numel() % block)).view(-1, block)
    return reduce(rows).repeat_interleave(block)[: x.numel()]
