"""The memory that runs may take, all together: folders may come from anybody, and hold anything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Protocol

__all__ = ["Room", "Rows", "Share", "cost_of", "pruned"]

ROWS_BYTES: Final = 96 << 20  # 780,000 steps; then tables give up every second row, the longest first
RECORDS_BYTES: Final = 32 << 20  # of what is kept as it was written; then nothing more is
FILES: Final = 4096  # of ranks; the others are not read
_OF_A_RUN: Final = 4  # the part of all records that one run may have: a quarter
_RECORD_BYTES: Final = 1 << 20
_NODE: Final = 100  # bytes of a number, or of the head of a text, list or object
_ITEMS: Final = 10_000
_TEXT: Final = 2000  # characters
_DEPTH: Final = 8


class Rows(Protocol):
    """What can give up every second of its rows."""

    def nbytes(self) -> int:
        """What it takes."""
        ...

    def thin(self) -> int:
        """Give up rows; how many bytes that were. 0 if it is too short for that."""
        ...


class Room:
    """What is left, and who can give something up.

    >>> share = Room().share()
    >>> share.take_rows(1 << 20), share.take_record(1 << 30)
    (True, False)
    """

    def __init__(self, rows: int = ROWS_BYTES, records: int = RECORDS_BYTES, files: int = FILES) -> None:
        self.rows, self.records, self.files = rows, records, files
        self._most_rows, self._most_record_bytes = rows, records // _OF_A_RUN
        self._shares: list[Share] = []

    def share(self) -> Share:
        """That of a run."""
        self._shares.append(share := Share(self, self._most_record_bytes))
        return share

    def make(self, nbytes: int) -> bool:
        """Have the longest tables thinned until there is room for so much more; False if none can be."""
        while self.rows < nbytes:
            tables = [(table.nbytes(), table) for share in self._shares for table in share.tables()]
            longest = max((size for size, _ in tables), default=0)
            freed = 0
            for size, table in tables:
                if 2 * size >= longest:
                    freed += table.thin()
            if not freed:
                return False
        return True


class Share:
    """What one run has of the room."""

    def __init__(self, room: Room, most_records: int) -> None:
        self.room, self._most_records = room, most_records
        self._rows = self._records = self._files = 0
        self._tables: dict[int, Rows] = {}

    def tables(self) -> Iterator[Rows]:
        """All that can be thinned."""
        return iter(self._tables.values())

    def add(self, table: Rows) -> None:
        """Count a table among them."""
        self._tables[id(table)] = table

    def forget(self, table: Rows) -> None:
        """Count it no longer."""
        del self._tables[id(table)]

    def take_rows(self, nbytes: int) -> bool:
        """Whether there is room for so much more; negative to give it back."""
        if nbytes > self.room.rows and not self.room.make(nbytes):
            return False
        self.room.rows -= nbytes
        self._rows += nbytes
        return True

    def take_record(self, nbytes: int) -> bool:
        """Whether there is room for so much more; negative to give it back."""
        if nbytes > min(self.room.records, self._most_records - self._records):
            return False
        self.room.records -= nbytes
        self._records += nbytes
        return True

    def take_file(self) -> bool:
        """Whether one more can be read."""
        if not self.room.files:
            return False
        self.room.files -= 1
        self._files += 1
        return True

    def clear(self) -> None:
        """Give everything back."""
        self.room.rows += self._rows
        self.room.records += self._records
        self.room.files += self._files
        self._rows = self._records = self._files = 0
        self._tables.clear()


def cost_of(value: Any) -> int:
    """About the bytes that a value of JSON takes, here and, escaped, in a report.

    >>> cost_of({"a": [1, 2]}) < cost_of({"a": [1, "\\U0001f600" * 100]})
    True
    """
    if isinstance(value, str):
        return _NODE + len(value) * (1 if value.isascii() else 12)
    if isinstance(value, dict):
        return _NODE + sum(cost_of(key) + cost_of(each) for key, each in value.items())
    if isinstance(value, list):
        return _NODE + sum(map(cost_of, value))
    return _NODE


def pruned(record: dict[str, Any]) -> dict[str, Any]:
    """A record with not too much of anything in it: what is cut would not be shown either.

    >>> pruned({"what": "x" * 5000, "step": 3})["what"] == "x" * 2000
    True
    """
    left = _RECORD_BYTES

    def walk(value: Any, depth: int) -> Any:
        nonlocal left
        if isinstance(value, str):
            value = value[:_TEXT]
            left -= cost_of(value)
            return value
        left -= _NODE
        if isinstance(value, dict) and depth < _DEPTH:
            found = {}
            for number, (key, each) in enumerate(value.items()):
                if number == _ITEMS or left <= 0:
                    break
                found[walk(key, depth)] = walk(each, depth + 1)
            return found
        if isinstance(value, list) and depth < _DEPTH:
            listed = []
            for each in value[:_ITEMS]:
                if left <= 0:
                    break
                listed.append(walk(each, depth + 1))
            return listed
        if type(value) is int and abs(value) >= 1 << 64:
            return None
        return value if value is None or isinstance(value, bool | int | float) else "..."

    found: dict[str, Any] = walk(record, 0)
    return found
