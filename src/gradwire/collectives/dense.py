"""The mean as torch itself takes it: for links on which compression does not pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.codecs import EMPTY, State
from gradwire.collectives.base import Reduced, Reduction, delivered, finite_mean, ring_bytes
from gradwire.collectives.peers import Peers
from gradwire.wire import Key, TensorSpec

__all__ = ["Dense"]


@dataclass(frozen=True)
class Dense:
    """All-reduce by the process group's own backend, gloo, NCCL or another: what plain DDP does.

    A program that uses the group itself keeps its order: the first part of a reduction must run where gradients are
    handed over, as :class:`~gradwire.collectives.Pipeline` does with ``here=True``.

    >>> from gradwire.collectives.base import run
    >>> from gradwire.collectives.loopback import Alone
    >>> run(Dense(Alone()).reduce(torch.arange(3.0), {}, Key(), tag=0)).mean
    tensor([0., 1., 2.])
    """

    peers: Peers

    def init(self, spec: TensorSpec, device: torch.device | str | None = None) -> State:
        """None."""
        return EMPTY

    def by_tensor(self, state: State, sizes: Sequence[int]) -> list[State]:
        """None."""
        return [EMPTY] * len(sizes)

    def from_tensors(self, states: Sequence[State], sizes: Sequence[int]) -> State:
        """None."""
        return EMPTY

    def reduce(self, x: Tensor, state: State, key: Key, tag: int, out: Tensor | None = None) -> Reduction:
        """Reduce a tensor where it is. Which rank held NaN or Inf nobody can say of a sum."""
        total = x if out is not None and out.data_ptr() == x.data_ptr() else x.clone()
        wait = self.peers.all_reduce(total, tag)
        yield
        wait()
        mean = finite_mean(total, self.peers.size, key)
        moved = ring_bytes(x.numel(), self.peers.size)
        return Reduced(delivered(mean, out, x), state, moved, moved, moved)
