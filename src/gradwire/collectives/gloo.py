"""Messages by gloo's point-to-point calls: where the native core is not built."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.collectives.processes import ProcessPeers, SilentError

__all__ = ["GlooPeers"]

_NEVER: Final = (1 << 31) - 1  # a tag nobody sends


@dataclass(frozen=True)
class GlooPeers(ProcessPeers):
    """A rank whose messages go over a gloo group of their own, so that they never meet those of the program."""

    messages: dist.ProcessGroup

    @classmethod
    def of(cls, rank: int, group: dist.ProcessGroup, name: str, timeout_s: float) -> GlooPeers:
        """Every one of the ranks must call it."""
        ranks = dist.get_process_group_ranks(group)
        timeout, local = timedelta(seconds=timeout_s), len(ranks) > 1
        messages = dist.new_group(ranks, backend="gloo", timeout=timeout, use_local_synchronization=local)
        assert messages is not None
        return cls(rank, len(ranks), group, name, timeout_s, messages)

    def swap(self, nbytes: Mapping[int, int], tag: int, what: str) -> _Messages:
        """Start to receive."""
        into = {rank: torch.empty(size, dtype=torch.uint8, device="cpu") for rank, size in nbytes.items()}
        messages = _Messages(self, tag, what, into)
        for rank, data in into.items():
            messages.works[rank] = messages.start(dist.irecv, rank, data, group_src=rank)
        return messages

    def close(self) -> None:
        """gloo's connections end with the process."""
        self._deadlines.close()

    def _hang_up(self, accused: int) -> None:
        """gloo closes all connections when a wait times out."""
        other = (
            next(rank for rank in range(self.size) if rank not in (self.rank, accused)) if self.size > 2 else accused
        )
        with suppress(RuntimeError):
            nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
            work: Any = dist.irecv(nothing, group=self.messages, group_src=other, tag=_NEVER)
            work.wait(timedelta(milliseconds=1))


@dataclass(frozen=True)
class _Messages:
    peers: GlooPeers
    tag: int
    what: str
    into: dict[int, Tensor]
    works: dict[int, dist.Work] = field(default_factory=dict)  # by rank: what has not arrived
    sent: list[tuple[int, Tensor, dist.Work]] = field(default_factory=list)  # kept alive until they have left

    def start(self, how: Any, rank: int, data: Tensor, **where: int) -> dist.Work:
        try:
            work: dist.Work = how(data, group=self.peers.messages, tag=self.tag, **where)
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
            seen = SilentError(str(error)) if "Timed out waiting" in str(error) else error
            raise self.peers.blame(rank, seen, self.what) from error
