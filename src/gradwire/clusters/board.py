"""A store in the program that starts ranks elsewhere: where they meet, leave checkpoints, and say how it goes.

For clusters without a file system that all machines share. It is torch's own TCP store, in the memory of that program.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final
from zlib import crc32

from gradwire.adapters import Replica
from gradwire.clusters.stores import Store, tcp_store
from gradwire.collectives.peers import tell
from gradwire.errors import CheckpointError
from gradwire.tree import from_bytes, to_bytes

__all__ = ["Board"]

_TAG: Final = 3
_PIECE: Final = 1 << 22  # bytes of a value: torch's store refuses large ones
_COMPLETE: Final = "checkpoint"
_SAID: Final = "said"


class Board:
    """What ranks leave with the program that has started them; also a keeper of checkpoints.

    >>> board = Board.open("127.0.0.1")
    >>> Board.reach(*board.address).say({"loss": 0.5})
    >>> list(board.heard())
    [{'loss': 0.5}]
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._heard = 0

    @classmethod
    def open(cls, host: str, timeout_s: float = 300.0) -> Board:
        """In the program that starts the others, which reach it by ``host``, at any free port."""
        return cls(tcp_store(host, 0, master=True, timeout_s=timeout_s))

    @classmethod
    def reach(cls, host: str, port: int, timeout_s: float = 300.0) -> Board:
        """From a rank."""
        return cls(tcp_store(host, port, master=False, timeout_s=timeout_s))

    @property
    def address(self) -> tuple[str, int]:
        """For :meth:`reach`."""
        return self.store.host, self.store.port

    # What ranks say.

    def say(self, values: dict[str, Any]) -> None:
        """For the program to hear."""
        place = self.store.add(f"{_SAID}/count", 1)
        self.store.set(f"{_SAID}/{place}", json.dumps(values))

    def heard(self) -> Iterator[dict[str, Any]]:
        """What has been said since the last time."""
        while self.store.check([f"{_SAID}/{self._heard + 1}"]):
            self._heard += 1
            key = f"{_SAID}/{self._heard}"
            yield json.loads(self.store.get(key))
            self.store.delete_key(key)

    # Checkpoints: the last complete one stays.

    def save(self, replica: Replica) -> None:
        """Leave what this rank keeps; it counts when all ranks have."""
        peers, data = replica.peers, to_bytes(replica.state_dict())
        for number, start in enumerate(range(0, len(data), _PIECE)):
            self.store.set(f"{_part(replica.steps, peers.size, peers.rank)}/{number}", data[start : start + _PIECE])
        told = tell(peers, f"{crc32(data)} {len(data)}", _TAG, "the saving of a checkpoint")
        if peers.rank == 0:
            old = self._complete()
            files = [[int(number) for number in line.split()] for line in told]
            self.store.set(_COMPLETE, json.dumps({"steps": replica.steps, "files": files}))
            if old is not None and old["steps"] != replica.steps:
                self._forget(old)
        tell(peers, "saved", _TAG, "the saving of a checkpoint")  # nobody goes on before it counts

    def restore(self, replica: Replica) -> bool:
        """From the last complete checkpoint."""
        found = self._complete()
        if found is None:
            return False
        ranks = len(found["files"])
        wanted = sorted({0, replica.peers.rank}) if ranks == replica.peers.size else range(ranks)
        replica.load_state_dict([self._read(found, rank) for rank in wanted])
        return True

    def _complete(self) -> dict[str, Any] | None:
        found: dict[str, Any] | None = None
        if self.store.check([_COMPLETE]):
            found = json.loads(self.store.get(_COMPLETE))
        return found

    def _read(self, found: dict[str, Any], rank: int) -> Any:
        checksum, nbytes = found["files"][rank]
        where = _part(found["steps"], len(found["files"]), rank)
        data = b"".join(self.store.get(f"{where}/{number}") for number in range(_pieces(nbytes)))
        if len(data) != nbytes or crc32(data) != checksum:
            raise CheckpointError(f"what rank {rank} left at step {found['steps']} is damaged.")
        return from_bytes(data)

    def _forget(self, found: dict[str, Any]) -> None:
        for rank, (_, nbytes) in enumerate(found["files"]):
            for number in range(_pieces(nbytes)):
                self.store.delete_key(f"{_part(found['steps'], len(found['files']), rank)}/{number}")


def _part(steps: int, ranks: int, rank: int) -> str:
    return f"{_COMPLETE}/{steps}/{ranks}/{rank}"


def _pieces(nbytes: int) -> int:
    return -(-nbytes // _PIECE)
