"""What was found out about a model on this machine, kept from one training to the next."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import torch
from torch import Tensor

from gradwire.files import write_whole

__all__ = ["PlanCache", "cache_folder"]

_FORMAT: Final = 2  # of what is kept: before, costs were those of trials with warm caches


def cache_folder() -> Path:
    """Where it is kept: ``gradwire`` in ``XDG_CACHE_HOME``, or in ``~/.cache``.

    >>> cache_folder().name
    'gradwire'
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gradwire"


class PlanCache:
    """Seconds of processor by method and tensors, and the last plans, for a model, a machine and a number of ranks.

    A cache that cannot be read or written is an empty one.

    >>> cache = PlanCache({"w": torch.zeros(64, 64)}, ranks=4)
    >>> cache.put("int8", ["w"], 4096, 0.25)
    >>> cache.get("int8", [{"w": torch.zeros(64, 64)}], 4096)
    0.25
    """

    def __init__(self, parameters: Mapping[str, Tensor], ranks: int) -> None:
        model = {name: list(parameter.shape) for name, parameter in parameters.items()}
        here = [_FORMAT, platform.machine(), platform.processor(), os.cpu_count(), torch.__version__, ranks, model]
        self._file = cache_folder() / f"plan-{crc32(json.dumps(here).encode()):08x}.json"
        self._known: dict[str, float] = {}
        self._changed = False
        self.plans: list[str] = []  # of the last contest, the best first, as text
        with suppress(OSError, ValueError, TypeError, AttributeError, KeyError):
            told: dict[str, Any] = json.loads(self._file.read_text())
            self._known = {str(key): float(value) for key, value in told["costs"].items() if float(value) >= 0}
            self.plans = [str(each) for each in told["plans"]]

    def keep_plans(self, plans: list[str]) -> None:
        """Remember the plan that flies, and those it has beaten."""
        self.plans, self._changed = plans, True
        self.save()

    def get(self, what: str, steps: Sequence[Mapping[str, Tensor]], numel: int) -> float | None:
        """Seconds of processor; None if nobody knows."""
        return self._known.get(_key(what, steps[0] if steps else (), numel))

    def put(self, what: str, names: Collection[str], numel: int, processor_s: float) -> None:
        """Remember the least that was seen."""
        key = _key(what, names, numel)
        if processor_s < self._known.get(key, math.inf):
            self._known[key], self._changed = processor_s, True

    def save(self) -> None:
        """Write what is new."""
        if self._changed:
            with suppress(OSError):
                self._file.parent.mkdir(parents=True, exist_ok=True)
                write_whole(self._file, json.dumps({"costs": self._known, "plans": self.plans}).encode())
            self._changed = False


def _key(what: str, names: Collection[str], numel: int) -> str:
    return f"{what} {numel} {crc32(' '.join(sorted(names)).encode()):08x}"
