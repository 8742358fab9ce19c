"""Failures that a training is started again after, from its last complete checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from gradwire.errors import ConfigError, PeerError

__all__ = ["Retries", "with_retries"]

T = TypeVar("T")


@dataclass
class Retries:
    """How many failures are forgiven.

    ``retry_times`` of them in a row. One that comes more than ``retry_times * retry_interval_s`` after the last counts
    as the first again.

    >>> retries = Retries(retry_times=1)
    >>> retries.forgive(), retries.forgive()
    (True, False)
    """

    retry_times: int = 5
    retry_interval_s: float = 120.0
    _failures: int = field(default=0, repr=False)
    _last: float = field(default=-1e18, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.retry_times, int) or self.retry_times < 0:
            raise ConfigError(f"`retry_times` must be a whole number of at least 0; got {self.retry_times!r}.")
        if not isinstance(self.retry_interval_s, int | float) or not self.retry_interval_s >= 0:
            raise ConfigError(f"`retry_interval_s` must not be negative; got {self.retry_interval_s!r}.")

    def forgive(self) -> bool:
        """Count a failure; whether to try again."""
        now = time.monotonic()
        recent = now - self._last <= self.retry_times * self.retry_interval_s
        self._failures, self._last = self._failures + 1 if recent else 1, now
        return self._failures <= self.retry_times


def with_retries(
    attempt: Callable[[int], T],
    *,
    retry_times: int = 5,
    retry_interval_s: float = 120.0,
    errors: tuple[type[BaseException], ...] = (PeerError, OSError),
) -> T:
    """Call ``attempt(number)``, counted from 0, until it returns, or has failed too often.

    A training that saves checkpoints and goes on from the last one, as ``optimize`` does, loses what came after it.

    >>> def attempt(number):
    ...     if number < 2:
    ...         raise PeerError("rank 1 is gone")
    ...     return number
    >>> with_retries(attempt)
    2
    """
    retries, number = Retries(retry_times, retry_interval_s), 0
    while True:
        try:
            return attempt(number)
        except errors:
            if not retries.forgive():
                raise
        number += 1
