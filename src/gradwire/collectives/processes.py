"""The ranks of a torch.distributed process group, and who is to blame when one is gone."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.errors import ConfigError, PeerError

__all__ = ["ProcessPeers"]

_GRACE_S: Final = 3.0  # for the others to notice the same and say so
_POLL_S: Final = 0.02
_NEVER: Final = (1 << 31) - 1  # a tag nobody sends


class _Trial:
    """Who is to blame, once for all threads of a rank."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.verdict: tuple[int, str] | None = None  # the culprit, and what is wrong with it


@dataclass(frozen=True)
class ProcessPeers:
    """A rank of a process group, by gloo's point-to-point messages over a group of its own.

    Messages carry tags, so several reductions are under way at once in any order and never meet those of the program.
    """

    group: dist.ProcessGroup
    name: str  # the same on every rank: where accusations are left in the store
    timeout_s: float
    _trial: _Trial = field(default_factory=_Trial, repr=False, compare=False)

    @classmethod
    def of(cls, group: dist.ProcessGroup | None = None, *, timeout_s: float = 300.0) -> ProcessPeers:
        """Make a group of the same ranks for gradwire's messages. Every rank of the group must call it."""
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError("torch.distributed is not initialized: call torch.distributed.init_process_group first.")
        if not timeout_s > 0:
            raise ConfigError(f"`timeout_s` must be above 0; got {timeout_s!r}.")
        ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        own = dist.new_group(
            ranks, backend="gloo", timeout=timedelta(seconds=timeout_s), use_local_synchronization=len(ranks) > 1
        )
        assert own is not None
        return cls(own, f"gradwire/{own.group_name}", timeout_s)

    @property
    def rank(self) -> int:
        """This rank, in the group."""
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return dist.get_world_size(self.group)

    def swap(self, into: Mapping[int, Tensor], tag: int, what: str) -> _Messages:
        """Start to receive."""
        messages = _Messages(self, tag, what, dict(into))
        for rank, data in into.items():
            messages.works[rank] = messages.start(dist.irecv, rank, data, group_src=rank)
        return messages

    def blame(self, rank: int, error: Exception, what: str) -> PeerError:
        """The error that names the rank to blame: this one's peer is often only waiting for, or gone after, another.

        Each rank leaves its accusation in the store. The culprit is the end of the chain: accused, and accusing nobody.
        """
        with self._trial.lock:  # the first of this rank's threads decides: what the others see follows from it
            if self._trial.verdict is None:
                stuck = "Timed out waiting" in str(error)
                self._trial.verdict = self._judge(rank, "did not answer in time" if stuck else "is gone")
            culprit, why = self._trial.verdict
        seen = "" if culprit == rank else f" (noticed by way of rank {rank})"
        return PeerError(f"{what} failed: rank {culprit} {why}{seen}. {_reason(error)}")

    def _judge(self, accused: int, why: str) -> tuple[int, str]:
        verdict: list[tuple[int, str]] = []

        def ask() -> None:
            with suppress(RuntimeError):  # the store is gone
                verdict.append(self._culprit(accused, why))
                self._stay(verdict[0][0])

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(2 * _GRACE_S + 2.0)
        # The store shares the fate of the process that keeps it, which is the first rank's.
        return verdict[0] if verdict else (0, "did not answer in time" if asking.is_alive() else "is gone")

    def _culprit(self, accused: int, why: str) -> tuple[int, str]:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{self.name}/{self.rank}", f"{accused} {why}")
        self._hang_up(accused)
        accusations = {self.rank: (accused, why)}
        end = time.monotonic() + _GRACE_S
        while time.monotonic() < end and len(accusations) < self.size - 1:
            for rank in range(self.size):
                key = f"{self.name}/{rank}"
                if rank not in accusations and store.check([key]):
                    whom, _, reason = store.get(key).decode().partition(" ")
                    accusations[rank] = (int(whom), reason)
            time.sleep(_POLL_S)
        culprit, reason, passed = accused, why, {self.rank}
        while culprit in accusations and culprit not in passed:
            passed.add(culprit)
            culprit, reason = accusations[culprit]
        return culprit, reason

    def _hang_up(self, accused: int) -> None:
        """Close the connections, so that ranks that wait for this one notice now: gloo does when a wait times out."""
        other = (
            next(rank for rank in range(self.size) if rank not in (self.rank, accused)) if self.size > 2 else accused
        )
        with suppress(RuntimeError):
            nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
            work: Any = dist.irecv(nothing, group=self.group, group_src=other, tag=_NEVER)
            work.wait(timedelta(milliseconds=1))

    def _stay(self, culprit: int) -> None:
        """Where the store may end with this process, let the other survivors ask it first."""
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{self.name}/{self.rank}/knows", "yes")
        if dist.get_rank() != 0:
            return
        keys = [f"{self.name}/{rank}/knows" for rank in range(self.size) if rank != culprit]
        end = time.monotonic() + _GRACE_S
        while time.monotonic() < end and not store.check(keys):
            time.sleep(_POLL_S)


@dataclass(frozen=True)
class _Messages:
    peers: ProcessPeers
    tag: int
    what: str
    into: dict[int, Tensor]
    works: dict[int, dist.Work] = field(default_factory=dict)  # by rank: what has not arrived
    sent: list[tuple[int, Tensor, dist.Work]] = field(default_factory=list)  # kept alive until they have left

    def start(self, how: Any, rank: int, data: Tensor, **where: int) -> dist.Work:
        try:
            work: dist.Work = how(data, group=self.peers.group, tag=self.tag, **where)
        except RuntimeError as error:
            raise self.peers.blame(rank, error, self.what) from error
        return work

    def send(self, rank: int, data: Tensor) -> None:
        self.sent.append((rank, data, self.start(dist.isend, rank, data, group_dst=rank)))

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
            raise self.peers.blame(rank, error, self.what) from error


def _reason(error: Exception) -> str:
    """What gloo says, without the place in its sources."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^\[\S*\] ", "", lines[0])
