"""All-gather of payloads: every rank decodes and sums what all others sent, in rank order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire import wire
from gradwire.codecs import Codec, State
from gradwire.collectives.base import Reduced
from gradwire.collectives.rank import all_gather
from gradwire.errors import NonFiniteError, PeerError, WireError
from gradwire.wire import Key, Payload, TensorSpec

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
        text = what.encode()[:_LINE_BYTES]
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        lines = torch.empty(dist.get_world_size(self.group) * _LINE_BYTES, dtype=torch.uint8)
        all_gather(lines, mine, group=self.group)
        said = [bytes(line.tolist()).rstrip(b"\0").decode(errors="replace") for line in lines.view(-1, _LINE_BYTES)]
        for rank, line in enumerate(said):
            if line != said[0]:
                raise PeerError(f"rank {rank} has {line!r}, but rank 0 has {said[0]!r}; all ranks must have the same.")

    def reduce(self, x: Tensor, codec: Codec, state: State, key: Key) -> _PendingGather:
        """Start the exchange of one tensor."""
        ranks = dist.get_world_size(self.group)
        payload, next_state = codec.encode(x, state, key)
        size = codec.layout(payload.spec).nbytes  # the same on every rank, though a frame may be shorter
        frame = torch.zeros(size, dtype=torch.uint8)
        data = wire.pack(payload)
        frame[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        frames = torch.empty(ranks * size, dtype=torch.uint8)
        work = all_gather(frames, frame, group=self.group, async_op=True)
        return _PendingGather(work, frames.view(ranks, size), codec, payload.spec, key, next_state)


@dataclass(frozen=True)
class _PendingGather:
    work: dist.Work
    frames: Tensor
    codec: Codec
    spec: TensorSpec
    key: Key
    state: State

    def wait(self) -> Reduced:
        try:
            self.work.wait()
        except RuntimeError as error:
            raise PeerError(
                f"the exchange of bucket {self.key.bucket} in step {self.key.step} failed: {error}"
            ) from error
        payloads = [self._checked(rank) for rank in range(len(self.frames))]
        bad = [rank for rank, payload in enumerate(payloads) if int(payload.nonfinite)]
        if bad:
            raise NonFiniteError(f"bucket {self.key.bucket} of step {self.key.step}: NaN or Inf on ranks {bad}.")
        total = torch.zeros(self.spec.shape)
        for payload in payloads:
            self.codec.decode_add(payload, total)
        mean, state = self.codec.finish(total / len(payloads), self.state)
        others = len(payloads) - 1
        moved = others * self.frames.shape[1]
        return Reduced(mean, state, moved, moved, others * 4 * self.spec.numel)

    def _checked(self, rank: int) -> Payload:
        try:
            payload = wire.unpack(self.frames[rank].numpy(), padded=True)
        except WireError as error:
            raise PeerError(f"rank {rank} sent something else than a payload: {error}") from error
        where = (payload.key.step, payload.key.bucket)
        if (payload.spec, *where) != (self.spec, self.key.step, self.key.bucket):
            raise PeerError(
                f"rank {rank} sent {payload.spec}, step {where[0]}, bucket {where[1]}; "
                f"this rank expected {self.spec}, step {self.key.step}, bucket {self.key.bucket}."
            )
        return payload
