"""Files that are whole, and on the disk, or not there."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path
from typing import Any

from gradwire.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["lock_folder", "read_toml", "write_whole"]


def read_toml(path: str | Path) -> dict[str, Any]:
    """The table of a file in TOML.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "a.toml"
    ...     _ = file.write_text("[train]\\nworkers = 4")
    ...     read_toml(file)
    {'train': {'workers': 4}}
    """
    try:
        table: dict[str, Any] = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}.") from None
    return table


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that, whenever the power fails, there is all of it or what was there before.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_whole(Path(folder) / "file", b"all")
    ...     (Path(folder) / "file").read_bytes()
    b'all'
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    folder = os.open(path.parent, os.O_RDONLY)  # first: when no more files can be opened, nothing has changed
    try:
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:  # a full disk must not keep half a file
            temporary.unlink(missing_ok=True)
            raise
        os.fsync(folder)
    finally:
        os.close(folder)


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
