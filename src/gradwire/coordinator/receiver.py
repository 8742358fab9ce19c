"""Pushes as they come in: refused before anything is allocated for them, applied in order, answered when safe."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from gradwire.coordinator.access import Identity
from gradwire.coordinator.calls import Call
from gradwire.coordinator.deadlines import LateError, time_left
from gradwire.coordinator.host import Host
from gradwire.coordinator.journal import NoSpaceError
from gradwire.coordinator.protocol import messages
from gradwire.coordinator.protocol.parts import Frames, read_pushes
from gradwire.coordinator.push import Push
from gradwire.coordinator.settings import Limits
from gradwire.coordinator.store import Receipt
from gradwire.errors import (
    AccessError,
    ConfigError,
    GradwireError,
    JournalError,
    NonFiniteError,
    PeerError,
    StaleGradientError,
    WireError,
)

__all__ = ["Incoming", "Receiver"]

_log: Final = logging.getLogger("gradwire.serve")
_MOST_ENTRIES: Final = 100_000
_IDLE_S: Final = 600.0
_TOGETHER: Final = 64  # answers in a message
_UNANSWERED: Final = 1024  # pushes of a stream whose answers were not taken


@dataclass
class _Bucket:
    """How much of its rate a worker has left."""

    left: float
    at: float

    def take(self, rate: float) -> bool:
        now = time.monotonic()
        self.left = min(max(1.0, 2 * rate), self.left + (now - self.at) * rate)
        self.at = now
        if self.left < 1:
            return False
        self.left -= 1
        return True


@dataclass
class Incoming:
    """Frames that a header has announced."""

    header: Any
    frames: Frames
    nbytes: int

    @classmethod
    def of(cls, header: Any, limits: Limits) -> Incoming:
        """Room for what a header announces."""
        sizes = [(entry.name, entry.length) for entry in header.entries]
        total = sum(size for _, size in sizes)
        if len(sizes) > _MOST_ENTRIES or total > limits.push_mb * 1e6:
            raise _TooLargeError(
                f"{total} bytes in {len(sizes)} entries were announced; `push_mb` of the server's limits allows "
                f"{limits.push_mb:g} MB, in at most {_MOST_ENTRIES} entries."
            )
        try:
            return cls(header, Frames(sizes), total)
        except MemoryError:
            raise _TooLargeError(f"{total} bytes are more than there is memory for.") from None


class _RefusedError(GradwireError):
    """A push that is refused for a reason that is not an error of its own."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class _TooLargeError(ConfigError):
    """More than the limits allow."""


_REASONS: Final = (
    (_TooLargeError, "TOO_LARGE"),
    (NoSpaceError, "NO_SPACE"),
    (NonFiniteError, "NONFINITE"),
    (AccessError, "FORBIDDEN"),
    (PeerError, "SUPERSEDED"),
    (ConfigError, "INVALID"),
    (WireError, "INVALID"),
)


_Replies: TypeAlias = "asyncio.Queue[tuple[Any, Receipt | None] | None]"


@dataclass
class _Stream:
    """Where a stream of pushes is."""

    host: Host
    call: Call
    replies: _Replies
    incoming: Incoming | None = None
    skip: int = 0  # bytes to come of a push that was refused already
    since: float = 0.0  # when that began
    sequence: int = 0  # of the push that is coming, or was last
    begun: bool = False  # whether a message has come

    @property
    def seconds(self) -> float:
        """How long the next message may be in coming."""
        if not self.begun:
            return self.host.settings.limits.call_s
        to_come = self.skip if self.incoming is None else self.incoming.nbytes
        return time_left(self.since, self.host.settings.limits.push_s, to_come) if to_come else _IDLE_S

    def begin(self, incoming: Incoming) -> None:
        self.incoming = incoming
        self.host.queued += 1

    def end(self) -> None:
        self.incoming = None
        self.host.queued -= 1

    def close(self) -> None:
        if self.incoming is not None:
            self.end()


