"""What a collective is: every rank gives a tensor, every rank gets the mean, bit for bit the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from gradwire.codecs import Codec, State
from gradwire.wire import Key

__all__ = ["Collective", "Pending", "Reduced"]


@dataclass(frozen=True)
class Reduced:
    """The result of a reduce, and what it moved."""

    mean: Tensor  # float32, in the shape of the tensor given
    state: State  # the codec's next state; keep the old one until the step is taken
    sent_bytes: int  # by this rank
    received_bytes: int  # by this rank
    dense_sent_bytes: int  # what this rank sends in a float32 ring all-reduce, which is what DDP does


class Pending(Protocol):
    """A reduce under way."""

    def wait(self) -> Reduced:
        """Block until the mean is there; raise what went wrong, on every rank."""
        ...


class Collective(Protocol):
    """A way to bring every rank's tensor to every rank's mean."""

    def agree(self, what: str) -> None:
        """Make sure that all ranks say the same; :class:`~gradwire.errors.PeerError` on every rank if one does not."""
        ...

    def reduce(self, x: Tensor, codec: Codec, state: State, key: Key) -> Pending:
        """Start a reduce. All ranks must call it for the same tensors in the same order."""
        ...
