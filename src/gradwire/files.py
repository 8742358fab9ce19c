"""Files that are whole, and on the disk, or not there."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

__all__ = ["lock_folder", "sync_folder", "write_whole"]


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that, whenever the power fails, there is all of it or what was there before.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_whole(Path(folder) / "file", b"all")
    ...     (Path(folder) / "file").read_bytes()
    b'all'
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def lock_folder(folder: Path) -> int | None:
    """Take a folder for this process alone, until the descriptor is closed or the process ends; None if another has it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     first, second = lock_folder(Path(folder)), lock_folder(Path(folder))
    ...     os.close(first)
    >>> second is None
    True
    """
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
