"""Which rank is to blame when ranks stop waiting for each other: a pure function of what each of them saw."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Final

__all__ = ["Report", "Verdict", "find_culprit"]

# Every rank sends a beat a second. Without any for so long, a process has stopped, or a network is cut.
_MUTE_S: Final = 3.0
_LONGEST_NAME: Final = 200


@dataclass(frozen=True)
class Report:
    """What one rank saw when it stopped waiting.

    >>> Report.from_text(Report(waited_for=2, timed_out=True, silences=(0.0, 0.4, 9.0)).to_text(), 3)
    Report(waited_for=2, timed_out=True, gone=(), silences=(0.0, 0.4, 9.0), failed='')
    >>> Report.from_text(b'{"waited_for": 7}', 3)
    """

    waited_for: int | None  # None: it waited for all ranks at once, as in an all-reduce
    timed_out: bool = False  # or it stopped because a connection ended, or because another rank reported
    gone: tuple[int, ...] = ()  # ranks whose connection ended
    silences: tuple[float, ...] = ()  # seconds since it last heard from each rank; empty where it cannot say
    failed: str = ""  # the type of the error by which this rank itself failed, if it did

    def to_text(self) -> str:
        """Return the report as a line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str | bytes, size: int) -> Report | None:
        """Return the report of a rank in a group of ``size``; None if it is malformed."""
        try:
            found = json.loads(text)
            waited_for, timed_out = found["waited_for"], found["timed_out"]
            gone, silences = tuple(found["gone"]), tuple(map(float, found["silences"]))
            failed = found["failed"]
            ranks = [*gone] if waited_for is None else [*gone, waited_for]
            right = all(type(rank) is int and 0 <= rank < size for rank in ranks) and isinstance(timed_out, bool)
            right = right and isinstance(failed, str) and len(failed) < _LONGEST_NAME
            if right and len(silences) in (0, size) and not any(map(math.isnan, silences)):
                return cls(waited_for, timed_out, gone, silences, failed)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            pass
        return None


@dataclass(frozen=True)
class Verdict:
    """The rank to blame."""

    rank: int
    gone: bool  # its connection ended; or it did not answer
    note: str = ""  # what else the rank that asks should know
    failed: str = ""  # the type of its own error, if it reported one

    def __str__(self) -> str:
        """Say what is wrong with the rank."""
        if self.failed:
            return f"failed with {self.failed}"
        return "is gone" if self.gone else "did not answer in time"


def find_culprit(asking: int, reports: Mapping[int, Report], size: int) -> Verdict | None:
    """Return the rank to blame, never the one that asks; None if all ranks are there and none accuses another.

    ``reports`` maps ranks to what they saw; that of the rank that asks is among them. A rank that is dead or stuck
    leaves none. The rules, the first that applies:

    1. A rank that reports an error of its own has failed by that.
    2. A rank whose connection ended, and that left no report, is dead.
    3. Where beats have stopped, the culprit is on the most pairs of ranks that do not hear each other: one that is
       stopped, or whose network is cut, is on all its pairs.
    4. All processes run: the culprit is at the end of the chain, waited for, and waiting for no rank itself. Of a
       circle of ranks that wait for each other it is the one that was silent for longest.
    5. All wait for all ranks at once: the culprit is the one that does not.

    >>> find_culprit(0, {0: Report(1, timed_out=True), 1: Report(2)}, 4)
    Verdict(rank=2, gone=False, note='', failed='')
    """
    for rank, report in sorted(reports.items()):
        if report.failed and rank != asking:
            return Verdict(rank, gone=False, failed=report.failed)
    own = reports[asking]
    saw_end = {rank for report in reports.values() for rank in report.gone}
    dead = saw_end - reports.keys()
    found = _first(own.waited_for, set(own.gone) & dead) or _first(own.waited_for, dead)
    found = found or _most_mute(asking, reports) or _end_of_chain(asking, reports, size)
    if found is None:
        return None
    return Verdict(found[0], found[0] in saw_end, _note(asking, found[0], reports, size))


# What the rules find is a tuple of one rank, or None: rank 0 is false.
_Found = tuple[int] | None


def _first(preferred: int | None, ranks: set[int]) -> _Found:
    if preferred is not None and preferred in ranks:
        return (preferred,)
    return (min(ranks),) if ranks else None


def _pairs(reports: Mapping[int, Report]) -> Iterator[tuple[int, int, float]]:
    """Yield who listens, to whom, and for how many seconds in vain."""
    for rank, report in reports.items():
        yield from ((rank, other, seconds) for other, seconds in enumerate(report.silences) if other != rank)


def _most_mute(asking: int, reports: Mapping[int, Report]) -> _Found:
    count = Counter[int]()
    for listener, other, seconds in _pairs(reports):
        if seconds > _MUTE_S:
            count.update([rank for rank in (listener, other) if rank != asking])
    own = reports[asking].waited_for
    ranks = sorted(count, key=lambda rank: (count[rank], rank == own, _silence(rank, reports), -rank))
    return (ranks[-1],) if ranks else None


def _silence(rank: int, reports: Mapping[int, Report]) -> float:
    return sum(seconds for listener, other, seconds in _pairs(reports) if rank in (listener, other))


def _end_of_chain(asking: int, reports: Mapping[int, Report], size: int) -> _Found:
    own = reports[asking]
    # A rank that waited in vain knows more than one that was interrupted.
    firm = [reports[rank].waited_for for rank in sorted(reports) if reports[rank].timed_out]
    starts = [*([own.waited_for] if own.timed_out else []), *firm, own.waited_for]
    at = next((start for start in starts if start is not None and start != asking), None)
    if at is None and asking in starts:  # the others wait for this rank: it knows whom it waits for
        at = own.waited_for
    passed = list[int]()
    while at is not None and at not in passed:
        passed.append(at)
        if at not in reports:
            return (at,)
        at = reports[at].waited_for
    if at is not None:
        circle = [rank for rank in passed[passed.index(at) :] if rank != asking]
        return (max(circle, key=lambda rank: (_silence(rank, reports), -rank)),)
    absent = set(range(size)) - reports.keys()
    if absent:
        return (max(absent, key=lambda rank: (_silence(rank, reports), -rank)),)
    others = [rank for rank in passed if rank != asking]
    return (others[-1],) if others else None


def _note(asking: int, culprit: int, reports: Mapping[int, Report], size: int) -> str:
    own = reports[asking]
    heard = [seconds for rank, seconds in enumerate(own.silences) if rank != asking]
    if size > 2 and heard and min(heard) > _MUTE_S:
        return (
            f"Rank {asking} has heard none of the other ranks for {min(heard):.0f} s: its own network may be cut, "
            "or its process was stopped."
        )
    if culprit in reports and reports[culprit].waited_for == asking:
        return f"Rank {culprit} says the same of rank {asking}: the network between them may be cut."
    return ""
