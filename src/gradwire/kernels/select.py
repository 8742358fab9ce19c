"""Which backend runs an op, and how to say otherwise. A choice is never silent: ``available`` lists it."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any, Final, ParamSpec, TypeVar

import torch

from gradwire.errors import ConfigError
from gradwire.kernels import reference

__all__ = ["available", "backends", "implementation", "native", "op", "use"]

P = ParamSpec("P")
R = TypeVar("R")

# By device type; what a backend lacks, and devices that are not listed, run on the reference.
_PREFERRED: Final[dict[str, tuple[str, ...]]] = {"cpu": ("native",), "cuda": ("triton",)}
_INTERPRETED: Final = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's kernels then run on the CPU, for tests
_OPS: Final[list[str]] = []
_forced: ContextVar[str | None] = ContextVar("gradwire_backend", default=None)


@functools.cache
def _modules() -> dict[str, ModuleType]:
    """The backends of this installation: what is missing is left out, what is broken raises."""
    modules = {"reference": reference}
    if importlib.util.find_spec("gradwire._native"):  # missing where there was no compiler
        modules["native"] = importlib.import_module("gradwire.kernels.native")
    if (torch.cuda.is_available() or _INTERPRETED) and importlib.util.find_spec("triton"):  # comes with torch for CUDA
        modules["triton"] = importlib.import_module("gradwire.kernels.triton")
    return modules


def backends() -> tuple[str, ...]:
    """Names of the backends that run at least one op here.

    >>> "reference" in backends()
    True
    """
    return tuple(name for name, module in _modules().items() if any(hasattr(module, op) for op in _OPS))


def available(device: str = "cpu") -> dict[str, str]:
    """Each op and the backend that runs it on a device.

    >>> available()["encode_blocks"] in backends()
    True
    """
    return {name: implementation(name, device)[0] for name in _OPS}


def use(backend: str) -> AbstractContextManager[None]:
    """In a ``with`` statement: run every op the backend has for a tensor's device on it, the others on the reference.

    >>> with use("reference"):
    ...     set(available().values())
    {'reference'}
    """
    if backend not in backends():
        raise ConfigError(f"`backend` must be one of {', '.join(backends())}; got {backend!r}.")
    return _using(backend)


@contextmanager
def _using(backend: str) -> Iterator[None]:
    token = _forced.set(backend)
    try:
        yield
    finally:
        _forced.reset(token)


def native() -> ModuleType | None:
    """The native backend, if that is what runs ops on the CPU: for what is more than an op.

    >>> with use("reference"):
    ...     print(native())
    None
    """
    return _modules().get("native") if _forced.get() in (None, "native") else None


def implementation(name: str, device: str) -> tuple[str, Callable[..., Any]]:
    """The backend chosen for an op on a device type, and its function."""
    order = _PREFERRED.get(device, ())
    if forced := _forced.get():
        order = (forced,) if forced in order or _INTERPRETED else ()
    for backend in (*order, "reference"):
        function = getattr(_modules().get(backend), name, None)
        if function is not None:
            return backend, function
    raise NotImplementedError(f"no backend has the op {name!r}")  # a bug: the reference has them all


def op(signature: Callable[P, R]) -> Callable[P, R]:
    """Make a signature the front of its implementations; the device of its first argument, or ``device``, decides."""
    name = signature.__name__
    chosen: dict[tuple[str, str | None], Callable[P, R]] = {}  # by device, and what is forced
    _OPS.append(name)

    @functools.wraps(signature)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        where = _device_type(kwargs.get("device", args[0])), _forced.get()
        if (function := chosen.get(where)) is None:
            function = chosen[where] = implementation(name, where[0])[1]
        return function(*args, **kwargs)

    return run


def _device_type(where: object) -> str:
    if isinstance(where, list | tuple):  # of tensors
        return _device_type(where[0]) if where else "cpu"
    return where.device.type if isinstance(where, torch.Tensor) else torch.device(str(where)).type
