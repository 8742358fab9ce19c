"""Ranks that are processes, and who is to blame when one is gone."""

from __future__ import annotations

import math
import queue
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import count
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from gradwire.collectives.peers import Swap, agree
from gradwire.collectives.waiting import waiting
from gradwire.errors import PeerError

__all__ = ["ProcessPeers", "SilentError", "store"]

_GRACE_S: Final = 3.0  # for the others to notice the same and say so
_POLL_S: Final = 0.02
_LOOK_S: Final = 0.25
_NOTICE_S: Final = 0.25  # for a connection to end after another has


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

    def add(self, seconds: float, late: Callable[[], None]) -> int:
        """Have something called after so many seconds, or a little later; its number."""
        with self._table.lock:
            self._table.pending[number := next(self._numbers)] = time.monotonic(), seconds, late
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
    """What is to be called, by number: since when it waits, how long, and what then."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    pending: dict[int, tuple[float, float, Callable[[], None]]] = field(default_factory=dict)
    last: float = -math.inf  # when one was taken back

    def call_late(self) -> None:
        """Call what has waited for too long."""
        with self.lock:
            now, last = time.monotonic(), self.last
            late = [each for each, (since, long, _) in self.pending.items() if max(since, last) + long < now]
            calls = [self.pending.pop(each)[2] for each in late]
        for call in calls:
            call()


def _watch(end: queue.SimpleQueue[None], table: _Table) -> None:
    while True:
        with suppress(queue.Empty):
            return end.get(timeout=_LOOK_S)
        table.call_late()


class _Trial:
    """Who is to blame, once for all threads of a rank."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.verdict: tuple[int, str] | None = None  # the culprit, and what is wrong with it


class SilentError(RuntimeError):
    """A rank that is there and has sent nothing for too long."""


