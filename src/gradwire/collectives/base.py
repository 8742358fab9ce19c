"""What a collective is: every rank gives a tensor, every rank gets the mean, bit for bit the same."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from gradwire.codecs import State
from gradwire.collectives.peers import Peers
from gradwire.errors import ConfigError, NonFiniteError
from gradwire.kernels import ops
from gradwire.kernels.memory import empty
from gradwire.wire import Key, TensorSpec

__all__ = [
    "STAGES",
    "Collective",
    "Reduced",
    "Reduction",
    "check_finite",
    "delivered",
    "finite_mean",
    "result_tensor",
    "ring_bytes",
    "run",
    "tensor_of",
    "where",
]

STAGES = 8
"""Tags a reduction may use, from its own on."""


@dataclass(frozen=True)
class Reduced:
    """The result of a reduce, and what it moved."""

    mean: Tensor  # float32, in the shape of the tensor given
    state: State  # the next state; keep the old one until the step is taken
    sent_bytes: int  # by this rank
    received_bytes: int  # by this rank
    dense_sent_bytes: int  # what this rank sends in a float32 ring all-reduce, which is what DDP does


Reduction: TypeAlias = Generator[None, None, Reduced]
"""A reduce in straight line; it yields wherever it has started messages and would wait for others' next."""


class Collective(Protocol):
    """A way to bring every rank's tensor to every rank's mean."""

    @property
    def peers(self) -> Peers:
        """The ranks."""
        ...

    def init(self, spec: TensorSpec, device: torch.device | str | None = None) -> State:
        """State before the first step."""
        ...

    def by_tensor(self, state: State, sizes: Sequence[int]) -> list[State]:
        """The state of each of the tensors that were reduced as one, end to end."""
        ...

    def from_tensors(self, states: Sequence[State], sizes: Sequence[int]) -> State:
        """The state of tensors that are to be reduced as one. Nothing is lost, whatever they were part of before."""
        ...

    def reduce(self, x: Tensor, state: State, key: Key, tag: int, out: Tensor | None = None) -> Reduction:
        """Reduce a float32 tensor. ``tag`` is the same on every rank; the ``STAGES`` tags from it on are this one's.

        The mean is written to ``out`` if there is one: a flat tensor, which may be ``x`` itself.

        Raises on every rank in the same reduction if any rank's tensor holds NaN or Inf.
        """
        ...


def tensor_of(state: State, name: str) -> Tensor:
    """A tensor of a state."""
    value = state.get(name)
    if not isinstance(value, Tensor):
        raise ConfigError(f"`state` must hold a tensor {name!r}; got {sorted(state)}.")
    return value


def run(reduction: Reduction) -> Reduced:
    """The result of a reduction, waiting where it waits."""
    while True:
        try:
            next(reduction)
        except StopIteration as stop:
            result: Reduced = stop.value
            return result


def ring_bytes(numel: int, ranks: int) -> int:
    """What a rank sends of a float32 tensor in a ring all-reduce.

    >>> ring_bytes(300, 3)
    1600
    """
    return 2 * (ranks - 1) * 4 * numel // ranks


def check_finite(nonfinite: Sequence[bool], key: Key) -> None:
    """Raise if any rank found NaN or Inf."""
    bad = [rank for rank, found in enumerate(nonfinite) if found]
    if bad:
        raise NonFiniteError(f"{where(key)}: NaN or Inf on ranks {bad}.")


def where(key: Key) -> str:
    """A reduction, for people."""
    return f"bucket {key.bucket} of step {key.step}"


def result_tensor(out: Tensor | None, numel: int) -> Tensor:
    """Where to write a mean: to ``out`` if it is a place for it."""
    if out is not None and out.device.type == "cpu" and out.is_contiguous() and out.dtype == torch.float32:
        return out.view(-1)
    return empty(numel, torch.float32, torch.device("cpu"))


def delivered(mean: Tensor, out: Tensor | None, like: Tensor) -> Tensor:
    """The mean as the caller wants it: in ``out``, or on the device of the tensor given."""
    if out is None:
        return mean.view(like.shape).to(like.device)
    if out.data_ptr() != mean.data_ptr():
        out.copy_(mean.view(out.shape))
    return out.view(like.shape)


def finite_mean(total: Tensor, ranks: int, key: Key) -> Tensor:
    """The sum of so many ranks becomes their mean where it lies, or an error if it has left float32."""
    if int(ops.divide(total.view(-1), ranks)):
        raise NonFiniteError(f"{where(key)}: the sum of all ranks leaves float32.")
    return total
