"""Reductions under way at once, on threads of their own: while one waits for the network, others encode and decode."""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch

from gradwire.collectives.base import Reduced, Reduction
from gradwire.collectives.waiting import is_waiting, waited, waiting
from gradwire.errors import ConfigError, NonFiniteError

__all__ = ["Pipeline", "Trace"]

_PATIENCE_S = 2.0
"""For threads that wait when a pipeline is closed, it may be for a rank that is gone."""
_WORK_S = 60.0
"""For threads that work: one that is in a function of torch's when the interpreter ends takes the process down."""
_LOOK_S = 0.02


@dataclass
class Trace:
    """What a reduction took: work until its first messages were on their way, work after that, and waiting for others.

    The owner's encode of a mean is work after that.
    """

    encode_s: float = 0.0
    wire_s: float = 0.0
    decode_s: float = 0.0


_Job: TypeAlias = tuple[Reduction, "Future[Reduced]", Trace]


class Pipeline:
    """A thread for each stage of a reduction. Every stage takes the reductions in the order they were submitted in.

    So all ranks wait for the same messages in the same order, whichever reductions are under way. After a reduction
    has failed all later ones fail with its error, for the ranks may no longer be in step.

    >>> import torch, gradwire
    >>> from gradwire.collectives import Gather
    >>> from gradwire.collectives.loopback import Alone
    >>> pipeline = Pipeline()
    >>> gather = Gather(Alone(), gradwire.codec("none"))
    >>> pipeline.submit(gather.reduce(torch.ones(2), {}, gradwire.Key(), tag=0)).result().mean
    tensor([1., 1.])
    >>> pipeline.close()
    """

    def __init__(self) -> None:
        self._stages: list[_Stage] = []
        self._error: BaseException | None = None
        self._closed = False
        self._threads = torch.get_num_threads()
        _open.add(self)

    def __del__(self) -> None:
        self._end()

    def submit(self, reduction: Reduction, *, here: bool = False, trace: Trace | None = None) -> Future[Reduced]:
        """Start a reduction; its result, or its error, comes with the future.

        With ``here`` its first part runs before this returns, on the thread of the caller. What it takes is added to
        the ``trace``.
        """
        self.check()
        future: Future[Reduced] = Future()
        job = (reduction, future, trace or Trace())
        if here:
            self._advance(0, job)
        else:
            self._pass(0, job)
        return future

    def check(self) -> None:
        """Raise if it was closed."""
        if self._closed:
            raise ConfigError("close() was called: nothing can be reduced any more.")

    def follow(self, start: Callable[[], Future[Reduced] | None]) -> Future[Reduced] | None:
        """Start a reduction that needs none of these threads, if ``start`` can. It and the others fail together."""
        self.check()
        if self._error is not None:
            failed: Future[Reduced] = Future()
            failed.set_exception(self._error)
            return failed
        future = start()
        if future is not None:
            future.add_done_callback(lambda done: self._note(done.exception()))
        return future

    def fail(self, error: BaseException) -> None:
        """Let all later reductions fail with an error."""
        self._note(error)

    def _note(self, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, NonFiniteError):  # which all ranks raise in the same reduction
            self._error = self._error or error

    def close(self) -> None:
        """End the threads once they have done what was submitted, which is waited for, though not for ever."""
        self._end()
        closed = worked = time.monotonic()
        me = threading.current_thread()
        while threads := [each.thread for each in self._stages if each.thread is not me and each.thread.is_alive()]:
            now = time.monotonic()
            if not all(map(is_waiting, threads)):
                worked = now
            if now - worked > _PATIENCE_S or now - closed > _WORK_S:
                return
            threads[0].join(_LOOK_S)

    def _end(self) -> None:
        if not self._closed and self._stages:
            self._stages[0].jobs.put(None)
        self._closed = True

    def _pass(self, number: int, job: _Job) -> None:
        while number >= len(self._stages):
            stage = _Stage(len(self._stages), self._threads)
            if self._stages:
                self._stages[-1].next = stage
            self._stages.append(stage)
        self._stages[number].jobs.put(partial(self._advance, number, job))

    def _advance(self, stage: int, job: _Job) -> None:
        """Run one stage of a reduction, and hand it to the next."""
        reduction, future, trace = job
        try:
            if self._error is not None:
                raise self._error
            with _traced(trace, first=stage == 0):
                next(reduction)
        except StopIteration as stop:
            future.set_result(stop.value)
        except BaseException as error:
            self._note(error)
            future.set_exception(error)
        else:
            self._pass(stage + 1, job)


class _Stage:
    """A thread and its queue. While it waits it knows nothing else, and keeps neither the pipeline nor gradients."""

    def __init__(self, number: int, threads: int) -> None:
        self.jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.next: _Stage | None = None
        self.thread = threading.Thread(target=self._run, args=(threads,), name=f"gradwire-{number}", daemon=True)
        self.thread.start()

    def _run(self, threads: int) -> None:
        torch.set_num_threads(threads)
        while (job := self._take()) is not None:
            job()
            del job
        if self.next is not None:
            self.next.jobs.put(None)  # the end, behind all that this stage has passed on

    def _take(self) -> Callable[[], None] | None:
        with waiting():
            return self.jobs.get()


@contextmanager
def _traced(trace: Trace, *, first: bool) -> Iterator[None]:
    started, before = time.perf_counter(), waited()
    try:
        yield
    finally:
        blocked = waited() - before
        worked = time.perf_counter() - started - blocked
        trace.wire_s += blocked
        if first:
            trace.encode_s += worked
        else:
            trace.decode_s += worked


_open: weakref.WeakSet[Pipeline] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Before the interpreter ends: no thread may be in one of torch's functions then."""
    for pipeline in list(_open):
        pipeline.close()
