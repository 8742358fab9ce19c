"""The C++ core, if this installation has it. An op that stands here runs natively on CPU tensors."""

from __future__ import annotations

try:
    from gradwire import _native  # noqa: F401

    LOADED = True
    """Whether the compiled core could be imported."""
except ImportError:  # a source tree that was not built
    LOADED = False
