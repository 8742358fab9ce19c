"""A model on the disk: a snapshot, and the journal of every gradient that was accepted after it.

A push is written to the journal, applied, and acknowledged once it is on the disk. Replayed from the snapshot, the
journal gives the same parameters to the bit. Each worker numbers its pushes, so that one which is sent again because
the answer was lost is not applied twice.

::

    snapshot-0000000007.safetensors    the model before the first record of journal 7
    journal-0000000007                 pushes since then
    journal-0000000008                 and more, if the snapshot of 8 was never finished
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from gradwire.api import decode
from gradwire.coordinator.journal import Fsync, Journal, read_journal
from gradwire.coordinator.rules import GradientChangeMode, Model, check_mode
from gradwire.coordinator.structure import check_entries
from gradwire.errors import ConfigError, GradwireError, JournalError
from gradwire.files import write_whole
from gradwire.tree import from_bytes, to_bytes

__all__ = ["Push", "Store"]

_LARGEST: Final = 1 << 30  # of a decoded entry


@dataclass(frozen=True)
class Push:
    """Gradients as they travel: encoded, by name, from a worker that numbers what it sends.

    >>> import gradwire, torch
    >>> push = Push("a", 1, {"w": gradwire.encode(torch.ones(2), "int8")}, version=3)
    >>> Push.from_bytes(push.to_bytes()) == push
    True
    """

    worker: str
    sequence: int
    gradients: Mapping[str, bytes]
    version: int | None = None
    mode: GradientChangeMode = "descent"

    def to_bytes(self) -> bytes:
        """As a record."""
        frames = {name: torch.frombuffer(bytearray(data), dtype=torch.uint8) for name, data in self.gradients.items()}
        about = {"worker": self.worker, "sequence": self.sequence, "version": self.version, "mode": self.mode}
        return to_bytes({**about, "gradients": frames})

    @classmethod
    def from_bytes(cls, data: bytes) -> Push:
        """Undo :meth:`to_bytes`; anything else raises :class:`~gradwire.errors.WireError`."""
        tree = from_bytes(data)
        right = isinstance(tree, dict) and {"worker", "sequence", "version", "mode", "gradients"} <= set(tree)
        if not right or not isinstance(tree["gradients"], dict):
            raise ConfigError("a record is not a push.")
        frames = {name: frame.numpy().tobytes() for name, frame in tree["gradients"].items()}
        return cls(str(tree["worker"]), int(tree["sequence"]), frames, tree["version"], check_mode(tree["mode"]))

    def decoded(self) -> dict[str, Tensor]:
        """The gradients."""
        return {name: decode(data, max_bytes=_LARGEST) for name, data in self.gradients.items()}


class Store:
    """A model that survives the end of its process.

    ``make`` builds the model, with the options it always has, from parameters; ``parameters`` are those of a new store,
    and not looked at if the folder has one already. A snapshot is taken after ``snapshot_every`` pushes.

    >>> import gradwire, tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Store(folder, Model, {"w": torch.zeros(2)}) as store:
    ...         store.push(Push("a", 1, {"w": gradwire.encode(torch.ones(2), "none")}))
    ...         store.push(Push("a", 1, {"w": gradwire.encode(torch.ones(2), "none")}))  # again: not applied twice
    ...     with Store(folder, Model) as store:
    ...         store.read()
    1
    1
    (1, {'w': tensor([-1., -1.])})
    """

    def __init__(
        self,
        folder: str | Path,
        make: Callable[[dict[str, Tensor]], Model],
        parameters: Mapping[str, Tensor] | None = None,
        *,
        fsync: Fsync = "each",
        snapshot_every: int = 10_000,
    ) -> None:
        if not isinstance(snapshot_every, int) or snapshot_every < 1:
            raise ConfigError(f"`snapshot_every` must be a whole number of at least 1; got {snapshot_every!r}.")
        self.folder, self._fsync, self._every = Path(folder), fsync, snapshot_every
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._snapshots = threading.Lock()  # one at a time
        self._acknowledged: dict[str, tuple[int, int]] = {}  # by worker: the last number, and the version it made
        self.replayed = 0
        """Pushes that the journal had after the snapshot."""
        numbers = self._numbers("snapshot-*.safetensors")
        if numbers:
            self._open(make, numbers[-1])
        elif parameters is None:
            raise ConfigError(f"{self.folder} has no store: give the parameters to begin with.")
        elif self._numbers("journal-*"):
            raise JournalError(f"{self.folder} has a journal, but no snapshot to begin with.")
        else:
            self._model = make({name: tensor.detach().clone() for name, tensor in parameters.items()})
            self._check_rule()
            self._number = 0
            self._save(0, self._state())
        self._journal = Journal(self._journal_path(self._number), fsync)

    def _check_rule(self) -> None:
        if self._model.staleness.rule == "compensate":
            raise ConfigError("compensated gradients depend on what workers have read, and cannot be replayed.")

    def _open(self, make: Callable[[dict[str, Tensor]], Model], number: int) -> None:
        state = from_bytes(self._snapshot_path(number).read_bytes())
        self._model = make({name: tensor.clone() for name, tensor in state["model"]["parameters"].items()})
        self._check_rule()
        self._model.load_state(state["model"])
        self._acknowledged = {worker: (int(last), int(made)) for worker, (last, made) in state["acknowledged"].items()}
        journals = [each for each in self._numbers("journal-*") if each >= number] or [number]
        for each in journals:
            path = self._journal_path(each)
            for record in read_journal(path) if path.exists() else []:
                self._apply(Push.from_bytes(record))
                self.replayed += 1
        self._number = journals[-1]

    # What it does.

    def push(self, push: Push) -> int:
        """Apply gradients, and return when they are safe: the version that they have made, or wait for.

        A push with a number that is not above the worker's last has been applied before, and is not again.
        """
        gradients = push.decoded()
        with self._lock:
            known = self._acknowledged.get(push.worker)
            if known is not None and push.sequence <= known[0]:
                ticket, version, full = self._journal.records, known[1], False
            else:
                check_entries("gradients", gradients, self._model.parameters)
                self._model.staleness.check(push.version, self._model.version)
                ticket = self._journal.write(push.to_bytes())
                version = self._apply(push, gradients)
                full = self._journal.records >= self._every
            journal = self._journal
        journal.wait(ticket)
        if full:
            self.snapshot()
        return version

    def _apply(self, push: Push, gradients: Mapping[str, Tensor] | None = None) -> int:
        self._model.take(gradients if gradients is not None else push.decoded(), push.mode, version=push.version)
        self._acknowledged[push.worker] = (push.sequence, self._model.version)
        return self._model.version

    def read(self) -> tuple[int, dict[str, Tensor]]:
        """The version, and a copy of the parameters."""
        with self._lock:
            return self._model.version, {name: tensor.clone() for name, tensor in self._model.parameters.items()}

    def snapshot(self) -> None:
        """Save the model; pushes go on meanwhile, into a new journal."""
        with self._snapshots:
            with self._lock:
                if not self._journal.records:
                    return
                state = self._state()
                self._journal.close()  # on the disk, before anything that is in it is acknowledged again
                self._number += 1
                number = self._number
                self._journal = Journal(self._journal_path(number), self._fsync)
            self._save(number, state)
            for each in self._numbers("journal-*"):
                if each < number:
                    self._journal_path(each).unlink()
            for each in self._numbers("snapshot-*.safetensors"):
                if each < number:
                    self._snapshot_path(each).unlink()

    def close(self) -> None:
        """Bring everything to the disk."""
        with self._lock:
            self._journal.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Files.

    def _state(self) -> dict[str, Any]:
        acknowledged = {worker: list(each) for worker, each in self._acknowledged.items()}
        return {"model": self._model.state(), "acknowledged": acknowledged}

    def _save(self, number: int, state: dict[str, Any]) -> None:
        try:
            write_whole(self._snapshot_path(number), to_bytes(state))
        except GradwireError as error:
            raise JournalError(f"the model cannot be saved: {error}") from error

    def _snapshot_path(self, number: int) -> Path:
        return self.folder / f"snapshot-{number:010d}.safetensors"

    def _journal_path(self, number: int) -> Path:
        return self.folder / f"journal-{number:010d}"

    def _numbers(self, pattern: str) -> list[int]:
        found = [path.name.split("-")[1].split(".")[0] for path in self.folder.glob(pattern)]
        return sorted(int(each) for each in found if each.isdigit())
