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

from gradwire.files import read_json, write_whole

__all__ = ["PlanCache", "cache_folder"]

_FORMAT: Final = 2  # of what is kept: before, costs were those of trials with warm caches


_MOST_BYTES: Final = 1 << 20  # of a file; of 10,000 costs it has 400 kB
_PLANS: Final = 100
_MOST_S: Final = 1e9  # of a cost


def cache_folder() -> Path | None:
    """Where it is kept: ``gradwire`` in ``XDG_CACHE_HOME``, or in ``~/.cache``; None for a user without a home.

    >>> folder = cache_folder()
    >>> folder is None or folder.name == "gradwire"
    True
    """
    told = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(told) if os.path.isabs(told) else Path.home() / ".cache") / "gradwire"
    except RuntimeError:  # no HOME, and no entry in the list of users, as in many containers
        return None


class PlanCache:
    """Seconds of processor by method and tensors, and the last plans, for a model, a machine and a number of ranks.

    A cache that cannot be read or written, or that holds anything else, is an empty one.

    >>> cache = PlanCache({"w": torch.zeros(64, 64)}, ranks=4)
    >>> cache.put("int8", ["w"], 4096, 0.25)
    >>> cache.get("int8", [{"w": torch.zeros(64, 64)}], 4096)
    0.25
    """

    def __init__(self, parameters: Mapping[str, Tensor], ranks: int) -> None:
        model = {name: list(parameter.shape) for name, parameter in parameters.items()}
        here = [_FORMAT, platform.machine(), platform.processor(), os.cpu_count(), torch.__version__, ranks, model]
        folder = cache_folder()
        self._file = folder and folder / f"plan-{crc32(json.dumps(here).encode()):08x}.json"
        self._known: dict[str, float] = {}
        self._changed = False
        self.plans: list[str] = []  # of the last contest, the best first, as text
        if self._file is not None:
            with suppress(OSError, ValueError):
                self._known, self.plans = _checked(read_json(self._file, _MOST_BYTES))

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
                if self._file is None:
                    return
                self._file.parent.mkdir(parents=True, exist_ok=True)
                write_whole(self._file, json.dumps({"costs": self._known, "plans": self.plans}).encode())
            self._changed = False


def _checked(told: Any) -> tuple[dict[str, float], list[str]]:
    """Costs and plans of a file; ValueError if it has anything but seconds and texts."""
    costs, plans = (told.get("costs"), told.get("plans")) if isinstance(told, dict) else (None, None)
    if not isinstance(costs, dict) or not isinstance(plans, list) or len(plans) > _PLANS:
        raise ValueError("it is not a cache of plans")
    if not all(type(each) in (int, float) and 0 <= each <= _MOST_S for each in costs.values()):
        raise ValueError("costs must be seconds")
    if not all(isinstance(each, str) for each in plans):
        raise ValueError("plans must be texts")
    return {key: float(each) for key, each in costs.items()}, plans


def _key(what: str, names: Collection[str], numel: int) -> str:
    return f"{what} {numel} {crc32(' '.join(sorted(names)).encode()):08x}"
