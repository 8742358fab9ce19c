"""The runs of some folders, kept up to date by one thread."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from heapq import nlargest
from pathlib import Path
from typing import Any, Final

from gradwire.dashboard import views
from gradwire.dashboard.room import Room
from gradwire.dashboard.runs import Run
from gradwire.errors import ConfigError

__all__ = ["Store", "run_folders"]

_SLICE_S: Final = 0.02  # of reading, before whoever asks gets a turn
_PAUSE_S: Final = 0.001
_IDLE_S: Final = 0.25
_LOOK_S: Final = 1.0  # for new folders
_MOST: Final = 200  # runs


def run_folders(folder: Path) -> list[Path]:
    """The folder itself if it is a run's, else those in it that are; the latest last.

    >>> run_folders(Path("/nowhere"))
    []
    """
    if _is_run(folder):
        return [folder]
    try:
        with os.scandir(folder) as entries:
            inside = ((changed, each.name) for each in entries if (changed := _run_changed(each)) is not None)
            return [folder / name for _, name in sorted(nlargest(_MOST, inside))]
    except OSError:
        return []


def _run_changed(entry: os.DirEntry[str]) -> float | None:
    """Return when the folder of a run changed last; None for any other entry, such as a link to itself."""
    try:
        return entry.stat().st_mtime if entry.is_dir() and _is_run(entry.path) else None
    except OSError:
        return None


def _is_run(folder: str | Path) -> bool:
    try:
        with os.scandir(folder) as entries:  # of millions only one is looked at
            return any(each.name.endswith(".jsonl") for each in entries)
    except OSError:
        return False


class Store:
    """Runs by a number of ours: nothing that a browser asks for becomes a path.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, Store([Path(folder)]) as store:
    ...     store.overview(-1)["runs"]
    []
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = [Path(folder) for folder in folders]
        for folder in self.folders:
            if not folder.is_dir():
                raise ConfigError(f"`RUN_DIR` must be a folder of a run, or of runs; {str(folder)!r} is none.")
        self._runs: dict[str, Run] = {}
        self._room = Room()
        self._known: set[Path] = set()
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._read, name="gradwire-dashboard", daemon=True)
        self._looked = 0.0

    def __enter__(self) -> Store:
        self.look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def look(self) -> None:
        """Find folders that are new."""
        self._looked = time.monotonic()
        for folder in self.folders:
            for found in run_folders(folder):
                place = found.resolve()
                if place in self._known or len(self._known) >= _MOST:
                    continue
                try:
                    run = Run(found, self._room)
                except ConfigError:  # it is gone again
                    continue
                self._known.add(place)
                with self._lock:
                    self._runs[f"run{len(self._runs)}"] = run

    def read_all(self) -> None:
        """Read everything there is now; for reports."""
        self.look()
        for run in self._runs.values():
            while run.poll(1.0):
                pass

    def overview(self, since: int) -> dict[str, Any]:
        """A line about each run; only the version if nothing happened ``since`` that one."""
        with self._lock:
            version = sum(run.version + 1 for run in self._runs.values())
            if version == since:
                return {"version": version}
            runs = [{"id": key, "versions": dict(run.versions)} | views.summary(run) for key, run in self._runs.items()]
        return {"version": version, "runs": _told_apart(runs)}

    @contextmanager
    def run(self, key: str) -> Iterator[Run]:
        """A run, which does not change meanwhile; KeyError if there is none.

        The lock is held as long as a view is made: sharing the interpreter with the reader would take longer.
        """
        with self._lock:
            yield self._runs[key]

    def _read(self) -> None:
        while not self._end.is_set():
            if time.monotonic() > self._looked + _LOOK_S:
                self.look()
            more = False
            for run in list(self._runs.values()):
                with self._lock:
                    more |= run.poll(_SLICE_S)
                time.sleep(_PAUSE_S)
            if not more:
                self._end.wait(_IDLE_S)


def _told_apart(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs of the same name in different folders get a number."""
    seen: dict[str, int] = {}
    for run in runs:
        seen[run["name"]] = seen.get(run["name"], 0) + 1
        if seen[run["name"]] > 1:
            run["name"] = f"{run['name']} ({seen[run['name']]})"
    return runs
