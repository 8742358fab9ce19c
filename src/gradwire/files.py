"""Files that are whole, and on the disk, or not there."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from gradwire.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["lock_folder", "read_json", "read_toml", "read_whole", "write_whole"]


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


def read_whole(path: Path, most: int) -> bytes:
    """Read a regular file of at most ``most`` bytes; OSError for a larger one, and for a pipe, device or folder.

    A pipe is refused before it is read: nothing may ever be written to it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     (Path(folder) / "file").write_bytes(b"all")
    ...     read_whole(Path(folder) / "file", 3)
    ...     read_whole(Path(folder), 3)
    Traceback (most recent call last):
    IsADirectoryError: [Errno 21] Is a directory: ...
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if found.st_size > most:
            raise OSError(errno.EFBIG, f"it has {found.st_size} bytes, more than the {most} allowed", str(path))
        data = file.read(found.st_size + 1)  # not `most`: the memory for it is allocated at once
    if len(data) > found.st_size:  # it has grown, or, as in /proc, is said to be empty
        raise OSError(errno.EFBIG, f"it has more than the {found.st_size} bytes it had when it was opened", str(path))
    return data


def read_json(path: Path, most: int) -> Any:
    """Read a file of at most ``most`` bytes of JSON; OSError if it cannot be read, ValueError if it is not JSON.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / "file").write_text("[" * 100_000)
    ...     read_json(Path(folder) / "file", 1 << 20)
    Traceback (most recent call last):
    ValueError: it is nested too deeply
    """
    try:
        return json.loads(read_whole(path, most))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that, whenever the power fails, there is all of it or what was there before.

    When it cannot be written, nothing of it stays.

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
        except BaseException:  # a full disk must not keep half a file
            with suppress(OSError):
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
