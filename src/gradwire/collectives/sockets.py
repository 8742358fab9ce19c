"""Messages by TCP connections of our own between all ranks, which the native core keeps busy.

A message of gloo's takes three: that there is one, that there is room for it, and itself. Ours are sent at once, and
wait where they arrive for whoever asks for their tag. That is several times faster, and a tenth of the processor time.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Final

from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.collectives.blame import Report
from gradwire.collectives.peers import others
from gradwire.collectives.processes import ProcessPeers, SilentError
from gradwire.collectives.waiting import waiting
from gradwire.errors import PeerError
from gradwire.torch_internals import PrefixStore, TCPStore, default_store

if TYPE_CHECKING:
    from gradwire._native import Connections

__all__ = ["SocketPeers", "own_address"]

_HELLO: Final = struct.Struct("<8sI16s")  # who calls: a name, the rank, and what only ranks know
_NAME: Final = b"gradwire"
_HELLO_S: Final = 10.0  # for a caller to say who it is
_MOST_STRANGERS: Final = 64  # that have not said who they are; of more the oldest must go
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.1  # between looks for the addresses of other ranks
_GRACE_S: Final = 1.5  # for ranks that wait to be interrupted by a report, and to report what they saw
# For an all-reduce of torch's to end after a rank has ended: the rank may have done its part of it.
_ENDING_S: Final = 2.0


@dataclass(frozen=True)
class SocketPeers(ProcessPeers):
    """A rank with a connection to each other one, over which reports travel as well."""

    grace_s: ClassVar[float] = _GRACE_S
    reports_first: ClassVar[bool] = True

    connections: Connections
    _disturbed: list[float] = field(default_factory=list, repr=False, compare=False, kw_only=True)  # since when

    @classmethod
    def of(cls, rank: int, size: int, group: ProcessGroup, name: str, timeout_s: float) -> SocketPeers:
        """Connect to all other ranks, which must call it too. They find each other by the process group's store."""
        from gradwire._native import Connections

        found = _connect(rank, size, name, timeout_s) if size > 1 else {}
        connections = Connections([(other, connected.detach()) for other, connected in found.items()])
        return cls(rank, size, group, name, timeout_s, connections)

    def swap(self, nbytes: Mapping[int, int], tag: int, what: str) -> _Messages:
        """Nothing needs to be prepared: messages wait where they arrive."""
        return _Messages(self, tag, what, dict(nbytes))

    @property
    def wire_bytes(self) -> int | None:
        """As the kernel counts them."""
        return self.connections.wire_bytes()

    def receive_within(self, rank: int, tag: int, seconds: float, what: str) -> Tensor | None:
        """A message, or None if none with that tag comes and the rank is silent for so long."""
        try:
            return self.connections.receive(rank, tag, seconds)
        except RuntimeError as error:
            raise self.blame(rank, error, what) from error

    def look(self, rank: int, tag: int) -> Tensor | None:
        """A message that is here already; None if it is not, even if the rank has ended."""
        with suppress(RuntimeError):
            return self.connections.receive(rank, tag, 0.0)
        return None

    def close(self) -> None:
        """End the connections, and close their descriptors."""
        self._deadlines.close()
        self.connections.close()

    def _send_report(self, report: Report) -> None:
        self.connections.report(report.to_text())

    def _reports(self) -> dict[int, Report]:
        texts = {rank: self.connections.report_of(rank) for rank in others(self)}
        found = {rank: text and Report.from_text(text, self.size) for rank, text in texts.items()}
        return {rank: report for rank, report in found.items() if report}

    def _ended(self, rank: int | None, error: BaseException) -> tuple[int, ...]:
        return tuple(rank for rank in others(self) if self.connections.gone(rank))

    def _silences(self) -> tuple[float, ...]:
        return tuple(0.0 if rank == self.rank else self.connections.silence(rank) for rank in range(self.size))

    def _hopeless(self) -> bool:
        if not self.connections.disturbed():
            return False
        if not self._disturbed:
            self._disturbed.append(time.monotonic())
        return self.connections.reported() or time.monotonic() > self._disturbed[0] + _ENDING_S


