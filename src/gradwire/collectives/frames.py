"""Tensors as messages: the frames of a codec's payloads, all of a spec's of one size."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire import wire
from gradwire.codecs import Codec
from gradwire.codecs.blocks import Blocks
from gradwire.errors import PeerError, WireError
from gradwire.kernels.memory import empty
from gradwire.kernels.select import native
from gradwire.wire import Key, Payload, TensorSpec

__all__ = ["Frames", "pack", "payload_of"]


class _Places(NamedTuple):
    """Where the parts of a block format lie in a frame."""

    parts: tuple[tuple[torch.dtype, int], ...]
    codes: int
    scales: int


@dataclass(frozen=True)
class Frames:
    """Messages of a codec without state. Block formats on the CPU are encoded into their frame, and decoded from it.

    >>> import gradwire
    >>> frames, spec = Frames(gradwire.codec("int8")), TensorSpec((4,))
    >>> frame, nonfinite = frames.encode(torch.full((4,), 127.0), spec, Key())
    >>> frames.decode([(0, frame)], spec, Key(), out := torch.empty(4), add=False), out
    ([], tensor([127., 127., 127., 127.]))
    """

    codec: Codec

    @functools.cached_property
    def _memory(self) -> dict[TensorSpec, tuple[int, _Places | None]]:
        return {}

    def _layout(self, spec: TensorSpec) -> tuple[int, _Places | None]:
        """Bytes of a frame, and the places in it if the native core knows the format."""
        found = self._memory.get(spec)
        if found is None:
            layout, places = self.codec.layout(spec), None
            if isinstance(self.codec, Blocks):
                starts, at = {}, layout.header_nbytes
                for part in layout.parts:
                    starts[part.name], at = at, at + part.nbytes
                scales, codes = self.codec._names
                parts = tuple((part.dtype, part.nbytes) for part in layout.parts)
                places = _Places(parts, starts[codes], starts.get(scales, 0))
            found = self._memory[spec] = (layout.nbytes, places)
        return found

    def nbytes(self, spec: TensorSpec) -> int:
        """Of the message with a tensor."""
        return self._layout(spec)[0]

    def encode(
        self,
        x: Tensor,
        spec: TensorSpec,
        key: Key,
        *,
        tail: int = 0,
        residual: Tensor | None = None,
        decay: float = 1.0,
        rest: Tensor | None = None,
    ) -> tuple[Tensor, bool]:
        """The message with flat ``x`` and ``decay`` times the residual, and ``tail`` zeros; whether any is NaN or Inf.

        What is lost is written to ``rest``, which comes with a residual; it is of no use after NaN or Inf.
        """
        nbytes, places = self._layout(spec)
        message = empty(nbytes + tail, torch.uint8, torch.device("cpu"))
        if tail:
            message[nbytes:] = 0
        core = native()
        if core is not None and places is not None and x.device.type == "cpu":
            assert isinstance(self.codec, Blocks)
            header = wire.frame_header(str(self.codec), spec, places.parts, key)
            frame = message[:nbytes] if tail else message
            found: int = core.encode_frame(
                x, self.codec._format, key, residual, decay, rest, frame, header, places.codes, places.scales
            )
            return message, found != 0
        payload, left = self.codec._payload(x, spec, key, residual, decay)
        pack(payload, message[:nbytes])
        if rest is not None and left is not None:
            rest.copy_(left.view(-1))
        return message, int(payload.nonfinite) != 0

    def decode(
        self, messages: Sequence[tuple[int, Tensor]], spec: TensorSpec, key: Key, out: Tensor, *, add: bool
    ) -> list[int]:
        """Sum what ranks sent, in their order, into flat ``out``, or ``add`` it to what is there.

        Returns the ranks whose tensor held NaN or Inf; if there are any, nothing is decoded. Raises
        :class:`~gradwire.errors.PeerError` if a message is not of this codec, spec, step and bucket.
        """
        nbytes, places = self._layout(spec)
        core = native()
        if core is None or places is None or out.device.type != "cpu":
            payloads = [payload_of(data[:nbytes], rank, self.codec, spec, key) for rank, data in messages]
            bad = [rank for (rank, _), each in zip(messages, payloads, strict=True) if int(each.nonfinite)]
            if not bad:
                shaped = out.view(spec.shape)
                if not add:
                    self.codec.decode(payloads[0], out=shaped)
                self.codec.decode_add(payloads if add else payloads[1:], shaped)
            return bad
        assert isinstance(self.codec, Blocks)
        header = wire.frame_header(str(self.codec), spec, places.parts, key)
        bad = []
        for rank, data in messages:
            found = core.check_frame(data, nbytes, header)
            if found is None:
                payload_of(data[:nbytes], rank, self.codec, spec, key)  # which says what is wrong
                raise PeerError(f"rank {rank} sent a frame with another header than this rank would.")
            if found:
                bad.append(rank)
        if not bad:
            frames = [data for _, data in messages]
            core.decode_frames(out, frames, self.codec._format, places.codes, places.scales, add=add)
        return bad


def pack(payload: Payload, message: Tensor) -> None:
    """Write a payload's frame to a message of the codec's size; the frame may be shorter."""
    message[wire.pack_into(payload, message) :] = 0


def payload_of(packed: Tensor, rank: int, codec: Codec, spec: TensorSpec, key: Key) -> Payload:
    """The payload of a rank's message, which must be of that codec, spec, step and bucket. It shares its memory."""
    try:
        payload = wire.unpack(packed.numpy(), max_bytes=1 << 62, padded=True, copy=False)
    except WireError as error:
        raise PeerError(f"rank {rank} sent something else than a payload: {error}") from error
    got = (payload.codec, payload.spec, payload.key.step, payload.key.bucket)
    wanted = (str(codec.sends(key.step)), spec, key.step, key.bucket)
    if got != wanted:
        raise PeerError(f"rank {rank} sent {_label(*got)}; this rank expected {_label(*wanted)}.")
    try:
        codec._checked_parts(payload)
    except WireError as error:
        raise PeerError(f"rank {rank} sent a payload of other parts: {error}") from error
    return payload


def _label(codec: str, spec: TensorSpec, step: int, bucket: int) -> str:
    return f"{codec} of {spec}, step {step}, bucket {bucket}"
