"""The page of metrics, and whoever holds on to it."""

import contextlib
import socket
import threading
import time
import urllib.request

from gradwire.telemetry import MetricsServer


def test_silent_connections_hold_few_threads_and_no_reader_up():
    before = threading.active_count()
    server = MetricsServer("127.0.0.1:0", lambda: "gradwire_version 7\n", lambda: True)
    host, _, port = server.address.rpartition(":")
    with contextlib.ExitStack() as stack:
        stack.callback(server.close)
        for _ in range(120):
            silent = stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
            silent.sendall(b"GET /metrics")
        with urllib.request.urlopen(f"http://{server.address}/ready", timeout=20) as answer:
            assert answer.status == 200
        end = time.monotonic() + 20  # the threads of connections that had to go take a moment to end
        while threading.active_count() - before > 40:
            assert time.monotonic() < end
            time.sleep(0.01)
