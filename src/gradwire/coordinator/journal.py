"""A journal: records that are on the disk before anybody is told that they are.

A file of records, each with its length and checksum. A process that is killed, or a machine that loses power, may leave
half a record at the end: it was never acknowledged, and is cut off. Anything else that is wrong is not a torn end but
damage: it is refused, and :func:`repair` keeps what is before it.

::

    8 bytes    GWJRNL01
    4          length of a record       | little-endian,
    4          CRC-32 of the record     | again and again
    ...        the record               |
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Literal
from zlib import crc32

from gradwire.errors import ConfigError, JournalError
from gradwire.files import sync_folder

__all__ = ["Fsync", "Journal", "read_journal", "repair"]

Fsync = Literal["each", "interval", "off"]

_MAGIC: Final = b"GWJRNL01"
_HEAD: Final = struct.Struct("<II")
_LARGEST: Final = (1 << 31) - 1


def _scan(data: memoryview, path: Path) -> tuple[list[memoryview], int, str]:
    """Records, where they end, and what is wrong there: nothing, or a torn end; damage raises."""
    if len(data) < len(_MAGIC) and bytes(data) == _MAGIC[: len(data)]:
        return [], 0, "torn"  # not even the name was written
    if bytes(data[: len(_MAGIC)]) != _MAGIC:
        raise JournalError(f"{path} is not a journal: it does not begin with {_MAGIC.decode()}.")
    records: list[memoryview] = []
    at = len(_MAGIC)
    while at < len(data):
        if at + _HEAD.size > len(data):
            return records, at, "torn"
        length, checksum = _HEAD.unpack_from(data, at)
        end = at + _HEAD.size + length
        if not length:  # there is no such record: a file that was made longer, and not written
            return records, at, "damaged" if any(data[at:]) else "torn"
        if end > len(data):
            return records, at, "torn" if not _any_record(data, at + 1) else "damaged"
        record = data[at + _HEAD.size : end]
        if crc32(record) != checksum:
            last = end == len(data) or not any(data[end:])
            return records, at, "torn" if last else "damaged"
        records.append(record)
        at = end
    return records, at, ""


def _any_record(data: memoryview, start: int) -> bool:
    """Whether a whole record begins anywhere from a place on: then what is before it is not a torn end."""
    for at in range(start, len(data) - _HEAD.size):
        length, checksum = _HEAD.unpack_from(data, at)
        end = at + _HEAD.size + length
        if length > 0 and end <= len(data) and crc32(data[at + _HEAD.size : end]) == checksum:
            return True
    return False


def read_journal(path: str | Path) -> list[bytes]:
    """All records. A torn end is left out; damage raises :class:`~gradwire.errors.JournalError`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Journal(Path(folder) / "journal") as journal:
    ...         journal.append(b"one")
    ...     read_journal(Path(folder) / "journal")
    [b'one']
    """
    path = Path(path)
    records, at, wrong = _scan(memoryview(path.read_bytes()), path)
    if wrong == "damaged":
        raise JournalError(
            f"{path} is damaged at byte {at}, after {len(records)} records, and goes on after that. To keep what is "
            f"before it: gradwire serve repair {path}"
        )
    return [bytes(record) for record in records]


def repair(path: str | Path) -> tuple[int, int]:
    """Cut a journal off where it is damaged; the whole of it is kept as ``PATH.damaged``.

    Returns how many records are left, and how many bytes were cut off.
    """
    path = Path(path)
    data = path.read_bytes()
    records, at, wrong = _scan(memoryview(data), path)
    if wrong:
        kept = path.with_name(f"{path.name}.damaged")
        kept.write_bytes(data)
        _truncate(path, at)
    return len(records), len(data) - at


def _truncate(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)
        os.fsync(file.fileno())


class Journal:
    """Appends records to a file, from any number of threads.

    ``fsync="each"``: ``append`` returns when its record is on the disk; those of several threads go there together.
    ``"interval"``: it is there within ``interval_s``, and a loss of power may take the last ones. ``"off"``: when the
    system pleases; what is acknowledged survives the end of the process, and not that of the machine.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, Journal(Path(folder) / "journal") as journal:
    ...     journal.append(b"a gradient")
    ...     journal.records
    1
    """

    def __init__(self, path: str | Path, fsync: Fsync = "each", interval_s: float = 0.1) -> None:
        if fsync not in ("each", "interval", "off"):
            raise ConfigError(f"`fsync` must be 'each', 'interval' or 'off'; got {fsync!r}.")
        if not interval_s > 0:
            raise ConfigError(f"`interval_s` must be above 0; got {interval_s!r}.")
        self.path, self.fsync, self._interval_s = Path(path), fsync, interval_s
        fresh = not self.path.exists()
        self.records = 0 if fresh else len(read_journal(self.path))
        if not fresh:
            _, at, _ = _scan(memoryview(self.path.read_bytes()), self.path)
            _truncate(self.path, at)
            fresh = at == 0
        self._file = self.path.open("ab", buffering=0)
        if fresh:
            self._file.write(_MAGIC)
            os.fsync(self._file.fileno())
            sync_folder(self.path.parent)
        self._lock = threading.Condition()
        self._written, self._durable, self._closed = self.records, self.records, False
        self._wanted = self.records  # the last record that somebody waits for
        self._failure: OSError | None = None
        self._waiting: list[tuple[int, Callable[[JournalError | None], Any]]] = []
        self._thread = threading.Thread(target=self._flush, daemon=True, name="gradwire-journal")
        if fsync != "off":
            self._thread.start()

    def append(self, record: bytes) -> None:
        """Write a record; by the policy, wait until it is on the disk."""
        self.wait(self.write(record))

    def write(self, record: bytes) -> int:
        """Write a record, which is not on the disk yet; returns what to wait for."""
        if not 0 < len(record) <= _LARGEST:
            raise ConfigError(f"`record` must have from 1 to {_LARGEST} bytes; got {len(record)}.")
        with self._lock:
            if self._closed:
                raise JournalError(f"{self.path} is closed.")
            self._check()
            try:
                _write_all(self._file.fileno(), _HEAD.pack(len(record), crc32(record)) + record)
            except OSError as error:  # the disk is full: nothing may follow half a record
                self._fail(error)
            self._check()
            self._written += 1
            self.records += 1
            if self.fsync == "interval":
                self._lock.notify_all()
            return self._written

    def wait(self, ticket: int) -> None:
        """By the policy, wait until a record, and all before it, are on the disk."""
        if self.fsync == "each":
            with self._lock:
                self._want(ticket)
                self._lock.wait_for(lambda: self._durable >= ticket or self._failure is not None)
                if self._durable < ticket:
                    self._check()

    def then(self, ticket: int, tell: Callable[[JournalError | None], Any]) -> bool:
        """Like :meth:`wait`, without waiting: true if it need not be; or ``tell`` is called, by another thread."""
        if self.fsync != "each":
            return True
        with self._lock:
            if self._durable >= ticket:
                return True
            self._waiting.append((ticket, tell))
            self._want(ticket)
            self._tell()
        return False

    def _want(self, ticket: int) -> None:
        """Somebody waits for a record. Not before: those that are written meanwhile go to the disk together."""
        if ticket > self._wanted:
            self._wanted = ticket
            self._lock.notify_all()

    def _tell(self) -> None:
        """Call those whose records are on the disk, or never will be."""
        over = self._failure is not None or (self._closed and not self._thread.is_alive())
        done = [each for each in self._waiting if over or each[0] <= self._durable]
        self._waiting = [each for each in self._waiting if each not in done]
        for ticket, tell in done:
            tell(None if ticket <= self._durable else JournalError(f"{self.path} cannot be written: {self._failure}."))

    def _check(self) -> None:
        if self._failure is not None:
            raise JournalError(f"{self.path} cannot be written: {self._failure}.") from self._failure

    def _fail(self, error: OSError) -> None:
        self._failure = error
        self._lock.notify_all()
        self._tell()

    def _due(self) -> bool:
        return (self._wanted if self.fsync == "each" else self._written) > self._durable

    def _flush(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._due() or self._closed)
                if self._written <= self._durable:
                    return
                upto, closing = self._written, self._closed
            if self.fsync == "interval" and not closing:
                time.sleep(self._interval_s)
                with self._lock:
                    upto = self._written
            try:
                os.fdatasync(self._file.fileno())
            except OSError as error:
                with self._lock:
                    self._fail(error)
                return
            with self._lock:
                self._durable = max(self._durable, upto)
                self._lock.notify_all()
                self._tell()

    def close(self) -> None:
        """Everything to the disk, and the file closed."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._lock.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        os.fsync(self._file.fileno())
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[bytes]:
        """The records that are in the file."""
        return iter(read_journal(self.path))


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