@dataclass(frozen=True)
class _Messages:
    peers: SocketPeers
    tag: int
    what: str
    expected: dict[int, int]  # by rank: bytes of what has not been received
    tickets: dict[int, int] = field(default_factory=dict)

    def send(self, rank: int, data: Tensor) -> None:
        self.tickets[rank] = self.peers.connections.send(rank, self.tag, data.data_ptr(), data.numel(), data)

    def receive(self, rank: int) -> Tensor:
        try:
            with waiting():
                data = self.peers.connections.receive(rank, self.tag, self.peers.timeout_s)
        except RuntimeError as error:
            raise self.peers.blame(rank, error, self.what) from error
        if data is None:
            raise self.peers.blame(rank, self._silence("sent"), self.what)
        if data.numel() != (expected := self.expected.pop(rank)):
            raise PeerError(f"{self.what} failed: rank {rank} sent {data.numel()} bytes; expected {expected}.")
        return data

    def wait(self) -> None:
        for rank in list(self.expected):
            self.receive(rank)
        for rank, ticket in self.tickets.items():
            try:
                with waiting():
                    gone = self.peers.connections.flush(rank, ticket, self.peers.timeout_s)
            except RuntimeError as error:
                raise self.peers.blame(rank, error, self.what) from error
            if not gone:
                raise self.peers.blame(rank, self._silence("taken"), self.what)

    def _silence(self, what: str) -> SilentError:
        return SilentError(f"It has {what} nothing for {self.peers.timeout_s:g} s.")


def _connect(rank: int, size: int, name: str, timeout_s: float) -> dict[int, socket.socket]:
    """Return a connection to every other rank: this one calls those below it, and those above call it."""
    with _Meeting(rank, size, name) as meeting:
        end, pause_s = time.monotonic() + timeout_s, _SHORTEST_PAUSE_S
        while missing := meeting.missing():
            if time.monotonic() >= end:
                raise PeerError(meeting.complaint(missing, timeout_s))
            meeting.wait(min(pause_s, max(0.0, end - time.monotonic())))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return meeting.connected()


