"""What the measurements were taken on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

import gradwire

__all__ = ["Stolen", "describe", "device_name"]


def device_name(device: str = "cpu") -> str:
    """Model of the CPU or the GPU.

    >>> bool(device_name())
    True
    """
    if device == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())


class Stolen:
    """How much of the processor time that programs wanted a hypervisor has given to other machines, from now on.

    Above some percent a benchmark tells little of what it measures. 0 where the kernel does not count it.

    >>> 0 <= Stolen().share <= 1
    True
    """

    def __init__(self) -> None:
        self._before = self._ticks()

    @property
    def share(self) -> float:
        """Since this was made."""
        worked, stolen = (now - before for now, before in zip(self._ticks(), self._before, strict=True))
        return stolen / (worked + stolen) if stolen else 0.0

    def _ticks(self) -> tuple[int, int]:
        counters = Path("/proc/stat")
        line = counters.read_text().splitlines()[0] if counters.exists() else "cpu"
        user, nice, system, _idle, _io, interrupts, softly, stolen, *_ = *map(int, line.split()[1:]), *[0] * 8
        return user + nice + system + interrupts + softly, stolen


def describe(device: str = "cpu") -> dict[str, Any]:
    """The device and the versions of what runs on it."""
    facts: dict[str, Any] = {"device": device_name(device), "cpus": os.cpu_count()}
    if device == "cuda":
        facts |= {"cuda": torch.version.cuda, "l2_bytes": torch.cuda.get_device_properties(0).L2_cache_size}
    return facts | {"torch": str(torch.__version__), "gradwire": gradwire.__version__}
