"""Ranks of one process: for one rank alone, and for tests of many with a thread each."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from gradwire.errors import PeerError

__all__ = ["Alone", "Loopback"]


class _Mail:
    """Messages by (sender, receiver, tag)."""

    def __init__(self) -> None:
        self.messages: dict[tuple[int, int, int], Tensor] = {}
        self.arrived = threading.Condition()


@dataclass(frozen=True)
class Loopback:
    """A rank whose peers are threads of this process. ``wait`` gives up after ``timeout_s``.

    >>> import torch
    >>> one, two = Loopback.ranks(2)
    >>> inbox = torch.empty(1, dtype=torch.uint8)
    >>> _ = one.swap({1: torch.tensor([7], dtype=torch.uint8)}, {}, 0, "a test")
    >>> two.swap({}, {0: inbox}, 0, "a test").wait()
    >>> inbox
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

    def swap(self, out: Mapping[int, Tensor], into: Mapping[int, Tensor], tag: int, what: str) -> _Delivery:
        """Leave messages for the others; ``wait`` collects theirs."""
        with self.mail.arrived:
            for to, message in out.items():
                self.mail.messages[self.rank, to, tag] = message.clone()
            self.mail.arrived.notify_all()
        return _Delivery(self, into, tag, what)


@dataclass(frozen=True)
class _Delivery:
    peers: Loopback
    into: Mapping[int, Tensor]
    tag: int
    what: str

    def wait(self) -> None:
        mail = self.peers.mail
        for source, into in self.into.items():
            key = (source, self.peers.rank, self.tag)
            with mail.arrived:
                if not mail.arrived.wait_for(functools.partial(mail.messages.__contains__, key), self.peers.timeout_s):
                    raise PeerError(f"{self.what}: rank {source} sent nothing for {self.peers.timeout_s:g} s.")
                into.copy_(mail.messages.pop(key))


class Alone(Loopback):
    """The only rank: what goes in comes out, through the codec.

    >>> Alone().size
    1
    """

    def __init__(self) -> None:
        super().__init__(0, 1)
