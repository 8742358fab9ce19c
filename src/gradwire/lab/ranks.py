"""One process a host: their environment, their output, and their end."""

from __future__ import annotations

import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Literal, TypeVar

__all__ = ["Outcome", "Output", "environment", "run_ranks", "started"]

Process = TypeVar("Process")

Output = Literal["all", "rank0"] | Callable[[int, str], None]
"""Where standard output of the ranks goes: printed as ``[rank] line``, that of rank 0 alone as it is, or a function
called with each rank and line. Standard error is printed as ``[rank] line`` in any case."""

_GRACE_S: Final = 5.0  # how long the others may take to notice that a rank is gone
_TERM_S: Final = 2.0  # from SIGTERM to SIGKILL
_DRAIN_S: Final = 1.0  # for output a child that left its rank still holds open


def environment(rank: int, world_size: int, *, master: str, interface: str) -> dict[str, str]:
    """What torchrun would set, for one rank a host; what the shell sets wins for the number of threads.

    >>> env = environment(1, 4, master="10.77.0.1", interface="eth0")
    >>> env["RANK"], env["WORLD_SIZE"], env["MASTER_ADDR"], env["GLOO_SOCKET_IFNAME"]
    ('1', '4', '10.77.0.1', 'eth0')
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "GROUP_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": master,
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        "TP_SOCKET_IFNAME": interface,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONUNBUFFERED": "1",  # or the last lines of a rank that is killed are lost
        # sudo drops the path, and with it the virtual environment that `python` should come from.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
    }


@dataclass(frozen=True)
class Outcome:
    """How the ranks of a run ended.

    >>> Outcome(statuses=(-15, 3), failed=1, timed_out=False, seconds=2.0).story()
    'rank 1 exited with status 3'
    >>> Outcome(statuses=(-9, 0), failed=0, timed_out=False, seconds=2.0).exit_status
    137
    """

    statuses: tuple[int, ...]  # of each rank; a negative one is the signal that ended it, as subprocess has it
    failed: int | None  # the rank that failed first
    timed_out: bool  # no rank failed, but not all were done in time
    seconds: float

    @property
    def exit_status(self) -> int:
        """As a shell would have it: 0, the status of the rank that failed first, or 124 out of time."""
        if self.failed is None:
            return 124 if self.timed_out else 0
        status = self.statuses[self.failed]
        return status if status > 0 else 128 - status

    def story(self) -> str:
        """What happened, in a few words."""
        if self.failed is None:
            end = f"not done after {self.seconds:.0f} s" if self.timed_out else f"done in {self.seconds:.1f} s"
            return f"{len(self.statuses)} ranks, {end}"
        status = self.statuses[self.failed]
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        return f"rank {self.failed} {how}"


def run_ranks(
    start: Callable[[int, int], subprocess.Popen[bytes]], ranks: int, *, timeout_s: float | None, output: Output
) -> Outcome:
    """Run ``start(rank, stdout)`` for every rank and wait for all; one that fails ends the others.

    ``start`` must make the process the leader of a session, so that a rank's children end with it.
    """
    began, printer = time.monotonic(), _Printer(output)
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()  # ranks, in the order of their ends

    def start_one(rank: int) -> _Rank:
        return _Rank(rank, start(rank, subprocess.PIPE if printer.wants(rank) else subprocess.DEVNULL), printer, ended)

    with started(start_one, ranks, _end) as running:
        failed, timed_out = _watch(running, ended, math.inf if timeout_s is None else began + timeout_s)
    statuses = tuple(rank.process.returncode for rank in running)
    return Outcome(statuses, failed, timed_out, time.monotonic() - began)


@contextmanager
def started(
    start: Callable[[int], Process], ranks: int, end: Callable[[list[Process]], None]
) -> Iterator[list[Process]]:
    """``start(rank)`` for every rank, and what came of it; in the end all that were started are given to ``end``.

    Whatever exception comes meanwhile, also that of a signal.

    >>> with started(lambda rank: rank, 2, print) as ranks:
    ...     pass
    [0, 1]
    """
    running: list[Process] = []
    starting, leaving = threading.Lock(), threading.Event()

    def start_all() -> None:
        for rank in range(ranks):
            with starting:
                if leaving.is_set():
                    return
                running.append(start(rank))

    # Not on this thread, where the exception of a signal could fall between a start and its place in the list.
    starter = ThreadPoolExecutor(1)
    try:
        starter.submit(start_all).result()
        yield running
    finally:
        leaving.set()
        with starting:  # by a lock, for an exception that comes while its thread begins makes the executor forget it
            end(running)
        starter.shutdown(wait=False)


def _watch(ranks: list[_Rank], ended: queue.SimpleQueue[int], deadline: float) -> tuple[int | None, bool]:
    """Wait until all have ended, or until time is up; the rank that failed first, and whether time was up."""
    failed: int | None = None
    for _ in ranks:
        left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        try:
            rank = ended.get(timeout=left)
        except queue.Empty:
            return failed, failed is None
        if failed is None and ranks[rank].process.returncode:
            failed, deadline = rank, min(deadline, time.monotonic() + _GRACE_S)
    return failed, False


def _end(ranks: list[_Rank]) -> None:
    try:
        for rank in ranks:
            rank.signal(signal.SIGTERM)
        deadline = time.monotonic() + _TERM_S
        for rank in ranks:
            rank.waiter.join(max(0.0, deadline - time.monotonic()))
    finally:  # also when someone who presses Ctrl-C presses it again
        for rank in ranks:
            rank.signal(signal.SIGKILL)
        for rank in ranks:
            rank.finish()


class _Rank:
    """A running process, with a thread that waits for it and one that reads each of its outputs."""

    def __init__(
        self, rank: int, process: subprocess.Popen[bytes], printer: _Printer, ended: queue.SimpleQueue[int]
    ) -> None:
        self.rank, self.process, self.ended = rank, process, ended
        self.lock, self.reaped = threading.Lock(), False
        outputs = [(process.stdout, printer.out), (process.stderr, printer.error)]
        self.readers = [_thread(self._read, stream, write) for stream, write in outputs if stream is not None]
        self.waiter = _thread(self._wait)

    def signal(self, number: int) -> None:
        """Signal the rank and its children; nothing if it has ended."""
        with self.lock:
            if not self.reaped:
                self._signal_group(number)

    def finish(self) -> None:
        """Wait for its end and for the last of its output."""
        self.waiter.join()
        for reader in self.readers:
            reader.join(_DRAIN_S)

    def _wait(self) -> None:
        # Until it is reaped its number is not given to another process, so a signal to its group hits nobody else.
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        with self.lock:
            self._signal_group(signal.SIGKILL)  # children it left behind, which would hold its output open
            self.process.wait()
            self.reaped = True
        self.ended.put(self.rank)

    def _signal_group(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def _read(self, stream: IO[bytes], write: Callable[[int, str], None]) -> None:
        with stream, suppress(BrokenPipeError):  # our own reader may go first, as `head` does
            for line in stream:
                write(self.rank, line.decode(errors="replace").rstrip("\n"))


class _Printer:
    """Puts the lines of all ranks out, one at a time."""

    def __init__(self, output: Output) -> None:
        self.output, self.lock = output, threading.Lock()

    def wants(self, rank: int) -> bool:
        return self.output != "rank0" or rank == 0

    def out(self, rank: int, line: str) -> None:
        with self.lock:
            if callable(self.output):
                self.output(rank, line)
            else:
                _print(sys.stdout, line if self.output == "rank0" else f"[{rank}] {line}")

    def error(self, rank: int, line: str) -> None:
        with self.lock:
            _print(sys.stderr, f"[{rank}] {line}")


def _print(stream: IO[str], line: str) -> None:
    stream.write(line + "\n")
    stream.flush()


def _thread(target: Callable[..., None], *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=target, args=arguments, daemon=True)
    thread.start()
    return thread
