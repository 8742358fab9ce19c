"""What the network and the processors of all ranks can do, measured by all of them at once."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch

from gradwire.collectives import Peers
from gradwire.collectives.base import ring_bytes
from gradwire.collectives.peers import Team, others, tell
from gradwire.planner.cost import Link, Machine

__all__ = ["Network", "glance_at_network", "probe_machine", "probe_network", "seconds_per_byte"]

_WHAT: Final = "the measurement of the network"
_TALKS: Final = 3
_GLANCE_TALKS: Final = 2
_FIRST_BYTES: Final = 1 << 18
_MOST_BYTES: Final = 1 << 22
_GLANCE_MOST_BYTES: Final = 1 << 20
_LONG_S: Final = 0.01  # enough for a bandwidth
_GLANCE_LONG_S: Final = 0.004  # for a rough one
_SURE_S: Final = 0.5  # what takes so long is measured once
_SPIN_S: Final = 0.025  # several turns of ranks that share a processor
_SPIN_MARGIN_S: Final = 0.008  # before and after: ranks do not begin at the same moment
_BUSY: Final = 1.3


@dataclass(frozen=True)
class Network:
    """Between ranks, and inside a host where several of them are; and as the process group's own all-reduce sees it.

    >>> link = Link(1e-4, 8e-8, 1e-9)
    >>> Network(between=link, dense=link, inside=None).between.latency_s
    0.0001
    """

    between: Link
    dense: Link
    inside: Link | None


Tags = Callable[[], int]
"""Gives tags nobody else uses, the same on every rank: as many as a reduction has."""


def probe_network(peers: Peers, tags: Tags, machine: Machine, hosts: tuple[int, ...] = ()) -> Network:
    """Measure latency and bandwidth; a tenth of a second, unless the link is slow. All ranks get the same figures.

    >>> from itertools import count
    >>> from gradwire.collectives.loopback import Alone
    >>> probe_network(Alone(), count().__next__, Machine()).between.latency_s
    0.0
    """
    if peers.size == 1:
        nothing = Link(0.0, 0.0, 0.0)
        return Network(nothing, nothing, None)
    shared = len(set(hosts)) < len(hosts)
    outside, inside = _teams(peers, hosts) if shared else (peers, None)
    between = _measure(peers, tags, machine, *_swapping(outside, peers, tags))
    dense = _measure(peers, tags, machine, *_all_reducing(peers, tags), _long_enough(between))
    within = _measure(peers, tags, machine, *_swapping(inside, peers, tags)) if inside is not None else None
    return Network(between, dense, within)


def glance_at_network(peers: Peers, tags: Tags, hosts: tuple[int, ...] = ()) -> Network:
    """A rough measurement, of some milliseconds: for where nothing is chosen by it.

    >>> from itertools import count
    >>> from gradwire.collectives.loopback import Alone
    >>> glance_at_network(Alone(), count().__next__).inside is None
    True
    """
    if peers.size == 1:
        return probe_network(peers, tags, Machine())
    exchange = _swapping(_between_hosts(peers, hosts), peers, tags)
    link = _measure(
        peers, tags, Machine(), *exchange, talks=_GLANCE_TALKS, long_s=_GLANCE_LONG_S, most=_GLANCE_MOST_BYTES
    )
    return Network(link, link, None)


def seconds_per_byte(peers: Peers, tags: Tags, before: Link | None, hosts: tuple[int, ...] = ()) -> float:
    """What a byte that a rank sends takes now: a short look at a link; ``before`` is what is known of it, if anything.

    >>> from itertools import count
    >>> from gradwire.collectives.loopback import Alone
    >>> seconds_per_byte(Alone(), count().__next__, None)
    0.0
    """
    if peers.size == 1:
        return 0.0
    exchange, _ = _swapping(_between_hosts(peers, hosts), peers, tags)
    nbytes = _long_enough(before) if before is not None else _FIRST_BYTES

    def least() -> float:
        return min(_timed(peers, tags, exchange, nbytes)[0] for _ in range(2))

    while (took := least()) < _GLANCE_LONG_S and before is None and nbytes < _MOST_BYTES:
        nbytes *= 4  # or a latency that nobody knows passes for bytes
    return max(0.0, took - (before.latency_s if before is not None else 0.0)) / nbytes


def _long_enough(link: Link) -> int:
    """Bytes that take a link some time."""
    return int(min(_MOST_BYTES, max(_FIRST_BYTES, 1.25 * _LONG_S * link.bits_per_s / 8)))


def _between_hosts(peers: Peers, hosts: tuple[int, ...]) -> Peers:
    """Who a rank talks to over the link."""
    return _teams(peers, hosts)[0] if len(set(hosts)) < len(hosts) else peers


def _teams(peers: Peers, hosts: tuple[int, ...]) -> tuple[Peers, Peers]:
    """Who talks between hosts, and who inside one, in a hierarchical reduce."""
    mine = [rank for rank, host in enumerate(hosts) if host == hosts[peers.rank]]
    place = mine.index(peers.rank)
    members = [[r for r, host in enumerate(hosts) if host == each] for each in dict.fromkeys(hosts)]
    across = [of_host[place] for of_host in members if place < len(of_host)]
    return Team.of(peers, across), Team.of(peers, mine)


def _swapping(team: Peers, peers: Peers, tags: Tags) -> tuple[Callable[[int], None], Callable[[int], float]]:
    """An all-to-all in which a rank sends so many bytes, and how many those are."""

    zeros = _kept(torch.uint8)

    def exchange(nbytes: int) -> None:
        each, tag = max(1, nbytes // max(1, team.size - 1)), tags()
        data = zeros(each)
        swap = team.swap(dict.fromkeys(others(team), each), tag, _WHAT)
        for rank in others(team):
            swap.send(rank, data)
        swap.wait()

    return exchange, float


def _all_reducing(peers: Peers, tags: Tags) -> tuple[Callable[[int], None], Callable[[int], float]]:
    zeros = _kept(torch.float32)

    def exchange(nbytes: int) -> None:
        peers.all_reduce(zeros(nbytes // 4), tags())()

    return exchange, lambda nbytes: float(ring_bytes(nbytes // 4, peers.size))


def _kept(dtype: torch.dtype) -> Callable[[int], torch.Tensor]:
    """Zeros, where the last ones of that size were: gradients do not lie in fresh memory either."""
    return cache(lambda numel: torch.zeros(numel, dtype=dtype))


def _measure(
    peers: Peers,
    tags: Tags,
    machine: Machine,
    exchange: Callable[[int], None],
    sent_bytes: Callable[[int], float],
    nbytes: int = _FIRST_BYTES,
    *,
    talks: int = _TALKS,
    long_s: float = _LONG_S,
    most: int = _MOST_BYTES,
) -> Link:
    short = [_timed(peers, tags, exchange, 4) for _ in range(talks)]
    latency, overhead = (statistics.median(each) for each in zip(*short, strict=True))
    while (took := _timed(peers, tags, exchange, nbytes)[0]) < long_s and nbytes < most:
        nbytes = min(4 * nbytes, int(1.25 * long_s / took * nbytes), most)
    # Again: the first time is also that of fresh memory, and short ones vary.
    again = [_timed(peers, tags, exchange, nbytes) for _ in range(talks if took < _SURE_S else 1)]
    seconds, processor = (statistics.median(each) for each in zip(*again, strict=True))
    sent = sent_bytes(nbytes)
    processor_per_byte = max(0.0, processor - overhead) / sent
    per_byte = (seconds - latency) / sent
    bound = per_byte < _BUSY * processor_per_byte * machine.crowding  # by the processor, not by the wire
    return Link(latency, 0.0 if bound else per_byte, processor_per_byte)


def _timed(peers: Peers, tags: Tags, exchange: Callable[[int], None], nbytes: int) -> tuple[float, float]:
    """Seconds, and seconds of processor, of an exchange: the mean over all ranks."""
    tell(peers, "", tags(), _WHAT)  # all begin together
    processor, started = time.process_time(), time.perf_counter()
    exchange(nbytes)
    mine = f"{time.perf_counter() - started} {time.process_time() - processor}"
    told = [tuple(map(float, line.split())) for line in tell(peers, mine, tags(), _WHAT)]
    return statistics.mean(each[0] for each in told), statistics.mean(each[1] for each in told)


def probe_machine(peers: Peers, tags: Tags) -> Machine:
    """Measure how ranks that share processors slow each other down; for a tenth of a second.

    >>> from itertools import count
    >>> from gradwire.collectives.loopback import Alone
    >>> probe_machine(Alone(), count().__next__).crowding >= 1
    True
    """
    alone, two = (_share(peers, tags, threads) for threads in (1, 2))
    # With a processor for each thread of all ranks two threads get as much each as one does; with none to spare, half.
    return Machine(max(1.0, 1 / alone), min(1.0, max(0.0, 2 * two / alone - 1)))


def _share(peers: Peers, tags: Tags, threads: int) -> float:
    """Of a processor that a thread gets if so many of each rank work at once: the mean of all.

    The mean of what is got, not of how much longer it takes: a thread that got next to nothing is one of many.
    """
    tell(peers, "", tags(), _WHAT)
    told = tell(peers, str(_spin(threads)), tags(), _WHAT)
    return max(1e-3, statistics.mean(map(float, told)))


def _spin(threads: int) -> float:
    shares = [0.0] * threads
    work = [torch.zeros(1 << 17) for _ in range(threads)]

    def spin(place: int) -> None:
        torch.set_num_threads(1)
        marks = [_busy(work[place], seconds) for seconds in (_SPIN_MARGIN_S, _SPIN_S, _SPIN_MARGIN_S)]
        (began, before), (ended, after) = marks[:2]
        shares[place] = (after - before) / (ended - began)

    several = [threading.Thread(target=spin, args=(place,)) for place in range(threads)]
    for each in several:
        each.start()
    for each in several:
        each.join()
    return min(1.0, statistics.mean(shares))


def _busy(work: torch.Tensor, seconds: float) -> tuple[float, float]:
    """Work for so long; the time after it, and what this thread has had of processors so far."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        for _ in range(10):
            work.add_(1.0)  # does not hold Python's lock
    return time.perf_counter(), time.thread_time()
