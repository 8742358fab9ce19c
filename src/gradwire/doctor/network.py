"""Network interfaces, which of them ranks would use, and whether processes of this machine reach each other."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gradwire.doctor.finding import Finding

__all__ = ["Interface", "interfaces", "network_findings"]

_SYSTEM: Final = Path("/sys/class/net")
_ADDRESS_REQUEST: Final = 0x8915  # SIOCGIFADDR
_CHOICE: Final = "GLOO_SOCKET_IFNAME"
_WAIT_S: Final = 5.0


@dataclass(frozen=True)
class Interface:
    """A network interface, as the system describes it.

    >>> Interface("eth0", "10.0.0.4", 1500, 10_000, True).describe()
    '10.0.0.4, MTU 1500, 10000 Mbit/s'
    """

    name: str
    address: str | None  # IPv4
    mtu: int | None
    mbit_s: int | None  # None: the system does not say, as of most virtual ones
    up: bool

    def describe(self) -> str:
        """In a line."""
        parts = [self.address or "no IPv4 address"]
        parts += [f"MTU {self.mtu}"] if self.mtu else []
        parts += [f"{self.mbit_s} Mbit/s"] if self.mbit_s else []
        return ", ".join(parts) + ("" if self.up else "; down")


def network_findings() -> list[Finding]:
    """The interfaces, the one that gloo would choose, and loopback.

    >>> [each.name for each in network_findings()][-2:]
    ['gloo uses', 'loopback']
    """
    found = interfaces()
    named = [Finding(f"interface {each.name}", "ok", each.describe()) for each in found if each.address or each.mbit_s]
    return [*named, _chosen(found), _loopback()]


def interfaces() -> list[Interface]:
    """All of this machine, loopback first.

    >>> interfaces()[0].address
    '127.0.0.1'
    """
    found = [_look(name) for _, name in socket.if_nameindex()]
    return sorted(found, key=lambda each: (not (each.address or "").startswith("127."), each.name))


def _look(name: str) -> Interface:
    mtu, speed = _number(name, "mtu"), _number(name, "speed")
    up = _text(name, "operstate") not in ("down", "lowerlayerdown", "notpresent")
    return Interface(name, _address(name), mtu, speed if speed and speed > 0 else None, up)


def _text(name: str, what: str) -> str | None:
    try:
        return (_SYSTEM / name / what).read_text().strip()
    except OSError:  # some drivers answer "invalid argument" to a question for the speed
        return None


def _number(name: str, what: str) -> int | None:
    with suppress(ValueError):
        return int(_text(name, what) or "")
    return None


def _address(name: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _ADDRESS_REQUEST, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _chosen(found: list[Interface]) -> Finding:
    """As gloo does: the interface that is named, or the one that has the address of this machine's name."""
    outside = [each for each in found if each.address and each.up and not each.address.startswith("127.")]
    better = f"export {_CHOICE}={outside[0].name}" if outside else None
    named = os.environ.get(_CHOICE, "").split(",")[0]
    if named:
        there = next((each for each in found if each.name == named), None)
        if there is None or there.address is None:
            fact = f"{_CHOICE} is {named!r}, which {'has no IPv4 address' if there else 'does not exist'}"
            return Finding("gloo uses", "problem", fact, fix=better or f"unset {_CHOICE}")
        return Finding("gloo uses", "ok", f"{named}, {there.address}, because {_CHOICE} says so")
    host = socket.gethostname()
    address = _own_address(host)
    if address is None:
        fact = "loopback: this machine's name has no address of its own, and other machines cannot reach it"
        return Finding("gloo uses", "warning" if outside else "ok", fact, fix=better)
    name = next((each.name for each in found if each.address == address), None)
    if address.startswith("127."):
        fact = f"{name or 'loopback'}, {address}, the address of this machine's name: other machines cannot reach it"
        return Finding("gloo uses", "warning" if outside else "ok", fact, fix=better)
    return Finding("gloo uses", "ok", f"{name or 'an interface'}, {address}, the address of this machine's name")


def _own_address(host: str) -> str | None:
    """The first address of a name that this machine can listen at."""
    try:
        told = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for family, kind, protocol, _, where in told:
        with suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(where)
            return str(where[0])
    return None


def _loopback() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(_WAIT_S)
            answering = threading.Thread(target=_answer, args=(server,), daemon=True)
            answering.start()
            with socket.create_connection(server.getsockname(), timeout=_WAIT_S) as caller:
                caller.sendall(b"here")
                heard = caller.recv(4)
            answering.join(_WAIT_S)
    except OSError as error:
        return Finding(
            "loopback", "problem", f"processes of this machine cannot meet: {error}", fix="ip link set lo up"
        )
    if heard != b"here":
        return Finding("loopback", "problem", f"a message came back as {heard!r}", fix="ip link set lo up")
    return Finding("loopback", "ok", "a message over 127.0.0.1 came back")


def _answer(server: socket.socket) -> None:
    with suppress(OSError):
        caller, _ = server.accept()
        with caller:
            caller.sendall(caller.recv(4))
