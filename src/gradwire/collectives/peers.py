"""The other ranks, and the one thing collectives do with them: send bytes to each while receiving bytes from each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol
from zlib import crc32

import torch
from torch import Tensor

from gradwire.errors import PeerError

__all__ = ["Peers", "Swap", "agree", "others"]

_LINE_BYTES: Final = 512
_AGREE: Final = "the agreement of all ranks"


class Swap(Protocol):
    """One message from each of some ranks, and to each of some: started, and to be waited for.

    Tensors are bytes on the CPU. They must not change before ``wait`` returns.
    """

    def send(self, rank: int, data: Tensor) -> None:
        """Start to send a message."""
        ...

    def receive(self, rank: int) -> Tensor:
        """Block until a rank's message has arrived; :class:`~gradwire.errors.PeerError` if it is gone or stuck."""
        ...

    def wait(self) -> None:
        """Block until all messages have arrived, and all sent ones have left."""
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

    def swap(self, nbytes: Mapping[int, int], tag: int, what: str) -> Swap:
        """Start to receive a message from each rank of ``nbytes``, none of them this one, of so many bytes.

        Messages of equal tags meet, whatever the order they are started in. ``what`` is for people, in an error.
        """
        ...


def others(peers: Peers) -> list[int]:
    """All other ranks, the next one first, so that not all ranks send to the same one.

    >>> from gradwire.collectives.loopback import Loopback
    >>> others(Loopback(2, 4))
    [3, 0, 1]
    """
    return [(peers.rank + distance) % peers.size for distance in range(1, peers.size)]


def agree(peers: Peers, what: str, tag: int = 0) -> None:
    """Exchange a line of text; :class:`~gradwire.errors.PeerError` on every rank if two ranks' lines differ.

    >>> from gradwire.collectives.loopback import Alone
    >>> agree(Alone(), "all is well")
    """
    mine = torch.zeros(_LINE_BYTES, dtype=torch.uint8, device="cpu")
    text = f"{what[: _LINE_BYTES - 64]} (checksum {crc32(what.encode()):08x})".encode()[:_LINE_BYTES]
    mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    swap = peers.swap(dict.fromkeys(others(peers), _LINE_BYTES), tag, _AGREE)
    for rank in others(peers):
        swap.send(rank, mine)
    lines = {rank: swap.receive(rank) for rank in others(peers)} | {peers.rank: mine}
    swap.wait()
    said = [bytes(lines[rank].tolist()).rstrip(b"\0").decode(errors="replace") for rank in range(peers.size)]
    for rank, line in enumerate(said):
        if line != said[0]:
            raise PeerError(f"rank {rank} has {line!r}, but rank 0 has {said[0]!r}; all ranks must have the same.")
