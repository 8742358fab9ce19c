"""Messages by gloo's point-to-point calls: where the native core is not built."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, Final

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.collectives.blame import Report, Verdict
from gradwire.collectives.processes import ANSWER_S, ProcessPeers, SilentError
from gradwire.torch_internals import PrefixStore, default_store, gloo_backend

__all__ = ["GlooPeers"]

_NEVER: Final = (1 << 31) - 1  # a tag nobody sends
_GRACE_S: Final = 3.0  # for the other ranks to notice the same and report it
_POLL_S: Final = 0.02


class _Line:
    """gloo's connections to all ranks. They end with :meth:`close`, or when nothing uses them any more.

    That is why this is no group of ``torch.distributed.new_group``: torch keeps those, and names them by their number,
    which ranks would disagree on if one of them had closed a group that another one still has.
    """

    def __init__(self, rank: int, size: int, name: str, timeout_s: float) -> None:
        self._backend = gloo_backend(PrefixStore(f"{name}/gloo", default_store()), rank, size, timeout_s)

    def send(self, rank: int, data: Tensor, tag: int) -> dist.Work:
        work: dist.Work = self._open().send([data], rank, tag)
        return work

    def receive(self, rank: int, data: Tensor, tag: int) -> dist.Work:
        work: dist.Work = self._open().recv([data], rank, tag)
        return work

    def _open(self) -> Any:
        if self._backend is None:
            raise RuntimeError("this rank has closed its connections")
        return self._backend

    def close(self) -> None:
        self._backend = None


@dataclass(frozen=True)
class GlooPeers(ProcessPeers):
    """A rank whose messages go over gloo's connections of their own, so that they never meet those of the program.

    Reports are left in the process group's store.
    """

    grace_s: ClassVar[float] = _GRACE_S
    reports_first: ClassVar[bool] = False  # gloo closes all connections by itself when a wait fails

    line: _Line

    @classmethod
    def of(cls, rank: int, group: dist.ProcessGroup, name: str, timeout_s: float) -> GlooPeers:
        """Every one of the ranks must call it."""
        size = group.size()
        return cls(rank, size, group, name, timeout_s, _Line(rank, size, name, timeout_s))

    def swap(self, nbytes: Mapping[int, int], tag: int, what: str) -> _Messages:
        """Start to receive."""
        into = {rank: torch.empty(size, dtype=torch.uint8, device="cpu") for rank, size in nbytes.items()}
        messages = _Messages(self, tag, what, into)
        for rank, data in into.items():
            messages.works[rank] = messages.start(self.line.receive, rank, data)
        return messages

    def close(self) -> None:
        """End the connections, once what is under way is done with them."""
        self._deadlines.close()
        self.line.close()

    def _send_report(self, report: Report) -> None:
        default_store().set(f"{self.name}/{self.rank}", report.to_text())
        self._hang_up(report.waited_for)

    def _hang_up(self, accused: int | None) -> None:
        """Close the connections, so that ranks that wait for this one notice: gloo does when a wait times out."""
        ranks = [rank for rank in range(self.size) if rank != self.rank]
        other = next((rank for rank in ranks if rank != accused), ranks[0])
        with suppress(RuntimeError):
            nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
            work: Any = self.line.receive(other, nothing, _NEVER)
            work.wait(timedelta(milliseconds=1))

    def _reports(self) -> dict[int, Report]:
        there, found = default_store(), dict[int, Report]()
        for rank in range(self.size):
            key = f"{self.name}/{rank}"
            if rank != self.rank and there.check([key]) and (report := Report.from_text(there.get(key), self.size)):
                found[rank] = report
        return found

    def _ended(self, rank: int | None, error: BaseException) -> tuple[int, ...]:
        return () if rank is None or isinstance(error, SilentError) else (rank,)

    def _judge(self, rank: int | None, error: BaseException) -> Verdict | None:
        found: list[Verdict | None] = []
        answered = threading.Event()  # or it is known that nothing will come

        def ask() -> None:
            with suppress(RuntimeError, ValueError):  # the store is gone, or the process group
                default_store().check([self.name])
                answered.set()
                found.append(super(GlooPeers, self)._judge(rank, error))
                self._stay(found[0])
            answered.set()

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        if answered.wait(ANSWER_S):
            asking.join(2 * _GRACE_S + 2.0)
        else:
            self._hang_up(rank)
        # The store shares the fate of the process that keeps it, which is the first rank's.
        return found[0] if found else Verdict(0, gone=not asking.is_alive())

    def _stay(self, verdict: Verdict | None) -> None:
        """Where the store may end with this process, let the other survivors ask it first."""
        there = default_store()
        there.set(f"{self.name}/{self.rank}/knows", "yes")
        if dist.get_rank() != 0:
            return
        keys = [f"{self.name}/{rank}/knows" for rank in range(self.size) if verdict is None or rank != verdict.rank]
        end = time.monotonic() + _GRACE_S
        while time.monotonic() < end and not there.check(keys):
            time.sleep(_POLL_S)


@dataclass(frozen=True)
class _Messages:
    peers: GlooPeers
    tag: int
    what: str
    into: dict[int, Tensor]
    works: dict[int, dist.Work] = field(default_factory=dict)  # by rank: what has not arrived
    sent: list[tuple[int, Tensor, dist.Work]] = field(default_factory=list)  # kept alive until they have left

    def start(self, how: Callable[[int, Tensor, int], dist.Work], rank: int, data: Tensor) -> dist.Work:
        try:
            return how(rank, data, self.tag)
        except RuntimeError as error:
            raise self.peers.blame(rank, error, self.what) from error

    def send(self, rank: int, data: Tensor) -> None:
        self.sent.append((rank, data, self.start(self.peers.line.send, rank, data)))

    def receive(self, rank: int) -> Tensor:
        if rank in self.works:
            self._finish(rank, self.works.pop(rank))
        return self.into[rank]

    def wait(self) -> None:
        for rank in list(self.works):
            self.receive(rank)
        while self.sent:
            rank, _, work = self.sent.pop()
            self._finish(rank, work)

    def _finish(self, rank: int, work: dist.Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            seen = SilentError(str(error)) if "Timed out waiting" in str(error) else error
            raise self.peers.blame(rank, seen, self.what) from error
