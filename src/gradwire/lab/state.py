"""What labs are up: one small JSON file a lab, so that the next command finds what the last one made."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from gradwire.errors import LabError
from gradwire.lab.tools import namespace_exists

__all__ = ["FOLDER", "Host", "Record", "forget", "locked", "read", "read_all", "write"]

FOLDER: Final = Path("/run/gradwire")  # as lasting as the namespaces, which ip keeps in /run too
_PREFIX: Final = "gradwire"


@dataclass(frozen=True)
class Host:
    """One host of a lab: a network namespace with one interface.

    >>> Host("gradwire-lab-0", "10.77.0.1").interface
    'eth0'
    """

    namespace: str
    address: str
    interface: str = "eth0"


@dataclass(frozen=True)
class Record:
    """A lab as its file has it.

    Every namespace carries the prefix and the lab's name; no other is ever touched.

    >>> record = Record.plan("lab", "1f", hosts=2, subnet=5, rate="100mbit")
    >>> record.bridge, record.hosts[1]
    ('gradwire-lab-bridge', Host(namespace='gradwire-lab-1', address='10.77.5.2', interface='eth0'))
    >>> Record.from_json(record.to_json()) == record
    True
    """

    name: str
    token: str  # tells a lab from a later one of the same name
    subnet: int  # x of 10.77.x.0/24
    rate: str
    bridge: str
    hosts: tuple[Host, ...]

    @classmethod
    def plan(cls, name: str, token: str, *, hosts: int, subnet: int, rate: str) -> Record:
        """The record of a lab that is to be made."""
        made = tuple(Host(f"{_PREFIX}-{name}-{i}", f"10.77.{subnet}.{i + 1}") for i in range(hosts))
        return cls(name, token, subnet, rate, f"{_PREFIX}-{name}-bridge", made)

    @property
    def namespaces(self) -> list[str]:
        """All of them, the bridge's first."""
        return [self.bridge, *(host.namespace for host in self.hosts)]

    def is_up(self) -> bool:
        """Whether anything of it exists; a file may outlive its namespaces where a container is restarted."""
        return any(namespace_exists(n) for n in self.namespaces)

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Record:
        """The inverse of :meth:`to_json`."""
        fields = json.loads(text)
        return cls(**{**fields, "hosts": tuple(Host(**host) for host in fields["hosts"])})


@contextmanager
def locked() -> Iterator[None]:
    """Alone on this machine: two labs that come up at once take different names and subnets."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def read(name: str) -> Record | None:
    """The lab of that name, if it is up."""
    file = _file(name)
    try:
        record = Record.from_json(file.read_text())
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError) as error:
        raise LabError(
            f"{file} is not the file of a lab ({error}); remove it, and what `ip netns` has of it."
        ) from error
    return record if record.is_up() else None


def read_all() -> list[Record]:
    """Every lab that is up, by name."""
    found = (read(file.stem) for file in sorted(FOLDER.glob("*.json")))
    return [record for record in found if record is not None]


def write(record: Record) -> None:
    """Remember a lab; a reader sees the old file or the new one, never half of it."""
    draft = _file(record.name).with_suffix(".new")
    draft.write_text(record.to_json())
    os.replace(draft, _file(record.name))


def forget(name: str) -> None:
    """Remove a lab's file."""
    _file(name).unlink(missing_ok=True)


def _file(name: str) -> Path:
    return FOLDER / f"{name}.json"
