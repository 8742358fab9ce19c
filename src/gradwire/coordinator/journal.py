"""A journal: records that are on the disk before they are acknowledged.

A file of records behind a header. A process that is killed, or a machine that loses power, may leave half a record at
the end: it was never acknowledged, and is cut off. Anything else that is wrong is damage: it is refused, and
:func:`repair` keeps what is before it. Each record begins with a mark that no other journal has, and with a checksum of
its own header. So one pass tells the two apart: after a torn end no mark begins a header that checks.

::

    8 bytes    GWJRNL02
    16         identity, drawn at random: that of the snapshot before the first record
    16         identity of the journal that this one continues; zeros if it begins with another model
    4          CRC-32 of the 40 bytes before

    4          the mark: the first 4 bytes of the identity        | again and again,
    4          length of the record                               | numbers are little-endian
    4          CRC-32 of the record                               |
    4          CRC-32 of the identity, of where this begins in    |
               the file (8 bytes), and of the 12 bytes before     |
    ...        the record                                         |

A worker does not know the identity, so no push can contain what looks like a record's header. Journals of earlier
versions, GWJRNL01, are read and not written: length and CRC-32 before every record, and no more.
"""

from __future__ import annotations

import errno
import os
import shutil
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any, Final, Literal

from gradwire.errors import ConfigError, JournalError
from gradwire.files import lock_folder, write_whole
from gradwire.wire import crc32

__all__ = ["Fsync", "Journal", "NoSpaceError", "Records", "repair"]

Fsync = Literal["each", "interval", "off"]

_OLD_MAGIC: Final = b"GWJRNL01"
_MAGIC: Final = b"GWJRNL02"
_BEGIN: Final = struct.Struct("<8s16s16sI")
_OLD_HEAD: Final = struct.Struct("<II")
_HEAD: Final = struct.Struct("<4sIII")
_PLACE: Final = struct.Struct("<Q")
_LARGEST: Final = (1 << 31) - 1
_CHUNK: Final = 1 << 20
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class NoSpaceError(JournalError):
    """There was no room for a record. Nothing of it is left in the journal, which goes on when there is room again."""


def _check_of(identity: bytes, place: int, head: bytes) -> int:
    """The checksum of a record's header: of this journal, and of this place in it."""
    return crc32(identity + _PLACE.pack(place) + head[:12])


class Records:
    """The records of a journal, read one at a time; at the end of them, how many there are and where they end.

    ``identity`` and ``previous`` are those of its header: None if nothing was written, and "" of an earlier version. A
    torn end is left out; damage raises :class:`~gradwire.errors.JournalError`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Journal(Path(folder) / "journal") as journal:
    ...         journal.append(b"one")
    ...     records = Records(Path(folder) / "journal")
    ...     [bytes(record) for record in records], records.count
    ([b'one'], 1)
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.count = self.end = 0
        self.identity: str | None = None
        self.previous = ""
        with self.path.open("rb") as file:
            begin = file.read(_BEGIN.size)
        if begin[: len(_OLD_MAGIC)] == _OLD_MAGIC:
            self.identity, self.end = "", len(_OLD_MAGIC)
        elif len(begin) == _BEGIN.size and begin.startswith(_MAGIC):
            _, identity, previous, checksum = _BEGIN.unpack(begin)
            if crc32(begin[:-4]) != checksum:
                raise JournalError(
                    f"{path} is damaged: the checksum of its header does not fit. To go on from the snapshot, without "
                    "what was pushed after it: make an empty file of that name."
                )
            self.identity, self.end = identity.hex(), len(begin)
            self.previous = previous.hex() if any(previous) else ""
        elif not _MAGIC.startswith(begin[: len(_MAGIC)]) and not _OLD_MAGIC.startswith(begin):
            raise JournalError(f"{path} is not a journal: it does not begin with {_MAGIC.decode()}.")

    def __iter__(self) -> Iterator[bytearray]:
        """Each record in memory of its own, which is the caller's."""
        if self.identity is None:
            return
        with BufferedReader(FileIO(self.path), _CHUNK) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(self.end)
            while self.end < size:
                length, checksum, begin = self._head(file)
                record = bytearray(length if begin + length <= size else 0)
                if not record or file.readinto(record) < length or crc32(record) != checksum:
                    self._check_torn(file, begin + length if length else self.end + 1, size)
                    return
                self.count += 1
                self.end = begin + length
                yield record
                del record  # before there is memory for the next

    def _head(self, file: BufferedReader[FileIO]) -> tuple[int, int, int]:
        """Length and checksum of the next record, and where it begins; a length of 0 if there is no header."""
        if not self.identity:
            head = file.read(_OLD_HEAD.size)
            if len(head) < _OLD_HEAD.size:
                return 0, 0, 0
            return *_OLD_HEAD.unpack(head), self.end + len(head)
        return *self._checked(file.read(_HEAD.size), self.end), self.end + _HEAD.size

    def _checked(self, head: bytes, place: int) -> tuple[int, int]:
        assert self.identity is not None
        if len(head) < _HEAD.size:
            return 0, 0
        _, length, checksum, check = _HEAD.unpack(head)
        return (length, checksum) if check == _check_of(bytes.fromhex(self.identity), place, head) else (0, 0)

    def _check_torn(self, file: BufferedReader[FileIO], start: int, size: int) -> None:
        """Raise unless a record that is not whole is the last: no record's header follows it."""
        where = f"{self.path} is damaged at byte {self.end}, after {self.count} records"
        cut = f"To keep what is before it: gradwire serve repair {self.path}"
        if not self.identity:
            file.seek(self.end)
            if any(chunk.count(0) < len(chunk) for chunk in iter(lambda: file.read(_CHUNK), b"")):
                raise JournalError(
                    f"{where}, and is of an earlier version, which does not show whether more records follow. {cut}"
                )
            return
        mark = bytes.fromhex(self.identity)[:4]
        for place in range(start, size, _CHUNK):
            file.seek(place)
            chunk = file.read(_CHUNK + len(mark) - 1)  # a mark may lie across the end of a chunk
            found = chunk.find(mark)
            while found >= 0:
                file.seek(place + found)
                if self._checked(file.read(_HEAD.size), place + found)[0]:
                    raise JournalError(f"{where}, and goes on after that. {cut}")
                found = chunk.find(mark, found + 1)