class Receiver:
    """The pushes of all streams."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._rates: dict[str, _Bucket] = {}

    async def serve(self, call: Call) -> None:
        """Take the pushes of a stream, and answer each when it is safe."""
        replies: _Replies = asyncio.Queue(_UNANSWERED)  # a worker that takes no answers sends no more pushes
        receiver = asyncio.ensure_future(self._receive(call, replies))
        try:
            ended = False
            while not ended:
                batch = [await replies.get()]
                while not replies.empty():
                    batch.append(replies.get_nowait())
                ended = batch[-1] is None
                answers = [each for each in batch if each is not None]
                receipts = [receipt for _, receipt in answers if receipt is not None]
                failure = await self._safe(receipts[-1]) if receipts else None
                for reply, receipt in answers:
                    if receipt is not None and failure is not None:
                        reply.refusal, reply.message = "FAILED", failure
                for start in range(0, len(answers), _TOGETHER):
                    first, *more = (reply for reply, _ in answers[start : start + _TOGETHER])
                    first.more.extend(more)
                    await call.reply(first)
        finally:
            receiver.cancel()

    async def _safe(self, receipt: Receipt) -> str | None:
        """Wait until a push, and all before it, are safe; or why they cannot be."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[GradwireError | None] = loop.create_future()

        def tell(error: GradwireError | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
                loop.call_soon_threadsafe(lambda: None if done.done() else done.set_result(error))

        if receipt.safe_now(tell):
            return None
        error = await done
        if error is not None:
            _log.error("%s", error)
        return None if error is None else str(error)

    async def _receive(self, call: Call, replies: _Replies) -> None:
        """Take the pushes of a stream; None is the last of its replies."""
        stream = _Stream(self._host, call, replies)
        try:
            await self._pushes(stream)
        except LateError:
            late = _RefusedError("INCOMPLETE", "the rest of the push did not come in time: send it again.")
            await replies.put((self._reply(stream.sequence, late), None))
        except GradwireError as error:  # nothing after it can be made sense of
            await replies.put((self._reply(stream.sequence, error), None))
        except Exception as error:
            _log.warning("a stream of pushes ended: %s", error)
        finally:
            stream.close()
        await replies.put(None)  # not after a cancellation: no answers are taken then

    async def _pushes(self, stream: _Stream) -> None:
        """Take the pushes of a stream, in their order, until one must be sent again later."""
        while (message := await stream.call.read(stream.seconds)) is not None:
            stream.begun = True
            self._host.metrics.count("received_bytes", len(message))
            for header, data in read_pushes(message):
                if not await self._part(stream, header, data):
                    return
            await asyncio.sleep(0)  # whoever sends the most does not keep the others waiting
        if stream.incoming is not None or not stream.begun:
            raise _RefusedError("INCOMPLETE", "the stream ended before all of the push had come: send it again.")

    async def _part(self, stream: _Stream, header: Any | None, data: memoryview) -> bool:
        """Take a part; false if no more may come."""
        if header is not None:
            if stream.incoming is not None or stream.skip:
                raise WireError("a push began inside another.")
            stream.sequence = header.sequence
            stream.since = time.monotonic()
            refused = self._admit(header, stream.call.identity)
            if refused is not None:
                await stream.replies.put((self._reply(header.sequence, refused), None))
                stream.skip = max(0, sum(entry.length for entry in header.entries) - len(data))
                return not isinstance(refused, _RefusedError)
            try:
                stream.begin(Incoming.of(header, self._host.settings.limits))
            except ConfigError as error:
                await stream.replies.put((self._reply(header.sequence, error), None))
                return False
        elif stream.skip:
            stream.skip -= min(stream.skip, len(data))
            return True
        elif stream.incoming is None:
            raise WireError("data came without a header.")
        incoming = stream.incoming
        assert incoming is not None
        incoming.frames.add(data)
        if not incoming.frames.complete:
            return True
        reply, receipt = await self._taken(incoming)
        await stream.replies.put((reply, receipt))
        stream.end()
        return bool(reply.refusal != reply.NO_SPACE)  # those after it must not be applied before it is sent again

    def _admit(self, header: Any, identity: Identity) -> GradwireError | None:
        """Why a push is not to be received, if so: nothing has been allocated for it."""
        limits = self._host.settings.limits
        try:
            identity.check_worker(header.worker)
            model = self._host.store.there()
        except GradwireError as error:
            return error
        if max(header.session, header.sequence) >= 1 << 63:
            return ConfigError("`session` and `sequence` must be below 2**63.")
        total = sum(entry.length for entry in header.entries)
        if total > limits.push_mb * 1e6 or len(header.entries) > min(len(model.parameters), _MOST_ENTRIES):
            return _TooLargeError(
                f"a push may have {limits.push_mb:g} MB and {len(model.parameters)} entries; this one has "
                f"{total / 1e6:g} MB and {len(header.entries)}."
            )
        if not header.entries:
            return ConfigError("`gradients` must hold at least one tensor; got none.")
        if self._host.draining:
            return _RefusedError("DRAINING", "the server is about to end.")
        if not self._host.store.room_for(total):
            return _RefusedError("NO_SPACE", self._host.store.trouble)
        if self._host.queued >= limits.queue:
            return _RefusedError(
                "FULL", f"{self._host.queued} pushes are being received already; at most {limits.queue} may."
            )
        crowded = header.worker not in self._host.workers and len(self._host.workers) >= limits.workers
        if crowded and not self._forget_idle():
            return _TooLargeError(
                f"there are {len(self._host.workers)} workers already; at most {limits.workers} may be."
            )
        self._host.workers[header.worker] = time.monotonic()
        if limits.pushes_per_s is not None:
            bucket = self._rates.setdefault(header.worker, _Bucket(max(1.0, 2 * limits.pushes_per_s), time.monotonic()))
            if not bucket.take(limits.pushes_per_s):
                return _RefusedError("RATE", f"{header.worker!r} may push {limits.pushes_per_s:g} times a second.")
        return None

    def _forget_idle(self) -> bool:
        """Forget workers that have not pushed for long: nothing of theirs will come again. Whether there were any."""
        late = time.monotonic() - _IDLE_S
        idle = [worker for worker, seen in self._host.workers.items() if seen < late]
        for worker in idle:
            del self._host.workers[worker]
            self._rates.pop(worker, None)
            self._host.store.forget(worker)
        return bool(idle)

    async def _taken(self, incoming: Incoming) -> tuple[Any, Receipt | None]:
        """Apply a push that is complete."""
        header = incoming.header
        try:
            push = Push(
                header.worker,
                header.sequence,
                incoming.frames.frames,
                header.version if header.HasField("version") else None,
                self._host.store.mode,
                header.session,
            )
            receipt = await self._host.run(incoming.nbytes, self._host.store.take, push, incoming.frames.checksums)
        except GradwireError as error:
            return self._reply(header.sequence, error), None
        except Exception as error:  # a worker must be told, whatever it is
            _log.exception("a push of %r could not be applied", header.worker)
            return self._reply(header.sequence, JournalError(f"it could not be applied: {error}")), None
        if receipt.applied:
            self._host.metrics.applied(None if push.version is None else max(0, receipt.version - 1 - push.version))
        else:
            self._host.metrics.count("repeated")
        self._host.snapshot_if_due()
        reply = messages()["PushReply"](sequence=header.sequence, version=receipt.version, applied=receipt.applied)
        return reply, receipt

    def _reply(self, sequence: int, error: GradwireError) -> Any:
        """The answer to a push that is refused."""
        if isinstance(error, _RefusedError):
            reason = error.reason
        elif isinstance(error, StaleGradientError):
            reason = "STALE"
        else:
            reason = next((reason for kind, reason in _REASONS if isinstance(error, kind)), "FAILED")
        self._host.metrics.refused(reason)
        reply = messages()["PushReply"](sequence=sequence, refusal=reason, message=str(error)[:2000])
        if isinstance(error, StaleGradientError):
            reply.current, reply.bound = error.current, error.bound
        return reply
