"""Clipping of a gradient whose slices are on different partitions, without gathering it."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable

import torch
from torch import Tensor

from gradwire.errors import ConfigError
from gradwire.sharding.exchange import Exchange
from gradwire.sharding.stragglers import Stragglers

__all__ = ["clip_norm", "clip_value", "global_norm"]

_NUMBER = struct.Struct("<d")


def clip_value(slices: Iterable[Tensor], least: float, most: float) -> None:
    """Bring every element into [least, most].

    >>> gradient = torch.tensor([-3.0, 0.5])
    >>> clip_value([gradient], -1, 1)
    >>> gradient
    tensor([-1.0000,  0.5000])
    """
    if not -math.inf < least < most < math.inf:
        raise ConfigError(f"`least` must be below `most`, both finite; got {least!r} and {most!r}.")
    for each in slices:
        each.clamp_(least, most)


def clip_norm(slices: Iterable[Tensor], norm: float, most: float) -> None:
    """Scale a gradient of that L2 norm down to ``most``; a shorter one stays as it is.

    >>> gradient = torch.tensor([3.0, 4.0])
    >>> clip_norm([gradient], 5.0, 1.0)
    >>> gradient
    tensor([0.6000, 0.8000])
    """
    if not 0 < most < math.inf:
        raise ConfigError(f"`most` must be above 0 and finite; got {most!r}.")
    if norm > most:
        for each in slices:
            each.div_(norm / most)


def global_norm(slices: Iterable[Tensor], exchange: Exchange, tag: int, stragglers: Stragglers | None = None) -> float:
    """The L2 norm over the slices of all partitions, the same number on each.

    >>> from gradwire.sharding import InProcessExchange
    >>> global_norm([torch.tensor([3.0, 4.0])], InProcessExchange(), tag=0)
    5.0
    """
    mine = math.fsum(float(torch.linalg.vector_norm(each, dtype=torch.float64)) ** 2 for each in slices)
    block = torch.frombuffer(bytearray(_NUMBER.pack(mine)), dtype=torch.uint8)
    others = [rank for rank in range(exchange.size) if rank != exchange.rank]
    for rank in others:
        exchange.put(rank, tag, block)
    told = (stragglers or Stragglers()).collect(others, lambda rank, wait: exchange.take(rank, tag, _NUMBER.size, wait))
    squares = [mine] + [_NUMBER.unpack(bytes(each.tolist()))[0] for each in told.values() if each is not None]
    return math.sqrt(math.fsum(squares))