@dataclass(frozen=True)
class ProcessPeers(ABC):
    """A rank of a process group, whatever carries its messages."""

    rank: int  # in the group
    size: int
    group: dist.ProcessGroup = field(repr=False)  # whose ranks they are
    name: str  # the same on every rank: where addresses and accusations are left in the store
    timeout_s: float
    _trial: _Trial = field(default_factory=_Trial, repr=False, compare=False, kw_only=True)
    _deadlines: _Deadlines = field(default_factory=_Deadlines, repr=False, compare=False, kw_only=True)

    @abstractmethod
    def swap(self, nbytes: Mapping[int, int], tag: int, what: str) -> Swap:
        """Start to receive."""

    @abstractmethod
    def close(self) -> None:
        """End the connections: whoever still waits for this rank is told at once."""

    @abstractmethod
    def _hang_up(self, accused: int) -> None:
        """Close the connections, so that ranks that wait for this one notice now."""

    def _gone(self, tag: int) -> tuple[int, Exception] | None:
        """A rank whose connection has ended, and how, as far as that is known; nobody uses the tag."""
        return None

    @property
    def wire_bytes(self) -> int | None:
        """Bytes this rank's messages have taken on the wire so far, with all headers; None where nobody counts."""
        return None

    def all_reduce(self, x: Tensor, tag: int) -> Callable[[], None]:
        """By the group's backend; if it fails, an exchange of ours finds out who is to blame."""
        try:
            work = dist.all_reduce(x, group=self.group, async_op=True)
        except RuntimeError as error:
            raise self.failed(error, tag) from error
        return lambda: self._await_all_reduce(work, x, tag)

    def _await_all_reduce(self, work: dist.Work | None, x: Tensor, tag: int) -> None:
        """Wait for one that was started in the group."""
        try:
            if work is not None:
                with waiting():
                    work.wait(timedelta(seconds=self.timeout_s))
            if x.device.type == "cuda":
                torch.cuda.current_stream(x.device).synchronize()
        except RuntimeError as error:
            raise self.failed(error, tag) from error

    def all_reduce_then(self, x: Tensor, tag: int, done: Callable[[PeerError | None], None]) -> None:
        """The same of a tensor on the CPU, with nobody waiting: ``done`` is called by the backend's thread.

        Or, with the error, by another: it takes a while to find out who is to blame.
        """
        try:
            work = dist.all_reduce(x, group=self.group, async_op=True)
        except RuntimeError as error:
            raise self.failed(error, tag) from error

        def fail(error: BaseException) -> None:
            def find_out() -> None:
                try:
                    blamed = self.failed(error, tag)
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
            fail(RuntimeError(f"Timed out waiting {self.timeout_s:g} s for the all-reduce."))

        number = self._deadlines.add(self.timeout_s, late)
        work.get_future().add_done_callback(finish)

    def failed(self, error: BaseException, tag: int) -> PeerError:
        """The error of an all-reduce that failed with one of torch's: who is to blame. All ranks give the same tag."""
        end = time.monotonic() + _NOTICE_S
        while time.monotonic() < end:  # others may not have noticed yet: who is gone is not to be waited for
            if gone := self._gone(tag + 1):
                return self.blame(*gone, "the all-reduce")
            time.sleep(_POLL_S)
        # Whoever is stuck has been waited for already.
        hasty = replace(self, timeout_s=min(self.timeout_s, _GRACE_S))
        try:
            agree(hasty, "the all-reduce failed", tag)
        except PeerError as blamed:
            return blamed
        return PeerError(f"the all-reduce failed, though all ranks are there: {_reason(error)}")

    def blame(self, rank: int, error: Exception, what: str) -> PeerError:
        """The error that names the rank to blame: this one's peer is often only waiting for, or gone after, another.

        Each rank leaves its accusation in the store. The culprit is the end of the chain: accused, and accusing nobody.
        """
        with self._trial.lock:  # the first of this rank's threads decides: what the others see follows from it
            if self._trial.verdict is None:
                stuck = isinstance(error, SilentError)
                self._trial.verdict = self._judge(rank, "did not answer in time" if stuck else "is gone")
            culprit, why = self._trial.verdict
        seen = "" if culprit == rank else f" (noticed by way of rank {rank})"
        return PeerError(f"{what} failed: rank {culprit} {why}{seen}. {_reason(error)}")

    def give_up(self, error: BaseException) -> None:
        """Tell the other ranks that this one has failed by itself: they do not wait for it any longer.

        Does nothing if a rank is to blame already, which the others know of then.
        """
        with self._trial.lock:
            if self._trial.verdict is not None or self.size == 1:
                return
            why = f"failed with {type(error).__name__}"
            self._trial.verdict = self.rank, why  # for this rank's threads: no peer is to blame for what follows

        def say_so() -> None:
            with suppress(RuntimeError, ValueError):  # the store is gone, or the process group
                store().set(f"{self.name}/{self.rank}", f"{self.rank} {why}")

        saying = threading.Thread(target=say_so, daemon=True)
        saying.start()
        saying.join(_GRACE_S)
        self._hang_up(next(rank for rank in range(self.size) if rank != self.rank))

    def _judge(self, accused: int, why: str) -> tuple[int, str]:
        verdict: list[tuple[int, str]] = []

        def ask() -> None:
            with suppress(RuntimeError, ValueError):  # the store is gone, or the process group
                verdict.append(self._culprit(accused, why))
                self._stay(verdict[0][0])

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(2 * _GRACE_S + 2.0)
        # The store shares the fate of the process that keeps it, which is the first rank's.
        return verdict[0] if verdict else (0, "did not answer in time" if asking.is_alive() else "is gone")

    def _culprit(self, accused: int, why: str) -> tuple[int, str]:
        there = store()
        there.set(f"{self.name}/{self.rank}", f"{accused} {why}")
        self._hang_up(accused)
        accusations = {self.rank: (accused, why)}
        end = time.monotonic() + _GRACE_S
        while True:  # at least once: the accused may have said why it failed
            for rank in range(self.size):
                key = f"{self.name}/{rank}"
                if rank not in accusations and there.check([key]):
                    whom, _, reason = there.get(key).decode().partition(" ")
                    accusations[rank] = (int(whom), reason)
            if len(accusations) >= self.size - 1 or time.monotonic() > end:
                break
            time.sleep(_POLL_S)
        culprit, reason, passed = accused, why, {self.rank}
        while culprit in accusations and culprit not in passed:
            passed.add(culprit)
            culprit, reason = accusations[culprit]
        return culprit, reason

    def _stay(self, culprit: int) -> None:
        """Where the store may end with this process, let the other survivors ask it first."""
        there = store()
        there.set(f"{self.name}/{self.rank}/knows", "yes")
        if dist.get_rank() != 0:
            return
        keys = [f"{self.name}/{rank}/knows" for rank in range(self.size) if rank != culprit]
        end = time.monotonic() + _GRACE_S
        while time.monotonic() < end and not there.check(keys):
            time.sleep(_POLL_S)


def store() -> Store:
    """Where ranks leave words for each other."""
    found: Store = dist.distributed_c10d._get_default_store()
    return found


def _reason(error: BaseException) -> str:
    """What the transport says, without the place in its sources."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    said = re.sub(r"^\[\S*\] ", "", lines[0])
    return f"{said[:1].upper()}{said[1:]}{'' if said.endswith('.') else '.'}"
