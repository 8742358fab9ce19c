"""A server of the coordinator: an address, and what it does from start to end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from gradwire.coordinator.connections import Connections, allowed_connections, raise_descriptor_limit
from gradwire.coordinator.host import Host
from gradwire.coordinator.protocol import grpc_module
from gradwire.coordinator.protocol.parts import PART_BYTES
from gradwire.coordinator.rules import OptimizerFactory
from gradwire.coordinator.service import Service
from gradwire.coordinator.settings import ServeSettings, is_loopback
from gradwire.errors import ConfigError, GradwireError
from gradwire.telemetry import JsonLines, MetricsServer, Telemetry

__all__ = ["Server", "serve"]

_log: Final = logging.getLogger("gradwire.serve")


def serve(
    settings: ServeSettings | None = None,
    *,
    parameters: dict[str, Tensor] | None = None,
    optimizer: OptimizerFactory | None = None,
) -> Server:
    """Start a server on a thread of its own; :meth:`Server.stop` ends it.

    ``parameters`` are those of a new model, unless the folder has one; ``optimizer`` is a function from parameters to
    any torch optimizer, where the settings know torch's by name only.

    >>> import torch
    >>> from gradwire import CoordinatorClient
    >>> with serve(ServeSettings(address="127.0.0.1:0"), parameters={"w": torch.zeros(2)}) as server:
    ...     with CoordinatorClient(server.address, codec="none") as client:
    ...         client.add_gradients({"w": torch.tensor([0.5, -1.0])})
    ...         client.read()
    (1, {'w': tensor([-0.5000,  1.0000])})
    """
    if not isinstance(settings, ServeSettings | None):
        raise ConfigError(f"`settings` must be ServeSettings, or None; got {type(settings).__name__}.")
    if optimizer is not None and not callable(optimizer):
        raise ConfigError(f"`optimizer` must be a function from parameters to an optimizer; got {optimizer!r}.")
    return Server(settings or ServeSettings(), parameters=parameters, optimizer=optimizer).start()


_RECORD_S: Final = 1.0
_STREAMS: Final = 128  # calls of one connection; a client waits before it begins more
_SWEEP_S: Final = 0.25


class Server:
    """A model behind an address. It is a context manager, and can be started once."""

    def __init__(
        self,
        settings: ServeSettings,
        *,
        parameters: dict[str, Tensor] | None = None,
        optimizer: OptimizerFactory | None = None,
    ) -> None:
        self._grpc = grpc_module()
        self.settings = settings
        self._host = Host(settings, parameters, optimizer)
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._http: MetricsServer | None = None
        self._failure: GradwireError | None = None
        folder = settings.run_dir
        self._telemetry = Telemetry(*([JsonLines(folder, "coordinator.jsonl")] if folder is not None else []))
        self.address = settings.address
        self.metrics_address: str | None = None

    def start(self) -> Server:
        """Begin to serve, on a thread."""
        ready: Future[None] = Future()

        def work() -> None:
            try:
                asyncio.run(self._main(ready))
            except GradwireError as error:
                self._failure = error  # for stop to raise

        self._thread = threading.Thread(target=work, daemon=True, name="gradwire-serve")
        self._thread.start()
        ready.result()
        return self

    def run(self, notify: Callable[[Server], Any] = lambda _: None) -> None:
        """Serve on this thread until SIGTERM or SIGINT; then finish what is there, and save."""
        raise_descriptor_limit(self.settings.limits.connections)

        async def main() -> None:
            loop = asyncio.get_running_loop()
            ready: Future[None] = Future()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._host.drain)
            task = asyncio.ensure_future(self._main(ready))
            started = asyncio.wrap_future(ready)
            await asyncio.wait([started, task], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                notify(self)
            await task
            await started  # raises what kept it from starting

        asyncio.run(main())

    async def _main(self, ready: Future[None]) -> None:
        server = None
        try:
            self._loop, ended = asyncio.get_running_loop(), asyncio.Event()
            self._host.on_drain = ended.set
            service = Service(self._host)
            limits = self.settings.limits
            connections = allowed_connections(limits.connections)
            if connections < limits.connections:
                _log.info("at most %d connections: this process may have too few descriptors for more", connections)
            server = self._grpc.aio.server(options=self._options(connections), maximum_concurrent_rpcs=limits.streams)
            server.add_generic_rpc_handlers(service.handlers())
            port = self._bind(server)
            self.address = f"{self.settings.address.rpartition(':')[0]}:{port}"
            self._start_telemetry()
            await server.start()
            if self.settings.metrics is not None:
                self._http = MetricsServer(self.settings.metrics, service.prometheus, lambda: self._host.ready)
                self.metrics_address = self._http.address
        except Exception as error:
            if server is not None:
                await server.stop(None)
            with contextlib.suppress(GradwireError):  # what kept it from starting is the one to be raised
                self._host.close()
            ready.set_exception(error)
            return
        self._say_who()
        ready.set_result(None)
        background = [
            asyncio.ensure_future(self._host.deadlines.run(min(1.0, limits.push_s / 4, limits.call_s / 4))),
            asyncio.ensure_future(_record(self._telemetry, service)),
            asyncio.ensure_future(self._host.watch_disk()),
            asyncio.ensure_future(self._sweep(port, connections)),
        ]
        await ended.wait()
        while self._host.queued:  # those that stop in the middle are late in the end
            await asyncio.sleep(0.005)
        for each in background:
            each.cancel()
        await server.stop(grace=1.0)
        self._telemetry.record("coordinator", **service.record())
        await asyncio.to_thread(self._telemetry.close)
        if self._http is not None:
            await asyncio.to_thread(self._http.close)
        await asyncio.to_thread(self._host.close)

    def _options(self, connections: int) -> list[tuple[str, Any]]:
        limits, tls = self.settings.limits, self.settings.tls
        # Windows that follow the link would let a stranger send megabytes before its headers are looked at.
        strangers = not self._host.access.open and (tls is None or tls.client_authority is None)
        return [
            ("grpc.max_receive_message_length", 2 * PART_BYTES),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_metadata_size", 16_384),
            ("grpc.so_reuseport", 0),
            ("grpc.max_allowed_incoming_connections", connections),
            ("grpc.max_concurrent_streams", min(_STREAMS, limits.streams_per_address)),
            ("grpc.http2.bdp_probe", int(not strangers)),
            ("grpc.http2.lookahead_bytes", 1024 * limits.read_ahead_kb),
            ("grpc.server_handshake_timeout_ms", int(1000 * limits.call_s)),
            ("grpc.keepalive_time_ms", 60_000),
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ]

    async def _sweep(self, port: int, most: int) -> None:
        """End the connections of strangers who stay for too long, or are too many."""
        limits = self.settings.limits
        connections = Connections(port, most, min(most, limits.connections_per_address), limits.call_s)
        self._host.identified = connections.identified
        pause = _SWEEP_S
        while True:
            await asyncio.sleep(pause)
            began = time.monotonic()
            ended = await asyncio.to_thread(connections.sweep)
            self._host.metrics.count("ended_connections", ended)
            # Under attack a worker finds a place sooner the more often places are freed: with a tenth of a core.
            pause = min(_SWEEP_S, 10 * (time.monotonic() - began)) if ended else _SWEEP_S

    def _start_telemetry(self) -> None:
        where = {"address": self.address, "pid": os.getpid()}
        self._telemetry.start(rank=0, ranks=1, codec="coordinator", gradwire=version("gradwire"), settings=where)

    def stop(self) -> None:
        """Finish what is there, save, and end; raises if the model cannot be saved, or a journal cannot be written."""
        if self._thread is None or self._loop is None:
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._host.drain)
        self._thread.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def version(self) -> int | None:
        """How often the parameters have changed; None if there are none."""
        return None if self._host.store.empty else self._host.store.there().version

    @property
    def replayed(self) -> int:
        """Pushes that were found in the journal at the start."""
        return self._host.store.replayed

    def _bind(self, server: Any) -> int:
        tls = self.settings.tls
        try:
            if tls is None:
                port = server.add_insecure_port(self.settings.address)
            else:
                pair = (Path(tls.key).read_bytes(), Path(tls.certificate).read_bytes())
                authority = None if tls.client_authority is None else Path(tls.client_authority).read_bytes()
                credentials = self._grpc.ssl_server_credentials([pair], authority, authority is not None)
                port = server.add_secure_port(self.settings.address, credentials)
        except OSError as error:
            raise ConfigError(f"{error.filename} cannot be read: {error.strerror}.") from None
        except RuntimeError:
            raise ConfigError(f"`address` {self.settings.address} cannot be had: is it in use?") from None
        if not port:
            raise ConfigError(f"`address` {self.settings.address} cannot be had.")
        return int(port)

    def _say_who(self) -> None:
        if self._host.access.open and self.settings.tls is None:
            _log.info("%s: nobody is asked who they are; only this machine reaches it", self.address)
        elif self._host.access.tokens and self.settings.tls is None and not is_loopback(self.settings.address):
            _log.warning("%s: tokens travel in the clear, without TLS", self.address)
        elif self._host.access.open:
            _log.warning("%s: nobody is asked who they are: there are no `workers`", self.address)


async def _record(telemetry: Telemetry, service: Service) -> None:
    while True:
        telemetry.record("coordinator", **service.record())
        await asyncio.sleep(_RECORD_S)
