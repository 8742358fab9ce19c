"""How ranks are started: by an engine that is there (``torchrun``, ``ray``, ``spark``), or as processes here."""

from importlib import import_module
from typing import Any

from gradwire.clusters.local import run_workers
from gradwire.clusters.worker import Worker

__all__ = ["Worker", "run_workers"]


def __getattr__(name: str) -> Any:
    if name in ("ray", "spark", "torchrun"):
        return import_module(f"gradwire.clusters.{name}")
    raise AttributeError(f"module 'gradwire.clusters' has no attribute {name!r}")
