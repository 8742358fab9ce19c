"""Optional parts: which extra brings which package, and the error that says so."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Final

from gradwire.errors import ConfigError, MissingExtraError

__all__ = ["EXTRAS", "require"]

EXTRAS: Final = {
    "ray": ("ray",),
    "spark": ("pyspark", "pandas", "pyarrow"),
    "lightning": ("lightning",),
    "accelerate": ("accelerate", "transformers"),
    "serve": ("grpc", "google.protobuf"),
    "demo": ("sklearn",),
    "bench": ("sklearn", "matplotlib"),
    "track": ("tensorboard", "mlflow", "wandb"),
}
"""Extra -> the packages it brings, by import name, the smallest extra first; ``pyproject.toml`` has their versions."""


def require(module: str, *, purpose: str) -> ModuleType:
    """Import an optional module, or say which extra brings it.

    >>> require("sklearn.datasets", purpose="the digits task").__name__
    'sklearn.datasets'
    >>> require("numpy", purpose="x")
    Traceback (most recent call last):
    gradwire.errors.ConfigError: `module` 'numpy' belongs to no extra; known: ray, spark, ...
    """
    extra = next((e for e, names in EXTRAS.items() for n in names if f"{module}.".startswith(f"{n}.")), None)
    if extra is None:
        raise ConfigError(f"`module` {module!r} belongs to no extra; known: {', '.join(EXTRAS)}.")
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{purpose} needs {module!r}, which is not installed ({error}): pip install 'gradwire[{extra}]'"
        ) from error
