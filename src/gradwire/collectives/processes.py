"""Ranks that are processes, and who is to blame when one is gone."""

from __future__ import annotations

import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from gradwire.collectives.peers import Swap, agree
from gradwire.collectives.waiting import waiting
from gradwire.errors import PeerError

__all__ = ["ProcessPeers", "SilentError", "store"]

_GRACE_S: Final = 3.0  # for the others to notice the same and say so
_POLL_S: Final = 0.02


class _Trial:
    """Who is to blame, once for all threads of a rank."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.verdict: tuple[int, str] | None = None  # the culprit, and what is wrong with it


class SilentError(RuntimeError):
    """A rank that is there and has sent nothing for too long."""


@dataclass(frozen=True)
class ProcessPeers(ABC):
    """A rank of a process group, whatever carries its messages."""

    rank: int  # in the group
    size: int
    group: dist.ProcessGroup = field(repr=False)  # whose ranks they are
    name: str  # the same on every rank: where addresses and accusations are left in the store
    timeout_s: float
    _trial: _Trial = field(default_factory=_Trial, repr=False, compare=False, kw_only=True)

    @abstractmethod
    def swap(self, nbytes: Mapping[int, int], tag: int, what: str) -> Swap:
        """Start to receive."""

    @abstractmethod
    def close(self) -> None:
        """End the connections: whoever still waits for this rank is told at once."""

    @abstractmethod
    def _hang_up(self, accused: int) -> None:
        """Close the connections, so that ranks that wait for this one notice now."""

    @property
    def wire_bytes(self) -> int | None:
        """Bytes this rank's messages have taken on the wire so far, with all headers; None where nobody counts."""
        return None

    def all_reduce(self, x: Tensor, tag: int) -> Callable[[], None]:
        """By the group's backend; if it fails, an exchange of ours finds out who is to blame."""
        try:
            work = dist.all_reduce(x, group=self.group, async_op=True)
        except RuntimeError as error:
            raise self._failed(error, tag) from error

        def wait() -> None:
            try:
                if work is not None:
                    with waiting():
                        work.wait(timedelta(seconds=self.timeout_s))
                if x.device.type == "cuda":
                    torch.cuda.current_stream(x.device).synchronize()
            except RuntimeError as error:
                raise self._failed(error, tag) from error

        return wait

    def _failed(self, error: RuntimeError, tag: int) -> PeerError:
        # Whoever is stuck has been waited for already.
        hasty = replace(self, timeout_s=min(self.timeout_s, _GRACE_S))
        try:
            agree(hasty, "the all-reduce failed", tag)
        except PeerError as blamed:
            return blamed
        return PeerError(f"the all-reduce failed, though all ranks are there: {_reason(error)}")

    def blame(self, rank: int, error: Exception, what: str) -> PeerError:
        """The error that names the rank to blame: this one's peer is often only waiting for, or gone after, another.

        Each rank leaves its accusation in the store. The culprit is the end of the chain: accused, and accusing nobody.
        """
        with self._trial.lock:  # the first of this rank's threads decides: what the others see follows from it
            if self._trial.verdict is None:
                stuck = isinstance(error, SilentError)
                self._trial.verdict = self._judge(rank, "did not answer in time" if stuck else "is gone")
            culprit, why = self._trial.verdict
        seen = "" if culprit == rank else f" (noticed by way of rank {rank})"
        return PeerError(f"{what} failed: rank {culprit} {why}{seen}. {_reason(error)}")

    def _judge(self, accused: int, why: str) -> tuple[int, str]:
        verdict: list[tuple[int, str]] = []

        def ask() -> None:
            with suppress(RuntimeError, ValueError):  # the store is gone, or the process group
                verdict.append(self._culprit(accused, why))
                self._stay(verdict[0][0])

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(2 * _GRACE_S + 2.0)
        # The store shares the fate of the process that keeps it, which is the first rank's.
        return verdict[0] if verdict else (0, "did not answer in time" if asking.is_alive() else "is gone")

    def _culprit(self, accused: int, why: str) -> tuple[int, str]:
        there = store()
        there.set(f"{self.name}/{self.rank}", f"{accused} {why}")
        self._hang_up(accused)
        accusations = {self.rank: (accused, why)}
        end = time.monotonic() + _GRACE_S
        while time.monotonic() < end and len(accusations) < self.size - 1:
            for rank in range(self.size):
                key = f"{self.name}/{rank}"
                if rank not in accusations and there.check([key]):
                    whom, _, reason = there.get(key).decode().partition(" ")
                    accusations[rank] = (int(whom), reason)
            time.sleep(_POLL_S)
        culprit, reason, passed = accused, why, {self.rank}
        while culprit in accusations and culprit not in passed:
            passed.add(culprit)
            culprit, reason = accusations[culprit]
        return culprit, reason

    def _stay(self, culprit: int) -> None:
        """Where the store may end with this process, let the other survivors ask it first."""
        there = store()
        there.set(f"{self.name}/{self.rank}/knows", "yes")
        if dist.get_rank() != 0:
            return
        keys = [f"{self.name}/{rank}/knows" for rank in range(self.size) if rank != culprit]
        end = time.monotonic() + _GRACE_S
        while time.monotonic() < end and not there.check(keys):
            time.sleep(_POLL_S)


def store() -> Store:
    """Where ranks leave words for each other."""
    found: Store = dist.distributed_c10d._get_default_store()
    return found


def _reason(error: Exception) -> str:
    """What the transport says, without the place in its sources."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    said = re.sub(r"^\[\S*\] ", "", lines[0])
    return f"{said[:1].upper()}{said[1:]}{'' if said.endswith('.') else '.'}"
