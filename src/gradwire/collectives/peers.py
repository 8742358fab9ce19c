"""The other ranks, and the one thing collectives do with them: send bytes to each while receiving bytes from each."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar
from zlib import crc32

import torch
from torch import Tensor

from gradwire.errors import GradwireError, PeerError

__all__ = ["Peers", "Swap", "Team", "agree", "others", "post", "share", "tell", "together"]

_LINE_BYTES: Final = 512
_BETWEEN_PARTS: Final = re.compile(r", (?![^(\[]*[)\]])")  # commas outside of brackets
_AGREE: Final = "the agreement of all ranks"

Result = TypeVar("Result")


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

    def all_reduce(self, x: Tensor, tag: int) -> Callable[[], None]:
        """Start to replace a tensor by the sum over all ranks, as the process group's own backend does it.

        The function that comes back waits for it. Every rank starts these in the same order.
        """
        ...


def others(peers: Peers) -> list[int]:
    """All other ranks, the next one first, so that not all ranks send to the same one.

    >>> from gradwire.collectives.loopback import Loopback
    >>> others(Loopback(2, 4))
    [3, 0, 1]
    """
    return [(peers.rank + distance) % peers.size for distance in range(1, peers.size)]


@dataclass(frozen=True)
class Team:
    """Some of the ranks, with numbers of their own.

    >>> from gradwire.collectives.loopback import Loopback
    >>> team = Team.of(Loopback(2, 4), [0, 2])
    >>> team.rank, team.size
    (1, 2)
    """

    peers: Peers
    members: tuple[int, ...]  # their ranks among all
    rank: int
    size: int

    @classmethod
    def of(cls, peers: Peers, members: Sequence[int]) -> Team:
        """The team of these ranks, this one among them."""
        return cls(peers, tuple(members), list(members).index(peers.rank), len(members))

    def swap(self, nbytes: Mapping[int, int], tag: int, what: str) -> Swap:
        """Messages among the team."""
        there = self.peers.swap({self.members[rank]: size for rank, size in nbytes.items()}, tag, what)
        return _TeamSwap(self.members, there)

    def all_reduce(self, x: Tensor, tag: int) -> Callable[[], None]:
        """A team has no process group."""
        raise NotImplementedError


@dataclass(frozen=True)
class _TeamSwap:
    members: tuple[int, ...]
    swap: Swap

    def send(self, rank: int, data: Tensor) -> None:
        self.swap.send(self.members[rank], data)

    def receive(self, rank: int) -> Tensor:
        return self.swap.receive(self.members[rank])

    def wait(self) -> None:
        self.swap.wait()


def tell(peers: Peers, line: str, tag: int, what: str) -> list[str]:
    """The line of text each rank tells all others.

    >>> from gradwire.collectives.loopback import Alone
    >>> tell(Alone(), "here", 0, "the roll call")
    ['here']
    """
    return post(peers, line, tag, what)()


def post(peers: Peers, line: str, tag: int, what: str) -> Callable[[], list[str]]:
    """The same, in two halves: the line is sent now, and those of the others are there when they are asked for.

    >>> from gradwire.collectives.loopback import Alone
    >>> told = post(Alone(), "here", 0, "the roll call")
    >>> told()
    ['here']
    """
    text = line.encode(errors="replace")[:_LINE_BYTES].ljust(_LINE_BYTES, b"\0")
    mine = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    swap = peers.swap(dict.fromkeys(others(peers), _LINE_BYTES), tag, what)
    for rank in others(peers):
        swap.send(rank, mine)

    def told() -> list[str]:
        lines = {rank: swap.receive(rank) for rank in others(peers)} | {peers.rank: mine}
        swap.wait()
        texts = [lines[rank].numpy().tobytes() for rank in range(peers.size)]
        return [each.rstrip(b"\0").decode(errors="replace") for each in texts]

    return told


def share(peers: Peers, text: str, tag: int, what: str) -> list[str]:
    """The text of any length that each rank has for all others. It uses the next tag too.

    >>> from gradwire.collectives.loopback import Alone
    >>> share(Alone(), "here" * 1000, 0, "the roll call") == ["here" * 1000]
    True
    """
    mine = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
    sizes = [int(size) for size in tell(peers, str(mine.numel()), tag, what)]
    swap = peers.swap({rank: sizes[rank] for rank in others(peers)}, tag + 1, what)
    for rank in others(peers):
        swap.send(rank, mine)
    told = {rank: swap.receive(rank) for rank in others(peers)} | {peers.rank: mine}
    swap.wait()
    return [told[rank].numpy().tobytes().decode() for rank in range(peers.size)]


def together(
    peers: Peers, act: Callable[[], Result], tag: int, what: str, error: type[GradwireError] = PeerError
) -> Result:
    """Return what ``act`` returns once it has succeeded on every rank; raise on every rank if it failed on one.

    The rank on which it failed raises that failure, the others an ``error`` that names the rank. Every rank must call
    it, and ``act`` must not leave other ranks waiting when it fails.

    >>> from gradwire.collectives.loopback import Alone
    >>> together(Alone(), lambda: 1 / 0, 0, "the division")
    Traceback (most recent call last):
    ZeroDivisionError: division by zero
    """
    failure: Exception | None = None
    try:
        result = act()
    except Exception as caught:
        failure = caught
    outcomes = tell(peers, "" if failure is None else str(failure) or type(failure).__name__, tag, what)
    if failure is not None:
        raise failure
    for rank, words in enumerate(outcomes):
        if words:
            raise error(f"rank {rank}: {words}")
    return result


def agree(peers: Peers, what: str, tag: int = 0) -> None:
    """Exchange a line of text; :class:`~gradwire.errors.PeerError` on every rank if two ranks' lines differ.

    >>> from gradwire.collectives.loopback import Alone
    >>> agree(Alone(), "all is well")
    """
    line = f"{what[: _LINE_BYTES - 64]} (checksum {crc32(what.encode()):08x})"
    said = tell(peers, line, tag, _AGREE)
    for rank, told in enumerate(said):
        if told != said[0]:
            raise PeerError(
                f"rank {rank} has {told!r}, but rank 0 has {said[0]!r}; all ranks must have the same."
                f"{_differing(told, said[0])}"
            )


def _differing(one: str, other: str) -> str:
    """What differs of two long lines, in words.

    >>> _differing("int4, seed 1, lr=(0.1, 0.9) (checksum 12)", "int4, seed 1, lr=(0.1, 0.8) (checksum 34)")
    " The difference: 'lr=(0.1, 0.9)' instead of 'lr=(0.1, 0.8)'."
    >>> _differing("int4, hierarchical, seed 1", "int4, seed 1")
    " The difference: 'hierarchical' instead of nothing."
    """
    mine, theirs = (_BETWEEN_PARTS.split(line.partition(" (checksum ")[0]) for line in (one, other))
    only = [[part for part in here if part not in there] for here, there in ((mine, theirs), (theirs, mine))]
    if max(len(mine), len(theirs)) < 2 or not any(only):
        return ""
    words = [", ".join(map(repr, each)) or "nothing" for each in only]
    return f" The difference: {words[0]} instead of {words[1]}."
