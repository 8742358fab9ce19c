"""The calls of the coordinator's service, but for pushes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from importlib.metadata import version
from typing import Any

from gradwire import wire
from gradwire.api import decode_payload
from gradwire.codecs import codec as make_codec
from gradwire.coordinator.access import Identity
from gradwire.coordinator.host import Host
from gradwire.coordinator.protocol import HEALTH, SERVICE, grpc_module, messages
from gradwire.coordinator.protocol.parts import announced, parsed, parts, read_part
from gradwire.coordinator.push import exact
from gradwire.coordinator.receiver import Incoming, Receiver
from gradwire.coordinator.structure import Structure
from gradwire.errors import (
    AccessError,
    ConfigError,
    GradwireError,
    NonFiniteError,
    PeerError,
    QueueFullError,
    WireError,
)
from gradwire.wire import frame_pieces

__all__ = ["Service"]


class Service:
    """Handlers of calls, for a server of gRPC."""

    def __init__(self, host: Host) -> None:
        self._grpc = grpc_module()
        self._host = host
        self._receiver = Receiver(host)

    def handlers(self) -> tuple[Any, ...]:
        """What a server is given."""
        grpc, known = self._grpc, messages()
        unary = {
            name: grpc.unary_unary_rpc_method_handler(
                self._guarded(handler, request),
                response_serializer=known[reply].SerializeToString,
            )
            for name, handler, request, reply in (
                ("Describe", self._describe, "DescribeRequest", "Description"),
                ("Manage", self._manage, "ManageRequest", "ManageReply"),
                ("Status", self._status, "StatusRequest", "StatusReply"),
            )
        }
        streams = {
            "Push": grpc.stream_stream_rpc_method_handler(
                self._push, response_serializer=known["PushReply"].SerializeToString
            ),
            "Pull": grpc.unary_stream_rpc_method_handler(self._pull),
            "SetModel": grpc.stream_unary_rpc_method_handler(
                self._guarded(self._set_model), response_serializer=known["Description"].SerializeToString
            ),
        }
        check = grpc.unary_unary_rpc_method_handler(
            self._guarded(self._check_health, "HealthCheckRequest"),
            response_serializer=known["HealthCheckResponse"].SerializeToString,
        )
        return (
            grpc.method_handlers_generic_handler(SERVICE, {**unary, **streams}),
            grpc.method_handlers_generic_handler(HEALTH, {"Check": check}),
        )

    def _guarded(self, handler: Callable[[Any, Any], Any], kind: str = "") -> Callable[[Any, Any], Any]:
        """A handler whose errors are answers; a request that is one message is parsed here, for it may be junk."""

        async def guarded(request: Any, context: Any) -> Any:
            try:
                return await handler(parsed(kind, request) if kind else request, context)
            except GradwireError as error:
                await self._abort(context, error)

        return guarded

    async def _abort(self, context: Any, error: GradwireError) -> None:
        codes = self._grpc.StatusCode
        code, reason = codes.INTERNAL, "FAILED"
        if isinstance(error, AccessError):
            code, reason = (codes.PERMISSION_DENIED if error.known else codes.UNAUTHENTICATED), "FORBIDDEN"
        elif isinstance(error, QueueFullError):
            code, reason = codes.RESOURCE_EXHAUSTED, "FULL"
        elif isinstance(error, PeerError):
            code, reason = codes.UNAVAILABLE, "DRAINING"
        elif isinstance(error, ConfigError | WireError | NonFiniteError):
            code, reason = codes.INVALID_ARGUMENT, "INVALID"
        self._host.metrics.refused(reason)
        await context.abort(code, str(error))

    async def _check_health(self, request: Any, context: Any) -> Any:
        if request.service not in ("", SERVICE):
            await context.abort(self._grpc.StatusCode.NOT_FOUND, f"there is no service {request.service!r}")
        return messages()["HealthCheckResponse"](status="SERVING" if self._host.ready else "NOT_SERVING")

    async def _describe(self, request: Any, context: Any) -> Any:
        identity = self._host.identity(context)
        reply = self._description()
        reply.identity = identity.name
        reply.last_session = self._host.store.last_session(request.worker)
        return reply

    def _description(self) -> Any:
        store = self._host.store
        reply = messages()["Description"](empty=store.empty, structure=store.structure, mode=store.mode)
        if not store.empty:
            model = store.there()
            reply.version = model.version
            for name, tensor in model.parameters.items():
                reply.parameters.add(name=name, shape=list(tensor.shape), dtype=str(tensor.dtype).partition(".")[2])
        return reply

    async def _manage(self, request: Any, context: Any) -> Any:
        self._host.identity(context).check("admin")
        reply = messages()["ManageReply"]()
        if request.mode:
            await self._host.off_loop(self._host.store.set_mode, request.mode)
        if request.clear:
            reply.cleared = await self._host.off_loop(self._host.store.clear)
        if request.snapshot:
            await self._host.off_loop(self._host.snapshot)
        if request.drain:
            self._host.drain()
        return reply

    async def _status(self, request: Any, context: Any) -> Any:
        self._host.identity(context).check("read")
        counts, store = self._host.metrics.counts, self._host.store
        model = None if store.empty else store.there()
        return messages()["StatusReply"](
            ready=self._host.ready,
            draining=self._host.draining,
            version=0 if model is None else model.version,
            parameters=0 if model is None else sum(tensor.numel() for tensor in model.parameters.values()),
            queued=self._host.queued,
            workers=len(self._host.workers),
            applied=counts["applied"],
            repeated_pushes=counts["repeated"],
            refused=dict(self._host.metrics.refusals),
            ages=dict(self._host.metrics.ages),
            bytes_received=counts["received_bytes"],
            bytes_sent=counts["sent_bytes"],
            pulls=counts["pulls"],
            snapshots=counts["snapshots"],
            seconds=time.monotonic() - self._host.metrics.started,
            durability="" if store.folder is None else self._host.settings.durability.fsync,
            replayed=store.replayed,
            gradwire=version("gradwire"),
            trouble=store.trouble,
        )

    def prometheus(self) -> str:
        """All counts, as Prometheus reads them."""
        gauges = {
            "queue": self._host.queued,
            "workers": len(self._host.workers),
            "ready": int(self._host.ready),
            "version": self._version,
            "seconds": time.monotonic() - self._host.metrics.started,
        }
        return self._host.metrics.prometheus(gauges)

    def record(self) -> dict[str, Any]:
        """What is going on, as telemetry has it."""
        now = {"version": self._version, "queued": self._host.queued, "workers": len(self._host.workers)}
        return now | self._host.metrics.totals()

    @property
    def _version(self) -> int:
        return 0 if self._host.store.empty else self._host.store.there().version

    # Parameters.

    async def _set_model(self, requests: Any, context: Any) -> Any:
        identity = self._host.identity(context)
        header, frames = None, None
        task, since = asyncio.current_task(), time.monotonic()
        self._host.unfinished(task, since, 0)
        try:
            async for message in requests:
                first, data = read_part("ModelPart", message)
                if first is not None:
                    if first.only_if_empty and not self._host.store.empty:
                        return self._description()
                    identity.check("admin")
                    header, frames = first, Incoming.of(first, self._host.settings.limits).frames
                if frames is None:
                    raise WireError("the first part has no header.")
                frames.add(data)
                self._host.unfinished(task, since, sum(map(len, frames.frames.values())))
        except asyncio.CancelledError:  # by the watch, which has counted it
            await context.abort(
                self._grpc.StatusCode.INVALID_ARGUMENT, "the rest of the parameters did not come in time."
            )
        finally:
            self._host.finished(task)
        if header is None or frames is None or not frames.complete:
            raise WireError("parameters were announced, and did not come.")
        if header.structure not in ("tensor", "list", "dict"):
            raise ConfigError(f"`structure` must be tensor, list or dict; got {header.structure!r}.")
        await self._host.off_loop(self._replace, header.structure, frames.frames)
        return self._description()

    def _replace(self, structure: Structure, frames: Mapping[str, memoryview]) -> None:
        if not frames:
            raise ConfigError("`parameters` must hold at least one tensor; got none.")
        parameters = {}
        for name, frame in frames.items():
            payload = wire.unpack(frame, copy=False)
            payload.check_finite()
            parameters[name] = decode_payload(payload)
        self._host.store.replace(parameters, structure)
        self._host.copies.clear()

    async def _push(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        try:
            identity = self._host.identity(context)
            identity.check("push")
        except GradwireError as error:
            await self._abort(context, error)
            return
        async for reply in self._receiver.replies(requests, identity):
            yield reply

    async def _pull(self, request: Any, context: Any) -> AsyncIterator[bytes]:
        try:
            identity = self._host.identity(context)
            identity.check("read")
            asked = parsed("PullRequest", request)
            stream = await self._host.off_loop(self._parameters, asked, identity)
        except GradwireError as error:
            await self._abort(context, error)
            return
        self._host.metrics.count("pulls")
        for message in stream:
            self._host.metrics.count("sent_bytes", len(message))
            yield message

    def _parameters(self, request: Any, identity: Identity) -> Iterator[bytes]:
        header = messages()["PullPart"].Header(structure=self._host.store.structure)
        plain = request.codec in ("", "none")
        if plain and request.HasField("since") and self._host.store.there().version == request.since:
            header.version, header.unchanged = request.since, True
            return parts(header, ())
        header.version, parameters = self._host.store.read()
        if plain:
            return parts(header, announced(header, {n: frame_pieces(exact(each)) for n, each in parameters.items()}))
        if not request.reader:
            raise ConfigError("`reader` must be a name: the server keeps track of what a reader has.")
        identity.check_worker(request.reader)
        sent = self._host.copies.send(request.reader, request.copy, parameters, make_codec(request.codec))
        header.copy, header.changes = sent.number, sent.changes
        return parts(header, announced(header, sent.frames))
