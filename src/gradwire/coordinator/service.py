"""The calls of the coordinator's service, except pushes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version as installed
from typing import Any

from torch import Tensor

from gradwire import wire
from gradwire.api import decode_payload
from gradwire.codecs import codec as make_codec
from gradwire.coordinator.calls import Call, Calls
from gradwire.coordinator.deadlines import time_left
from gradwire.coordinator.host import Host
from gradwire.coordinator.protocol import HEALTH, SERVICE, grpc_module, messages
from gradwire.coordinator.protocol.parts import announced, parts, read_part
from gradwire.coordinator.push import exact
from gradwire.coordinator.receiver import Incoming, Receiver
from gradwire.coordinator.structure import Structure
from gradwire.errors import ConfigError, WireError
from gradwire.wire import frame_pieces

__all__ = ["Service"]


class Service:
    """Handlers of calls, for a server of gRPC."""

    def __init__(self, host: Host) -> None:
        self._grpc = grpc_module()
        self._host = host
        self._receiver = Receiver(host)
        self._calls = Calls(host)

    def handlers(self) -> tuple[Any, ...]:
        """What a server is given."""
        methods = {
            "Describe": self._calls.handler(self._describe),
            "Manage": self._calls.handler(self._manage, "admin"),
            "Status": self._calls.handler(self._status, "read"),
            "Push": self._calls.handler(self._receiver.serve, "push"),
            "Pull": self._calls.handler(self._pull, "read"),
            "SetModel": self._calls.handler(self._set_model),
        }
        generic = self._grpc.method_handlers_generic_handler
        return generic(SERVICE, methods), generic(HEALTH, {"Check": self._calls.open(self._check_health)})

    async def _check_health(self, _: Any, context: Any) -> None:
        """Answer for the server, whichever service is asked for: the request may be a stranger's, and is not read."""
        status = "SERVING" if self._host.ready else "NOT_SERVING"
        await context.write(messages()["HealthCheckResponse"](status=status).SerializeToString())

    async def _describe(self, call: Call) -> None:
        request = await call.request("DescribeRequest")
        reply = self._description()
        reply.identity = call.identity.name
        reply.last_session = self._host.store.last_session(request.worker)
        await call.reply(reply)

    def _description(self) -> Any:
        store = self._host.store
        reply = messages()["Description"](empty=store.empty, structure=store.structure, mode=store.mode)
        if not store.empty:
            model = store.there()
            reply.version = model.version
            for name, tensor in model.parameters.items():
                reply.parameters.add(name=name, shape=list(tensor.shape), dtype=str(tensor.dtype).partition(".")[2])
        return reply

    async def _manage(self, call: Call) -> None:
        request = await call.request("ManageRequest")
        reply = messages()["ManageReply"]()
        if request.mode:
            await self._host.off_loop(self._host.store.set_mode, request.mode)
        if request.clear:
            reply.cleared = await self._host.off_loop(self._host.store.clear)
        if request.snapshot:
            await self._host.off_loop(self._host.snapshot)
        if request.drain:
            self._host.drain()
        await call.reply(reply)

    async def _status(self, call: Call) -> None:
        await call.request("StatusRequest")
        counts, store = self._host.metrics.counts, self._host.store
        model = None if store.empty else store.there()
        reply = messages()["StatusReply"](
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
            gradwire=installed("gradwire"),
            trouble=store.trouble,
        )
        await call.reply(reply)

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

    async def _set_model(self, call: Call) -> None:
        header, frames, nbytes = None, None, 0
        since = time.monotonic()
        while (message := await call.read(time_left(since, self._host.settings.limits.push_s, nbytes))) is not None:
            first, data = read_part("ModelPart", message)
            if first is not None:
                if first.only_if_empty and not self._host.store.empty:
                    await call.reply(self._description())
                    return
                call.identity.check("admin")
                incoming = Incoming.of(first, self._host.settings.limits)
                header, frames, nbytes = first, incoming.frames, incoming.nbytes
            if frames is None:
                raise WireError("the first part has no header.")
            frames.add(data)
        if header is None or frames is None or not frames.complete:
            raise WireError("parameters were announced, and did not come.")
        if header.structure not in ("tensor", "list", "dict"):
            raise ConfigError(f"`structure` must be tensor, list or dict; got {header.structure!r}.")
        await self._host.off_loop(self._replace, header.structure, frames.frames)
        await call.reply(self._description())

    def _replace(self, structure: Structure, frames: Mapping[str, memoryview]) -> None:
        if not frames:
            raise ConfigError("`parameters` must hold at least one tensor; got none.")
        parameters = {}
        for name, frame in frames.items():
            payload = wire.unpack(frame, copy=False)
            payload.check_finite()
            parameters[name] = decode_payload(payload)
        self._host.store.replace(parameters, structure)
        self._host.readers.copies.clear()

    async def _pull(self, call: Call) -> None:
        request = await call.request("PullRequest")
        header = messages()["PullPart"].Header(structure=self._host.store.structure)
        plain = request.codec in ("", "none")
        if plain and request.HasField("since") and self._host.store.there().version == request.since:
            header.version, header.unchanged = request.since, True
            await self._send(call, parts(header, ()))
            return
        if not plain:
            if not request.reader:
                raise ConfigError("`reader` must be a name: the server keeps track of what a reader has.")
            call.identity.check_worker(request.reader)
        async with self._host.readers.reading(None if plain else request.reader) as (version, parameters, nbytes):
            header.version = version
            frames = await self._host.run(nbytes, self._frames_of, request, header, parameters)
            await self._send(call, parts(header, announced(header, frames)))

    def _frames_of(
        self, request: Any, header: Any, parameters: Mapping[str, Tensor]
    ) -> Mapping[str, Sequence[memoryview]]:
        """What a reader is sent: exact parameters, or what brings the copy that it has to them."""
        if request.codec in ("", "none"):
            return {name: frame_pieces(exact(each)) for name, each in parameters.items()}
        sent = self._host.readers.copies.send(request.reader, request.copy, parameters, make_codec(request.codec))
        header.copy, header.changes = sent.number, sent.changes
        return sent.frames

    async def _send(self, call: Call, stream: Iterator[bytes]) -> None:
        self._host.metrics.count("pulls")
        for message in stream:
            self._host.metrics.count("sent_bytes", len(message))
            await call.write(message)
