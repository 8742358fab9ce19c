"""Parameters that come back compressed: what each reader has, so that nobody drifts.

The server keeps, for every reader, the very copy that the reader has, and sends what is missing, encoded. What encoding
loses is still missing from the copy, and is part of the next one: the reader's error is that of the last encoding,
however many there have been.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradwire.api import decode_payload
from gradwire.codecs import Codec
from gradwire.coordinator.push import exact
from gradwire.kernels.memory import copy_of
from gradwire.wire import Key, TensorSpec, frame_pieces

__all__ = ["Copies", "Sent", "add_changes"]


@torch.no_grad()
def add_changes(values: Tensor, changes: Tensor) -> Tensor:
    """Values with decoded changes added, in float32, in place: the same bits at the server and at the reader.

    >>> add_changes(torch.ones(2), torch.tensor([0.5, -1.0]))
    tensor([1.5000, 0.0000])
    """
    if values.dtype == torch.float32:
        return values.add_(changes)
    return values.copy_(values.float() + changes)


@dataclass
class _Copy:
    number: int
    values: dict[str, Tensor]
    nbytes: int
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True)
class Sent:
    """Frames for a reader: of changes to the copy it has, or of all parameters. It has copy ``number`` then."""

    number: int
    changes: bool
    frames: dict[str, list[memoryview]]


class Copies:
    """Copies of ``most`` readers; a reader whose copy was dropped is sent everything again.

    >>> import gradwire
    >>> copies, int4 = Copies(), gradwire.codec("int4")
    >>> first = copies.send("a", 0, {"w": torch.zeros(1000)}, int4)
    >>> second = copies.send("a", first.number, {"w": torch.ones(1000)}, int4)
    >>> first.changes, sum(map(len, first.frames["w"])), second.changes, sum(map(len, second.frames["w"]))
    (False, 4072, True, 596)
    """

    def __init__(self, most: int = 10_000) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._nbytes = 0
        self._copies: OrderedDict[str, _Copy] = OrderedDict()
        self._numbers = secrets.randbits(62)  # so that no number of an earlier life of the server is taken for one

    def __len__(self) -> int:
        return len(self._copies)

    def clear(self) -> None:
        """Forget them all: the parameters are others now."""
        self.shrink(0)

    @property
    def nbytes(self) -> int:
        """Memory of all of them."""
        return self._nbytes

    def touch(self, reader: str) -> None:
        """Keep the copy of a reader for longer than the others."""
        with self._lock:
            if reader in self._copies:
                self._copies.move_to_end(reader)

    def shrink(self, most_bytes: int) -> None:
        """Drop the copies that were used the longest ago, until they have so many bytes."""
        with self._lock:
            while self._copies and (self._nbytes > most_bytes or len(self._copies) > self._most):
                self._nbytes -= self._copies.popitem(last=False)[1].nbytes

    @torch.no_grad()
    def send(self, reader: str, number: int, parameters: Mapping[str, Tensor], codec: Codec) -> Sent:
        """What brings a reader that has copy ``number`` to these parameters; they must not change while it is sent."""
        with self._lock:
            self._numbers += 1
            new = self._numbers
            known = self._copies.get(reader)
        if known is not None:
            with known.lock:
                fits = (
                    known.number == number
                    and _smaller(codec, parameters)
                    and all(
                        name in known.values and known.values[name].shape == tensor.shape
                        for name, tensor in parameters.items()
                    )
                )
                if fits:
                    known.number = new
                    return Sent(new, True, self._changes(known.values, parameters, codec, new))
        copied = {name: copy_of(tensor) for name, tensor in parameters.items()}
        self._keep(reader, _Copy(new, copied, sum(tensor.nbytes for tensor in copied.values())))
        return Sent(new, False, {name: frame_pieces(exact(tensor)) for name, tensor in parameters.items()})

    def _changes(
        self, values: dict[str, Tensor], parameters: Mapping[str, Tensor], codec: Codec, new: int
    ) -> dict[str, list[memoryview]]:
        frames = {}
        for place, (name, tensor) in enumerate(parameters.items()):
            payload, _ = codec.encode(tensor.float() - values[name].float(), key=Key(new, bucket=place))
            payload.check_finite()
            add_changes(values[name], decode_payload(payload))
            frames[name] = frame_pieces(payload)
        return frames

    def _keep(self, reader: str, copy: _Copy) -> None:
        with self._lock:
            before = self._copies.pop(reader, None)
            self._nbytes += copy.nbytes - (0 if before is None else before.nbytes)
            self._copies[reader] = copy
        self.shrink(self._nbytes)


def _smaller(codec: Codec, parameters: Mapping[str, Tensor]) -> bool:
    """Whether changes in a codec are fewer bytes than the parameters as they are."""
    encoded = sum(codec.layout(TensorSpec(tuple(each.shape))).nbytes for each in parameters.values())
    return encoded < sum(tensor.nbytes for tensor in parameters.values())
