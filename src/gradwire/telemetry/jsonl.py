"""Records as lines of JSON, in a folder a run."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
from io import FileIO
from pathlib import Path
from typing import Any, Final

from gradwire.errors import ConfigError
from gradwire.telemetry.base import Record

__all__ = ["JsonLines"]

_log: Final = logging.getLogger("gradwire")
_MOST_LINES: Final = 100  # that are held until the next flush


class JsonLines:
    """A line a record, appended to ``rank-N.jsonl`` in the folder of a run; or to a file of another name.

    NaN and Inf, which JSON has not, are written as null. While the disk is full, lines are left out.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sink = JsonLines(folder)
    ...     sink.open({"event": "start", "rank": 0})
    ...     sink.write({"event": "step", "step": 1, "loss": float("nan")})
    ...     sink.close()
    ...     (Path(folder) / "rank-0.jsonl").read_text()
    '{"event":"step","step":1,"loss":null}\\n'
    """

    every_rank = True

    def __init__(self, folder: str | Path, file: str | None = None) -> None:
        self.folder, self._name = Path(folder), file
        self._file: FileIO | None = None
        self._lines: list[str] = []  # that are to be written
        self._full = False  # the disk, when it was last written to

    def open(self, start: Record) -> None:
        """Make the folder, and the rank's file in it."""
        path = self.folder / (self._name or f"rank-{start['rank']}.jsonl")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"the run's folder {str(self.folder)!r} cannot be written: {error.strerror}.") from error

    def write(self, record: Record) -> None:
        """Append a line."""
        assert self._file is not None
        try:
            line = json.dumps(record, separators=(",", ":"), allow_nan=False)
        except (ValueError, TypeError):
            line = json.dumps(_plain(record), separators=(",", ":"))
        self._lines.append(line + "\n")
        if len(self._lines) >= _MOST_LINES:
            self.flush()

    def flush(self) -> None:
        """To the file, where the dashboard sees it: whole lines."""
        if self._file is None or not self._lines:
            return
        data, end = "".join(self._lines).encode(), self._file.seek(0, os.SEEK_END)
        self._lines.clear()
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._file.truncate(end)
            if not self._full:
                _log.warning("%s: records are left out until there is room again: %s", self._file.name, error.strerror)
        self._full = bool(data)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self.flush()
            self._file.close()


def _plain(value: Any) -> Any:
    """What JSON can hold of it: tensors of one number as that, other things as text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, str | int):
        return value
    try:
        return _plain(value.item())
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return str(value)[:1000]
