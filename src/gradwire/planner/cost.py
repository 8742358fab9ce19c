"""How long a step takes: computing, encoding, sending, and how much of it happens at once.

The classical model of a message, latency and bytes over bandwidth, with a third term for what the processor does to the
bytes. Buckets become ready while backward goes on; one is encoded and sent while the next is computed.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import Final

__all__ = ["Cost", "Link", "Machine", "Prediction", "predict_step", "pure_times"]

_ITERATIONS: Final = 8


@dataclass(frozen=True)
class Link:
    """What carries messages between ranks, as one of them sees it.

    >>> link = Link(latency_s=1e-4, seconds_per_byte=8e-8, processor_per_byte=1e-9)
    >>> round(link.bits_per_s / 1e6)
    100
    """

    latency_s: float  # of one round: every rank tells every other something short
    seconds_per_byte: float  # a rank sends; 0: the processor is the limit
    processor_per_byte: float  # seconds of processor a rank takes meanwhile, to send and to receive as much

    @property
    def bits_per_s(self) -> float:
        """What a rank can send."""
        return 8 / max(self.seconds_per_byte, self.processor_per_byte, 1e-12)


@dataclass(frozen=True)
class Machine:
    """What ranks take from each other, and a rank's threads from one another."""

    crowding: float = 1.0  # seconds that a second of processor takes while all ranks work
    spare: float = 1.0  # of a processor for encoding while backward goes on: 1 a whole one, 0 none


@dataclass(frozen=True)
class Cost:
    """What it takes a rank to reduce a bucket."""

    processor_s: float  # to encode, sum and decode
    sent_bytes: float
    rounds: int  # in which all ranks wait for each other
    dense: bool = False  # by the process group's own all-reduce


@dataclass(frozen=True)
class Prediction:
    """A step, as it is expected.

    >>> Prediction(seconds=1.5, ready=(0.9, 1.1), done=(1.2, 1.5), computing_s=1.0).exposed_s
    0.5
    """

    seconds: float
    ready: tuple[float, ...]  # when each bucket is handed over
    done: tuple[float, ...]  # and when its means are there
    computing_s: float  # of the same step, if nothing were sent

    @property
    def exposed_s(self) -> float:
        """What the exchange adds to a step."""
        return self.seconds - self.computing_s


@dataclass
class _Job:
    """A bucket on its way: works of the processor, with a transfer after each but the last."""

    works: deque[float]
    transfers: deque[tuple[float, float, float]]  # seconds of the link, of waiting, and of the processor meanwhile
    done: float = 0.0
    counts: bool = True  # False: work nobody waits for by itself


def predict_step(
    ready_s: Sequence[float], costs: Sequence[Sequence[Cost]], link: Link, dense_link: Link, machine: Machine
) -> Prediction:
    """What a step takes whose bucket i is computed after ``ready_s[i]`` and reduced at ``costs[i]``.

    Encoding goes before computing, as far as both need the same processor. The link carries one transfer at a time.

    >>> slow = Link(0.0, 1e-6, 0.0)
    >>> step = predict_step([1.0, 2.0], [[Cost(0.1, 5e5, 1)], [Cost(0.1, 5e5, 1)]], slow, slow, Machine())
    >>> round(step.seconds, 2)  # the first is hidden, the second is not
    2.6
    >>> round(predict_step([1.0, 2.0], [[Cost(0.1, 5e5, 1)]] * 2, slow, slow, Machine(spare=0.0)).seconds, 2)
    2.7
    """
    jobs = [[_job(cost, dense_link if cost.dense else link, machine) for cost in several] for several in costs]
    now, computed = 0.0, 0.0
    ready: list[float] = []
    works: deque[_Job] = deque()  # that wait for the processor
    transfers: deque[_Job] = deque()  # that wait for the link
    delayed: list[tuple[float, int, _Job]] = []  # whose messages are on their way
    sending: float | None = None  # until when the link is taken
    flying = 0
    pending = sum(map(len, jobs))
    while len(ready) < len(ready_s) or pending:
        speed = machine.spare if works else 1.0
        left = ready_s[len(ready)] - computed if len(ready) < len(ready_s) else inf
        until_ready = left / speed if speed > 0 else inf
        until_work = works[0].works[0] if works else inf
        until_sent = sending - now if sending is not None else inf
        until_there = delayed[0][0] - now if delayed else inf
        passed = max(0.0, min(until_ready, until_work, until_sent, until_there))
        now += passed
        computed += passed * speed
        if works:
            works[0].works[0] -= passed
        if until_ready <= passed:
            computed = ready_s[len(ready)]
            works += jobs[len(ready)]
            ready.append(now)
        elif until_work <= passed:
            job = works.popleft()
            job.works.popleft()
            if job.transfers:
                transfers.append(job)
            elif job.counts:
                job.done, pending = now, pending - 1
        elif until_sent <= passed:
            job = transfers.popleft()
            flying += 1
            heapq.heappush(delayed, (now + job.transfers.popleft()[1], flying, job))
            sending = None
        else:
            works.append(heapq.heappop(delayed)[2])
        if sending is None and transfers:
            wire, _, processor = transfers[0].transfers[0]
            sending = now + wire
            if processor > 0:  # the kernel's and ours, packet by packet, beside whatever else there is to do
                works.append(_Job(deque([processor]), deque(), counts=False))
    done = tuple(max([at, *(job.done for job in several)]) for at, several in zip(ready, jobs, strict=True))
    return Prediction(now, tuple(ready), done, ready_s[-1])


def _job(cost: Cost, link: Link, machine: Machine) -> _Job:
    rounds = max(1, cost.rounds)
    encoding = cost.processor_s * machine.crowding / (rounds + 1)
    wire = cost.sent_bytes * link.seconds_per_byte / rounds
    processor = cost.sent_bytes * link.processor_per_byte * machine.crowding / rounds
    return _Job(deque([encoding] * (rounds + 1)), deque([(wire, link.latency_s, processor)] * rounds))


def pure_times(
    seen_s: Sequence[float], costs: Sequence[Sequence[Cost]], link: Link, dense_link: Link, machine: Machine
) -> tuple[float, ...]:
    """When buckets would be ready if nothing were encoded meanwhile, from when they were while ``costs`` were paid.

    >>> slow, crowded = Link(0.0, 1e-6, 0.0), Machine(spare=0.0)
    >>> pure = pure_times([1.0, 2.1], [[Cost(0.2, 5e5, 1)], [Cost(0.2, 5e5, 1)]], slow, slow, crowded)
    >>> [round(each, 3) for each in pure]
    [1.0, 1.9]
    """
    pure = list(seen_s)
    for _ in range(_ITERATIONS):
        again = predict_step(pure, costs, link, dense_link, machine).ready
        corrected = [old - (new - seen) for old, new, seen in zip(pure, again, seen_s, strict=True)]
        # Buckets stay in order, and what the model cannot explain does not make computing vanish.
        pure = list(accumulate((max(each, seen / 2) for each, seen in zip(corrected, seen_s, strict=True)), max))
    return tuple(pure)
