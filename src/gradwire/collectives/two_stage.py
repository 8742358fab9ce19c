"""Slices to their owners, and the owners' means to everybody: the bytes of a ring, two encodes."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor

from gradwire.codecs import EMPTY, Codec, State
from gradwire.collectives.base import (
    Reduced,
    Reduction,
    check_finite,
    delivered,
    result_tensor,
    ring_bytes,
    tensor_of,
    where,
)
from gradwire.collectives.frames import Frames
from gradwire.collectives.peers import Peers, others
from gradwire.errors import ConfigError, NonFiniteError
from gradwire.kernels import ops
from gradwire.kernels.memory import empty
from gradwire.partition import partition
from gradwire.transforms import ErrorFeedback, is_stateful
from gradwire.wire import Key, TensorSpec

__all__ = ["TwoStage", "slices"]

_ALIGNMENT: Final = 1024  # elements: whole blocks of nearly all codecs, so that slicing costs no scales


def slices(numel: int, ranks: int) -> tuple[slice, ...]:
    """The slice of each rank, of whole blocks.

    >>> slices(5000, 3)
    (slice(0, 2048, None), slice(2048, 4096, None), slice(4096, 5000, None))
    """
    return partition(numel, ranks, _ALIGNMENT)


@dataclass(frozen=True)
class TwoStage:
    """Each rank encodes the others' slices for them; the owner of a slice sums it in float32 and encodes the mean once.

    The owner uses its own decoded bytes, so that all ranks have the same. With error feedback a rank keeps what its
    encodes lost, and an owner what the encode of the mean lost: nothing ever is.

    >>> from gradwire import codec
    >>> from gradwire.collectives.base import run
    >>> from gradwire.collectives.loopback import Alone
    >>> two_stage = TwoStage(Alone(), codec("none"))
    >>> run(two_stage.reduce(torch.arange(3.0), {}, Key(), tag=0)).mean
    tensor([0., 1., 2.])
    """

    peers: Peers
    codec: Codec

    def __post_init__(self) -> None:
        if is_stateful(self._inner):
            raise ConfigError(f"`codec` must have no state but error feedback's, to be sliced; got '{self.codec}'.")

    @property
    def _feedback(self) -> ErrorFeedback | None:
        return self.codec if isinstance(self.codec, ErrorFeedback) else None

    @property
    def _inner(self) -> Codec:
        return self._feedback.inner if self._feedback else self.codec

    @functools.cached_property
    def _frames(self) -> Frames:
        return Frames(self._inner)

    def init(self, spec: TensorSpec, device: torch.device | str | None = None) -> State:
        """Residuals of zeros: of what this rank sends, and of the slice it owns."""
        if self._feedback is None:
            return EMPTY
        own = slices(spec.numel, self.peers.size)[self.peers.rank]
        return {
            "residual": torch.zeros(spec.shape, device=device),
            "owned": torch.zeros(own.stop - own.start, device=device),
        }

    def by_tensor(self, state: State, sizes: Sequence[int]) -> list[State]:
        """Residuals of each tensor, and the part of the owned slice that lies in it."""
        if self._feedback is None:
            return [EMPTY] * len(sizes)
        own = slices(sum(sizes), self.peers.size)[self.peers.rank]
        residuals, owned = torch.split(tensor_of(state, "residual").view(-1), list(sizes)), tensor_of(state, "owned")
        result: list[State] = []
        for residual, start in zip(residuals, _starts(sizes), strict=True):
            first, last = max(start, own.start), min(start + residual.numel(), own.stop)
            piece = owned[max(0, first - own.start) : max(0, last - own.start)]
            result.append({"residual": residual, "owned": piece, "owned_from": first - start if len(piece) else 0})
        return result

    def from_tensors(self, states: Sequence[State], sizes: Sequence[int]) -> State:
        """The state of tensors that may have been part of others before: what was owned and no longer is, is sent."""
        if self._feedback is None:
            return EMPTY
        own = slices(sum(sizes), self.peers.size)[self.peers.rank]
        residual = torch.cat([tensor_of(state, "residual").reshape(-1) for state in states])
        owned = residual.new_zeros(own.stop - own.start)
        for state, start in zip(states, _starts(sizes), strict=True):
            piece, at = tensor_of(state, "owned"), start + int(state["owned_from"])
            inside = slice(max(at, own.start), max(at, own.start, min(at + len(piece), own.stop)))
            # A mean's loss counts once for all ranks; sent by this one alone it is divided by their number.
            residual[at : at + len(piece)] += piece * self.peers.size
            residual[inside] -= piece[inside.start - at : inside.stop - at] * self.peers.size
            owned[inside.start - own.start : inside.stop - own.start] = piece[inside.start - at : inside.stop - at]
        return {"residual": residual, "owned": owned}

    def reduce(self, x: Tensor, state: State, key: Key, tag: int, out: Tensor | None = None) -> Reduction:
        """Reduce a tensor as a flat one."""
        peers, me, frames = self.peers, self.peers.rank, self._frames
        flat, ranks, what = x.reshape(-1), others(peers), f"the exchange of {where(key)}"
        parts, specs = _slices_and_specs(flat.numel(), peers.size)
        feedback, decay = self._feedback is not None, self._feedback.decay if self._feedback else 1.0
        residual = tensor_of(state, "residual").view(-1) if feedback else None
        rest = None if residual is None else empty(flat.numel(), torch.float32, residual.device)

        # This rank's slices to their owners, each as soon as it is encoded. Its own takes part as it is.
        swap = peers.swap(dict.fromkeys(ranks, frames.nbytes(specs[me])), tag, what)
        sent = 0
        for rank in ranks:
            at, mine = parts[rank], key.fold(me * peers.size + rank)
            before, after = (None, None) if residual is None or rest is None else (residual[at], rest[at])
            packed, _ = frames.encode(flat[at], specs[rank], mine, residual=before, decay=decay, rest=after)
            swap.send(rank, packed)
            sent += packed.numel()
        own, bad = ops.accumulate(flat[parts[me]], None if residual is None else residual[parts[me]], decay)
        if own.data_ptr() == flat[parts[me]].data_ptr() and out is None:
            own = own.clone()  # what was given stays as it is
        if rest is not None:
            rest[parts[me]] = 0
        yield

        # The owner: the sum of all, its own first and then in the order of ranks, in float32; and who sent NaN or Inf.
        own = own.to("cpu")
        letters = [(rank, swap.receive(rank)) for rank in sorted(ranks)]
        received = sum(letter.numel() for _, letter in letters)
        nonfinite = frames.decode(letters, specs[me], key, own, add=True) + ([me] if int(bad) else [])
        own.div_(peers.size)
        owned = tensor_of(state, "owned") if feedback else None
        left = None if owned is None else torch.empty_like(owned)
        mine = key.fold(peers.size * peers.size + me)
        mean, _ = frames.encode(own, specs[me], mine, tail=peers.size, residual=owned, decay=decay, rest=left)
        for rank in nonfinite:
            mean[rank - peers.size] = 1
        swap.wait()
        swap = peers.swap({rank: frames.nbytes(specs[rank]) + peers.size for rank in ranks}, tag + 1, what)
        for rank in ranks:
            swap.send(rank, mean)
        sent += len(ranks) * mean.numel()
        yield

        # The means of all owners, each as it arrives.
        result = result_tensor(out, flat.numel())
        overflow, found = False, mean[-peers.size :]
        for rank in [*reversed(ranks), me]:
            told = mean if rank == me else swap.receive(rank)
            overflow |= bool(frames.decode([(rank, told)], specs[rank], key, result[parts[rank]], add=False))
            if rank != me:
                received += told.numel()
                found = found | told[-peers.size :]
        swap.wait()
        check_finite(found.tolist(), key)
        if overflow:
            raise NonFiniteError(f"{where(key)}: the sum of all ranks leaves float32.")
        after_all: State = EMPTY
        if rest is not None and left is not None:
            after_all = {"residual": rest.view(x.shape), "owned": left}
        return Reduced(delivered(result, out, x), after_all, sent, received, ring_bytes(flat.numel(), peers.size))


@functools.lru_cache(maxsize=1024)
def _slices_and_specs(numel: int, ranks: int) -> tuple[tuple[slice, ...], list[TensorSpec]]:
    """Remembered: a training asks for the same few every step."""
    parts = slices(numel, ranks)
    return parts, [TensorSpec((part.stop - part.start,)) for part in parts]


def _starts(sizes: Sequence[int]) -> Iterator[int]:
    return accumulate(sizes[:-1], initial=0)
