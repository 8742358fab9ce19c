"""Processors and threads, the folder of plans, the clock."""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
import time
from math import ceil
from pathlib import Path
from typing import Final

import torch

from gradwire.doctor.finding import Finding
from gradwire.planner.cache import cache_folder

__all__ = ["machine_findings"]

_UNSYNCHRONIZED: Final = 5  # what adjtimex answers then: TIME_ERROR
_TIMEX_BYTES: Final = 512  # of its structure, and room
_COARSE_S: Final = 1e-4
_BUILT_S: Final = 1.7e9  # gradwire is younger than that: November 2023


def machine_findings() -> list[Finding]:
    """What the machine gives to this process.

    >>> [each.name for each in machine_findings()]
    ['processors', 'cache', 'clock']
    """
    return [_processors(), _cache(), _clock()]


def _processors() -> Finding:
    cores, threads = _cores(), torch.get_num_threads()
    said = os.environ.get("OMP_NUM_THREADS")
    fact = f"{_count(cores, 'core')} for this process, torch uses {_count(threads, 'thread')}"
    fact += f" (OMP_NUM_THREADS={said})" if said else ""
    if threads > cores:
        return Finding(
            "processors", "warning", f"{fact}: they wait for each other", fix=f"export OMP_NUM_THREADS={cores}"
        )
    return Finding("processors", "ok", fact)


def _cores() -> int:
    """Those this process may use: what the system has, what it is bound to, and what its container is given."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(bound, ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # not here, or "max"
        return bound


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _cache() -> Finding:
    folder = cache_folder()
    fix = "export XDG_CACHE_HOME=$HOME/cache   # any folder of yours"
    if folder is None:
        fact = "this user has no home folder: what `auto` measures is measured again each time"
        return Finding("cache", "warning", fact, fix="export XDG_CACHE_HOME=/path/to/a/folder   # any folder of yours")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        fact = f"{folder} cannot be written ({error.strerror}): what `auto` measures is measured again each time"
        return Finding("cache", "warning", fact, fix=fix)
    return Finding("cache", "ok", f"{folder}, can be written")


def _clock() -> Finding:
    resolution = time.get_clock_info("perf_counter").resolution
    fact = f"{time.strftime('%Y-%m-%d %H:%M:%S %z')}, resolution {resolution * 1e9:.0f} ns"
    synchronize = "timedatectl set-ntp true"
    if time.time() < _BUILT_S:
        return Finding("clock", "problem", f"{fact}: it is wrong, and certificates seem not valid yet", fix=synchronize)
    if resolution > _COARSE_S:
        return Finding("clock", "warning", f"{fact}: too coarse for what `auto` measures", fix=None)
    if _synchronized() is False:
        return Finding("clock", "ok", f"{fact}; nobody keeps it right, which only certificates need", fix=synchronize)
    return Finding("clock", "ok", fact)


def _synchronized() -> bool | None:
    """Whether the kernel says that somebody keeps the clock right; None where it cannot be asked."""
    if sys.platform != "linux":
        return None
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != _UNSYNCHRONIZED
