"""Gradients as they travel, and as the journal keeps them."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from torch import Tensor

from gradwire import wire
from gradwire.api import decode_payload
from gradwire.coordinator.rules import GradientChangeMode, check_mode
from gradwire.coordinator.structure import known_entry, label
from gradwire.errors import ConfigError, WireError
from gradwire.kernels import ops
from gradwire.wire import Key, Payload, TensorSpec

__all__ = ["Decoding", "Push", "decoded", "exact", "split"]

_LENGTH: Final = struct.Struct("<I")


@dataclass(frozen=True)
class Push:
    """Encoded gradients by name, from a worker that numbers what it sends.

    A worker that starts again begins a new ``session`` with a higher number; ``sequence`` counts inside of it.

    >>> import gradwire, torch
    >>> push = Push("a", 1, {"w": gradwire.encode(torch.ones(2), "int8")}, version=3)
    >>> Push.from_bytes(push.to_bytes()) == push
    True
    """

    worker: str
    sequence: int
    gradients: Mapping[str, bytes | memoryview]
    version: int | None = None
    mode: GradientChangeMode = "descent"
    session: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", check_mode(self.mode, "mode"))

    def to_bytes(self) -> bytes:
        """As a record: the length of a description in JSON, the description, the gradients."""
        about = {
            "worker": self.worker,
            "session": self.session,
            "sequence": self.sequence,
            "version": self.version,
            "mode": self.mode,
            "gradients": [[name, len(data)] for name, data in self.gradients.items()],
        }
        text = json.dumps(about).encode()
        return b"".join([_LENGTH.pack(len(text)), text, *self.gradients.values()])

    @classmethod
    def from_bytes(cls, data: bytes | bytearray) -> Push:
        """Undo :meth:`to_bytes`; the gradients are parts of ``data``.

        Anything else raises :class:`~gradwire.errors.WireError`.

        >>> Push.from_bytes(b"junk!")
        Traceback (most recent call last):
        gradwire.errors.WireError: a record of 5 bytes is not a push.
        """
        try:
            start = _LENGTH.size + _LENGTH.unpack_from(data)[0]
            about = json.loads(data[_LENGTH.size : start])
            gradients = split(memoryview(data)[start:], [(str(n), int(size)) for n, size in about["gradients"]])
            version = None if about["version"] is None else int(about["version"])
            return cls(
                str(about["worker"]),
                int(about["sequence"]),
                gradients,
                version,
                about["mode"],
                int(about["session"]),
            )
        except (struct.error, ValueError, KeyError, TypeError) as error:
            raise WireError(f"a record of {len(data)} bytes is not a push.") from error


def exact(tensor: Tensor) -> Payload:
    """A tensor as it is, not copied, as a payload of the codec ``none``.

    >>> import torch
    >>> torch.equal(decode_payload(exact(torch.ones(2))), torch.ones(2))
    True
    """
    flat = tensor.detach().contiguous().view(-1)
    return Payload("none", TensorSpec.of(tensor), Key(), (flat,), ops.count_nonfinite(flat))


def split(data: memoryview, sizes: list[tuple[str, int]]) -> dict[str, memoryview]:
    """Pieces of data by name, one after the other; they must fill it.

    >>> {name: bytes(piece) for name, piece in split(memoryview(b"abc"), [("x", 1), ("y", 2)]).items()}
    {'x': b'a', 'y': b'bc'}
    """
    pieces, at = {}, 0
    for name, size in sizes:
        if name in pieces:
            raise WireError(f"{name!r} is there twice.")
        if size < 0 or at + size > len(data):
            break
        pieces[name] = data[at : at + size]
        at += size
    if at != len(data) or len(pieces) != len(sizes):
        raise WireError(f"entries of {sum(size for _, size in sizes)} bytes were announced; got {len(data)}.")
    return pieces


def decoded(
    what: str,
    frames: Mapping[str, bytes | memoryview],
    like: Mapping[str, Tensor],
    checksums: Mapping[str, int] | None = None,
) -> dict[str, Tensor]:
    """Tensors of frames, each of which must be of one of the entries, its shape and dtype: looked at before decoding.

    ``checksums`` are those of the frames, if they are known already.

    >>> import gradwire, torch
    >>> decoded("gradients", {"w": gradwire.encode(torch.ones(3), "int8")}, {"w": torch.zeros(2)})
    Traceback (most recent call last):
    gradwire.errors.ConfigError: `gradients['w']` must have shape (2,) and torch.float32, as the parameter; got (3,)...
    """
    return dict(Decoding(what, frames, like, checksums or {}))


@dataclass(frozen=True)
class Decoding(Mapping[str, Tensor]):
    """What :func:`decoded` returns, decoded one by one when it is asked for: with memory for one tensor.

    >>> import gradwire, torch
    >>> Decoding("gradients", {"w": gradwire.encode(torch.ones(2), "int8")}, {"w": torch.zeros(2)})["w"]
    tensor([0.9999, 0.9999])
    """

    what: str
    frames: Mapping[str, bytes | memoryview]
    like: Mapping[str, Tensor]
    checksums: Mapping[str, int] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        """Decode one."""
        wanted, frame = known_entry(self.what, name, self.like), self.frames[name]
        payload = wire.unpack(frame, copy=memoryview(frame).readonly, checksum=self.checksums.get(name))
        if payload.spec != TensorSpec(tuple(wanted.shape), wanted.dtype):
            raise ConfigError(
                f"{label(self.what, name)} must have shape {tuple(wanted.shape)} and {wanted.dtype}, as the parameter; "
                f"got {payload.spec.shape} and {payload.spec.dtype}."
            )
        payload.check_finite()
        return decode_payload(payload)

    def __iter__(self) -> Iterator[str]:
        """Their names."""
        return iter(self.frames)

    def __len__(self) -> int:
        return len(self.frames)
