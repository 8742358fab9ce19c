"""Numbers of a run, a column a quantity: what is kept of a million records."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any, Final

from gradwire.dashboard.room import Room, Share

__all__ = ["CoordinatorTable", "StepTable", "number", "whole"]

STEP_FIELDS: Final = (
    "time loss seconds compute_s exposed_s encode_s wire_s decode_s sent received dense".split()  # noqa: SIM905
)
COORDINATOR_FIELDS: Final = "time version applied refused queued workers received sent".split()  # noqa: SIM905
ROWS: Final = 1 << 21
"""At most; then every second row is given up, and every second one again."""
_FEWEST: Final = 16  # that are not thinned


def number(value: Any) -> float:
    """A finite number, or NaN for anything else.

    >>> number(3), number("3"), number(10**400)
    (3.0, nan, nan)
    """
    kind = type(value)
    if kind is float:
        return value if math.isfinite(value) else math.nan
    if kind is int:
        try:
            return float(value)
        except OverflowError:
            return math.nan
    return math.nan


def whole(value: Any) -> int | None:
    """A whole number that a float holds exactly, from 0; None for anything else.

    >>> whole(3), whole(-1), whole(True), whole(2.5)
    (3, None, None, None)
    """
    return value if type(value) is int and 0 <= value < 1 << 53 else None


class _Table:
    def __init__(self, names: list[str], share: Share | None = None) -> None:
        self.columns: dict[str, array[float]] = {name: array("d") for name in names}
        self.offsets = array("q")  # where in the file the record of a row is
        self._share = share or Room().share()
        self._share.add(self)
        self._row_bytes = 8 * (len(names) + 1)
        self._taken = 0  # rows there is room for

    def __len__(self) -> int:
        return len(self.offsets)

    def nbytes(self) -> int:
        """What its rows take."""
        return self._row_bytes * len(self)

    def thin(self) -> int:
        """Give up every second row; how many bytes that were."""
        if len(self) <= _FEWEST:
            return 0
        self._thin()
        freed = self._taken - len(self)
        self._taken -= freed
        self._share.take_rows(-freed * self._row_bytes)
        return max(freed, 0) * self._row_bytes

    def _has_room(self) -> bool:
        """Whether there is room for one more row."""
        rows = len(self)
        if rows >= ROWS:
            self.thin()
        if len(self) < self._taken:
            return True
        more = max(_FEWEST, rows // 16)
        if not self._share.take_rows(more * self._row_bytes):
            return False
        self._taken += more
        return True

    def _thin(self) -> None:
        for column in self.columns.values():
            del column[-2::-2]  # the last row stays: totals go on from it
        del self.offsets[-2::-2]


class StepTable(_Table):
    """A row a step, in the order of steps; a step that comes again takes the place of what there was from it on.

    Beside what records hold there are ``seconds_total``, ``sent_total`` and ``dense_total``: up to and with the step.

    >>> table = StepTable()
    >>> for step in (1, 2, 3, 2):
    ...     _ = table.add(step, {"sent": 10})
    >>> list(table.columns["step"]), list(table.columns["sent_total"])
    ([1.0, 2.0], [10.0, 20.0])
    """

    def __init__(self, share: Share | None = None) -> None:
        super().__init__(["step", *STEP_FIELDS, "seconds_total", "sent_total", "dense_total"], share)
        self._adders = [(name, self.columns[name].append) for name in STEP_FIELDS]

    def add(self, step: int, record: Mapping[str, Any], offset: int = 0) -> bool:
        """A row of the record of a step; False if there is no room for it."""
        columns = self.columns
        steps = columns["step"]
        if steps and step <= steps[-1]:
            self._cut(bisect_left(steps, step))
        if not self._has_room():
            return False
        steps.append(step)
        get = record.get
        for name, add in self._adders:
            add(number(get(name)))
        self.offsets.append(offset)
        self._count("seconds", self._seconds())
        self._count("sent", columns["sent"][-1])
        self._count("dense", columns["dense"][-1])
        return True

    def row_of(self, step: int) -> int | None:
        """The row of a step, or of the one before it, if it has none; None if there is none."""
        if not self.offsets:
            return None
        row = bisect_left(self.columns["step"], step)
        if row == len(self) or self.columns["step"][row] != step:
            row -= 1
        return row if row >= 0 else None

    def _seconds(self) -> float:
        told, times = self.columns["seconds"][-1], self.columns["time"]
        if told >= 0 or len(times) < 2:
            return told
        return max(times[-1] - times[-2], 0.0)

    def _count(self, name: str, value: float) -> None:
        column = self.columns[f"{name}_total"]
        column.append((column[-1] if column else 0.0) + (value if value > 0 else 0.0))

    def _cut(self, row: int) -> None:
        for column in self.columns.values():
            del column[row:]
        del self.offsets[row:]


class CoordinatorTable(_Table):
    """A row a record of a coordinator.

    >>> table = CoordinatorTable()
    >>> table.add({"time": 5.0, "queued": 2})
    True
    >>> table.columns["queued"][0], table.columns["sent"][0]
    (2.0, nan)
    """

    def __init__(self, share: Share | None = None) -> None:
        super().__init__(list(COORDINATOR_FIELDS), share)

    def add(self, record: Mapping[str, Any], offset: int = 0) -> bool:
        """A row of a record; False if there is no room for it."""
        if not self._has_room():
            return False
        for name, column in self.columns.items():
            column.append(number(record.get(name)))
        self.offsets.append(offset)
        return True