class _Meeting:
    """The connections of a rank while they are made, all at once: no caller that is silent delays another.

    Strangers may call as well. Each costs a descriptor until it says something wrong or is silent for too long.
    """

    def __init__(self, rank: int, size: int, name: str) -> None:
        self._rank, self._size, self._name = rank, size, name
        self._secret = secrets.token_bytes(16)
        self._found: dict[int, socket.socket] = {}
        self._calls: dict[socket.socket, int] = {}  # being made, to which rank
        self._callers: dict[socket.socket, _Caller] = {}  # that have not said who they are, the oldest first
        self._most_callers = size + _MOST_STRANGERS
        family, address = own_address()
        self._server = socket.create_server((address, 0), family=family, backlog=size + _MOST_STRANGERS)
        self._ready = selectors.DefaultSelector()
        self._server.setblocking(False)
        self._ready.register(self._server, selectors.EVENT_READ)
        port = self._server.getsockname()[1]
        default_store().set(f"{name}/address/{rank}", f"{port} {self._secret.hex()} {address}")

    def __enter__(self) -> _Meeting:
        return self

    def __exit__(self, *error: object) -> None:
        """Close everything but the connections that were handed over."""
        for each in (*self._calls, *self._callers, *self._found.values(), self._server):
            each.close()
        self._ready.close()

    def missing(self) -> list[int]:
        """Return the ranks that are not connected."""
        return [other for other in range(self._size) if other != self._rank and other not in self._found]

    def connected(self) -> dict[int, socket.socket]:
        """Hand the connections over."""
        found, self._found = self._found, {}
        return found

    def complaint(self, missing: list[int], timeout_s: float) -> str:
        """Say which ranks did not come in time."""
        below = [other for other in missing if other < self._rank]
        if not below:
            return f"ranks {missing} have not connected to rank {self._rank} in {timeout_s:g} s."
        why = "it does not answer" if below[0] in self._calls.values() else "it has not said where it listens"
        return f"rank {self._rank} cannot connect to rank {below[0]}: {why} in {timeout_s:g} s."

    def wait(self, seconds: float) -> None:
        """Do what can be done within so many seconds."""
        self._call_others()
        for key, _ in self._ready.select(seconds):
            which = key.fileobj
            assert isinstance(which, socket.socket)
            if which is self._server:
                self._accept()
            elif which in self._calls:
                self._greet(which)
            elif which in self._callers:
                self._listen(which)
        now = time.monotonic()
        for each in [each for each, caller in self._callers.items() if caller.since + _HELLO_S < now]:
            self._hang_up(each)

    def _call_others(self) -> None:
        for other in range(self._rank):
            if other in self._found or other in self._calls.values():
                continue
            if not default_store().check([key := f"{self._name}/address/{other}"]):
                return  # the next ones are asked for once this one is there
            port, _, address = str(default_store().get(key), "utf-8").split(" ")
            family, kind, _, _, target = socket.getaddrinfo(address, int(port), type=socket.SOCK_STREAM)[0]
            calling = socket.socket(family, kind)
            self._calls[calling] = other
            calling.setblocking(False)
            with suppress(BlockingIOError), self._naming(other):
                calling.connect(target)
            self._ready.register(calling, selectors.EVENT_WRITE)

    def _greet(self, calling: socket.socket) -> None:
        other = self._calls[calling]
        _, secret, _ = str(default_store().get(f"{self._name}/address/{other}"), "utf-8").split(" ")
        with self._naming(other):
            if failed := calling.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(failed, os.strerror(failed))
            calling.send(_HELLO.pack(_NAME, self._rank, bytes.fromhex(secret)))  # a new connection has room for it
        self._ready.unregister(calling)
        self._found[self._calls.pop(calling)] = calling

    @contextmanager
    def _naming(self, other: int) -> Iterator[None]:
        try:
            yield
        except BlockingIOError:
            raise
        except OSError as error:
            raise PeerError(f"rank {self._rank} cannot connect to rank {other}: {error}") from error

    def _accept(self) -> None:
        for _ in range(self._most_callers):  # and then those who have said something have their turn
            if len(self._callers) >= self._most_callers:
                self._hang_up(next(iter(self._callers)))
            try:
                caller, _ = self._server.accept()
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    return  # no caller is left, or it has gone again
                if not self._callers:
                    raise
                self._hang_up(next(iter(self._callers)))
                continue
            caller.setblocking(False)
            self._callers[caller] = _Caller()
            self._ready.register(caller, selectors.EVENT_READ)
            self._listen(caller)

    def _listen(self, caller: socket.socket) -> None:
        hello = self._callers[caller].hello
        try:
            more = caller.recv(_HELLO.size - len(hello))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        hello += more
        if not more:
            self._hang_up(caller)
        elif len(hello) == _HELLO.size:
            name, who, secret = _HELLO.unpack(hello)
            known = name == _NAME and hmac.compare_digest(secret, self._secret)
            if known and self._rank < who < self._size and who not in self._found:
                self._forget(caller)
                self._found[who] = caller
            else:
                self._hang_up(caller)

    def _forget(self, caller: socket.socket) -> None:
        self._ready.unregister(caller)
        del self._callers[caller]

    def _hang_up(self, caller: socket.socket) -> None:
        self._forget(caller)
        caller.close()


@dataclass
class _Caller:
    hello: bytearray = field(default_factory=bytearray)  # as much as has come
    since: float = field(default_factory=time.monotonic)


def own_address() -> tuple[socket.AddressFamily, str]:
    """The address others reach this rank by: that of gloo's interface if one is named, or else of the way to the store.

    Only it is listened at.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        return socket.AF_INET, _address_of(interface)
    there: object = default_store()
    while isinstance(there, PrefixStore):
        there = there.underlying_store
    host = there.host if isinstance(there, TCPStore) else socket.gethostname()
    with suppress(OSError):
        for family, kind, _, _, target in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe, suppress(OSError):
                probe.connect(target)  # sends nothing, but chooses the way
                return family, str(probe.getsockname()[0])
    return socket.AF_INET, "127.0.0.1"


def _address_of(interface: str) -> str:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
        except OSError as error:
            raise PeerError(f"GLOO_SOCKET_IFNAME names {interface!r}, which has no IPv4 address: {error}.") from error
    return socket.inet_ntoa(answer[20:24])
