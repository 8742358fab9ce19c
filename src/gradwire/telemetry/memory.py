"""Records kept, for programs that look at them themselves."""

from __future__ import annotations

from collections import deque

from gradwire.errors import ConfigError
from gradwire.telemetry.base import Record

__all__ = ["Memory"]


class Memory:
    """The last records, in :attr:`records`.

    >>> memory = Memory(most=2)
    >>> for step in range(3):
    ...     memory.write({"event": "step", "step": step})
    >>> [record["step"] for record in memory.records]
    [1, 2]
    """

    every_rank = True

    def __init__(self, most: int = 100_000) -> None:
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise ConfigError(f"`most` must be a whole number of records; got {most!r}.")
        self.records: deque[Record] = deque(maxlen=most)

    def open(self, start: Record) -> None:
        """Nothing to do."""

    def write(self, record: Record) -> None:
        """Keep it."""
        self.records.append(record)

    def flush(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""
