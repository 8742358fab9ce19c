"""Calls as they come in: headers identify the caller before any message is read, and everything has a deadline.

Every method is a stream to gRPC, also those that are not in ``coordinator.proto`` (the bytes are the same): gRPC reads
the request of a unary method by itself, up to the largest message and for as long as the caller likes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from gradwire.coordinator.access import Identity
from gradwire.coordinator.deadlines import SLOWEST, Deadlines, LateError
from gradwire.coordinator.host import Host
from gradwire.coordinator.protocol import grpc_module
from gradwire.coordinator.protocol.parts import parsed
from gradwire.errors import (
    AccessError,
    ConfigError,
    GradwireError,
    NonFiniteError,
    PeerError,
    QueueFullError,
    WireError,
)

__all__ = ["Call", "Calls"]

_STRANGERS: Final = 64  # calls of methods that are open to everybody
_STRANGER_S: Final = 1.0  # for which such a call may last


class Call:
    """A call whose caller is identified. Messages are bytes."""

    def __init__(self, context: Any, identity: Identity, deadlines: Deadlines, call_s: float, end: Any) -> None:
        self.identity = identity
        self._context, self._deadlines, self._call_s, self._end = context, deadlines, call_s, end

    async def read(self, seconds: float) -> bytes | None:
        """The next message, which must come within so many seconds; None at the end."""
        with self._deadlines.within(seconds):
            message = await self._context.read()
        return None if message is self._end else message

    async def request(self, kind: str) -> Any:
        """The only message of a unary call."""
        message = await self.read(self._call_s)
        if message is None:
            raise WireError("the call ended without a request.")
        return parsed(kind, message)

    async def write(self, message: bytes) -> None:
        """Send a message; the caller must take it in time."""
        with self._deadlines.within(self._call_s + len(message) / SLOWEST):
            await self._context.write(message)

    async def reply(self, message: Any) -> None:
        """Send a message of protobuf's."""
        await self.write(message.SerializeToString())


class Calls:
    """Lets calls in: ``limits.streams`` in all, ``limits.streams_per_address`` of one address.

    Calls of strangers have a small limit of their own: they take no place from an address that workers share.
    """

    def __init__(self, host: Host) -> None:
        self._grpc, self._host = grpc_module(), host
        self._open: Counter[str] = Counter()  # calls of each address, and those of strangers

    def handler(self, behaviour: Callable[[Call], Awaitable[None]], role: str | None = None) -> Any:
        """A method for callers that are identified and have the role."""

        async def serve(_: Any, context: Any) -> None:
            identity = self._host.identity(context)
            self._host.identified(context.peer())
            if role is not None:
                identity.check(role)
            call_s = self._host.settings.limits.call_s
            await behaviour(Call(context, identity, self._host.deadlines, call_s, self._grpc.aio.EOF))

        return self._guarded(
            serve, lambda peer: peer.rpartition(":")[0], self._host.settings.limits.streams_per_address
        )

    def open(self, serve: Callable[[Any, Any], Awaitable[None]]) -> Any:
        """A method for everybody, who must take the answer at once."""

        async def limited(requests: Any, context: Any) -> None:
            with self._host.deadlines.within(_STRANGER_S):
                await serve(requests, context)

        return self._guarded(limited, lambda peer: "strangers", _STRANGERS)

    def _guarded(self, serve: Callable[[Any, Any], Awaitable[None]], place_of: Callable[[str], str], most: int) -> Any:
        async def guarded(requests: Any, context: Any) -> None:
            try:
                with self._place(place_of(context.peer()), most):
                    await serve(requests, context)
            except GradwireError as error:
                await self._abort(context, error)

        return self._grpc.stream_stream_rpc_method_handler(guarded)

    @contextmanager
    def _place(self, place: str, most: int) -> Iterator[None]:
        if self._open[place] >= most:
            raise QueueFullError(f"{most} calls are under way from here; at most {most} may be.")
        self._open[place] += 1
        try:
            yield
        finally:
            self._open[place] -= 1
            if not self._open[place]:
                del self._open[place]

    async def _abort(self, context: Any, error: GradwireError) -> None:
        codes = self._grpc.StatusCode
        code, reason = codes.INTERNAL, "FAILED"
        if isinstance(error, AccessError):
            code, reason = (codes.PERMISSION_DENIED if error.known else codes.UNAUTHENTICATED), "FORBIDDEN"
        elif isinstance(error, QueueFullError):
            code, reason = codes.RESOURCE_EXHAUSTED, "FULL"
        elif isinstance(error, LateError):
            code, reason = codes.ABORTED, "SLOW"
        elif isinstance(error, PeerError):
            code, reason = codes.UNAVAILABLE, "DRAINING"
        elif isinstance(error, ConfigError | WireError | NonFiniteError):
            code, reason = codes.INVALID_ARGUMENT, "INVALID"
        self._host.metrics.refused(reason)
        await context.abort(code, str(error))
