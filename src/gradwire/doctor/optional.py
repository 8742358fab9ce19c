"""What is not needed, and switches something on."""

from __future__ import annotations

import importlib.util

from gradwire.doctor.finding import Finding
from gradwire.extras import EXTRAS
from gradwire.lab import unavailable

__all__ = ["optional_findings"]


def optional_findings() -> list[Finding]:
    """Extras and the lab.

    >>> [each.name for each in optional_findings()][-1]
    'lab'
    """
    return [*(_extra(name, modules) for name, modules in EXTRAS.items()), _lab()]


def _extra(name: str, modules: tuple[str, ...]) -> Finding:
    missing = [module for module in modules if not _installed(module)]
    install = f"pip install 'gradwire[{name}]'"
    if not missing:
        return Finding(f"extra {name}", "ok", f"installed: {', '.join(modules)}")
    if len(missing) < len(modules):
        return Finding(f"extra {name}", "ok", f"not whole: {', '.join(missing)} not installed", fix=install)
    return Finding(f"extra {name}", "ok", "not installed", fix=install)


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package it is in
        return False


def _lab() -> Finding:
    reason = unavailable()
    if reason is None:
        return Finding("lab", "ok", "can be made: root, ip and tc are here")
    if "the program" in reason:
        return Finding(
            "lab", "ok", f"cannot be made: {reason}", fix=f"apt-get install {reason.rstrip('.').split()[-1]}"
        )
    return Finding("lab", "ok", f"cannot be made: {reason}", fix="sudo gradwire lab up" if "sudo" in reason else None)
