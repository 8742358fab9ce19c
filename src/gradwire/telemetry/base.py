"""Records of a training on their way to those who want them, off the thread that trains."""

from __future__ import annotations

import atexit
import logging
import math
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

from gradwire.errors import ConfigError

__all__ = ["RUN_FOLDER", "Record", "Sink", "Telemetry", "as_number"]

RUN_FOLDER: Final = "GRADWIRE_RUN_DIR"
"""Environment variable: a folder to which trainings write their records, whatever their program says."""

Record: TypeAlias = Mapping[str, Any]
"""``event``, ``time``, and what docs/telemetry.md lists for the event."""

_log: Final = logging.getLogger(__name__)
_FLUSH_S: Final = 0.25  # for which sinks may hold something back
_PATIENCE_S: Final = 10.0  # for sinks, at the end


class Sink(Protocol):
    """Takes records, one after another, on a thread of its own."""

    every_rank: bool
    """Whether each rank has one; otherwise only rank 0 does."""

    def open(self, start: Record) -> None:
        """Before the first record, with that of the start."""
        ...

    def write(self, record: Record) -> None:
        """Take a record."""
        ...

    def flush(self) -> None:
        """Nothing has come for a while: let others see what there is."""
        ...

    def close(self) -> None:
        """There will be no more."""
        ...


class Telemetry:
    """What happens in a training, step by step and bucket by bucket, for files, dashboards and trackers.

    Each of ``sinks`` is the path of a run's folder (every rank writes a file there, which ``gradwire dash`` and
    ``gradwire report`` read) or a sink of :mod:`gradwire.telemetry`. Give it to :func:`gradwire.compress`, and tell
    losses to ``compression.observe_loss``; ``compression.close`` closes it. Or call :meth:`start` and :meth:`step` from
    any loop.

    The training only puts records into a queue. A sink that fails is named in the log and left out; training goes on.

    >>> import tempfile
    >>> from gradwire.telemetry import Memory
    >>> memory = Memory()
    >>> with tempfile.TemporaryDirectory() as folder, Telemetry(folder, memory) as telemetry:
    ...     telemetry.start(rank=0, ranks=1, codec="int4")
    ...     telemetry.step(1, loss=2.5, sent=1000, dense=8000)
    >>> [record["event"] for record in memory.records]
    ['start', 'step', 'done']
    """

    def __init__(self, *sinks: Sink | str | Path, quality_every: int = 50) -> None:
        if not isinstance(quality_every, int) or quality_every < 0:
            raise ConfigError(f"`quality_every` must be a whole number of steps, 0 for never; got {quality_every!r}.")
        self.quality_every = quality_every
        self._writer = _Writer([_sink(each) for each in sinks])

    def __del__(self) -> None:
        if hasattr(self, "_writer"):  # not after a bad argument
            self._writer.end()

    @classmethod
    def of(cls, what: Telemetry | str | Path | None) -> Telemetry | None:
        """What somebody gave as telemetry; the folder the environment names, if nothing.

        >>> Telemetry.of(None) is None
        True
        """
        if isinstance(what, Telemetry):
            return what
        if what is not None and (not isinstance(what, str | Path) or not str(what)):
            raise ConfigError(f"`telemetry` must be the folder of a run, a Telemetry or None; got {what!r}.")
        folder = what or os.environ.get(RUN_FOLDER)
        return cls(folder) if folder else None

    @property
    def started(self) -> bool:
        """Whether :meth:`start` was called."""
        return self._writer.started

    @property
    def busy_s(self) -> float:
        """Seconds of the processor that the thread of the sinks has used so far."""
        return self._writer.busy_s

    def start(self, *, rank: int, ranks: int, **facts: Any) -> None:
        """Begin: ``facts`` are the codec, the number of parameters and of steps, settings, whatever is to be known."""
        if self._writer.ended:
            raise ConfigError("close() was called: there can be no more records.")
        if self.started:
            raise ConfigError("this Telemetry belongs to a training already: each needs its own.")
        self._writer.start({"event": "start", "time": time.time(), "rank": rank, "ranks": ranks, **facts})

    def record(self, event: str, **fields: Any) -> None:
        """Hand a record over; docs/telemetry.md lists those that others understand. Ignored before :meth:`start`."""
        if self.started:
            self._writer.put({"event": event, "time": time.time(), **fields})

    def step(self, step: int, *, loss: float | None = None, **fields: Any) -> None:
        """A step was taken; ``fields`` as far as they are known: seconds, sent, received, dense, compute_s, ..."""
        if isinstance(step, bool) or not isinstance(step, int):
            raise ConfigError(f"`step` must be a whole number; got {step!r}.")
        self.record("step", step=step, loss=None if loss is None else as_number("loss", loss), **fields)

    def later(self, make: Callable[[], Record | None]) -> None:
        """Have a record made on the thread of the sinks: for what takes time to find out."""
        if self.started:
            self._writer.put(make)

    def flush(self) -> None:
        """Wait until all that was recorded so far is with the sinks."""
        self._writer.flush()

    def close(self, status: str = "done", what: str = "") -> None:
        """End: a last record says how it went."""
        if not self._writer.ended:
            self._writer.end(status, what)
            self._writer.join()

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:
            self.close("failed", _words(error))


