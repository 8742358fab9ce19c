"""Ranks that are processes, and who is to blame when one is gone."""

from __future__ import annotations

import ctypes
import math
import queue
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import count
from typing import ClassVar, Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.collectives.blame import Report, Verdict, find_culprit
from gradwire.collectives.peers import Swap
from gradwire.collectives.waiting import waiting
from gradwire.errors import PeerError

__all__ = ["ANSWER_S", "ProcessPeers", "SilentError", "with_store"]

_POLL_S: Final = 0.02
_LOOK_S: Final = 0.25
ANSWER_S: Final = 1.0  # for torch's store to answer one call

Result = TypeVar("Result")


class _Deadlines:
    """Calls what has not been taken back in time, on a thread that looks now and then.

    The clock of all of them begins again whenever one is taken back: they wait for each other.

    >>> deadlines = _Deadlines()
    >>> deadlines.take(deadlines.add(60.0, lambda: None)), deadlines.take(7)
    (True, False)
    >>> deadlines.close()
    """

    def __init__(self) -> None:
        self._numbers, self._table = count(), _Table()
        self._thread: threading.Thread | None = None
        self._end: queue.SimpleQueue[None] = queue.SimpleQueue()

    def __del__(self) -> None:
        self.close()  # the thread does not keep this alive: it knows the table alone

    def add(self, seconds: float, late: Callable[[], None], hopeless: Callable[[], bool] = lambda: False) -> int:
        """Have ``late`` called after so many seconds, or once it is hopeless, or a little later; return its number."""
        with self._table.lock:
            self._table.pending[number := next(self._numbers)] = _Pending(time.monotonic(), seconds, late, hopeless)
            if self._thread is None:
                watched = self._end, self._table
                self._thread = threading.Thread(target=_watch, args=watched, name="gradwire-deadlines", daemon=True)
                self._thread.start()
        return number

    def take(self, number: int) -> bool:
        """Take it back; False if it was called."""
        with self._table.lock:
            self._table.last = time.monotonic()
            return self._table.pending.pop(number, None) is not None

    def close(self) -> None:
        """Nothing is called any more."""
        self._end.put(None)


@dataclass
class _Table:
    """What is to be called, by number."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    pending: dict[int, _Pending] = field(default_factory=dict)
    last: float = -math.inf  # when one was taken back

    def call_late(self) -> None:
        """Call what has waited for too long."""
        with self.lock:
            now, last = time.monotonic(), self.last
            late = [number for number, each in self.pending.items() if each.is_late(now, last)]
            calls = [self.pending.pop(number).late for number in late]
        for call in calls:
            call()


def _watch(end: queue.SimpleQueue[None], table: _Table) -> None:
    while True:
        with suppress(queue.Empty):
            return end.get(timeout=_LOOK_S)
        table.call_late()


@dataclass(frozen=True)
class _Pending:
    since: float
    seconds: float
    late: Callable[[], None]
    hopeless: Callable[[], bool]

    def is_late(self, now: float, last: float) -> bool:
        return max(self.since, last) + self.seconds < now or self.hopeless()


class _Blame:
    """Who is to blame, once for all threads of a rank."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.verdict: list[Verdict | None] = []  # empty until it is found


class SilentError(RuntimeError):
    """A rank that is there and has sent nothing for too long."""


class _HopelessError(RuntimeError):
    def __init__(self) -> None:
        super().__init__("Its connection ended, or another rank reported it.")


