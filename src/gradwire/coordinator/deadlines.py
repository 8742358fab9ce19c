"""Deadlines of tasks that wait for a caller."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

from gradwire.errors import GradwireError

__all__ = ["SLOWEST", "Deadlines", "LateError", "time_left"]

SLOWEST: Final = 65_536
"""Bytes a second that every caller must manage."""


def time_left(since: float, seconds: float, nbytes: int) -> float:
    """Return the seconds left of ``seconds``, and of those that so many bytes may take, after ``since``."""
    return max(0.0, since + seconds + nbytes / SLOWEST - time.monotonic())


class LateError(GradwireError):
    """A caller took too long."""


class _Deadline:
    """One of them; a class and not a generator, because every message passes here."""

    __slots__ = ("_ends", "_late", "_seconds", "_task")

    def __init__(self, ends: dict[asyncio.Task[Any], float], late: set[asyncio.Task[Any]], seconds: float) -> None:
        self._ends, self._late, self._seconds = ends, late, seconds

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._ends[task] = task, time.monotonic() + self._seconds

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._ends.pop(self._task, None)
        if self._task in self._late:
            self._late.discard(self._task)
            if kind is asyncio.CancelledError:
                raise LateError(f"nothing came within {self._seconds:g} seconds.") from None


class Deadlines:
    """Cancels tasks that wait for a caller for too long.

    >>> async def late(deadlines):
    ...     ending = asyncio.ensure_future(deadlines.run(every_s=0.01))
    ...     with deadlines.within(0.02):
    ...         await asyncio.sleep(5)
    >>> asyncio.run(late(Deadlines()))
    Traceback (most recent call last):
    gradwire.coordinator.deadlines.LateError: nothing came within 0.02 seconds.
    """

    def __init__(self) -> None:
        self._ends: dict[asyncio.Task[Any], float] = {}
        self._late: set[asyncio.Task[Any]] = set()

    def within(self, seconds: float) -> _Deadline:
        """A block that raises :class:`LateError` in this task unless it ends in time."""
        return _Deadline(self._ends, self._late, seconds)

    async def run(self, every_s: float) -> None:
        """Look for late tasks, until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            now = time.monotonic()
            for task, end in list(self._ends.items()):
                if end < now:
                    del self._ends[task]
                    self._late.add(task)
                    task.cancel()
