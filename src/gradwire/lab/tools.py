"""The programs a lab is made with, and whether they may be used here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from gradwire.errors import LabError

__all__ = ["call", "call_inside", "inside", "namespace_exists", "program", "python_inside", "require", "unavailable"]

_PACKAGES: Final = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux"}
_NAMESPACES: Final = Path("/run/netns")  # where ip keeps the named ones
_CAPABILITIES: Final = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}


def unavailable() -> str | None:
    """Why no lab can be made here; None if one can.

    >>> reason = unavailable()
    >>> reason is None or reason.startswith("a lab needs")
    True
    """
    if sys.platform != "linux":
        return f"a lab needs Linux: it makes network namespaces; this is {sys.platform}."
    if os.geteuid() != 0:
        return "a lab needs root: it makes network namespaces; run with sudo."
    if lacking := [name for name, bit in _CAPABILITIES.items() if not _effective_capabilities() >> bit & 1]:
        return f"a lab needs {' and '.join(lacking)}, which root lacks here; start the container with --privileged."
    for name, package in _PACKAGES.items():
        if _which(name) is None:
            return f"a lab needs the program {name!r}, which is not installed; it is in the package {package}."
    return None


def require() -> None:
    """Raise :class:`LabError` with the reason where no lab can be made."""
    if reason := unavailable():
        raise LabError(reason)


def program(name: str) -> str:
    """Full path of one of the programs."""
    path = _which(name)
    if path is None:
        raise LabError(f"the program {name!r} is not installed; it is in the package {_PACKAGES[name]}.")
    return path


def call(name: str, *arguments: str) -> str:
    """Run one of the programs and return what it prints."""
    return _checked([program(name), *arguments])


def inside(namespace: str, *command: str) -> list[str]:
    """The command, to be run in a namespace: same files and user, another network. It keeps its process id."""
    return [program("nsenter"), f"--net={_NAMESPACES / namespace}", *command]


def call_inside(namespace: str, *command: str) -> str:
    """Run a command in a namespace and return what it prints."""
    return _checked(inside(namespace, *command))


def python_inside(namespace: str, program: str, *arguments: str) -> str:
    """Run a small Python program in a namespace and return what it prints; its last words are the error."""
    command = inside(namespace, sys.executable, "-I", "-S", "-c", program, *arguments)
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LabError((done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1])
    return done.stdout


def namespace_exists(namespace: str) -> bool:
    """Whether a network namespace of that name exists.

    >>> namespace_exists("gradwire-never-made")
    False
    """
    return (_NAMESPACES / namespace).exists()


def _checked(command: list[str]) -> str:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        words = (done.stderr or done.stdout).strip() or f"status {done.returncode}"
        raise LabError(f"`{' '.join([Path(command[0]).name, *command[1:]])}` failed: {words}")
    return done.stdout


def _which(name: str) -> str | None:
    # Shells of root often come without the folders where distributions keep ip and tc.
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]))


def _effective_capabilities() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1], 16) for line in status if line.startswith("CapEff:"))
