"""All-gather of payloads: every rank decodes and sums what all others sent, in rank order."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.codecs import Codec, State
from gradwire.collectives.base import (
    Reduced,
    Reduction,
    check_finite,
    delivered,
    finite_mean,
    result_tensor,
    ring_bytes,
    tensor_of,
    where,
)
from gradwire.collectives.frames import Frames, pack, payload_of
from gradwire.collectives.peers import Peers, others
from gradwire.transforms import is_stateful
from gradwire.wire import Key, TensorSpec

__all__ = ["Gather"]


@dataclass(frozen=True)
class Gather:
    """One round; each rank's bytes grow with the number of ranks, so it is for two of them or for sparse payloads.

    Every rank sends the frame of its payload, so that a peer with another codec, step or tensor is noticed and named
    on every rank, and so is one whose tensor holds NaN or Inf.

    >>> from gradwire import codec
    >>> from gradwire.collectives.base import run
    >>> from gradwire.collectives.loopback import Alone
    >>> gather = Gather(Alone(), codec("none"))
    >>> run(gather.reduce(torch.arange(3.0), {}, Key(), tag=0)).mean
    tensor([0., 1., 2.])
    """

    peers: Peers
    codec: Codec

    @functools.cached_property
    def _frames(self) -> Frames:
        return Frames(self.codec)

    @functools.cached_property
    def _stateful(self) -> bool:
        return is_stateful(self.codec)

    def init(self, spec: TensorSpec, device: torch.device | str | None = None) -> State:
        """That of the codec."""
        return self.codec.init(spec, device)

    def by_tensor(self, state: State, sizes: Sequence[int]) -> list[State]:
        """Residuals of each tensor. Any other state is of one tensor."""
        if len(sizes) == 1 or not state:
            return [state] * len(sizes)
        pieces = torch.split(tensor_of(state, "residual").view(-1), list(sizes))
        return [{"residual": piece} for piece in pieces]

    def from_tensors(self, states: Sequence[State], sizes: Sequence[int]) -> State:
        """Residuals end to end."""
        if len(sizes) == 1 or not states[0]:
            return states[0]
        return {"residual": torch.cat([tensor_of(state, "residual").reshape(-1) for state in states])}

    def reduce(self, x: Tensor, state: State, key: Key, tag: int, out: Tensor | None = None) -> Reduction:
        """Send one payload to all, and decode those of all."""
        peers, codec, frames = self.peers, self.codec, self._frames
        # Ranks draw different random bits, so that their errors average out; a payload carries its own key.
        mine = key.fold(peers.rank)
        spec = TensorSpec.of(x)
        if self._stateful:
            payload, state = codec.encode(x, state, mine)
            packed = torch.empty(frames.nbytes(spec), dtype=torch.uint8, device="cpu")
            pack(payload, packed)
        else:
            packed, _ = frames.encode(x.reshape(-1), spec, mine)
        swap = peers.swap(dict.fromkeys(others(peers), packed.numel()), tag, f"the exchange of {where(key)}")
        for rank in others(peers):
            swap.send(rank, packed)
        yield
        told = {rank: swap.receive(rank) for rank in others(peers)} | {peers.rank: packed}
        swap.wait()
        letters = [(rank, told[rank]) for rank in range(peers.size)]
        total = result_tensor(out, x.numel()).zero_()
        if self._stateful:
            payloads = [payload_of(letter, rank, codec, spec, key) for rank, letter in letters]
            bad = [rank for rank, each in enumerate(payloads) if int(each.nonfinite)]
            if not bad:
                codec.decode_add(payloads, total.view(spec.shape))
        else:
            bad = frames.decode(letters, spec, key, total, add=True)
        check_finite([rank in bad for rank in range(peers.size)], key)
        mean, state = codec.finish(finite_mean(total.view(spec.shape), peers.size, key), state)
        moved = (peers.size - 1) * packed.numel()
        return Reduced(delivered(mean, out, x), state, moved, moved, ring_bytes(x.numel(), peers.size))
