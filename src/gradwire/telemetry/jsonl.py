"""Records as lines of JSON, in a folder a run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import IO, Any

from gradwire.errors import ConfigError
from gradwire.telemetry.base import Record

__all__ = ["JsonLines"]


class JsonLines:
    """A line a record, appended to ``rank-N.jsonl`` in the folder of a run; or to a file of another name.

    NaN and Inf, which JSON has not, are written as null.

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
        self._file: IO[str] | None = None

    def open(self, start: Record) -> None:
        """Make the folder, and the rank's file in it."""
        path = self.folder / (self._name or f"rank-{start['rank']}.jsonl")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"the run's folder {str(self.folder)!r} cannot be written: {error.strerror}.") from error

    def write(self, record: Record) -> None:
        """Append a line."""
        assert self._file is not None
        try:
            line = json.dumps(record, separators=(",", ":"), allow_nan=False)
        except (ValueError, TypeError):
            line = json.dumps(_plain(record), separators=(",", ":"))
        self._file.write(line + "\n")

    def flush(self) -> None:
        """To the file, where the dashboard sees it."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
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
