"""The server's connections: few and short as long as their caller is not identified.

gRPC accepts connections by itself and limits their number; it cannot tell a stranger's from a worker's. This module
finds the server's sockets among the descriptors of the process, and shuts down those of strangers.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Final
from urllib.parse import unquote

__all__ = ["Connections", "allowed_connections", "peer_address", "raise_descriptor_limit"]

_DESCRIPTORS: Final = Path("/proc/self/fd")
_RESERVED: Final = 64  # descriptors kept for the journal, snapshots and other files
_STRANGERS: Final = 8  # one connection in so many may be a stranger's


def raise_descriptor_limit(connections: int) -> None:
    """Allow this process descriptors for so many connections, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + 4 * _RESERVED
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def allowed_connections(most: int) -> int:
    """How many connections may be open, so that descriptors are left for the journal.

    >>> 0 < allowed_connections(10) <= 10
    True
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return most
    used = len(os.listdir(_DESCRIPTORS)) if _DESCRIPTORS.exists() else _RESERVED
    return max(1, min(most, soft - used - _RESERVED))


def peer_address(peer: str) -> str:
    """The address of a caller as gRPC names it, in the form of :class:`Connections`.

    >>> peer_address("ipv4:127.0.0.1:5000"), peer_address("ipv6:%5B::1%5D:5000")
    ('127.0.0.1 5000', '::1 5000')
    """
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return _address(host.strip("[]"), port)


def _address(host: str, port: int | str) -> str:
    with contextlib.suppress(ValueError):
        address = ip_address(host.partition("%")[0])
        mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
        host = str(mapped or address)
    return f"{host} {port}"


@dataclass
class _Connection:
    address: str
    since: float
    known: bool = False

    @property
    def host(self) -> str:
        return self.address.partition(" ")[0]


class Connections:
    """The connections of a server that listens at ``port``.

    ``most`` and ``most_per_address`` are limits for all connections; an eighth of each for those of strangers, that is,
    connections without an identified call. A stranger's ends after ``stranger_s``, and when there are too many the
    oldest ends first.
    """

    def __init__(self, port: int, most: int, most_per_address: int, stranger_s: float) -> None:
        self._port, self._most, self._most_per_address, self._stranger_s = port, most, most_per_address, stranger_s
        self._open: dict[str, _Connection | None] = {}  # by the name of the socket; None: not one of ours
        self._identified: set[str] = set()

    def identified(self, peer: str) -> None:
        """Keep the connection of a caller, named as gRPC names it, who was identified."""
        self._identified.add(peer)

    def sweep(self) -> int:
        """Shut down connections beyond the limits; returns how many."""
        # Whoever is in this set had connected before the descriptors are listed: no name waits for a later connection.
        identified, self._identified = self._identified, set()
        descriptors = self._find()
        ours = {name: each for name, each in self._open.items() if each is not None}
        known = {peer_address(peer) for peer in identified}
        for each in ours.values():
            each.known = each.known or each.address in known
        ended = 0
        for name in self._surplus(ours):
            if self._shut(descriptors[name], name):
                self._open[name] = None  # it is shut down once
                ended += 1
        return ended

    def _find(self) -> dict[str, int]:
        """Descriptors of all sockets, by name; what is new is looked at."""
        found: dict[str, int] = {}
        try:
            listed = os.listdir(_DESCRIPTORS)
        except OSError:  # no /proc, or no descriptor left to list them: handshakes end in time all the same
            return dict.fromkeys(self._open, -1)
        for each in listed:
            with contextlib.suppress(OSError):  # it was closed meanwhile
                name = os.readlink(_DESCRIPTORS / each)
                if name.startswith("socket:"):
                    found[name] = int(each)
        self._open = {name: each for name, each in self._open.items() if name in found}
        for name in found.keys() - self._open.keys():
            with contextlib.suppress(OSError):
                self._open[name] = self._look(found[name], name)
        return found

    def _look(self, descriptor: int, name: str) -> _Connection | None:
        with _duplicate(descriptor, name) as own:
            if own.family not in (socket.AF_INET, socket.AF_INET6) or own.getsockname()[1] != self._port:
                return None
            try:
                host, port = own.getpeername()[:2]
            except OSError:  # it listens
                return None
            return _Connection(_address(host, port), time.monotonic())

    def _surplus(self, ours: dict[str, _Connection]) -> Iterable[str]:
        """Names of connections to be shut down."""
        late = time.monotonic() - self._stranger_s
        strangers = sorted((each.since, name) for name, each in ours.items() if not each.known)
        surplus = {name for since, name in strangers if since < late}
        surplus.update(name for _, name in _oldest(strangers, self._most // _STRANGERS))
        by_host: dict[str, list[tuple[float, str]]] = defaultdict(list)
        for name, each in ours.items():
            by_host[each.host].append((each.since, name))
        for host, all_of in by_host.items():
            surplus.update(name for _, name in _oldest(sorted(all_of, reverse=True), self._most_per_address))
            of_host = [pair for pair in strangers if ours[pair[1]].host == host]
            surplus.update(name for _, name in _oldest(of_host, self._most_per_address // _STRANGERS))
        return surplus

    def _shut(self, descriptor: int, name: str) -> bool:
        with contextlib.suppress(OSError), _duplicate(descriptor, name) as own:
            own.shutdown(socket.SHUT_RDWR)
            return True
        return False


def _oldest(connections: list[tuple[float, str]], most: int) -> list[tuple[float, str]]:
    """Those at the front that are beyond ``most``, but one at least may stay."""
    return connections[: max(0, len(connections) - max(1, most))]


def _duplicate(descriptor: int, name: str) -> socket.socket:
    """A socket of our own for a descriptor of gRPC's, which may close it, and use its number again, at any time."""
    copy = os.dup(descriptor)
    try:
        if os.readlink(_DESCRIPTORS / str(copy)) != name:
            raise OSError(f"descriptor {descriptor} is no longer {name}.")
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
