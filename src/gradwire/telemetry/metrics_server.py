"""A page of metrics by HTTP, as Prometheus reads it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from gradwire.errors import ConfigError

__all__ = ["MetricsServer"]

_CONNECTIONS: Final = 32


class _Server(ThreadingHTTPServer):
    """A server whose connections are few: a new one beyond the limit ends the oldest."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *arguments: Any) -> None:
        self._open: dict[Any, None] = {}  # in the order of their coming
        self._lock = threading.Lock()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            oldest = next(iter(self._open)) if len(self._open) == _CONNECTIONS else None
            self._open.pop(oldest, None)
            self._open[request] = None
        if oldest is not None:
            with contextlib.suppress(OSError):  # it has just ended
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: the caller is gone, or was ended."""


class MetricsServer:
    """``/metrics``, ``/health`` and ``/ready`` by HTTP, on a thread of its own.

    >>> server = MetricsServer("127.0.0.1:0", lambda: "gradwire_version 7\\n", lambda: True)
    >>> server.close()
    """

    def __init__(
        self, address: str, metrics: Callable[[], str], ready: Callable[[], bool], argument: str = "metrics"
    ) -> None:
        host, _, port = address.rpartition(":")

        class Handler(BaseHTTPRequestHandler):
            timeout = 10  # whoever sends half a request does not hold a thread

            def do_GET(self) -> None:
                pages: dict[str, Callable[[], tuple[int, str]]] = {
                    "/metrics": lambda: (200, metrics()),
                    "/health": lambda: (200, "alive\n"),
                    "/ready": lambda: (200, "ready\n") if ready() else (503, "not ready\n"),
                }
                page = pages.get(self.path.partition("?")[0])
                status, text = page() if page is not None else (404, "there are /metrics, /health and /ready\n")
                data = text.encode()
                self.send_response(status)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - http.server's name
                pass

        try:
            self._server = _Server((host.strip("[]"), int(port)), Handler)
        except OSError as error:
            raise ConfigError(f"`{argument}` {address} cannot be had: {error.strerror or error}.") from None
        self.address = f"{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True, name="gradwire-metrics")
        self._thread.start()

    def close(self) -> None:
        """End it."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
