"""The other ranks, and the one thing collectives do with them: send bytes to each while receiving bytes from each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol
from zlib import crc32

import torch
from torch import Tensor

from gradwire.errors import PeerError

__all__ = ["Peers", "Swap", "agree"]

_LINE_BYTES: Final = 512
_AGREE: Final = "the agreement of all ranks"


class Swap(Protocol):
    """Messages under way."""

    def wait(self) -> None:
        """Block until all have arrived; :class:`~gradwire.errors.PeerError` names a rank that is gone or stuck."""
        ...


class Peers(Protocol):
    """A rank's view of its group."""

    @property
    def rank(self) -> int:
        """This one."""
        ...

    @property
    def size(self) -> int:
        """How many there are, this one included."""
        ...

    def swap(self, out: Mapping[int, Tensor], into: Mapping[int, Tensor], tag: int, what: str) -> Swap:
        """Start to send ``out`` and to receive ``into``: bytes on the CPU, by rank, none of them this rank's.

        Messages of equal tags meet, whatever the order they are started in. The tensors must not change before
        ``wait`` returns. ``what`` is for people, in an error.
        """
        ...


def agree(peers: Peers, what: str, tag: int = 0) -> None:
    """Exchange a line of text; :class:`~gradwire.errors.PeerError` on every rank if two ranks' lines differ.

    >>> from gradwire.collectives.loopback import Alone
    >>> agree(Alone(), "all is well")
    """
    mine = torch.zeros(_LINE_BYTES, dtype=torch.uint8, device="cpu")
    text = f"{what[: _LINE_BYTES - 64]} (checksum {crc32(what.encode()):08x})".encode()[:_LINE_BYTES]
    mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    others = [rank for rank in range(peers.size) if rank != peers.rank]
    lines = {rank: torch.empty_like(mine) for rank in others}
    peers.swap(dict.fromkeys(others, mine), lines, tag, _AGREE).wait()
    lines[peers.rank] = mine
    said = [bytes(lines[rank].tolist()).rstrip(b"\0").decode(errors="replace") for rank in range(peers.size)]
    for rank, line in enumerate(said):
        if line != said[0]:
            raise PeerError(f"rank {rank} has {line!r}, but rank 0 has {said[0]!r}; all ranks must have the same.")
