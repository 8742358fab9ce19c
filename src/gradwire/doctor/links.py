"""How fast messages travel between ranks, pair by pair, measured by the ranks themselves."""

from __future__ import annotations

import json
import socket
import statistics
from dataclasses import asdict, dataclass
from itertools import combinations, count
from typing import Any, Final

import torch
import torch.distributed as dist

from gradwire import __version__
from gradwire.collectives import connect
from gradwire.collectives.peers import share
from gradwire.collectives.sockets import own_address
from gradwire.doctor.finding import Finding, Level
from gradwire.errors import PeerError
from gradwire.kernels import available
from gradwire.planner.cost import Link, Machine
from gradwire.planner.probe import probe_network

__all__ = ["LinkReport", "PairSpeed", "measure_links", "rank_findings"]

_ALL_PAIRS: Final = 8  # with more ranks than that only neighbours are measured
_TAGS: Final = 16  # that a measurement may use for itself
_SLOW: Final = 0.5  # of the median: a link to look at
_MUST_AGREE: Final[dict[str, Level]] = {"gradwire": "problem", "torch": "warning", "kernels": "warning"}
_BY_THE_CLOCK: Final = Machine(crowding=0.0)  # what the clock says, though it be the processor that is the limit


@dataclass(frozen=True)
class PairSpeed:
    """Between two ranks, each sending while it receives; and by the process group's all-reduce of the two.

    >>> PairSpeed((0, 1), 940.0, 0.2, 450.0, 0.3).mbit_s
    940.0
    """

    ranks: tuple[int, int]
    mbit_s: float
    ms: float  # of a short message
    all_reduce_mbit_s: float  # what a rank sends in it
    all_reduce_ms: float  # of a short one
    error: str | None = None


@dataclass(frozen=True)
class LinkReport:
    """What was measured between all ranks, and where they are."""

    hosts: tuple[str, ...]  # by rank
    addresses: tuple[str, ...]
    pairs: tuple[PairSpeed, ...]
    findings: tuple[Finding, ...]

    @classmethod
    def of(cls, told: dict[str, Any]) -> LinkReport:
        """From what :meth:`as_json` gave."""
        pairs = tuple(PairSpeed(**(each | {"ranks": tuple(each["ranks"])})) for each in told["pairs"])
        findings = tuple(Finding(**each) for each in told["findings"])
        return cls(tuple(told["hosts"]), tuple(told["addresses"]), pairs, findings)

    def as_json(self) -> dict[str, Any]:
        """Of numbers, strings, lists and tables."""
        told: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return told


def measure_links(rank: int, ranks: int, *, timeout_s: float = 60.0) -> LinkReport:
    """Measure the links of the process group that is there; every rank calls it, and gets the same report.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> measure_links(0, 1).pairs
    ()
    >>> dist.destroy_process_group()
    """
    everybody = connect(timeout_s=timeout_s)
    try:
        tags = count(0, _TAGS)
        described = [json.loads(each) for each in share(everybody, json.dumps(_description()), next(tags), "roll call")]
        pairs = []
        for pair in _pairs(ranks):
            mine = json.dumps(asdict(_measured(pair, rank, timeout_s)) if rank in pair else None)
            told = json.loads(share(everybody, mine, next(tags), "the speed of links")[pair[0]])
            pairs.append(PairSpeed(**(told | {"ranks": pair})))
    finally:
        everybody.close()
    hosts, addresses = ([each[what] for each in described] for what in ("host", "address"))
    found = (*rank_findings(described), *_link_findings(pairs, addresses))
    return LinkReport(tuple(hosts), tuple(addresses), tuple(pairs), found)


def _pairs(ranks: int) -> list[tuple[int, int]]:
    if ranks <= _ALL_PAIRS:
        return list(combinations(range(ranks), 2))
    return [(min(a, b), max(a, b)) for a, b in ((rank, (rank + 1) % ranks) for rank in range(ranks))]


