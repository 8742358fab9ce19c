"""Ranks as processes of this machine, joined over loopback."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from gradwire.collectives.rank import RENDEZVOUS
from gradwire.errors import PeerError
from gradwire.lab import Lab
from gradwire.lab.ranks import started
from gradwire.sharding import Retries

__all__ = ["run_workers"]

_LOOPBACK: Final = "lo0" if sys.platform == "darwin" else "lo"
_GRACE_S: Final = 5.0  # how long the others may take to notice that a worker is gone


def run_workers(
    module: str,
    settings: Mapping[str, Any],
    workers: int,
    lab: Lab | None = None,
    *,
    retry_times: int = 0,
    retry_interval_s: float = 120.0,
) -> Iterator[dict[str, Any]]:
    """Run ``python -m module SETTINGS`` once a rank and yield the JSON events rank 0 prints.

    Ranks are joined over loopback, or with a ``lab`` over its links, one a host.

    When a worker fails the others are ended, and :class:`PeerError` says which rank failed first and how; or, as long
    as failures are forgiven (:class:`~gradwire.sharding.Retries`), all are started again after an event ``retry``.
    """
    retries = Retries(retry_times, retry_interval_s)
    while True:
        try:
            yield from _run_once(module, settings, workers, lab)
            return
        except PeerError as error:
            if not retries.forgive():
                raise
            yield {"event": "retry", "error": str(error)}


def _run_once(module: str, settings: Mapping[str, Any], workers: int, lab: Lab | None) -> Iterator[dict[str, Any]]:
    watch: _Watch | None = None

    def start(rank: int) -> subprocess.Popen[str]:
        return _start(module, settings, rank, workers, folder, lab)

    def end(processes: list[subprocess.Popen[str]]) -> None:
        _end(processes)
        if watch is not None and watch.ident is not None:  # None: it was not started yet
            watch.join()  # before the folder goes

    with tempfile.TemporaryDirectory(prefix="gradwire-") as name:
        folder = Path(name)
        with started(start, workers, end) as processes:
            watch = _Watch(processes, folder)
            watch.start()
            output = processes[0].stdout
            assert output is not None
            with output:
                for line in output:
                    yield json.loads(line)
            watch.join()
            if watch.failed is not None:
                raise PeerError(_story(watch.failed, processes[watch.failed], folder))


def _start(
    module: str, settings: Mapping[str, Any], rank: int, workers: int, folder: Path, lab: Lab | None
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", module, json.dumps(dict(settings))]
    with (folder / f"stderr-{rank}").open("w") as errors:
        pipes: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            "stderr": errors,
            "text": True,
        }
        if lab is not None:
            return lab.popen(rank, command, **pipes)
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(workers),
            RENDEZVOUS: str(folder / "rendezvous"),
            "GLOO_SOCKET_IFNAME": _LOOPBACK,
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        return subprocess.Popen(command, env=environment, **pipes)


class _Watch(threading.Thread):
    """Waits for all workers, and ends the others soon after one has failed: they may be waiting for it."""

    def __init__(self, processes: list[subprocess.Popen[str]], folder: Path) -> None:
        super().__init__(daemon=True)
        self.processes, self.folder = processes, folder
        self.failed: int | None = None  # the rank to blame

    def run(self) -> None:
        deadline = math.inf
        while any(p.poll() is None for p in self.processes) and time.monotonic() < deadline:
            if deadline == math.inf and any(p.poll() for p in self.processes):
                deadline = time.monotonic() + _GRACE_S
            time.sleep(0.02)
        failed = [rank for rank, p in enumerate(self.processes) if p.poll()]
        if failed:
            self.failed = min(failed, key=self._blame)
            _end(self.processes)

    def _blame(self, rank: int) -> tuple[bool, bool, int]:
        """The first to blame: one that was killed, then one that failed by itself, then one that noticed."""
        noticed = "PeerError" in _last_words(self.folder, rank)
        return self.processes[rank].returncode > 0, noticed, rank


def _end(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
    for process in processes:
        process.wait()


def _story(rank: int, process: subprocess.Popen[str], folder: Path) -> str:
    code = process.returncode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
    words = _last_words(folder, rank)
    return f"worker {rank} {how}" + (f": {words}" if words else ".")


def _last_words(folder: Path, rank: int) -> str:
    lines = (folder / f"stderr-{rank}").read_text().strip().splitlines()
    return lines[-1] if lines else ""
