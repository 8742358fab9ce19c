"""All-gather of payloads: every rank decodes and sums what all others sent, in rank order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire import wire
from gradwire.codecs import Codec, State
from gradwire.collectives.base import Reduced
from gradwire.collectives.rank import all_gather
from gradwire.errors import NonFiniteError, PeerError, WireError
from gradwire.kernels import ops
from gradwire.wire import Key, Payload

__all__ = ["Gather"]

_LINE_BYTES: Final = 512


@dataclass(frozen=True)
class Gather:
    """One round; each rank's bytes grow with the number of ranks, so it is for two of them or for sparse payloads.

    Every rank sends the frame of its payload, so that a peer with another codec, step or tensor is noticed and named
    on every rank, and so is one whose tensor holds NaN or Inf.
    """

    group: dist.ProcessGroup | None = None

    def agree(self, what: str) -> None:
        """Exchange a line of text, and raise on every rank if two ranks' lines differ."""
        mine = torch.zeros(_LINE_BYTES, dtype=torch.uint8)
        text = f"{what[: _LINE_BYTES - 64]} (checksum {crc32(what.encode()):08x})".encode()
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        lines = torch.empty(dist.get_world_size(self.group) * _LINE_BYTES, dtype=torch.uint8)
        with _peer_errors("the agreement of all ranks"):
            all_gather(lines, mine, group=self.group)
        said = [bytes(line.tolist()).rstrip(b"\0").decode(errors="replace") for line in lines.view(-1, _LINE_BYTES)]
        for rank, line in enumerate(said):
            if line != said[0]:
                raise PeerError(f"rank {rank} has {line!r}, but rank 0 has {said[0]!r}; all ranks must have the same.")

    def reduce(self, x: Tensor, codec: Codec, state: State, key: Key) -> _PendingGather:
        """Start the exchange of one tensor."""
        ranks = dist.get_world_size(self.group)
        # Ranks draw different random bits, so that their errors average out; a payload carries its own key.
        payload, next_state = codec.encode(x, state, key.fold(dist.get_rank(self.group)))
        size = codec.layout(payload.spec).nbytes  # the same on every rank, though a frame may be shorter
        frame = torch.zeros(size, dtype=torch.uint8)
        data = wire.pack(payload)
        frame[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        frames = torch.empty(ranks * size, dtype=torch.uint8)
        work = all_gather(frames, frame, group=self.group, async_op=True)
        return _PendingGather(work, frames.view(ranks, size), codec, payload, key, next_state)


@dataclass(frozen=True)
class _PendingGather:
    work: dist.Work
    frames: Tensor
    codec: Codec
    mine: Payload
    key: Key
    state: State

    def wait(self) -> Reduced:
        where = f"bucket {self.key.bucket} of step {self.key.step}"
        with _peer_errors(f"the exchange of {where}"):
            self.work.wait()
        payloads = [self._checked(rank) for rank in range(len(self.frames))]
        bad = [rank for rank, payload in enumerate(payloads) if int(payload.nonfinite)]
        if bad:
            raise NonFiniteError(f"{where}: NaN or Inf on ranks {bad}.")
        total = torch.zeros(self.mine.spec.shape)
        self.codec.decode_add(payloads, total)
        if int(ops.count_nonfinite(total.view(-1))):
            raise NonFiniteError(f"{where}: the sum of all ranks leaves float32.")
        mean, state = self.codec.finish(total / len(payloads), self.state)
        others = len(payloads) - 1
        moved = others * self.frames.shape[1]
        ring = 2 * others * 4 * self.mine.spec.numel // len(payloads)
        return Reduced(mean, state, moved, moved, ring)

    def _checked(self, rank: int) -> Payload:
        try:
            payload = wire.unpack(self.frames[rank].numpy(), padded=True)
        except WireError as error:
            raise PeerError(f"rank {rank} sent something else than a payload: {error}") from error
        if _label(payload) != _label(self.mine):
            raise PeerError(f"rank {rank} sent {_label(payload)}; this rank expected {_label(self.mine)}.")
        return payload


def _label(payload: Payload) -> str:
    return f"{payload.codec} of {payload.spec}, step {payload.key.step}, bucket {payload.key.bucket}"


@contextmanager
def _peer_errors(what: str) -> Iterator[None]:
    """What torch.distributed raises when a peer is gone, as ours."""
    try:
        yield
    except RuntimeError as error:
        raise PeerError(f"{what} failed: {error}") from error
