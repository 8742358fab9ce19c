"""The coordinator's service beside a socket, gloo and a Ray actor."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from gradwire.benchmarks.coordinator_peers import (
    Gloo,
    Gradwire,
    RayActor,
    Socket,
    certificates,
    peer_process,
    serving,
)
from gradwire.errors import ConfigError

__all__ = ["Report", "Settings", "measure"]

_ADDRESS: Final = 'address = "127.0.0.1:0"\n'
_TLS: Final = '[tls]\ncertificate = "{0}/certificate.pem"\nkey = "{0}/key.pem"\n'
_SMALL: Final = 2500  # numbers of a small update: 10 KB
_CLIENTS: Final = 64
_WARM_UP: Final = 2


@dataclass(frozen=True)
class Settings:
    """What is measured."""

    nbytes: int = 64 << 20
    rounds: int = 9
    seconds: float = 5.0
    ray: bool = False

    def __post_init__(self) -> None:
        if self.nbytes < 4 or self.nbytes % 4:
            raise ConfigError(f"`--mb` must be above 0; got {self.nbytes / (1 << 20):g}.")
        for name, value in (("rounds", self.rounds), ("seconds", self.seconds)):
            if value <= 0:
                raise ConfigError(f"`--{name}` must be above 0; got {value}.")


@dataclass(frozen=True)
class Report:
    """What was found."""

    push_s: Mapping[str, float]  # median seconds of a large push, by contender
    pull_s: Mapping[str, float]
    small_per_s: Mapping[str, float]  # small pushes applied a second, by durability
    starved: float  # the slowest of many clients, over the median


def measure(settings: Settings, notify: Callable[[str], Any] = lambda _: None) -> Report:
    """Measure everything; large tensors round after round, in an order drawn anew each time."""
    torch.set_num_threads(1)
    push, pull = _large(settings, notify)
    small = {}
    for name, kept in (("in memory", ""), ("fsync each", '[durability]\nfolder = "FOLDER"\n')):
        notify(f"small updates, {name}")
        with serving(_ADDRESS + kept) as address:
            small[name] = sum(_clients(address, 1, 1, 64, settings.seconds)) / settings.seconds
    notify(f"{_CLIENTS} clients")
    with serving(_ADDRESS) as address:
        counts = _clients(address, 2, _CLIENTS // 2, 1, settings.seconds)
    return Report(push, pull, small, min(counts) / statistics.median(counts))


def _large(settings: Settings, notify: Callable[[str], Any]) -> tuple[dict[str, float], dict[str, float]]:
    tensor = torch.randn(settings.nbytes // 4)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        with_tls = certificates(folder)
        contenders: dict[str, Any] = {}
        contenders["socket"] = Socket(
            stack.enter_context(peer_process(role="socket", nbytes=settings.nbytes)), tensor, None
        )
        contenders["socket, memory kept"] = Socket(
            stack.enter_context(peer_process(role="socket", nbytes=settings.nbytes, kept=True)), tensor, None, kept=True
        )
        contenders["gradwire"] = Gradwire(stack.enter_context(serving(_ADDRESS)), tensor, None)
        contenders["gradwire, int4"] = Gradwire(stack.enter_context(serving(_ADDRESS)), tensor, None, "int4")
        if with_tls:
            pem = folder / "certificate.pem"
            asked = {"role": "socket", "nbytes": settings.nbytes, "certificates": str(folder)}
            contenders["socket, TLS"] = Socket(stack.enter_context(peer_process(**asked)), tensor, pem)
            address = stack.enter_context(serving(_ADDRESS + _TLS.format(folder)))
            contenders["gradwire, TLS"] = Gradwire(address.replace("127.0.0.1", "localhost"), tensor, pem)
        port = _free_port()
        stack.enter_context(peer_process(role="gloo", nbytes=settings.nbytes, port=port))
        contenders["gloo send"] = Gloo(port, tensor)
        if settings.ray:
            contenders["Ray actor, tensors"] = RayActor(tensor, arrays=False)
            contenders["Ray actor, arrays"] = RayActor(tensor, arrays=True)
        draw = random.Random(0)
        push: dict[str, list[float]] = {name: [] for name in contenders}
        pull: dict[str, list[float]] = {name: [] for name in contenders}
        for number in range(_WARM_UP + settings.rounds):
            notify(f"{settings.nbytes >> 20} MB, round {number}")
            for name in draw.sample(list(contenders), len(contenders)):
                for times, call in ((push, contenders[name].push), (pull, contenders[name].pull)):
                    began = time.perf_counter()
                    call()
                    if number >= _WARM_UP:
                        times[name].append(time.perf_counter() - began)
        for each in contenders.values():
            each.close()
    return (
        {name: statistics.median(times) for name, times in push.items()},
        {name: statistics.median(times) for name, times in pull.items()},
    )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _clients(address: str, processes: int, clients: int, window: int, seconds: float) -> list[int]:
    """How often each of so many clients was acknowledged."""
    Gradwire(address, torch.zeros(_SMALL), None).close()
    asked = {"address": address, "clients": clients, "window": window, "seconds": seconds}
    asked |= {"numel": _SMALL, "codec": "none"}
    command = [sys.executable, "-m", "gradwire.benchmarks.coordinator_worker", json.dumps(asked)]
    running = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(processes)
    ]
    try:
        for process in running:
            assert process.stdout is not None
            process.stdout.readline()
        counts: list[int] = []
        for process in running:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in running:
            assert process.stdout is not None
            counts += json.loads(process.stdout.readline())["counts"]
        return counts
    finally:
        for process in running:
            process.kill()
            process.communicate()
