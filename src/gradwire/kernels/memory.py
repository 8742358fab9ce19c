"""Memory for results. Large tensors on the CPU reuse what earlier ones gave back: fresh pages cost more than a pass."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

try:
    from gradwire._native import take_memory
except ImportError:  # not built: a machine without a compiler
    take_memory = None  # type: ignore[assignment]

__all__ = ["copy_of", "empty", "zeros"]

_LARGE: Final = 1 << 20  # bytes


def empty(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A flat tensor of anything.

    >>> empty(3, torch.float32, torch.device("cpu")).shape
    torch.Size([3])
    """
    nbytes = count * dtype.itemsize
    if take_memory is None or device.type != "cpu" or nbytes < _LARGE:
        return torch.empty(count, dtype=dtype, device=device)
    memory: Tensor = take_memory(nbytes)
    return memory.view(dtype)


def zeros(count: int, device: torch.device) -> Tensor:
    """A flat float32 tensor of zeros.

    >>> zeros(2, torch.device("cpu"))
    tensor([0., 0.])
    """
    return empty(count, torch.float32, device).zero_()


def copy_of(tensor: Tensor) -> Tensor:
    """A contiguous copy.

    >>> copy_of(torch.ones(2, 2)).shape
    torch.Size([2, 2])
    """
    return empty(tensor.numel(), tensor.dtype, tensor.device).view(tensor.shape).copy_(tensor)
