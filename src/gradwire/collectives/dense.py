"""The mean as torch itself takes it: for links on which compression does not pay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.codecs import EMPTY, State
from gradwire.collectives.base import Reduced, Reduction, delivered, ring_bytes, where
from gradwire.collectives.peers import Peers
from gradwire.collectives.processes import ProcessPeers
from gradwire.errors import NonFiniteError, PeerError
from gradwire.kernels import ops
from gradwire.wire import Key, TensorSpec

__all__ = ["Dense"]


@dataclass(frozen=True)
class Dense:
    """All-reduce by the process group's own backend, gloo, NCCL or another: what plain DDP does.

    A program that uses the group itself keeps its order: the first part of a reduction must run where gradients are
    handed over, as :class:`~gradwire.collectives.Pipeline` does with ``here=True``.

    Ranks divide before they sum, as DDP does: a sum of shares cannot leave float32. A rank that finds NaN or Inf while
    it does so makes the first element NaN, where all will find it: nobody needs to look at the rest of the sum.

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
        self._divide(total)
        wait = self.peers.all_reduce(total, tag)
        yield
        wait()
        return self._reduced(total, out, x, key)

    def start(self, x: Tensor, key: Key) -> Future[Reduced] | None:
        """The same where the tensor lies, with none of our threads waiting: one of the backend's completes the future.

        None, and nothing is started, if that cannot be.
        """
        if not isinstance(self.peers, ProcessPeers) or x.device.type != "cpu":
            return None
        future: Future[Reduced] = Future()

        def done(error: PeerError | None) -> None:
            try:
                if error is not None:
                    raise error
                future.set_result(self._reduced(x, x, x, key))
            except BaseException as why:  # torch would print it, and nobody would learn that it is over
                future.set_exception(why)

        try:
            self._divide(x)
            self.peers.all_reduce_then(x, done)
        except Exception as error:
            future.set_exception(error)
        return future

    def _divide(self, x: Tensor) -> None:
        nonfinite = ops.divide(x.view(-1), self.peers.size)
        x.view(-1)[:1].masked_fill_(nonfinite > 0, math.nan)

    def _reduced(self, total: Tensor, out: Tensor | None, like: Tensor, key: Key) -> Reduced:
        if not all(map(math.isfinite, total.view(-1)[:1].tolist())):
            raise NonFiniteError(f"{where(key)}: a rank's gradient holds NaN or Inf.")
        moved = ring_bytes(total.numel(), self.peers.size)
        return Reduced(delivered(total, out, like), {}, moved, moved, moved)