@dataclass(frozen=True)
class ProcessPeers(ABC):
    """A rank of a process group, whatever carries its messages."""

    rank: int  # in the group
    size: int
    group: dist.ProcessGroup = field(repr=False)  # whose ranks they are
    name: str  # the same on every rank: where addresses and accusations are left in the store
    timeout_s: float
    grace_s: ClassVar[float]  # how long reports of the other ranks are waited for
    reports_first: ClassVar[bool]  # whether a rank's report has come when its connection is seen to end
    _blame: _Blame = field(default_factory=_Blame, repr=False, compare=False, kw_only=True)
    _deadlines: _Deadlines = field(default_factory=_Deadlines, repr=False, compare=False, kw_only=True)

    @abstractmethod
    def swap(self, nbytes: Mapping[int, int], tag: int, what: str) -> Swap:
        """Start to receive."""

    @abstractmethod
    def close(self) -> None:
        """End the connections: whoever still waits for this rank is told at once."""

    @abstractmethod
    def _send_report(self, report: Report) -> None:
        """Send every rank what this one saw, and end the waiting of all."""

    @abstractmethod
    def _reports(self) -> dict[int, Report]:
        """Return the reports of other ranks that have come."""

    @abstractmethod
    def _ended(self, rank: int | None, error: BaseException) -> tuple[int, ...]:
        """Return the ranks whose connection has ended; ``error`` came of waiting for ``rank``."""

    def _silences(self) -> tuple[float, ...]:
        """Return for how many seconds nothing has come from each rank; nothing where that is not known."""
        return ()

    def _hopeless(self) -> bool:
        """Return whether an all-reduce that is under way will not end."""
        return False

    @property
    def wire_bytes(self) -> int | None:
        """Bytes this rank's messages have taken on the wire so far, with all headers; None where nobody counts."""
        return None

    def all_reduce(self, x: Tensor, tag: int) -> Callable[[], None]:
        """By the group's backend; if it fails, the ranks find out who is to blame."""
        try:
            work = dist.all_reduce(x, group=self.group, async_op=True)
        except RuntimeError as error:
            raise self.failed(error) from error
        return lambda: self._await_all_reduce(work, x)

    def _await_all_reduce(self, work: dist.Work | None, x: Tensor) -> None:
        if x.device.type == "cpu":
            if work is not None:
                self.wait_for(work)
            return
        try:
            if work is not None:
                with waiting():
                    work.wait(timedelta(seconds=self.timeout_s))
            if x.device.type == "cuda":
                torch.cuda.current_stream(x.device).synchronize()
        except RuntimeError as error:
            raise self.failed(error) from error

    def wait_for(self, work: dist.Work) -> None:
        """Wait for an all-reduce of tensors on the CPU that was started in the group.

        A child that a dead rank forked keeps the connections of torch's backend open. Those of gradwire end with the
        rank, and are looked at meanwhile.
        """
        end = time.monotonic() + self.timeout_s
        try:
            with waiting():
                while not _ends_within(work, min(_LOOK_S, max(0.001, end - time.monotonic()))):
                    late = time.monotonic() >= end
                    if late or self._hopeless():
                        _keep_for_good(self.group)
                        raise SilentError(f"It has not ended in {self.timeout_s:g} s.") if late else _HopelessError()
        except RuntimeError as error:
            raise self.failed(error) from error

    def all_reduce_then(self, x: Tensor, done: Callable[[PeerError | None], None]) -> None:
        """The same of a tensor on the CPU, with nobody waiting: ``done`` is called by the backend's thread.

        Or, with the error, by another: it takes a while to find out who is to blame.
        """
        try:
            work = dist.all_reduce(x, group=self.group, async_op=True)
        except RuntimeError as error:
            raise self.failed(error) from error

        def fail(error: BaseException) -> None:
            def find_out() -> None:
                try:
                    blamed = self.failed(error)
                except Exception as why:  # such as a process group that is gone
                    blamed = PeerError(f"the all-reduce failed: {_reason(why)}")
                done(blamed)

            threading.Thread(target=find_out, daemon=True).start()

        def finish(future: torch.futures.Future[list[Tensor]]) -> None:
            if self._deadlines.take(number):
                try:
                    future.wait()  # it is done: only for its error
                except BaseException as error:
                    fail(error)
                else:
                    done(None)

        def late() -> None:
            _keep_for_good(self.group)
            fail(_HopelessError() if self._hopeless() else SilentError(f"It has not ended in {self.timeout_s:g} s."))

        number = self._deadlines.add(self.timeout_s, late, self._hopeless)
        work.get_future().add_done_callback(finish)

    def failed(self, error: BaseException) -> PeerError:
        """Return the error that names the rank to blame for an all-reduce that failed with one of torch's."""
        return self.blame(None, error, "the all-reduce")

    def blame(self, rank: int | None, error: BaseException, what: str) -> PeerError:
        """Return the error that names the rank to blame: the one waited for is often only waiting for, or gone after,
        another.

        Each rank sends the others a report of what it saw. ``rank`` is None where all were waited for.
        """
        with self._blame.lock:  # the first of this rank's threads decides: what the others see follows from it
            if not self._blame.verdict:
                self._blame.verdict.append(self._judge(rank, error))
            verdict = self._blame.verdict[0]
        reason = _reason(error)
        if verdict is None:
            return PeerError(f"{what} failed, though all ranks are there: {reason}")
        seen = "" if rank in (None, verdict.rank) else f" (noticed by way of rank {rank})"
        sentences = (f"{what} failed: rank {verdict.rank} {verdict}{seen}.", reason, verdict.note)
        return PeerError(" ".join(filter(None, sentences)))

    def give_up(self, error: BaseException) -> None:
        """Report to the other ranks that this one has failed by itself: they do not wait for it any longer.

        Does nothing if a rank is to blame already, which the others know of then.
        """
        failed = type(error).__name__
        with self._blame.lock:
            if self._blame.verdict or self.size == 1:
                return
            # For this rank's threads: no other rank is to blame for what follows.
            self._blame.verdict.append(Verdict(self.rank, gone=False, failed=failed))

        def report() -> None:
            with suppress(RuntimeError, ValueError):  # the store is gone, or the process group
                self._send_report(Report(None, failed=failed))

        reporting = threading.Thread(target=report, daemon=True)
        reporting.start()
        reporting.join(self.grace_s)

    def _judge(self, rank: int | None, error: BaseException) -> Verdict | None:
        end = time.monotonic() + self.grace_s
        own = Report(rank, isinstance(error, SilentError), self._ended(rank, error), self._silences())
        self._send_report(own)
        while True:
            own = replace(own, gone=self._ended(rank, error))
            reports = {**self._reports(), self.rank: own}
            verdict = find_culprit(self.rank, reports, self.size)
            culprit = {verdict.rank} - reports.keys() if verdict else set()
            dead = self.reports_first and verdict is not None and verdict.gone and bool(culprit)
            if (
                dead
                or (verdict is not None and verdict.failed)
                or set(range(self.size)) == reports.keys() | culprit
                or time.monotonic() >= end
            ):
                return verdict
            time.sleep(_POLL_S)


