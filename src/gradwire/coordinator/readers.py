"""Memory that readers cause: the parameters on their way to them, and the copies that the server keeps for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from gradwire.coordinator.copies import Copies
from gradwire.coordinator.deadlines import Deadlines, LateError
from gradwire.coordinator.protocol.parts import PART_BYTES
from gradwire.coordinator.settings import Limits
from gradwire.coordinator.store import Store
from gradwire.errors import QueueFullError

__all__ = ["Readers"]

_LEAST_MB: Final = 1024.0  # for readers, unless the settings say otherwise
_MODELS: Final = 8  # or so many models
_FLOAT32: Final = 4  # bytes
_UNDER_WAY: Final = 2 * PART_BYTES  # of each reader: a message here, and one in gRPC's buffers


@dataclass(eq=False)
class _Present:
    """Parameters of one version, shared by all that read it."""

    nbytes: int
    copied: asyncio.Future[tuple[int, dict[str, Tensor]]]
    readers: int = 0


class Readers:
    """Lets readers in as long as there is memory for them; the others wait for ``limits.call_s``, in their order.

    Its methods are for the event loop's thread; those of ``copies`` are for any.
    """

    def __init__(self, store: Store, limits: Limits, deadlines: Deadlines, run: Callable[..., Any]) -> None:
        self._store, self._limits, self._deadlines, self._run = store, limits, deadlines, run
        self.copies = Copies(limits.workers)
        self._used = 0  # bytes of parameters and messages under way
        self._present: _Present | None = None
        self._turn, self._changed = asyncio.Lock(), asyncio.Event()

    @property
    def nbytes(self) -> int:
        """Memory in use."""
        return self._used + self.copies.nbytes

    @property
    def _most(self) -> int:
        if self._limits.reader_mb is not None:
            return int(self._limits.reader_mb * 1e6)
        return max(int(_LEAST_MB * 1e6), _MODELS * self._store.there().nbytes)

    @asynccontextmanager
    async def reading(self, reader: str | None = None) -> AsyncIterator[tuple[int, Mapping[str, Tensor], int]]:
        """The present version, its parameters and their bytes, for as long as they are on their way.

        The parameters must not be changed. With the name of a ``reader`` there is room for its copy or for what it is
        sent, and for a tensor's change before and after it is encoded.
        """
        now = self._store.there()
        model, own = now.nbytes, _UNDER_WAY
        if reader is not None:
            self.copies.touch(reader)  # not the first to make room
            own += model + 2 * _FLOAT32 * now.largest
        try:
            with self._deadlines.within(self._limits.call_s):
                present = await self._admitted(own, model)
        except LateError:
            raise QueueFullError(
                f"readers have taken {self.nbytes / 1e6:.0f} MB, and may take {self._most / 1e6:.0f}: read again "
                "later, or raise `reader_mb` of limits."
            ) from None
        try:
            version, parameters = await asyncio.shield(present.copied)  # others wait for it, too
            yield version, parameters, model
        finally:
            present.readers -= 1
            self._used -= own
            if not present.readers:
                self._used -= present.nbytes
                if self._present is present:
                    self._present = None
            self.copies.shrink(self._most - self._used)
            self._changed.set()

    async def _admitted(self, own: int, model: int) -> _Present:
        """Wait for room; the parameters, which others may be reading already."""
        async with self._turn:
            while True:
                present = self._present
                if present is not None and not present.copied.done():
                    await asyncio.wait([present.copied])
                    continue
                if present is not None and present.copied.result()[0] != self._store.there().version:
                    present = None
                if self._has_room(own + (0 if present is not None else model)):
                    break
                self._changed.clear()
                await self._changed.wait()
            if present is None:
                self._used += model
                present = self._present = _Present(model, asyncio.ensure_future(self._run(model, self._store.read)))
            present.readers += 1
            self._used += own
            return present

    def _has_room(self, nbytes: int) -> bool:
        """Whether there is room, after the oldest copies have made some; a reader alone always has it."""
        self.copies.shrink(self._most - self._used - nbytes)
        return not self._used or self.nbytes + nbytes <= self._most
