"""The lines of a file that somebody else is still writing."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

__all__ = ["Lines"]

_BLOCK: Final = 1 << 18  # a few milliseconds' worth: whoever waits for the reader waits for one block
_LONGEST: Final = 1 << 22  # a longer line is nobody's record
_HEAD: Final = 256


class Lines:
    """Whole lines of a file, in blocks; a last line without its newline is left for the next time.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "file"
    ...     _ = path.write_bytes(b"one\\ntwo\\nthr")
    ...     lines = Lines(path)
    ...     lines.refresh(), lines.block(), lines.refresh(), lines.block()
    (True, [(0, b'one'), (4, b'two')], True, [])
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0  # all before it was given
        self.size = 0
        self.too_long = 0  # lines that were left out
        self._inode: int | None = None
        self._head = b""
        self._inside = False  # of a line that is too long
        self._waiting = 0  # bytes after `position` that are known to have no newline

    @property
    def more(self) -> bool:
        """Whether there are bytes that were not looked at."""
        return self.size > self.position + self._waiting

    def refresh(self) -> bool:
        """Look how large the file is now; False if it is not the one that was read so far."""
        try:
            found = os.stat(self.path)
        except OSError:
            return True  # gone, or not for us: what was read stays
        if not stat.S_ISREG(found.st_mode):
            return True
        if self._inode is None:
            self._inode = found.st_ino
        if found.st_ino != self._inode or found.st_size < self.position:
            return False
        if found.st_size != self.size and self._head and self._read(0, len(self._head)) != self._head:
            return False  # written anew, and longer already
        self.size = found.st_size
        return True

    def block(self) -> list[tuple[int, bytes]]:
        """The next lines, each with where in the file it begins."""
        data = self._read(self.position, _BLOCK + self._waiting)
        end = data.rfind(b"\n") + 1
        if not end:
            return self._no_end(data)
        if not self._head:
            self._head = data[: min(end, _HEAD)]
        at, found = self.position, []
        for line in data[: end - 1].split(b"\n"):
            found.append((at, line))
            at += len(line) + 1
        self.position, self._waiting = at, 0
        if self._inside:
            self._inside = False
            del found[0]
        return found

    def line_at(self, position: int) -> bytes:
        """The line that begins there; empty if there is none."""
        for length in (1 << 14, 1 << 17, _LONGEST + 1):
            data = self._read(position, length)
            end = data.find(b"\n")
            if end >= 0 or len(data) < length:
                break
        return data[:end] if end >= 0 else b""

    def _no_end(self, data: bytes) -> list[tuple[int, bytes]]:
        self._waiting = len(data)
        if len(data) > _LONGEST or (self._inside and data):
            self.too_long += not self._inside
            self._inside = True
            self.position += len(data)
            self._waiting = 0
        elif not data:
            self.size = self.position  # it cannot be read
        return []

    def _read(self, position: int, length: int) -> bytes:
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return b""
        try:
            return os.pread(descriptor, length, position)
        except OSError:
            return b""
        finally:
            os.close(descriptor)
