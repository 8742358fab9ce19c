"""How long a thread has waited for messages: what a reduction takes is work, or it is that."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["waited", "waiting"]


class _Clock(threading.local):
    seconds = 0.0


_clock = _Clock()


@contextmanager
def waiting() -> Iterator[None]:
    """Around whatever blocks until a message has come or gone."""
    started = time.perf_counter()
    try:
        yield
    finally:
        _clock.seconds += time.perf_counter() - started


def waited() -> float:
    """Seconds of this thread so far.

    >>> before = waited()
    >>> with waiting():
    ...     time.sleep(0.01)
    >>> waited() - before >= 0.01
    True
    """
    return _clock.seconds