def with_store(act: Callable[[], Result], timeout_s: float, what: str) -> Result:
    """Return what ``act``, which asks the store, returns; PeerError if the store is gone, or silent for so long.

    torch's calls of a store do not end while the process that keeps it is stopped. So ``act`` runs on a thread of its
    own, which is left behind when it is late.

    >>> with_store(lambda: 3, 5.0, "nobody can count")
    3
    """
    outcome = Future[Result]()

    def run() -> None:
        try:
            outcome.set_result(act())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="gradwire-store", daemon=True).start()
    if not wait([outcome], timeout_s + ANSWER_S).done:  # `act` may give up after `timeout_s`, and say why
        raise PeerError(
            f"{what}: the process that keeps torch's store has not answered for {timeout_s:g} s. It is stopped, or its "
            "network is cut: look at rank 0, or at the agent of torchrun, and start the training again."
        )
    try:
        return outcome.result()
    except PeerError:
        raise
    except RuntimeError as error:
        raise PeerError(f"{what}: {_reason(error)}") from error


def _keep_for_good(group: dist.ProcessGroup) -> None:
    """Never destroy a group with an all-reduce that does not end: gloo's would wait for it, and the process not end."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _ends_within(work: dist.Work, seconds: float) -> bool:
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # it ended just now, or with an error of its own
    return True


def _reason(error: BaseException) -> str:
    """What the transport says, without the place in its sources."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    said = re.sub(r"^\[\S*\] ", "", lines[0])
    return f"{said[:1].upper()}{said[1:]}{'' if said.endswith('.') else '.'}"
