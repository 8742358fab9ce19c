"""Times of many contenders, taken so that they can be compared.

Round after round, everything is timed once, in an order drawn anew for each round: a disturbance of the machine hits
all alike, and none always runs behind the same neighbour. The first rounds are discarded; the median counts.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

__all__ = ["Clock", "CpuClock", "CudaClock", "Timing", "interleaved"]

_FLUSH_BYTES: Final = 1 << 30


@dataclass(frozen=True)
class Timing:
    """Seconds of one contender: the median and the quartiles of its rounds.

    >>> Timing.of([0.3, 0.1, 0.2]).median_s
    0.2
    """

    median_s: float
    lower_quartile_s: float
    upper_quartile_s: float
    rounds: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """Of the samples of all rounds."""
        quartiles = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else [samples[0]] * 3
        return cls(statistics.median(samples), quartiles[0], quartiles[2], len(samples))


class Clock:
    """Takes the time of calls; ``read`` gives those since the last ``read``."""

    def time(self, call: Callable[[], object]) -> None:
        """Run and time one call."""
        raise NotImplementedError

    def read(self) -> list[float]:
        """Seconds of each call, in order."""
        raise NotImplementedError


class CpuClock(Clock):
    """Wall time. What a call returns is released after the clock stops; what it replaces, before.

    >>> clock = CpuClock()
    >>> clock.time(lambda: None)
    >>> len(clock.read())
    1
    """

    def __init__(self) -> None:
        self._taken: list[float] = []

    def time(self, call: Callable[[], object]) -> None:
        """Run and time one call."""
        start = time.perf_counter()
        result = call()
        self._taken.append(time.perf_counter() - start)
        del result

    def read(self) -> list[float]:
        """Seconds of each call, in order."""
        taken, self._taken = self._taken, []
        return taken


class CudaClock(Clock):
    """Time on the device, between two events around each call.

    Before each call a buffer larger than the cache is overwritten, so that no input is found there. The device is busy
    with that while Python starts the call: what is measured is what the call costs a training that has queued its work
    ahead. A call that waits for the device is charged for the wait.
    """

    def __init__(self, device: torch.device) -> None:
        memory = torch.cuda.get_device_properties(device).total_memory
        self._flush = torch.empty(min(_FLUSH_BYTES, memory // 16), dtype=torch.uint8, device=device)
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def time(self, call: Callable[[], object]) -> None:
        """Queue one call between two events."""
        start, end = self._event(), self._event()
        self._flush.zero_()
        start.record()
        result = call()
        end.record()
        del result
        self._events.append((start, end))

    def read(self) -> list[float]:
        """Wait for the device; seconds of each call, in order."""
        torch.cuda.synchronize()
        taken = [start.elapsed_time(end) / 1000 for start, end in self._events]
        self._events = []
        return taken

    @staticmethod
    def _event() -> Any:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def interleaved(
    work: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int,
    clock: Clock,
    threads: Sequence[int] = (1,),
    on_round: Callable[[int], None] = lambda done: None,
) -> dict[int, dict[str, Timing]]:
    """Time everything once a round; by number of threads, then by name.

    >>> times = interleaved({"a": lambda: 1, "b": lambda: 2}, rounds=3, warmup=1, clock=CpuClock())
    >>> sorted(times[1]), times[1]["a"].rounds
    (['a', 'b'], 3)
    """
    shuffled = random.Random(0)
    samples: dict[int, dict[str, list[float]]] = {count: {name: [] for name in work} for count in threads}
    before = torch.get_num_threads()
    try:
        for number in range(warmup + rounds):
            for count in threads:
                torch.set_num_threads(count)
                order = shuffled.sample(sorted(work), len(work))
                for name in order:
                    clock.time(work[name])
                for name, seconds in zip(order, clock.read(), strict=True):
                    if number >= warmup:
                        samples[count][name].append(seconds)
            on_round(number + 1)
    finally:
        torch.set_num_threads(before)
    return {count: {name: Timing.of(taken) for name, taken in by_name.items()} for count, by_name in samples.items()}
