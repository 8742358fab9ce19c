"""Messages by TCP connections of our own between all ranks, which the native core keeps busy.

A message of gloo's takes three: that there is one, that there is room for it, and itself. Ours are sent at once, and
wait where they arrive for whoever asks for their tag. That is several times faster, and a tenth of the processor time.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import ProcessGroup

from gradwire.collectives.peers import others
from gradwire.collectives.processes import ProcessPeers, SilentError, store
from gradwire.collectives.waiting import waiting
from gradwire.errors import PeerError

if TYPE_CHECKING:
    from gradwire._native import Connections

__all__ = ["SocketPeers", "own_address"]

_HELLO: Final = struct.Struct("<8sI16s")  # who calls: a name, the rank, and what only ranks know
_NAME: Final = b"gradwire"
_HELLO_S: Final = 10.0
# Places in Linux's struct tcp_info.
_OPTIONS, _SEGMENTS_OUT, _BYTES_SENT, _TCP_INFO_BYTES = 5, 136, 200, 208


class _Counters:
    """Descriptors of the connections, for the kernel's counts."""

    def __init__(self, descriptors: list[int]) -> None:
        self._descriptors, self._lock = descriptors, threading.Lock()
        self._last: int | None = 0 if sys.platform.startswith("linux") else None

    def __del__(self) -> None:
        self._release()

    def close(self) -> None:
        """Count for the last time, and close the descriptors."""
        with self._lock:
            self._last = self._count()
            self._release()

    def wire_bytes(self) -> int | None:
        """What has left, acknowledgements, repetitions and the headers down to Ethernet's included."""
        with self._lock:
            return self._count()

    def _release(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _count(self) -> int | None:
        if not self._descriptors or not sys.platform.startswith("linux"):
            return self._last
        total = 0
        for each in self._descriptors:
            connected = socket.socket(fileno=each)
            try:
                told = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                internet = 40 if connected.family == socket.AF_INET6 else 20
            finally:
                connected.detach()
            if len(told) < _TCP_INFO_BYTES:  # before Linux 4.19
                return None
            (segments,), (data,) = (
                struct.unpack_from("=I", told, _SEGMENTS_OUT),
                struct.unpack_from("=Q", told, _BYTES_SENT),
            )
            timestamps = 12 * (told[_OPTIONS] & 1)
            total += data + segments * (14 + internet + 20 + timestamps)
        return total


@dataclass(frozen=True)
class SocketPeers(ProcessPeers):
    """A rank with a connection to each other one."""

    connections: Connections
    counters: _Counters

    @classmethod
    def of(cls, rank: int, size: int, group: ProcessGroup, name: str, timeout_s: float) -> SocketPeers:
        """Connect to all other ranks, which must call it too. They find each other by the process group's store."""
        from gradwire._native import Connections

        found = _connect(rank, size, name, timeout_s) if size > 1 else {}
        counters = _Counters([connected.dup().detach() for connected in found.values()])
        connections = Connections([(other, connected.detach()) for other, connected in found.items()])
        return cls(rank, size, group, name, timeout_s, connections, counters)

    def swap(self, nbytes: Mapping[int, int], tag: int, what: str) -> _Messages:
        """Nothing needs to be prepared: messages wait where they arrive."""
        return _Messages(self, tag, what, dict(nbytes))

    @property
    def wire_bytes(self) -> int | None:
        """As the kernel counts them."""
        return self.counters.wire_bytes()

    def receive_within(self, rank: int, tag: int, seconds: float, what: str) -> Tensor | None:
        """A message, or None if none with that tag comes and the rank is silent for so long."""
        try:
            return self.connections.receive(rank, tag, seconds)
        except RuntimeError as error:
            raise self.blame(rank, error, what) from error

    def close(self) -> None:
        """End the connections, and close their descriptors."""
        self._deadlines.close()
        self.connections.close()
        self.counters.close()

    def _hang_up(self, accused: int) -> None:
        self.connections.close()

    def _gone(self, tag: int) -> tuple[int, Exception] | None:
        for rank in others(self):
            try:
                self.connections.receive(rank, tag, 0.0)
            except RuntimeError as error:
                return rank, error
        return None


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
    """A connection to every other rank: this one calls those below it, and is called by those above."""
    secret, deadline = secrets.token_bytes(16), time.monotonic() + timeout_s
    family, address = own_address()
    connected: dict[int, socket.socket] = {}
    try:
        with socket.create_server((address, 0), family=family, backlog=size) as server:
            port = server.getsockname()[1]
            store().set(f"{name}/address/{rank}", f"{port} {secret.hex()} {address}")
            for other in range(rank):
                connected[other] = _call(rank, other, name, deadline)
            while len(connected) < size - 1:
                who, caller = _answer(server, secret, deadline)
                if caller is None:
                    missing = [other for other in range(rank + 1, size) if other not in connected]
                    raise PeerError(f"ranks {missing} have not connected to rank {rank} in {timeout_s:g} s.")
                if rank < who < size and who not in connected:
                    connected[who] = caller
                else:
                    caller.close()  # nobody of ours
    except BaseException:
        for each in connected.values():
            each.close()
        raise
    for each in connected.values():
        each.setblocking(False)
    return connected


def _call(rank: int, other: int, name: str, deadline: float) -> socket.socket:
    try:
        port, secret, address = _told(f"{name}/address/{other}", _left(deadline)).split(" ")
        connected = socket.create_connection((address, int(port)), _left(deadline))
        try:
            connected.sendall(_HELLO.pack(_NAME, rank, bytes.fromhex(secret)))
        except OSError:
            connected.close()
            raise
    except (OSError, RuntimeError) as error:
        raise PeerError(f"rank {rank} cannot connect to rank {other}: {error}") from error
    return connected


def _left(deadline: float) -> float:
    return max(0.01, deadline - time.monotonic())


def _told(key: str, timeout_s: float) -> str:
    there = store()
    there.wait([key], timedelta(seconds=timeout_s))
    return str(there.get(key), "utf-8")


def _answer(server: socket.socket, secret: bytes, deadline: float) -> tuple[int, socket.socket | None]:
    """The next one that calls, and its rank, -1 if it is nobody of ours; no socket if nobody calls in time."""
    try:
        server.settimeout(_left(deadline))
        caller, _ = server.accept()
    except TimeoutError:
        return -1, None
    hello, patience = b"", min(deadline, time.monotonic() + _HELLO_S)
    with suppress(OSError):
        while len(hello) < _HELLO.size and time.monotonic() < patience:
            caller.settimeout(_left(patience))
            more = caller.recv(_HELLO.size - len(hello))
            if not more:
                break
            hello += more
    if len(hello) < _HELLO.size:
        return -1, caller
    name, who, told = _HELLO.unpack(hello)
    return (int(who) if name == _NAME and hmac.compare_digest(told, secret) else -1), caller


def own_address() -> tuple[socket.AddressFamily, str]:
    """The address others reach this rank by: that of gloo's interface if one is named, or else of the way to the store.

    Only it is listened at.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        return socket.AF_INET, _address_of(interface)
    there: object = store()
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
