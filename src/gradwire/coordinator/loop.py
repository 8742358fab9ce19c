"""A background loop that is started, stopped and started again, by any number of threads."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from gradwire.errors import ConfigError

__all__ = ["Loop"]


class Loop(ABC):
    """What both coordinators are: state behind a lock, and a thread that changes it.

    A subclass writes ``_check_ready``, which raises if there is nothing to work on, ``_idle``, whether there is nothing
    to do, and ``_work``, which does one thing and returns the new version if there is one. The lock is held then.
    """

    _name: ClassVar[str]

    def __init__(self, on_update: Callable[[int], Any] | None) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._lifecycle = threading.RLock()  # of start and stop
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._on_update = on_update
        self.last_error: BaseException | None = None
        """What went wrong in the loop, or in ``on_update``, last."""

    @abstractmethod
    def _check_ready(self) -> None: ...

    @abstractmethod
    def _idle(self) -> bool: ...

    @abstractmethod
    def _work(self) -> int | None: ...

    def _patience_s(self) -> float | None:
        """How long to wait before it is to be asked again whether there is something to do."""
        return None

    def start(self) -> None:
        """Begin to work, also on what was added before."""
        with self._lifecycle:
            if self._thread is not None:
                raise ConfigError("the coordinator has been started already: call stop first.")
            with self._changed:
                self._check_ready()
                self._stopping = False
            self._thread = threading.Thread(target=self._run, daemon=True, name=self._name)
            self._thread.start()

    def stop(self) -> None:
        """Do what there is to do, and end the loop. Can be called again, and the coordinator started again."""
        if threading.current_thread() is self._thread:
            raise ConfigError("stop cannot be called by on_update: it waits for the loop that called it.")
        with self._lifecycle:
            if self._thread is None:
                return
            with self._changed:
                self._stopping = True
                self._changed.notify_all()
            self._thread.join()
            self._thread = None

    @property
    def running(self) -> bool:
        """Whether the loop has been started."""
        return self._thread is not None

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or not self._idle(), self._patience_s())
                if self._idle():
                    if self._stopping:
                        return
                    continue
                version = self._work()
                self._changed.notify_all()
            if version is not None and self._on_update is not None:
                try:
                    self._on_update(version)
                except Exception as error:  # somebody else's: the loop must live
                    self.last_error = error
