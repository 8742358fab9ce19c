"""Blocks of bytes between partitions: left for one of them, and taken by it."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Protocol

from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.collectives.connect import connect
from gradwire.collectives.peers import Swap
from gradwire.collectives.processes import ProcessPeers
from gradwire.collectives.sockets import SocketPeers
from gradwire.errors import ConfigError, PeerError

__all__ = ["Exchange", "InProcessExchange", "ProcessGroupExchange"]

_POLL_S: Final = 0.05
_WHAT: Final = "the exchange of slices"
_MOST_LEAVING: Final = 256
_TAGS: Final = 1 << 31  # what gloo can tell apart


class Exchange(Protocol):
    """How the partitions of a parameter reach each other.

    Blocks are flat tensors of bytes on the CPU, named by a tag. They arrive while nobody waits for them, so that
    fetching from many partitions is done in parallel and beside decoding.
    """

    @property
    def rank(self) -> int:
        """The partition this is."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def put(self, to: int, tag: int, block: Tensor) -> None:
        """Leave a block for another partition. Returns at once; the block must not change any more."""
        ...

    def take(self, source: int, tag: int, nbytes: int, timeout_s: float | None = None) -> Tensor | None:
        """Wait for a block of so many bytes; None if it has not come in time.

        Without a time, that of the exchange holds, and :class:`~gradwire.errors.PeerError` names the partition.
        """
        ...

    def look(self, source: int, tag: int, nbytes: int) -> Tensor | None:
        """Take a block that is here already; None if it is not, even if the partition has ended."""
        ...

    def close(self) -> None:
        """End it: whoever waits for this partition is told."""
        ...


class _Blocks:
    """Blocks by (from, to, tag)."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, int, int], Tensor] = {}
        self.arrived = threading.Condition()
        self.closed: set[int] = set()


@dataclass(frozen=True)
class InProcessExchange:
    """Partitions in one process, whether they share a thread or not.

    >>> import torch
    >>> one, two = InProcessExchange.group(2)
    >>> one.put(1, 7, torch.tensor([5], dtype=torch.uint8))
    >>> two.take(0, 7, nbytes=1)
    tensor([5], dtype=torch.uint8)
    """

    rank: int = 0
    size: int = 1
    timeout_s: float = 300.0
    _shared: _Blocks = field(default_factory=_Blocks, repr=False)

    @classmethod
    def group(cls, size: int, timeout_s: float = 300.0) -> list[InProcessExchange]:
        """One for each partition."""
        shared = _Blocks()
        return [cls(rank, size, timeout_s, shared) for rank in range(size)]

    def put(self, to: int, tag: int, block: Tensor) -> None:
        """Leave a block."""
        with self._shared.arrived:
            self._shared.blocks[self.rank, to, tag] = block
            self._shared.arrived.notify_all()

    def take(self, source: int, tag: int, nbytes: int, timeout_s: float | None = None) -> Tensor | None:
        """Take it away."""
        shared, key = self._shared, (source, self.rank, tag)
        with shared.arrived:
            patience = self.timeout_s if timeout_s is None else timeout_s
            shared.arrived.wait_for(lambda: key in shared.blocks or source in shared.closed, patience)
            block = shared.blocks.pop(key, None)
        if block is not None:
            return sized(block, source, nbytes)
        if source in shared.closed:
            raise PeerError(f"partition {source} is gone: its exchange was closed.")
        if timeout_s is None:
            raise PeerError(f"partition {source} has left no block for {self.timeout_s:g} s.")
        return None

    def look(self, source: int, tag: int, nbytes: int) -> Tensor | None:
        """Take a block that is here already."""
        with self._shared.arrived:
            block = self._shared.blocks.pop((source, self.rank, tag), None)
        return None if block is None else sized(block, source, nbytes)

    def close(self) -> None:
        """Tell the others."""
        with self._shared.arrived:
            self._shared.closed.add(self.rank)
            self._shared.arrived.notify_all()


@dataclass(frozen=True)
class ProcessGroupExchange:
    """Partitions are the ranks of a process group.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> ProcessGroupExchange.of(None).size
    1
    >>> dist.destroy_process_group()
    """

    peers: ProcessPeers
    # What may not have left yet. Our own connections keep it themselves, and who waits for the last waits for all.
    _leaving: dict[int, deque[Swap]] = field(default_factory=lambda: defaultdict(deque), repr=False)

    @classmethod
    def of(cls, group: ProcessGroup | None = None, *, timeout_s: float = 300.0) -> ProcessGroupExchange:
        """Connect the ranks of a group, or of all; every one of them must call it."""
        return cls(connect(group, timeout_s=timeout_s))

    @property
    def rank(self) -> int:
        """In the group."""
        return self.peers.rank

    @property
    def size(self) -> int:
        """Of the group."""
        return self.peers.size

    def put(self, to: int, tag: int, block: Tensor) -> None:
        """Start to send."""
        swap = self.peers.swap({}, tag % _TAGS, _WHAT)
        swap.send(to, block)
        leaving = self._leaving[to]
        if isinstance(self.peers, SocketPeers):
            leaving.clear()
        elif len(leaving) >= _MOST_LEAVING:
            leaving.popleft().wait()
        leaving.append(swap)

    def take(self, source: int, tag: int, nbytes: int, timeout_s: float | None = None) -> Tensor | None:
        """Receive. A process that ends is noticed, and named, at once."""
        if timeout_s is None:
            return self.peers.swap({source: nbytes}, tag % _TAGS, _WHAT).receive(source)
        peers, end = self._own_connections(), time.monotonic() + timeout_s
        while True:
            left = max(0.0, end - time.monotonic())
            block = peers.receive_within(source, tag % _TAGS, min(left, _POLL_S), _WHAT)
            if block is not None:
                return sized(block, source, nbytes)
            if left == 0:
                return None

    def look(self, source: int, tag: int, nbytes: int) -> Tensor | None:
        """Receive what is here already. An end is not reported: a partition that is done may end before the others."""
        block = self._own_connections().look(source, tag % _TAGS)
        return None if block is None else sized(block, source, nbytes)

    def _own_connections(self) -> SocketPeers:
        if not isinstance(self.peers, SocketPeers):
            raise ConfigError(
                "to leave out stragglers gradwire's own connections are needed: GRADWIRE_TRANSPORT=sockets."
            )
        return self.peers

    def close(self) -> None:
        """End the connections, once everything has left, unless others are gone already."""
        with suppress(PeerError):
            for leaving in self._leaving.values():
                while leaving:
                    leaving.popleft().wait()
        self.peers.close()


def sized(block: Tensor, source: int, nbytes: int) -> Tensor:
    """A block that must have so many bytes.

    >>> import torch
    >>> sized(torch.zeros(3, dtype=torch.uint8), 2, 5)
    Traceback (most recent call last):
    gradwire.errors.PeerError: partition 2 left 3 bytes; expected 5.
    """
    if block.numel() not in (1, nbytes):  # one byte is a notice, that there is nothing
        raise PeerError(f"partition {source} left {block.numel()} bytes; expected {nbytes}.")
    return block
