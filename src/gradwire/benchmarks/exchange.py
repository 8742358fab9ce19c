"""How much of a link the exchange of gradients uses."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from gradwire.benchmarks import exchange_worker
from gradwire.clusters import run_workers
from gradwire.codecs import codec
from gradwire.errors import ConfigError
from gradwire.lab import Lab, parse_rate

__all__ = ["Exchange", "Settings", "measure"]

_SHARE_S = 0.25  # of sending at the full rate, in one exchange


@dataclass(frozen=True)
class Settings:
    """What is measured."""

    workers: int = 4
    rates: tuple[str, ...] = ("100mbit", "1gbit")
    codecs: tuple[str, ...] = ("int8", "int4")
    rounds: int = 7

    def __post_init__(self) -> None:
        if not 2 <= self.workers <= 64:
            raise ConfigError(f"`--workers` must be from 2 to 64; got {self.workers}.")
        if self.rounds < 1:
            raise ConfigError(f"`--rounds` must be at least 1; got {self.rounds}.")
        for rate in self.rates:
            if parse_rate(rate, argument="--rate") is None:
                raise ConfigError("`--rate` must be a rate such as 100mbit, to know the share of; got none.")
        for name in self.codecs:
            codec(name)


@dataclass(frozen=True)
class Exchange:
    """A contender under a link."""

    sent_bytes: int  # by a rank, without headers
    seconds: float
    efficiency: float  # of the rate; headers alone leave 0.956


def measure(settings: Settings, notify: Callable[[str], None] = lambda _: None) -> dict[str, dict[str, Exchange]]:
    """By rate, then contender."""
    found: dict[str, dict[str, Exchange]] = {}
    for rate in settings.rates:
        bits = parse_rate(rate, argument="--rate")
        assert bits is not None
        asked = {"codecs": settings.codecs, "nbytes": int(bits / 8 * _SHARE_S), "rounds": settings.rounds}
        times: dict[str, list[float]] = {}
        sent: dict[str, int] = {}
        with Lab.up(settings.workers, rate, name=f"exchange-{os.getpid()}") as lab:
            module = exchange_worker.__name__
            for event in run_workers(module, asked, settings.workers, lab):
                times.setdefault(event["contender"], []).append(event["seconds"])
                sent[event["contender"]] = event["sent_bytes"]
                notify(f"{rate}: {event['contender']}")
        found[rate] = {
            name: Exchange(sent[name], median, sent[name] * 8 / bits / median)
            for name, seconds in times.items()
            for median in [statistics.median(seconds)]
        }
    return found
