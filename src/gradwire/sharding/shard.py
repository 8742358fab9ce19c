"""A flat parameter whose slices live on different partitions: gradients to their owners, weights back from them.

Every partition sends each other one a block in every step, be it only to say that it has no gradient, so that late
blocks can be told from missing ones and are taken off the exchange when they come.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from gradwire.codecs import EMPTY, Codec, State, codec
from gradwire.collectives.choose import is_elementwise
from gradwire.collectives.frames import Frames, pack, payload_of
from gradwire.errors import ConfigError, NonFiniteError, PeerError
from gradwire.kernels import ops
from gradwire.kernels.memory import empty, zeros
from gradwire.partition import partition
from gradwire.sharding.exchange import Exchange
from gradwire.sharding.stragglers import Stragglers
from gradwire.transforms import ErrorFeedback, is_stateful
from gradwire.wire import Key, TensorSpec

__all__ = ["NONFINITE", "STOP", "Gathered", "Shard", "Vector", "norm_tag", "whole_tag"]

NONFINITE: Final = 1  # flags a partition tells all others with its gradient
STOP: Final = 2
_NOTHING: Final = 4  # it has no gradient in this step
_IDS: Final = 1 << 12
_CPU: Final = torch.device("cpu")


def _tag(step: int, kind: int, number: int) -> int:
    return (4 * step + kind) * _IDS + number


def norm_tag(step: int, number: int = 0) -> int:
    """For a norm of a step, by the number of a parameter.

    >>> norm_tag(0) == whole_tag(0)
    False
    """
    return _tag(step, 2, number)


def whole_tag(number: int) -> int:
    """For something that travels as a whole, and not in steps.

    >>> whole_tag(1) - whole_tag(0) > 1
    True
    """
    return _tag(number, 3, 0)


class Vector:
    """Tensors end to end, as one flat float32 tensor.

    >>> vector = Vector([torch.zeros(2), torch.ones(1, 2)])
    >>> vector.read(slice(1, 4))
    tensor([0., 1., 1.])
    >>> vector.write(slice(0, 3), torch.full((3,), 5.0))
    >>> vector.read(slice(0, 4))
    tensor([5., 5., 5., 1.])
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.flats = [_flat(tensor) for tensor in tensors]
        self.starts = [0]
        for flat in self.flats:
            self.starts.append(self.starts[-1] + flat.numel())

    def __len__(self) -> int:
        """Elements."""
        return self.starts[-1]

    def pieces(self, where: slice) -> list[tuple[int, slice]]:
        """The tensors that a slice meets, by their place, and which part of each."""
        return [
            (place, slice(max(0, where.start - start), min(stop, where.stop) - start))
            for place, (start, stop) in enumerate(pairwise(self.starts))
            if max(start, where.start) < min(stop, where.stop)
        ]

    def read(self, where: slice) -> Tensor:
        """A slice, float32, on the CPU or where the tensors are; it may share their memory."""
        parts = [self.flats[place][part] for place, part in self.pieces(where)]
        if len(parts) == 1:
            return parts[0].to(torch.float32)
        if not parts:
            return torch.empty(0)
        out = empty(where.stop - where.start, torch.float32, parts[0].device)
        return torch.cat([part.to(torch.float32) for part in parts], out=out)

    def write(self, where: slice, values: Tensor) -> None:
        """Replace a slice, rounding to the tensors' types."""
        for place, part, piece in self._beside(where, values):
            self.flats[place][part].copy_(piece)

    def add(self, where: slice, values: Tensor) -> None:
        """Add to a slice in float32, and round: the same bits wherever the same is added to the same."""
        for place, part, piece in self._beside(where, values):
            target = self.flats[place][part]
            if target.dtype == torch.float32:
                target.add_(piece.to(target.device))
            else:
                target.copy_(target.to(torch.float32).add_(piece.to(target.device)))

    def _beside(self, where: slice, values: Tensor) -> list[tuple[int, slice, Tensor]]:
        found, at = [], 0
        for place, part in self.pieces(where):
            length = part.stop - part.start
            found.append((place, part, values[at : at + length]))
            at += length
        return found


