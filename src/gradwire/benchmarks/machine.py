"""What the measurements were taken on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

import gradwire

__all__ = ["describe", "device_name"]


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


def describe(device: str = "cpu") -> dict[str, Any]:
    """The device and the versions of what runs on it."""
    facts: dict[str, Any] = {"device": device_name(device), "cpus": os.cpu_count()}
    if device == "cuda":
        facts |= {"cuda": torch.version.cuda, "l2_bytes": torch.cuda.get_device_properties(0).L2_cache_size}
    return facts | {"torch": str(torch.__version__), "gradwire": gradwire.__version__}
