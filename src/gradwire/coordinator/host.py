"""What every call of a server works on: the store, who may do what, limits and counts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from gradwire.coordinator.access import Access, Identity
from gradwire.coordinator.deadlines import Deadlines
from gradwire.coordinator.metrics import ServerMetrics
from gradwire.coordinator.readers import Readers
from gradwire.coordinator.rules import Model, OptimizerFactory
from gradwire.coordinator.settings import ServeSettings
from gradwire.coordinator.store import Store
from gradwire.coordinator.structure import check_parameters, entries_of
from gradwire.errors import AccessError, ConfigError, GradwireError, JournalError

__all__ = ["Host"]

_log: Final = logging.getLogger("gradwire.serve")
_PROBE_S: Final = 1.0  # between two looks at a full disk
_REMIND_S: Final = 60.0  # between two lines of the log about the same trouble
_SMALL: Final = 1 << 18  # bytes


class Host:
    """A model that is served."""

    def __init__(
        self, settings: ServeSettings, parameters: dict[str, Tensor] | None, optimizer: OptimizerFactory | None
    ) -> None:
        self.settings = settings
        rules, kept = settings.model, settings.durability
        if optimizer is not None and rules.optimizer is not None:
            raise ConfigError("`optimizer` is given twice: as a function, and by its name in the settings.")
        factory = optimizer or rules.factory()
        if factory is not None and rules.learning_rate != 1.0:
            raise ConfigError("`learning_rate` is the optimizer's affair if there is an `optimizer`.")
        if parameters is None and rules.file is not None:
            parameters = _parameters_of(Path(rules.file))
        if parameters is not None:
            check_parameters(entries_of("parameters", parameters)[0])
        self.store = Store(
            kept.folder,
            lambda given: Model(given, factory, rules.learning_rate, rules.average_over, settings.staleness),
            parameters,
            fsync=kept.fsync,
            interval_s=kept.interval_s,
            snapshot_every=kept.snapshot_every,
            snapshot_mb=kept.snapshot_mb,
            mode=rules.mode,
            rules=str(
                {
                    "learning_rate": rules.learning_rate,
                    "average_over": rules.average_over,
                    "optimizer": "a function" if optimizer is not None else rules.optimizer,
                    "options": dict(rules.options),
                    "staleness": settings.staleness.rule,
                }
            ),
        )
        self.access = Access(settings.workers)
        self.metrics = ServerMetrics()
        self.deadlines = Deadlines()
        self.readers = Readers(self.store, settings.limits, self.deadlines, self.run)
        self.workers: dict[str, float] = {}  # when each was last heard of
        self.queued = 0
        self.draining = False
        self.on_drain: Callable[[], Any] = lambda: None
        self.identified: Callable[[str], None] = lambda peer: None  # called with the peer of every identified call
        self._snapshotting = False
        self._pool = ThreadPoolExecutor(4, "gradwire-serve")

    @property
    def ready(self) -> bool:
        """Whether it has a model, and takes pushes."""
        return not self.draining and not self.store.empty and not self.store.trouble

    def drain(self) -> None:
        """Take no more pushes, and end when those that are there are done."""
        self.draining = True
        self.on_drain()

    def off_loop(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Do something that takes its time, on another thread."""
        return asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)

    async def run(self, nbytes: int, work: Callable[..., Any], *arguments: Any) -> Any:
        """Do something with so many bytes: here, if handing it to another thread would cost more."""
        return work(*arguments) if nbytes <= _SMALL else await self.off_loop(work, *arguments)

    def snapshot(self) -> None:
        """Save the model."""
        self.store.snapshot()
        self.metrics.count("snapshots")

    def snapshot_if_due(self) -> None:
        """Save the model on another thread, if the journal has become long."""
        if not self.store.snapshot_due or self._snapshotting:
            return
        self._snapshotting = True

        def work() -> None:
            try:
                self.snapshot()
            except GradwireError as error:
                _log.error("%s", error)
            except Exception:  # no memory for a copy of the model, perhaps: pushes go on
                _log.exception("the model could not be saved")
            finally:
                self._snapshotting = False

        self._pool.submit(work)

    def close(self) -> None:
        """Save, and let go of everything; raises if the model cannot be saved, or a journal cannot be written."""
        self._pool.shutdown()  # first: what it still works on belongs into the snapshot
        try:
            self.store.snapshot()
        except JournalError as error:
            raise JournalError(
                f"{error} What was acknowledged is in the journal; the next start applies it."
            ) from error
        finally:
            self.store.close()

    # Who calls.

    def identity(self, context: Any) -> Identity:
        """Who has made a call, by its token or its certificate."""
        if self.access.open:
            return self.access.anybody()
        for name, value in context.invocation_metadata() or ():
            if name == "authorization":
                kind, _, token = str(value).partition(" ")
                if kind.lower() != "bearer":
                    raise AccessError("`authorization` must be: Bearer TOKEN.")
                return self.access.by_token(token)
        told = context.auth_context()
        names = [*told.get("x509_common_name", []), *told.get("x509_subject_alternative_name", [])]
        if names:
            return self.access.by_certificate(name.decode(errors="replace") for name in names)
        raise AccessError("neither a token nor a certificate was given.")

    # The disk.

    async def watch_disk(self) -> None:
        """Say in the log that pushes are refused for the disk, and see whether there is room again."""
        said, reported, probing = -_REMIND_S, False, None
        while True:
            await asyncio.sleep(_PROBE_S)
            now, trouble = time.monotonic(), self.store.trouble
            if trouble and now - said >= _REMIND_S:
                said, reported = now, True
                _log.error("pushes are refused: %s", trouble)
            elif reported and not trouble:
                reported = False
                _log.info("pushes are taken again")
            if trouble and (probing is None or probing.done()):
                probing = self.off_loop(self.store.probe)


def _parameters_of(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"`file` {path} must be safetensors: {error}.") from None
