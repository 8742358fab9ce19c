"""Who is late, for how long the others wait for it, and what is counted."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from gradwire.errors import ConfigError

__all__ = ["StragglerPolicy", "Stragglers"]


@dataclass(frozen=True)
class StragglerPolicy:
    """Which late partitions are left out of a step.

    After ``warmup`` steps in which all are waited for, a partition is late when the others' blocks have been there for
    ``slack`` times as long as blocks usually take: all but the slowest ``drop`` of the last ``window`` ones. If more
    than ``max_drop`` of all partitions are missing the step is abandoned.

    >>> StragglerPolicy(drop=0.1, max_drop=0.5).max_drop
    0.5
    """

    drop: float = 0.02
    max_drop: float = 0.5
    warmup: int = 10
    window: int = 200
    slack: float = 3.0
    least_s: float = 0.05  # patience is never shorter

    def __post_init__(self) -> None:
        for name, right, allowed in (
            ("drop", 0 <= self.drop < 1, "in [0, 1)"),
            ("max_drop", 0 <= self.max_drop < 1, "in [0, 1)"),
            ("warmup", self.warmup >= 1, "at least 1"),
            ("window", self.window >= 1, "at least 1"),
            ("slack", self.slack >= 1, "at least 1"),
            ("least_s", self.least_s >= 0, "not negative"),
        ):
            if not right:
                raise ConfigError(f"`{name}` of a straggler policy must be {allowed}; got {getattr(self, name)!r}.")


@dataclass
class Stragglers:
    """What is known of the others' punctuality. Shared by all parameters that travel over one exchange."""

    policy: StragglerPolicy | None = None
    absent: set[int] = field(default_factory=set)  # late, and nothing came since
    waits: deque[float] = field(default_factory=deque)
    steps: int = 0
    dropped: int = 0  # gradients of a partition in a step that were left out
    stale: int = 0  # weights of a partition in a step that were not there in time
    abandoned: int = 0  # steps
    on_late: Callable[[str, int, int], None] | None = None  # told what, of whom, and the step
    _last: dict[tuple[str, int], int] = field(default_factory=dict)

    def count(self, what: Literal["dropped", "stale"], source: int, step: int) -> None:
        """Once a partition and step, however many parameters travel."""
        if self._last.get((what, source)) != step:
            self._last[what, source] = step
            setattr(self, what, getattr(self, what) + 1)
            if self.on_late is not None:
                self.on_late(what, source, step)

    def patience_s(self) -> float | None:
        """How long to wait for a block; None for as long as it takes."""
        if self.policy is None or self.steps < self.policy.warmup or not self.waits:
            return None
        ranked = sorted(self.waits)
        usual = ranked[min(len(ranked) - 1, int((1 - self.policy.drop) * len(ranked)))]
        return max(self.policy.least_s, self.policy.slack * usual)

    def collect(
        self, sources: Sequence[int], take: Callable[[int, float | None], Tensor | None]
    ) -> dict[int, Tensor | None]:
        """The block of each partition, None for those that are late."""
        if self.policy is None:
            return {source: take(source, None) for source in sources}
        started, patience = time.monotonic(), self.patience_s()
        found: dict[int, Tensor | None] = {}
        for source in sources:
            if source in self.absent:
                left: float | None = 0.0
            else:
                left = None if patience is None else max(0.0, started + patience - time.monotonic())
            block = found[source] = take(source, left)
            if block is None:
                self.absent.add(source)
            else:
                self.absent.discard(source)
                self.waits.append(time.monotonic() - started)
                if len(self.waits) > self.policy.window:
                    self.waits.popleft()
        return found

    def too_few(self, arrived: int, of: int) -> bool:
        """Whether a step must be abandoned."""
        return self.policy is not None and of - arrived > self.policy.max_drop * of
