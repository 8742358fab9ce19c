"""A model on the disk: a snapshot, and the journal of every gradient that was accepted after it.

A push is written to the journal, applied, and acknowledged once it is on the disk. Replayed from the snapshot, the
journal gives the same parameters to the bit. Each worker numbers its pushes, so that one which is sent again because
the answer was lost is not applied twice.

::

    snapshot-0000000007-1c291ca3.safetensors    the model before the first record of journal 7, and its CRC-32
    journal-0000000007                          pushes since then
    journal-0000000008                          and more, if the snapshot of 8 was never finished

A snapshot and the journal of its number have the same identity, drawn at random for them, and a journal that goes on
without a snapshot has the identity of the one before: files that do not belong together are refused by their names.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from gradwire.coordinator.journal import Fsync, Journal, Records
from gradwire.coordinator.push import Decoding, Push, decoded
from gradwire.coordinator.rules import GradientChangeMode, Model, check_mode
from gradwire.coordinator.structure import Structure, check_entries
from gradwire.errors import ConfigError, GradwireError, JournalError, PeerError, WireError
from gradwire.files import lock_folder, write_whole
from gradwire.kernels.memory import copy_of
from gradwire.tree import from_file, to_bytes
from gradwire.wire import crc32

__all__ = ["Receipt", "Store"]

_SNAPSHOT: Final = re.compile(r"snapshot-(\d+)-[0-9a-f]{8}\.safetensors")
_JOURNAL: Final = re.compile(r"journal-(\d+)")
_LEFTOVER: Final = re.compile(r"\.(?:snapshot|journal)-.+\.\d+")  # of write_whole, whose process was killed
_JOURNAL_BYTES: Final = 256_000_000  # or four times the model: a restart reads so much in moments
_AGAIN_S: Final = 60.0  # after a snapshot that failed
_SESSIONS: Final = 1 << 63


def _checksum(path: Path) -> str:
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            checksum = crc32(chunk, checksum)
    return f"{checksum:08x}"


def _newer(session: int, than: int) -> bool:
    """Whether a session is a later one. Numbers go round, from the highest to 0: none is so high that none follows.

    >>> _newer(2, than=1), _newer(1, than=2), _newer(1, than=2**63 - 1), _newer(2**63 - 1, than=1)
    (True, False, True, False)
    """
    return 0 < (session - than) % _SESSIONS < _SESSIONS // 2


@dataclass(frozen=True)
class Receipt:
    """What became of a push: ``version`` is the one it has made, or waits for others to make.

    It is on the disk, by the journal's policy, when ``wait`` returns; ``applied`` is false of one that had been applied
    before.
    """

    version: int
    applied: bool
    journal: Journal | None
    ticket: int

    def wait(self) -> int:
        """Wait until it is safe to say so; returns the version."""
        if self.journal is not None:
            self.journal.wait(self.ticket)
        return self.version

    def safe_now(self, tell: Callable[[GradwireError | None], Any]) -> bool:
        """Whether it need not be waited for; if it must, ``tell`` is called later, by another thread."""
        return self.journal is None or self.journal.then(self.ticket, tell)


@dataclass(frozen=True)
class _Last:
    """The last push of a worker that was applied."""

    session: int
    sequence: int
    version: int


class _UnsureError(JournalError):
    """A snapshot has its name, which may not be on the disk."""


class Store:
    """A model that survives the end of its process.

    ``make`` builds the model, with the options it always has, from parameters; ``parameters`` are those of a new store,
    and not looked at if the folder has one already. A snapshot is taken after ``snapshot_every`` pushes, or once the
    journal has more than ``snapshot_mb``; unless given, that is four times the model, and at least 256. Without a
    folder nothing survives. ``rules`` describe what ``make`` builds: a journal is not replayed by other ones.

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
        folder: str | Path | None,
        make: Callable[[dict[str, Tensor]], Model],
        parameters: Mapping[str, Tensor] | None = None,
        *,
        fsync: Fsync = "each",
        interval_s: float = 0.05,
        snapshot_every: int = 10_000,
        snapshot_mb: float | None = None,
        mode: str = "descent",
        rules: str | None = None,
    ) -> None:
        if not isinstance(snapshot_every, int) or snapshot_every < 1:
            raise ConfigError(f"`snapshot_every` must be a whole number of at least 1; got {snapshot_every!r}.")
        if snapshot_mb is not None and not snapshot_mb > 0:
            raise ConfigError(f"`snapshot_mb` must be above 0; got {snapshot_mb!r}.")
        self.folder = None if folder is None else Path(folder)
        self._make, self._fsync, self._interval_s = make, fsync, interval_s
        self._every, self._snapshot_mb = snapshot_every, snapshot_mb
        self._lock = threading.Lock()
        self._snapshots = threading.Lock()  # one at a time
        self._last: dict[str, _Last] = {}
        self._model: Model | None = None
        self._journal: Journal | None = None
        self._number = -1  # of the journal that is written
        self._most_bytes = 0.0  # of journals, before a snapshot is due
        self._before = (0, 0)  # records and bytes of journals since the snapshot, but for the one that is written
        self._not_before = 0.0  # when a snapshot may be tried again
        self._lock_file: int | None = None
        self._rules = rules
        self.structure: Structure = "dict"
        self.mode: GradientChangeMode = check_mode(mode)
        self.replayed = 0
        """Pushes that the journal had after the snapshot."""
        if self.folder is not None:
            self._lock_file = self._taken_folder(self.folder)
        try:
            if self.folder is not None:
                self._find()
            if self._model is None and parameters is not None:
                self.replace(parameters)
        except BaseException:
            self.close()
            raise

    def _find(self) -> None:
        """Open what the folder has, if it has something."""
        try:
            self._find_in(self._root())
        except OSError as error:
            raise JournalError(f"{self.folder} cannot be used: {error}.") from error

    def _find_in(self, folder: Path) -> None:
        for path in folder.iterdir():
            if _LEFTOVER.fullmatch(path.name):
                path.unlink(missing_ok=True)
        numbers = self._numbers(_SNAPSHOT)
        if numbers:
            self._open(numbers[-1])
            self._forget(numbers[-1])
        elif self._numbers(_JOURNAL):
            raise JournalError(f"{folder} has a journal, but no snapshot to begin with.")

    @staticmethod
    def _taken_folder(folder: Path) -> int:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            locked = lock_folder(folder)
        except OSError as error:
            raise ConfigError(f"`folder` {folder} cannot be used: {error.strerror}.") from None
        if locked is None:
            raise JournalError(f"{folder} is in use by another server.")
        return locked

    def _made(self, parameters: Mapping[str, Tensor]) -> Model:
        model = self._make(dict(parameters))
        if self.folder is not None and model.staleness.rule == "compensate":
            raise ConfigError("compensated gradients depend on what workers have read, and cannot be replayed.")
        return model

    def _take_over(self, model: Model) -> None:
        self._model = model
        if self._snapshot_mb is None:
            self._most_bytes = max(_JOURNAL_BYTES, 4 * model.nbytes)
        else:
            self._most_bytes = self._snapshot_mb * 1e6

    def _open(self, number: int) -> None:
        path = self._snapshot_path(number)
        if (checksum := _checksum(path)) not in path.name:
            raise JournalError(f"{path} is damaged: its checksum is {checksum}.")
        try:
            state = from_file(path)
            rules = state["rules"]
        except (WireError, KeyError, TypeError) as error:
            raise JournalError(f"{path} is damaged, or is no snapshot: {error}") from None
        model = self._made(state["model"]["parameters"])
        model.load_state(state["model"])
        self._take_over(model)
        self._last = {worker: _Last(*map(int, each)) for worker, each in state["acknowledged"].items()}
        self.structure, self.mode = state["structure"], check_mode(state["mode"])
        journals = [each for each in self._numbers(_JOURNAL) if each >= number]
        if number and number not in journals:  # the first may be missing: it is begun after the first snapshot
            raise JournalError(
                f"{self._journal_path(number)} is missing, and what was pushed after the snapshot with it. To go on "
                "without: make an empty file of that name."
            )
        identity, last = state.get("identity", ""), None  # "": all of an earlier version
        for each in journals:
            records = Records(self._journal_path(each))
            belongs = records.identity is None or identity == (records.previous if last else records.identity)
            if not belongs and last and not records.previous and not any(True for _ in records):
                records.path.unlink()  # of parameters that were to be set, and whose snapshot was never finished
                break
            if not belongs:
                raise JournalError(
                    f"{records.path} does not belong to {last.path if last else path}: they have other identities. "
                    "Put back the files that were there before."
                )
            self._replay(records, model, rules)
            if last is not None:
                self._before = (self._before[0] + last.count, self._before[1] + last.end)
            self._number, last, identity = each, records, records.identity or identity
        if last is None or not last.identity:  # an earlier version's, or empty: there is nothing to go on with
            self._number = max(number, self._number)
            self._begin_anew(model)
        else:
            self._journal = Journal(last.path, self._fsync, self._interval_s, known=last)

    def _replay(self, records: Records, model: Model, rules: str | None) -> None:
        """Apply what a journal has, one push after the other."""
        for record in records:
            if self._rules is not None and rules != self._rules:
                raise JournalError(
                    f"{records.path} was written by a server with other rules, and would not lead to the same "
                    f"parameters: start it once more with {rules}, and stop it; then change them."
                )
            try:
                push = Push.from_bytes(record)
            except WireError as error:
                raise JournalError(
                    f"{records.path}: {error} To keep what is before it: gradwire serve repair {records.path}"
                ) from None
            self._apply(model, push, Decoding("gradients", push.gradients, model.parameters))
            self.replayed += 1
            del record, push  # before there is memory for the next

    # What it does.

    def there(self) -> Model:
        """The model, or an error if there is none yet."""
        if self._model is None:
            raise ConfigError(
                "there are no parameters: an admin calls set_model_parameters first, or `file` of the server's `model` "
                "names them."
            )
        return self._model

    @property
    def empty(self) -> bool:
        """Whether there is no model yet."""
        return self._model is None

    def last_session(self, worker: str) -> int:
        """The session of a worker's last push, than which the next number is higher; 0 if it never pushed."""
        known = self._last.get(worker)
        return 0 if known is None else known.session % (_SESSIONS - 1)

    def forget(self, worker: str) -> None:
        """A worker is not expected to come again."""
        with self._lock:
            self._last.pop(worker, None)

    def take(self, push: Push, checksums: Mapping[str, int] | None = None) -> Receipt:
        """Apply gradients; they are safe when the receipt has been waited for.

        One that the worker has sent before is not applied again. One of an earlier session is refused: another client
        goes by the same name. ``checksums`` are those of the frames, if they are known already.
        """
        gradients = decoded("gradients", push.gradients, self.there().parameters, checksums)
        with self._lock:
            model, known = self.there(), self._last.get(push.worker)
            if known is not None and push.session != known.session and not _newer(push.session, known.session):
                raise PeerError(
                    f"worker {push.worker!r} has begun session {known.session} since; one of session {push.session} "
                    "cannot push any more. Do two workers have the same name?"
                )
            if known is not None and push.session == known.session and push.sequence <= known.sequence:
                ticket = 0 if self._journal is None else self._journal.records
                return Receipt(known.version, False, self._journal, ticket)
            check_entries("gradients", gradients, model.parameters)  # they may have been replaced meanwhile
            model.staleness.check(push.version, model.version)
            ticket = 0 if self._journal is None else self._journal.write(push.to_bytes())
            return Receipt(self._apply(model, push, gradients), True, self._journal, ticket)

    def push(self, push: Push) -> int:
        """Apply gradients, and return when they are safe: the version that they have made, or wait for."""
        version = self.take(push).wait()
        if self.snapshot_due:
            self.snapshot()
        return version

    def _apply(self, model: Model, push: Push, gradients: Mapping[str, Tensor]) -> int:
        model.take(gradients, push.mode, version=push.version)
        self._last[push.worker] = _Last(push.session, push.sequence, model.version)
        return model.version

    def read(self) -> tuple[int, dict[str, Tensor]]:
        """The version, and a copy of the parameters."""
        with self._lock:
            model = self.there()
            return model.version, {name: copy_of(tensor) for name, tensor in model.parameters.items()}

    def replace(self, parameters: Mapping[str, Tensor], structure: Structure = "dict") -> int:
        """Go on with other parameters, which are safe when this returns.

        An optimizer begins anew, the version goes on.
        """
        model = self._made({name: tensor.detach().clone() for name, tensor in parameters.items()})
        with self._snapshots, self._lock:
            if self._model is not None:
                model.version = self._model.version + 1
            self._begin_anew(model, structure=structure)
            self._take_over(model)
            self.structure = structure
            return model.version

    def set_mode(self, mode: str) -> None:
        """Which way gradients move the parameters from now on, and after a restart."""
        mode = check_mode(mode, "mode")
        with self._snapshots, self._lock:
            if mode != self.mode:
                if self._model is not None:
                    self._begin_anew(self._model, mode=mode)
                self.mode = mode

    def clear(self) -> int:
        """Forget gradients that wait for others to be averaged with, for good; how many there were."""
        with self._snapshots, self._lock:
            cleared = copy(self.there())
            if cleared.clear():
                self._begin_anew(cleared)
            return self.there().clear()

    @property
    def snapshot_due(self) -> bool:
        """Whether the journal has become long, and a snapshot has not failed a moment ago."""
        if self._journal is None or time.monotonic() < self._not_before:
            return False
        records, nbytes = self._since_snapshot()
        return records >= self._every or nbytes >= self._most_bytes

    def _since_snapshot(self) -> tuple[int, int]:
        """Records and bytes of all journals after the last snapshot."""
        assert self._journal is not None
        return self._before[0] + self._journal.records, self._before[1] + self._journal.nbytes

    @property
    def trouble(self) -> str:
        """Why pushes are refused: the disk is full, or has failed; "" if they are not."""
        return "" if self._journal is None else self._journal.trouble

    def room_for(self, nbytes: int) -> bool:
        """Whether a push may fit on the disk, which had no room for some record.

        A record is longer than its frames, by names above all: half as long as that record is too long.
        """
        journal = self._journal
        return journal is None or not 0 < journal.short <= 2 * nbytes

    def probe(self) -> None:
        """See whether a full disk has room again."""
        if self._journal is not None:
            self._journal.probe()

    def snapshot(self) -> None:
        """Save the model; pushes go on meanwhile, into a new journal."""
        with self._snapshots:
            try:
                with self._lock:
                    if self._journal is None or not self._since_snapshot()[0]:
                        return
                    self._journal.check()
                    state = self._state(self.there())
                    if self._journal.records:  # none if the last snapshot failed: this one begins where that did
                        self._turn(self._journal)
                    number, identity = self._number, self._journal.identity
                self._save(number, identity, state)
            except Exception:
                self._not_before = time.monotonic() + _AGAIN_S
                raise
            self._before = (0, 0)
            self._forget(number)

    def close(self) -> None:
        """Bring everything to the disk; raises if not all of it got there."""
        with self._lock:
            try:
                if self._journal is not None:
                    self._journal.close()
            finally:
                if self._lock_file is not None:
                    os.close(self._lock_file)
                    self._lock_file = None

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Files.

    def _begin_anew(self, model: Model, **changes: Any) -> None:
        """Save a model that the journal does not lead to; the lock is held, for no push may come before that.

        If it cannot be saved nothing has changed: the caller takes the model over afterwards.
        """
        if self.folder is None:
            return
        if self._journal is not None:
            self._journal.check()
        number = self._number + 1
        journal = self._new_journal(number, "")  # first: empty and without a snapshot, it does no harm after a restart
        try:
            self._save(number, journal.identity, self._state(model) | changes)
        except Exception as error:
            journal.discard()
            if isinstance(error, _UnsureError):  # a restart may go on with either model
                self._number = number
                if self._journal is not None:
                    self._journal.fail(OSError(f"it is not known whether another model was saved: {error}"))
            raise
        old, self._journal, self._number, self._before = self._journal, journal, number, (0, 0)
        if old is not None:
            with suppress(JournalError):  # all that it has is in the snapshot
                old.close()
        self._forget(number)

    def _turn(self, old: Journal) -> None:
        """Begin a new journal, whose snapshot is about to be saved; if that cannot be, the old one goes on."""
        journal, before = self._new_journal(self._number + 1, old.identity), self._since_snapshot()
        try:
            old.close()  # on the disk, before anything that is in it is acknowledged again
        except JournalError:
            journal.discard()
            raise
        journal.short = old.short  # the disk is as full as it was
        self._journal, self._number, self._before = journal, self._number + 1, before

    def _new_journal(self, number: int, previous: str) -> Journal:
        path = self._journal_path(number)
        try:
            path.unlink(missing_ok=True)  # one that could not be removed when its snapshot failed
            return Journal(path, self._fsync, self._interval_s, previous=previous)
        except (OSError, RuntimeError) as error:  # RuntimeError: there can be no more threads
            with suppress(OSError):
                path.unlink(missing_ok=True)
            raise JournalError(f"{path} cannot be begun: {error}.") from error

    def _forget(self, number: int) -> None:
        """Remove what a snapshot has made superfluous."""
        with suppress(OSError):  # the next snapshot tries again
            for pattern, path_of in ((_JOURNAL, self._journal_path), (_SNAPSHOT, self._snapshot_path)):
                for each in self._numbers(pattern):
                    if each < number:
                        path_of(each).unlink()

    def _state(self, model: Model) -> dict[str, Any]:
        acknowledged = {name: [last.session, last.sequence, last.version] for name, last in self._last.items()}
        about = {"structure": self.structure, "mode": self.mode, "rules": self._rules}
        return {"model": model.state(), "acknowledged": acknowledged, **about}

    def _save(self, number: int, identity: str, state: dict[str, Any]) -> None:
        try:
            data = to_bytes(state | {"identity": identity})
        except GradwireError as error:
            raise JournalError(f"the model cannot be saved: {error}") from error
        path = self._root() / f"snapshot-{number:010d}-{crc32(data):08x}.safetensors"
        try:
            write_whole(path, data)
        except OSError as error:
            kind = _UnsureError if path.exists() else JournalError
            raise kind(f"the model cannot be saved: {error}.") from error

    def _snapshot_path(self, number: int) -> Path:
        return next(self._root().glob(f"snapshot-{number:010d}-????????.safetensors"))

    def _journal_path(self, number: int) -> Path:
        return self._root() / f"journal-{number:010d}"

    def _root(self) -> Path:
        assert self.folder is not None
        return self.folder

    def _numbers(self, pattern: re.Pattern[str]) -> list[int]:
        found = (pattern.fullmatch(path.name) for path in self._root().iterdir())
        return sorted({int(match.group(1)) for match in found if match is not None})