@dataclass(frozen=True)
class Gathered:
    """The sum of a slice's gradients, of those that came."""

    total: Tensor  # flat float32, on the CPU
    arrived: tuple[int, ...]  # whose gradients are in it
    flags: int  # of all that came, or-ed
    note: int  # the same
    nonfinite: tuple[int, ...]  # who has NaN or Inf, in this gradient or one before


@dataclass
class Shard:
    """One partition's view: its slice, what it owes the others and what they owe it.

    A step is ``put`` (or ``skip``), ``gather``, ``publish``, ``fetch``; the residuals of ``put`` count once ``commit``
    is called. Steps begin at 1; what is published as version 0 is sent as it is.
    """

    exchange: Exchange
    size: int
    gradient_codec: Codec
    weight_codec: Codec
    id: int = 0
    seed: int = 0
    differences: bool = True  # of weights, to what all hold, instead of the weights themselves
    stragglers: Stragglers = field(default_factory=Stragglers)
    slices: tuple[slice, ...] = ()  # of each partition; by the split rule if not given
    note_bytes: int = 0  # that every gradient brings with it
    device: torch.device = _CPU  # where gradients are, and what their encodes have lost

    def __post_init__(self) -> None:
        if not 0 <= self.id < _IDS:
            raise ConfigError(f"`id` must be from 0 to {_IDS - 1}; got {self.id}.")
        for what, chosen in (("gradients", self.gradient_codec), ("weights", self.weight_codec)):
            if not is_elementwise(chosen.sends(0)):
                raise ConfigError(f"the codec of {what} must take tensors end to end, to be sliced; got '{chosen}'.")
        if is_stateful(self.weight_codec):
            raise ConfigError(
                f"weights travel as differences to what all hold, so that nothing is lost; their codec must have no "
                f"state of its own, got '{self.weight_codec}'."
            )
        self.slices = self.slices or partition(self.size, self.exchange.size)
        self.specs = [TensorSpec((each.stop - each.start,)) for each in self.slices]
        self.me, self.others = self.exchange.rank, _others(self.exchange)
        self._feedback = self.gradient_codec if isinstance(self.gradient_codec, ErrorFeedback) else None
        self._frames = Frames(self._feedback.inner if self._feedback else self.gradient_codec)
        self._stateful = self._feedback is None and is_stateful(self.gradient_codec)
        self._weights, self._raw = Frames(self.weight_codec), Frames(codec("none"))
        self.step = 0
        self.states: list[State] = self._fresh()
        self._next: list[State] | None = None
        self._own: Tensor | None = None
        self._late: deque[tuple[int, int, int]] = deque()  # gradients that were left out: source, tag, bytes
        self._owed = {source: deque[int]() for source in self.others}  # versions of weights, by owner
        self._stash: dict[tuple[int, int], Tensor] = {}
        self._lock = threading.Lock()
        self.sent_bytes = self.received_bytes = 0
        self.sent_gradients = self.sent_weights = 0  # bytes of the last step

    # What travels.

    @property
    def own(self) -> slice:
        """The slice that lives here."""
        return self.slices[self.me]

    def dense_bytes(self) -> int:
        """What this partition would send of float32 gradients in a step, and once more of weights."""
        return 4 * (self.size - self.specs[self.me].numel)

    def _fresh(self) -> list[State]:
        if self._feedback is not None:
            return [{"residual": zeros(self.size, self.device)}]
        if self._stateful:
            return [self.gradient_codec.init(spec, self.device) for spec in self.specs]
        return [EMPTY]

    def _block_bytes(self, owner: int) -> int:
        """Of a gradient's message to an owner. One that owns nothing gets the note and the flags only."""
        payload = self._frames.nbytes(self.specs[owner]) if self.specs[owner].numel else 0
        return payload + self.note_bytes + 1

    def _key(self, step: int) -> Key:
        return Key(self.seed, step, self.id + 1)

    def _gradient_tag(self, step: int) -> int:
        return _tag(step, 0, self.id)

    def _weight_tag(self, version: int) -> int:
        return _tag(version, 1, self.id)

    # Gradients.

    def put(self, gradient: Vector, flags: int = 0, note: int = 0) -> int:
        """Send the slices of a gradient to their owners. Returns the flags with :data:`NONFINITE` if it is.

        ``note`` is a number of ``note_bytes`` that all owners are told.
        """
        self._begin()
        encode = self._encode_stateful if self._stateful else self._encode
        messages, bad = encode(gradient, self._key(self.step))
        flags |= NONFINITE if bad else 0
        written = _bytes_of(note, self.note_bytes)
        for rank, message in messages.items():
            message[-1] = flags
            if self.note_bytes:
                message[-1 - self.note_bytes : -1] = written
            self._send(rank, self._gradient_tag(self.step), message)
        self.sent_gradients = sum(message.numel() for message in messages.values())
        self._flags, self._note = flags, note
        return flags

    def skip(self, flags: int = 0) -> None:
        """Tell the others that this partition has no gradient in this step."""
        self._begin()
        self._next, self._own, self._flags, self._note = None, None, flags, 0
        notice = torch.tensor([flags | _NOTHING], dtype=torch.uint8)
        for rank in self.others:
            self._send(rank, self._gradient_tag(self.step), notice)
        self.sent_gradients = len(self.others)

    def _begin(self) -> None:
        self.step += 1
        self.stragglers.steps = max(self.stragglers.steps, self.step)
        self._drain()

    def _send(self, rank: int, tag: int, message: Tensor) -> None:
        self.exchange.put(rank, tag, message)
        self.sent_bytes += message.numel()

    def _encode(self, gradient: Vector, key: Key) -> tuple[dict[int, Tensor], bool]:
        residual = self.states[0]["residual"] if self._feedback else None
        assert residual is None or isinstance(residual, Tensor)
        rest = None if residual is None else empty(self.size, torch.float32, self.device)
        decay, messages, bad = self._feedback.decay if self._feedback else 1.0, {}, False
        for rank in self.others:
            at, mine = self.slices[rank], key.fold(self.me * self.exchange.size + rank)
            if not self.specs[rank].numel:
                messages[rank] = torch.zeros(self._block_bytes(rank), dtype=torch.uint8)
                continue
            before, after = (None, None) if residual is None or rest is None else (residual[at], rest[at])
            x = gradient.read(at).contiguous()
            messages[rank], found = self._frames.encode(
                x, self.specs[rank], mine, tail=1 + self.note_bytes, residual=before, decay=decay, rest=after
            )
            bad |= found
        own = gradient.read(self.own)
        total, nonfinite = ops.accumulate(own, None if residual is None else residual[self.own], decay)
        # What was given stays as it is.
        total = total.clone() if total.data_ptr() == own.data_ptr() and total.device == _CPU else total
        self._own, bad = total.to(_CPU), bad or bool(nonfinite)
        self._next = None if rest is None else [{"residual": rest}]
        if rest is not None:
            rest[self.own] = 0
        return messages, bad

    def _encode_stateful(self, gradient: Vector, key: Key) -> tuple[dict[int, Tensor], bool]:
        """Each slice with a state of its own, also that which stays here."""
        messages, bad, self._next = {}, False, list(self.states)
        for rank, at in enumerate(self.slices):
            mine = key.fold(self.me * self.exchange.size + rank)
            payload, self._next[rank] = self.gradient_codec.encode(gradient.read(at), self.states[rank], mine)
            bad |= bool(int(payload.nonfinite))
            if rank == self.me:
                own = zeros(at.stop - at.start, self.device)
                if not int(payload.nonfinite):
                    self.gradient_codec.decode_add(payload, own)
                self._own = own.to(_CPU)
            else:
                message = torch.zeros(self._block_bytes(rank), dtype=torch.uint8)
                if payload.spec.numel:
                    pack(payload, message[: -1 - self.note_bytes])
                messages[rank] = message
        return messages, bad

    def gather(self) -> Gathered:
        """Wait for the gradients of this slice and add them up, this partition's first and then in their order."""
        tag, nbytes = self._gradient_tag(self.step), self._block_bytes(self.me)
        blocks = self.stragglers.collect(self.others_in_order, lambda rank, wait: self._take(rank, tag, nbytes, wait))
        letters, flags, note, arrived = [], self._flags, self._note, [] if self._own is None else [self.me]
        nonfinite = [self.me] if flags & NONFINITE else []
        for rank, block in blocks.items():
            if block is None:
                self._late.append((rank, tag, nbytes))
                self.stragglers.count("dropped", rank, self.step)
                continue
            told = int(block[-1])
            nonfinite += [rank] if told & NONFINITE else []
            if self.stragglers.policy is not None and told & NONFINITE:
                self.stragglers.count("dropped", rank, self.step)
            elif told & _NOTHING:
                self.stragglers.count("dropped", rank, self.step)
                flags |= told & ~_NOTHING
            else:
                flags |= told
                note |= int.from_bytes(bytes(block[-1 - self.note_bytes : -1].tolist()), "little")
                letters.append((rank, block[: -1 - self.note_bytes]))
                arrived.append(rank)
        own = self.own.stop - self.own.start
        total = zeros(own, _CPU) if self._own is None else self._own
        self._own = None
        if own and not flags & NONFINITE:
            self._sum(letters, total)
        return Gathered(total, tuple(sorted(arrived)), flags, note, tuple(sorted(nonfinite)))

    def _sum(self, letters: list[tuple[int, Tensor]], total: Tensor) -> None:
        spec, key = self.specs[self.me], self._key(self.step)
        if self._stateful:
            payloads = [payload_of(data, rank, self.gradient_codec, spec, key) for rank, data in letters]
            self.gradient_codec.decode_add(payloads, total)
        else:
            self._frames.decode(letters, spec, key, total, add=True)

    def mean(self, gathered: Gathered, count: float) -> Tensor:
        """What the sum over so many stands for."""
        mean = gathered.total / count
        if self._stateful:
            self._next = self._next or list(self.states)
            mean, self._next[self.me] = self.gradient_codec.finish(mean.to(self.device), self._next[self.me])
        if int(ops.count_nonfinite(mean)):
            raise NonFiniteError(f"step {self.step}: the sum of all gradients leaves float32.")
        return mean

    def commit(self) -> None:
        """The step counts: what its encodes lost is remembered."""
        if self._next is not None:
            self.states, self._next = self._next, None

    def abort(self) -> None:
        """The step does not count."""
        self._next = None

    def ahead(self, step: int) -> bool:
        """Whether all others have sent their gradients of a step already."""
        tag, nbytes = self._gradient_tag(step), self._block_bytes(self.me)
        if not self.others:
            return False
        for rank in self.others:
            if (rank, tag) not in self._stash:
                block = self._look(rank, tag, nbytes)
                if block is None:
                    return False
                self._stash[rank, tag] = block
        return True

    # Weights.

    def publish(self, master: Tensor | None, held: Vector, version: int) -> None:
        """Send the weights of this slice to all, and bring what is held here to what they then hold.

        Without a master copy what is held is the truth.
        """
        spec, key = self.specs[self.me], self._key(version).fold(self.me)
        for source in self.others:
            if self.specs[source].numel:  # one that owns nothing sends nothing
                self._owed[source].append(version)
        self.sent_weights = 0
        if not spec.numel:
            return
        frames = self._raw if version == 0 else self._weights
        if master is None:
            x = held.read(self.own)
        elif version == 0 or not self.differences:
            x = master
        else:
            x = master - held.read(self.own).to(master.device)
        message, bad = frames.encode(x.reshape(-1).contiguous(), spec, key)
        if bad:
            raise NonFiniteError(f"the weights of version {version} hold NaN or Inf.")
        for rank in self.others:
            self._send(rank, self._weight_tag(version), message)
        self.sent_weights = len(self.others) * message.numel()
        if master is not None or self.weight_codec != codec("none"):
            self._apply(self.me, version, message, held)

    def share(self, held: Vector) -> None:
        """Bring the slices of all owners to all as they are: weights that did not come from a step."""
        self.publish(None, held, 0)
        self.fetch_late(held)

    def fetch(self, source: int, held: Vector, wait_s: float | None = None) -> bool:
        """Bring the slice of an owner to the newest version; whether it is there."""
        owed = self._owed[source]
        while owed:
            version = owed[0]
            frames = self._raw if version == 0 else self._weights
            block = self._take(source, self._weight_tag(version), frames.nbytes(self.specs[source]), wait_s)
            if block is None:
                return False
            owed.popleft()
            self._apply(source, version, block, held)
        return True

    def fetch_late(self, held: Vector) -> None:
        """Wait for what is still owed."""
        for source in self.others_in_order:
            self.fetch(source, held)

    def fetch_all(self, held: Vector) -> None:
        """Every slice; late ones stay as they are, and are counted."""
        there = self.stragglers.collect(
            self.others_in_order, lambda rank, wait: _HERE if self.fetch(rank, held, wait) else None
        )
        for source, block in there.items():
            if block is None:
                self.stragglers.count("stale", source, self.step)

    def _apply(self, source: int, version: int, message: Tensor, held: Vector) -> None:
        spec, at, key = self.specs[source], self.slices[source], self._key(version)
        frames = self._raw if version == 0 else self._weights
        values = empty(at.stop - at.start, torch.float32, _CPU)
        if frames.decode([(source, message)], spec, key, values, add=False):
            raise PeerError(f"partition {source} sent weights with NaN or Inf.")
        held.write(at, values) if version == 0 or not self.differences else held.add(at, values)

    # Blocks.

    @property
    def others_in_order(self) -> list[int]:
        """For sums that do not depend on who asks."""
        return sorted(self.others)

    def _take(self, source: int, tag: int, nbytes: int, wait_s: float | None) -> Tensor | None:
        if (source, tag) in self._stash:
            return self._stash.pop((source, tag))
        return self._counted(self.exchange.take(source, tag, nbytes, wait_s))

    def _look(self, source: int, tag: int, nbytes: int) -> Tensor | None:
        return self._counted(self.exchange.look(source, tag, nbytes))

    def _counted(self, block: Tensor | None) -> Tensor | None:
        if block is not None:
            with self._lock:
                self.received_bytes += block.numel()
        return block

    def _drain(self) -> None:
        """Take what came too late off the exchange; who sent it is no longer absent."""
        for _ in range(len(self._late)):
            source, tag, nbytes = self._late.popleft()
            if self._look(source, tag, nbytes) is None:
                self._late.append((source, tag, nbytes))
            else:
                self.stragglers.absent.discard(source)


_HERE: Final = torch.empty(0)


def _bytes_of(number: int, nbytes: int) -> Tensor:
    return torch.tensor(list(number.to_bytes(nbytes, "little")), dtype=torch.uint8)


def _flat(tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous():
        raise ConfigError(f"tensors must be contiguous; got one of shape {tuple(tensor.shape)} that is not.")
    return tensor.detach().view(-1)


def _others(exchange: Exchange) -> list[int]:
    return [(exchange.rank + distance) % exchange.size for distance in range(1, exchange.size)]
