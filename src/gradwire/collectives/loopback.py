"""Ranks of one process: for one rank alone, and for tests of many with a thread each."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradwire.collectives.waiting import waiting
from gradwire.errors import PeerError

__all__ = ["Alone", "Loopback"]


class _Mail:
    """Messages by (sender, receiver, tag), in the order they were sent in."""

    def __init__(self) -> None:
        self.messages: defaultdict[tuple[int, int, int], deque[Tensor]] = defaultdict(deque)
        self.arrived = threading.Condition()


@dataclass(frozen=True)
class Loopback:
    """A rank whose peers are threads of this process. ``wait`` gives up after ``timeout_s``.

    >>> import torch
    >>> one, two = Loopback.ranks(2)
    >>> one.swap({}, 0, "a test").send(1, torch.tensor([7], dtype=torch.uint8))
    >>> two.swap({0: 1}, 0, "a test").receive(0)
    tensor([7], dtype=torch.uint8)
    """

    rank: int
    size: int
    timeout_s: float = 30.0
    mail: _Mail = field(default_factory=_Mail, repr=False)

    @classmethod
    def ranks(cls, size: int, timeout_s: float = 30.0) -> list[Loopback]:
        """All ranks of a group."""
        mail = _Mail()
        return [cls(rank, size, timeout_s, mail) for rank in range(size)]

    def swap(self, nbytes: Mapping[int, int], tag: int, what: str) -> _Delivery:
        """Messages are left for the others at once, and theirs collected when they are received."""
        return _Delivery(self, dict(nbytes), tag, what)

    def all_reduce(self, x: Tensor, tag: int) -> Callable[[], None]:
        """The sum in the order of ranks."""
        ranks = [rank for rank in range(self.size) if rank != self.rank]
        mine = x.clone().view(-1).view(torch.uint8)
        swap = self.swap(dict.fromkeys(ranks, mine.numel()), tag, "the all-reduce")
        for rank in ranks:
            swap.send(rank, mine)

        def wait() -> None:
            told = {rank: swap.receive(rank) for rank in ranks} | {self.rank: mine}
            x.zero_()
            for rank in range(self.size):
                x.add_(told[rank].view(x.dtype).view(x.shape))

        return wait


@dataclass(frozen=True)
class _Delivery:
    peers: Loopback
    expected: dict[int, int]
    tag: int
    what: str

    def send(self, rank: int, data: Tensor) -> None:
        with self.peers.mail.arrived:
            self.peers.mail.messages[self.peers.rank, rank, self.tag].append(data.clone())
            self.peers.mail.arrived.notify_all()

    def receive(self, rank: int) -> Tensor:
        mail, key = self.peers.mail, (rank, self.peers.rank, self.tag)
        with waiting(), mail.arrived:
            if not mail.arrived.wait_for(lambda: mail.messages[key], self.peers.timeout_s):
                raise PeerError(f"{self.what} failed: rank {rank} sent nothing for {self.peers.timeout_s:g} s.")
            data = mail.messages[key].popleft()
        if data.numel() != (expected := self.expected.pop(rank)):
            raise PeerError(f"{self.what} failed: rank {rank} sent {data.numel()} bytes; expected {expected}.")
        return data

    def wait(self) -> None:
        for rank in list(self.expected):
            self.receive(rank)


class Alone(Loopback):
    """The only rank: what goes in comes out, through the codec.

    >>> Alone().size
    1
    """

    def __init__(self) -> None:
        super().__init__(0, 1)
