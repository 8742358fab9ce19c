"""What a server has done, for people and for Prometheus."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

__all__ = ["ServerMetrics"]

_AGES: Final = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class ServerMetrics:
    """Counts, from any thread.

    >>> metrics = ServerMetrics()
    >>> metrics.applied(age=3)
    >>> metrics.refused("STALE")
    >>> print(metrics.prometheus({"version": 7}).splitlines()[-1])
    gradwire_version 7
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.ages: Counter[int] = Counter()
        self.started = time.monotonic()

    def count(self, name: str, number: int = 1) -> None:
        """Count something."""
        with self._lock:
            self.counts[name] += number

    def applied(self, age: int | None) -> None:
        """A push was applied, that was so many versions old."""
        with self._lock:
            self.counts["applied"] += 1
            if age is not None:
                self.ages[min(age, _AGES[-1] + 1)] += 1  # so that no worker can make it long

    def refused(self, reason: str) -> None:
        """A push or a call was refused."""
        with self._lock:
            self.refusals[reason] += 1

    def totals(self) -> dict[str, Any]:
        """So far: pushes applied and refused, bytes, and how many versions behind gradients were."""
        with self._lock:
            counts, ages = self.counts, {str(age): number for age, number in sorted(self.ages.items())}
            moved = {"received": counts["received_bytes"], "sent": counts["sent_bytes"]}
            done = {"applied": counts["applied"], "refused": sum(self.refusals.values())}
            return {**done, **moved, "staleness": ages}

    def prometheus(self, gauges: Mapping[str, float]) -> str:
        """Everything in Prometheus's text format; ``gauges`` are values of this moment."""
        with self._lock:
            return "\n".join(self._lines(gauges)) + "\n"

    def _lines(self, gauges: Mapping[str, float]) -> Iterator[str]:
        for name, text in (
            ("applied", "pushes applied"),
            ("repeated", "pushes that had been applied before"),
            ("pulls", "reads of the parameters"),
            ("received_bytes", "bytes of pushes"),
            ("sent_bytes", "bytes of parameters"),
            ("snapshots", "snapshots saved"),
            ("ended_connections", "connections of strangers that the server ended"),
        ):
            yield f"# HELP gradwire_{name}_total {text}"
            yield f"# TYPE gradwire_{name}_total counter"
            yield f"gradwire_{name}_total {self.counts[name]}"
        yield "# HELP gradwire_refused_total calls and pushes that were refused"
        yield "# TYPE gradwire_refused_total counter"
        for reason, number in sorted(self.refusals.items()):
            yield f'gradwire_refused_total{{reason="{reason}"}} {number}'
        yield "# HELP gradwire_staleness versions that gradients were behind"
        yield "# TYPE gradwire_staleness histogram"
        for edge in _AGES:
            yield f'gradwire_staleness_bucket{{le="{edge}"}} {sum(n for age, n in self.ages.items() if age <= edge)}'
        total = sum(self.ages.values())
        yield f'gradwire_staleness_bucket{{le="+Inf"}} {total}'
        yield f"gradwire_staleness_sum {sum(age * number for age, number in self.ages.items())}"
        yield f"gradwire_staleness_count {total}"
        for name, value in gauges.items():
            yield f"# TYPE gradwire_{name} gauge"
            yield f"gradwire_{name} {value:g}"
