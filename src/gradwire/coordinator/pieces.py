"""A model split over several servers: each has a slice of all parameters laid end to end, by the one split rule."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from gradwire.coordinator.structure import label
from gradwire.errors import ConfigError, PeerError
from gradwire.partition import partition

__all__ = ["Piece", "cut", "joined", "pieces_of"]

_NAME: Final = re.compile(r"(.*)@(\d+)/(\d+(?:x\d+)*|-)", re.DOTALL)


@dataclass(frozen=True)
class Piece:
    """Elements of an entry from ``start`` on. Its name says which, so that a server's entries explain themselves.

    >>> Piece("w", 100, (30, 10)).text, Piece.parsed("w@100/30x10")
    ('w@100/30x10', Piece(name='w', start=100, shape=(30, 10)))
    """

    name: str
    start: int
    shape: tuple[int, ...]  # of the whole entry

    @property
    def text(self) -> str:
        """What a server calls it."""
        return f"{self.name}@{self.start}/{'x'.join(map(str, self.shape)) or '-'}"

    @classmethod
    def parsed(cls, text: str) -> Piece:
        """Undo :attr:`text`."""
        match = _NAME.fullmatch(text)
        if match is None:
            raise PeerError(f"{text!r} is not a piece of a model that was split over several servers.")
        name, start, shape = match.groups()
        return cls(name, int(start), () if shape == "-" else tuple(map(int, shape.split("x"))))


def pieces_of(entries: Mapping[str, Tensor], servers: int) -> list[dict[str, Tensor]]:
    """For each server its pieces of the entries, flat, by the names of pieces.

    >>> [list(each) for each in pieces_of({"w": torch.zeros(2, 3), "b": torch.zeros(2)}, 2)]
    [['w@0/2x3'], ['w@4/2x3', 'b@0/2']]
    """
    result: list[dict[str, Tensor]] = [{} for _ in range(servers)]
    slices = partition(sum(tensor.numel() for tensor in entries.values()), servers)
    at = 0
    for name, tensor in entries.items():
        flat, shape = tensor.reshape(-1), tuple(tensor.shape)
        for mine, share in zip(result, slices, strict=True):
            start, stop = max(share.start - at, 0), min(share.stop - at, flat.numel())
            if start < stop:
                mine[Piece(name, start, shape).text] = flat[start:stop]
        at += flat.numel()
    return result


def cut(entries: Mapping[str, Tensor], names: Iterable[tuple[str, int]]) -> dict[str, Tensor]:
    """Those pieces of entries that a server has, of the names and lengths it gives; entries may be missing.

    >>> list(cut({"b": torch.zeros(2)}, [("w@4/2x3", 2), ("b@0/2", 2)]))
    ['b@0/2']
    """
    result = {}
    for text, length in names:
        piece = Piece.parsed(text)
        tensor = entries.get(piece.name)
        if tensor is not None:
            if tuple(tensor.shape) != piece.shape:
                raise ConfigError(
                    f"{label('gradients', piece.name)} must have shape {piece.shape}, as the parameter; "
                    f"got {tuple(tensor.shape)}."
                )
            result[text] = tensor.reshape(-1)[piece.start : piece.start + length]
    return result


def joined(parts: list[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Undo :func:`pieces_of`.

    >>> entries = {"w": torch.arange(6.0).view(2, 3), "b": torch.ones(2)}
    >>> joined(pieces_of(entries, 3))["w"]
    tensor([[0., 1., 2.],
            [3., 4., 5.]])
    """
    found: dict[str, list[tuple[Piece, Tensor]]] = {}
    for part in parts:
        for text, tensor in part.items():
            piece = Piece.parsed(text)
            found.setdefault(piece.name, []).append((piece, tensor))
    result = {}
    for name, each in found.items():
        each.sort(key=lambda pair: pair[0].start)
        flat = torch.cat([tensor.reshape(-1) for _, tensor in each])
        shape = each[0][0].shape
        if flat.numel() != math.prod(shape):
            raise PeerError(f"the servers have {flat.numel()} elements of {name!r}, which has {math.prod(shape)}.")
        result[name] = flat.view(shape)
    return result
