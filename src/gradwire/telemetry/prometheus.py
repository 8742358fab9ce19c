"""The latest numbers on a page that Prometheus reads."""

from __future__ import annotations

import re
import threading

from gradwire.errors import ConfigError
from gradwire.telemetry.base import Record
from gradwire.telemetry.metrics_server import MetricsServer
from gradwire.telemetry.scalars import scalars

__all__ = ["Prometheus"]


class Prometheus:
    """``http://HOST:PORT/metrics`` of every rank: gauges of the last step, counters of steps and bytes.

    Rank N of a machine listens N ports further up, so that ranks of one machine do not meet; 0 takes any free port.
    Only this machine is served unless ``address`` says otherwise.

    >>> sink = Prometheus("127.0.0.1:0")
    >>> sink.open({"event": "start", "rank": 0})
    >>> sink.write({"event": "step", "step": 1, "loss": 0.5, "sent": 100})
    >>> [line for line in sink.page().splitlines() if "loss" in line and not line.startswith("#")]
    ['gradwire_loss{rank="0"} 0.5']
    >>> sink.close()
    """

    every_rank = True

    def __init__(self, address: str = "127.0.0.1:9464") -> None:
        host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise ConfigError(f"`address` must be HOST:PORT; got {address!r}.")
        self.address, self._host, self._port = address, host, int(port)
        self._server: MetricsServer | None = None
        self._lock = threading.Lock()
        self._gauges: dict[str, float] = {}
        self._counters = {"steps": 0.0, "sent_bytes": 0.0, "received_bytes": 0.0, "dropped": 0.0, "notes": 0.0}
        self._rank = 0

    def open(self, start: Record) -> None:
        """Listen."""
        self._rank = int(start["rank"])
        port = self._port + self._rank if self._port else 0
        self._server = MetricsServer(f"{self._host}:{port}", self.page, lambda: True, "address")
        self.address = self._server.address

    def write(self, record: Record) -> None:
        """Note the numbers of a record."""
        with self._lock:
            event = record["event"]
            self._gauges |= scalars(record)
            if event == "step":
                self._gauges["step"] = float(record["step"])
                self._counters["steps"] += 1
                self._counters["sent_bytes"] += record.get("sent") or 0
                self._counters["received_bytes"] += record.get("received") or 0
            elif event in ("drop", "note"):
                self._counters["dropped" if event == "drop" else "notes"] += 1

    def page(self) -> str:
        """What Prometheus reads."""
        lines: list[str] = []
        with self._lock:
            for name, value in self._counters.items():
                lines += [
                    f"# TYPE gradwire_{name}_total counter",
                    f'gradwire_{name}_total{{rank="{self._rank}"}} {value:g}',
                ]
            families: dict[str, list[str]] = {}
            for name, value in self._gauges.items():
                kind, _, layer = name.partition("/")
                label = f',layer="{_escaped(layer)}"' if kind in ("error", "residual") else ""
                family = f"gradwire_{_clean(kind if label else name)}"
                families.setdefault(family, []).append(f'{family}{{rank="{self._rank}"{label}}} {value:g}')
        for family, values in families.items():
            lines += [f"# TYPE {family} gauge", *values]
        return "\n".join(lines) + "\n"

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
            self._server = None


def _clean(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