def repair(path: str | Path) -> tuple[int, int]:
    """Cut a journal off where it is damaged; the whole of it is kept as ``PATH.damaged``.

    Returns how many records are left, and how many bytes were cut off. A journal that a server writes is refused.
    """
    path = Path(path)
    locked = lock_folder(path.parent)
    if locked is None:
        raise JournalError(f"{path} is in use by a server: stop the server before you repair its journal.")
    try:
        return _cut_off(path)
    finally:
        os.close(locked)


def _cut_off(path: Path) -> tuple[int, int]:
    records, size = Records(path), path.stat().st_size
    with suppress(JournalError):
        for _ in records:
            pass
    if records.end < size:
        shutil.copyfile(path, path.with_name(f"{path.name}.damaged"))
        _truncate(path, records.end)
    return records.count, size - records.end


def _truncate(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)
        os.fsync(file.fileno())


class Journal:
    """Appends records to a file, from any number of threads.

    ``fsync="each"``: ``append`` returns when its record is on the disk; those of several threads go there together.
    ``"interval"``: it is there within ``interval_s``, and a loss of power may take the last ones. ``"off"``: when the
    system pleases; what is acknowledged survives the end of the process, and not that of the machine.

    A new file gets an identity of its own, and ``previous``, that of the journal it continues. Of a file that has been
    read already, ``known`` is what was found: it is not read again.

    A full disk refuses a record by :class:`NoSpaceError`, and the journal goes on when there is room again. Any other
    failure ends it for good, one of fsync above all: the system may have dropped the pages that it could not write and
    have marked them as written, so that the next fsync would succeed without them. Nothing is acknowledged after that.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, Journal(Path(folder) / "journal") as journal:
    ...     journal.append(b"a gradient")
    ...     journal.records
    1
    """

    def __init__(
        self,
        path: str | Path,
        fsync: Fsync = "each",
        interval_s: float = 0.1,
        *,
        previous: str = "",
        known: Records | None = None,
    ) -> None:
        if fsync not in ("each", "interval", "off"):
            raise ConfigError(f"`fsync` must be 'each', 'interval' or 'off'; got {fsync!r}.")
        if not interval_s > 0:
            raise ConfigError(f"`interval_s` must be above 0; got {interval_s!r}.")
        self.path, self.fsync, self._interval_s = Path(path), fsync, interval_s
        if known is None and self.path.exists():
            known = Records(self.path)
            for _ in known:
                pass
        if known is not None and known.identity == "":
            raise JournalError(f"{path} is of an earlier version, and can be read only.")
        if known is None or known.identity is None:
            self.identity = os.urandom(16).hex()
            begin = _BEGIN.pack(_MAGIC, bytes.fromhex(self.identity), bytes.fromhex(previous or "00" * 16), 0)[:-4]
            write_whole(self.path, begin + crc32(begin).to_bytes(4, "little"))
            self.records, self.nbytes = 0, _BEGIN.size
        else:
            self.identity, self.records, self.nbytes = known.identity, known.count, known.end
            _truncate(self.path, known.end)
        self.short = 0
        """Bytes of the smallest record that there was no room for; 0 if there is room."""
        self._file = self.path.open("ab", buffering=0)
        self._own = bytes.fromhex(self.identity)
        self._lock = threading.Condition()
        self._written, self._durable, self._closed = self.records, self.records, False
        self._wanted = self.records  # the last record that is waited for
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
        checksum = crc32(record)
        with self._lock:
            self.check()
            head = _HEAD.pack(self._own[:4], len(record), checksum, 0)
            head = head[:12] + _check_of(self._own, self.nbytes, head).to_bytes(4, "little")
            try:
                _write_all(self._file.fileno(), head, record)
            except OSError as error:
                self._undo(error, len(record))
            if len(record) >= self.short:
                self.short = 0
            self.nbytes += len(head) + len(record)
            self._written += 1
            self.records += 1
            if self.fsync == "interval":
                self._lock.notify_all()
            return self._written

    def _undo(self, error: OSError, nbytes: int) -> None:
        """Remove what was written of a record, if there was no room for the rest; any other failure is for good."""
        if error.errno in _NO_ROOM and self._cut():
            self.short = min(nbytes, self.short or nbytes)
            raise NoSpaceError(f"{self.path} cannot be written: {error}.") from error
        self._fail(error)
        self.check()

    def _cut(self) -> bool:
        """Remove what follows the last whole record: the next one would come after it. Whether that went well."""
        try:
            os.ftruncate(self._file.fileno(), self.nbytes)
        except OSError as error:
            self._fail(error)
            return False
        return True

    def probe(self) -> bool:
        """Whether records can be written: if there was no room for one, whether there is now."""
        with self._lock:
            if self.short and self._failure is None and not self._closed:
                with suppress(OSError), self.path.open("r+b") as file:  # to append is refused by some file systems
                    os.posix_fallocate(file.fileno(), self.nbytes, _HEAD.size + self.short)
                    self.short = 0
                self._cut()
            return not self.trouble

    @property
    def trouble(self) -> str:
        """Why records are refused; "" if they are not."""
        if self._failure is not None:
            return f"{self.path} cannot be written: {self._failure}. It is closed for good: start the server again."
        if self.short:
            return f"{self.path} cannot be written: there is no room for {self.short} bytes. It goes on when there is."
        return ""

    def wait(self, ticket: int) -> None:
        """By the policy, wait until a record, and all before it, are on the disk."""
        if self.fsync == "each":
            with self._lock:
                self._want(ticket)
                self._lock.wait_for(lambda: self._durable >= ticket or self._failure is not None)
                if self._durable < ticket:
                    self.check()

    def then(self, ticket: int, tell: Callable[[JournalError | None], Any]) -> bool:
        """Like :meth:`wait`, without waiting: true if it need not be; or ``tell`` is called, by another thread."""
        if self.fsync != "each" and self._failure is None:
            return True
        with self._lock:
            if self._durable >= ticket:
                return True
            self._waiting.append((ticket, tell))
            self._want(ticket)
            self._tell()
        return False

    def _want(self, ticket: int) -> None:
        """A record is waited for. Not before: those that are written meanwhile go to the disk together."""
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

    def check(self) -> None:
        """Raise unless records can be written, now or when there is room."""
        if self._failure is not None:
            raise JournalError(f"{self.path} cannot be written: {self._failure}.") from self._failure
        if self._closed:
            raise JournalError(f"{self.path} is closed.")

    def fail(self, error: OSError) -> None:
        """Take no more records, for good."""
        with self._lock:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self._failure = self._failure or error
        self._lock.notify_all()
        self._tell()

    def _due(self) -> bool:
        return (self._wanted if self.fsync == "each" else self._written) > self._durable

    def _flush(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._due() or self._closed or self._failure is not None)
                if self._written <= self._durable or self._failure is not None:
                    return
                upto, closing = self._written, self._closed
            if self.fsync == "interval" and not closing:
                time.sleep(self._interval_s)
                with self._lock:
                    upto = self._written
            try:
                os.fdatasync(self._file.fileno())
            except OSError as error:  # for good: the class says why
                self.fail(error)
                return
            with self._lock:
                if self._failure is None:
                    self._durable = max(self._durable, upto)
                self._lock.notify_all()
                self._tell()

    def close(self) -> None:
        """Everything to the disk, and the file closed; raises if not all of it got there."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._lock.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        try:
            if self._failure is None:
                os.fsync(self._file.fileno())
        except OSError as error:
            self.fail(error)
        self._file.close()
        if self._failure is not None:
            self.check()

    def discard(self) -> None:
        """Remove a journal that has no records."""
        with suppress(JournalError):
            self.close()
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[bytearray]:
        """The records that are in the file."""
        return iter(Records(self.path))


def _write_all(descriptor: int, head: bytes, record: bytes) -> None:
    written = os.writev(descriptor, (head, record))
    if written < len(head):
        record, written = head + record, written + len(head)
    view = memoryview(record)[written - len(head) :]
    while view:
        view = view[os.write(descriptor, view) :]
