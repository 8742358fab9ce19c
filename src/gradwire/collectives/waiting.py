"""Which threads wait for messages, and how long: what a reduction takes is work, or it is that."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["is_waiting", "waited", "waiting"]


class _Clock(threading.local):
    seconds = 0.0


_clock = _Clock()
_waiting: set[int | None] = set()


@contextmanager
def waiting() -> Iterator[None]:
    """Around whatever blocks until a message has come or gone."""
    started, thread = time.perf_counter(), threading.get_ident()
    _waiting.add(thread)
    try:
        yield
    finally:
        _waiting.discard(thread)
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


def is_waiting(thread: threading.Thread) -> bool:
    """Whether a thread that has not ended is waiting now, and would not miss the interpreter.

    >>> with waiting():
    ...     is_waiting(threading.current_thread())
    True
    >>> is_waiting(threading.current_thread())
    False
    """
    return thread.ident in _waiting