_Item: TypeAlias = Record | Callable[[], Record | None] | threading.Event | None


class _Writer:
    """The sinks and their thread, which must not keep the telemetry alive: it ends when the telemetry goes."""

    def __init__(self, sinks: list[Sink]) -> None:
        self._sinks = sinks
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.ended, self.busy_s = False, 0.0

    @property
    def started(self) -> bool:
        return self._thread is not None

    def start(self, first: Record) -> None:
        self._sinks = [sink for sink in self._sinks if sink.every_rank or first["rank"] == 0]
        for sink in self._sinks:
            sink.open(first)  # here, so that a folder that cannot be written is an error and not a line in a log
        self._thread = threading.Thread(target=self._run, name="gradwire-telemetry", daemon=True)
        self._thread.start()
        _open.add(self)
        self._queue.put(first)

    def put(self, item: Record | Callable[[], Record | None]) -> None:
        if not self.ended:
            self._queue.put(item)

    def flush(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            done = threading.Event()
            self._queue.put(done)
            done.wait(_PATIENCE_S)

    def end(self, status: str = "done", what: str = "") -> None:
        if self.ended:
            return
        self.ended = True
        if self.started:
            self._queue.put({"event": "done", "time": time.time(), "status": status, "what": what})
            self._queue.put(None)

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join(_PATIENCE_S)

    def _run(self) -> None:
        held = math.inf  # since when sinks may hold something back
        while True:
            if time.monotonic() - held >= _FLUSH_S:
                self._tell("flush")
                held = math.inf
            try:
                item = self._queue.get(timeout=_FLUSH_S if held < math.inf else None)
            except queue.Empty:
                continue
            if item is None:
                break
            if self._take(item):
                held = min(held, time.monotonic())
            del item  # it may know gradients, which must not live until the next one comes
        self._tell("close")

    def _take(self, item: Record | Callable[[], Record | None] | threading.Event) -> bool:
        """Do what was asked for; whether there was something to write."""
        if isinstance(item, threading.Event):
            self._tell("flush")
            item.set()
            return False
        record = self._made(item) if callable(item) else item
        if record is not None:
            self._tell("write", record)
        self.busy_s = time.thread_time()
        return record is not None

    def _made(self, make: Callable[[], Record | None]) -> Record | None:
        try:
            made = make()
        except Exception as error:  # telemetry must not end a training
            _log.warning("a record could not be made: %s: %s", type(error).__name__, error)
            return None
        return None if made is None else {"time": time.time(), **made}

    def _tell(self, what: str, *arguments: Record) -> None:
        for sink in list(self._sinks):
            try:
                getattr(sink, what)(*arguments)
            except Exception as error:  # a full disk or a tracker that is away must not end a training
                _log.warning("telemetry goes on without %s: %s: %s", type(sink).__name__, type(error).__name__, error)
                self._sinks.remove(sink)


def _sink(what: Sink | str | Path) -> Sink:
    if isinstance(what, str | Path):
        from gradwire.telemetry.jsonl import JsonLines

        return JsonLines(what)
    if not all(hasattr(what, name) for name in ("every_rank", "open", "write", "flush", "close")):
        raise ConfigError(f"a sink must be a folder or one of gradwire.telemetry; got {type(what).__name__}.")
    return what


_open: weakref.WeakSet[_Writer] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    error = getattr(sys, "last_value", None)  # what ended the program, if something did
    for writer in list(_open):
        writer.end(*(("done",) if error is None else ("failed", _words(error))))
        writer.join()


def as_number(name: str, value: Any) -> float:
    """A number, or a tensor or array that holds one, as a float.

    >>> as_number("loss", 3)
    3.0
    """
    try:
        if isinstance(value, str | bytes | bool):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # torch raises the last for tensors of several elements
        raise ConfigError(f"`{name}` must be a number; got {value!r:.80}.") from None


def _words(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return f"{type(error).__name__}: {error}"