def _measured(pair: tuple[int, int], rank: int, timeout_s: float) -> PairSpeed:
    """One pair at a time, while the others wait: links that share a cable do not disturb each other."""
    group = dist.new_group(list(pair), backend="gloo", use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    try:
        two = connect(group, timeout_s=timeout_s)
        tags = count(0, _TAGS).__next__
        probe_network(two, tags, _BY_THE_CLOCK)  # the first time is also that of fresh memory and windows that open
        found = probe_network(two, tags, _BY_THE_CLOCK)
        two.close()
    except (PeerError, RuntimeError) as error:
        return PairSpeed(pair, 0.0, 0.0, 0.0, 0.0, str(error))
    finally:
        dist.destroy_process_group(group)
    return PairSpeed(pair, _mbit_s(found.between), _ms(found.between), _mbit_s(found.dense), _ms(found.dense))


def _mbit_s(link: Link) -> float:
    return 8e-6 / max(link.seconds_per_byte, 1e-12)


def _ms(link: Link) -> float:
    return 1000 * link.latency_s


def _description() -> dict[str, str]:
    return {
        "host": socket.gethostname(),
        "address": own_address()[1],
        "gradwire": __version__,
        "torch": str(torch.__version__).partition("+")[0],
        "kernels": available("cpu")["encode_blocks"],
    }


def rank_findings(described: list[dict[str, str]]) -> list[Finding]:
    """Whether all ranks are of the same versions.

    >>> here = {"host": "a", "address": "10.0.0.1", "gradwire": "1.0", "torch": "2.7.0", "kernels": "native"}
    >>> [each.level for each in rank_findings([here, here | {"gradwire": "2.0"}])]
    ['problem']
    """
    found = []
    for what, level in _MUST_AGREE.items():
        by_value: dict[str, list[int]] = {}
        for rank, each in enumerate(described):
            by_value.setdefault(each[what], []).append(rank)
        if len(by_value) > 1:
            told = "; ".join(f"{value} on {_ranks(several)}" for value, several in by_value.items())
            fix = "gradwire doctor   # on those that lack the native ones" if what == "kernels" else None
            fix = fix or f"pip install '{what}=={max(by_value)}'   # on every machine"
            found.append(Finding("ranks", level, f"{what} differs: {told}", fix))
    places = len({(each["host"], each["address"]) for each in described})
    where = "one machine" if places == 1 else f"{places} machines"
    return found or [Finding("ranks", "ok", f"{len(described)} on {where}, of the same versions")]


def _ranks(several: list[int]) -> str:
    return f"rank{'s' if len(several) > 1 else ''} {', '.join(map(str, several))}"


def _link_findings(pairs: list[PairSpeed], addresses: list[str]) -> list[Finding]:
    if not pairs:
        return []
    broken = [each for each in pairs if each.error is not None]
    if broken:
        first = broken[0]
        fact = f"ranks {first.ranks[0]} and {first.ranks[1]} cannot exchange messages: {first.error}"
        return [Finding("links", "problem", fact, fix="export GLOO_SOCKET_IFNAME=eth0   # the interface they share")]
    # Inside a machine it is the processor's speed, and swings.
    between = [each for each in pairs if addresses[each.ranks[0]] != addresses[each.ranks[1]]]
    median = statistics.median(each.mbit_s for each in between) if between else 0.0
    slow = [each for each in between if each.mbit_s < _SLOW * median]
    if slow:
        named = ", ".join(f"{a}-{b} ({each.mbit_s:,.0f} Mbit/s)" for each in slow for a, b in [each.ranks])
        fact = f"slower than half the median, {median:,.0f} Mbit/s: {named}"
        return [Finding("links", "warning", fact, fix="gradwire doctor   # on those machines: interface and its speed")]
    slowest = min(pairs, key=lambda each: each.mbit_s)
    return [Finding("links", "ok", f"{slowest.mbit_s:,.0f} Mbit/s and {slowest.ms:.2f} ms at the slowest")]
