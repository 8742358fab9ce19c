"""What block-scaled codecs share: the dtypes of a scale, and blocks in their bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

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
