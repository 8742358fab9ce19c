"""Parts of streams: a header, and bulk data that does not go through protobuf's own copies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from gradwire.coordinator.protocol import messages
from gradwire.errors import WireError
from gradwire.kernels.memory import empty
from gradwire.wire import crc32

__all__ = [
    "PART_BYTES",
    "READ_CHUNKS",
    "SMALL_BYTES",
    "Frames",
    "announced",
    "buffer",
    "parsed",
    "part",
    "parts",
    "read_part",
    "read_pushes",
    "together",
]

PART_BYTES: Final = 1 << 20
"""Data of a part: large enough that calls do not count, small enough to overlap."""

READ_CHUNKS: Final = (
    ("grpc.experimental.tcp_read_chunk_size", 4 << 20),
    ("grpc.experimental.tcp_min_read_chunk_size", 1 << 20),
    ("grpc.experimental.tcp_max_read_chunk_size", 8 << 20),
)
"""Options of gRPC: it reads by a few kilobytes otherwise."""

SMALL_BYTES: Final = 1 << 16
"""Data of a push that is one message, and may travel with others."""

_SUMMED: Final = 8  # bytes of a frame before those that its checksum is of
_TOGETHER: Final = 1 << 18
_MOST_TOGETHER: Final = 64
_DATA: Final = 0x12  # field 2, of bytes, in every message of parts


def _varint(number: int) -> bytes:
    digits = bytearray()
    while number > 0x7F:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    digits.append(number)
    return bytes(digits)


def buffer(size: int) -> memoryview:
    """Memory for data that comes in parts; large ones reuse what earlier ones gave back.

    >>> len(buffer(10))
    10
    """
    return empty(size, torch.uint8, torch.device("cpu")).numpy().data


class Frames:
    """Room for frames that come in parts, and their checksums, which are computed as they come.

    >>> frames = Frames([("w", 10), ("b", 9)])
    >>> for data in (b"0123456", b"789abcdefgh", b"i"):
    ...     frames.add(memoryview(data))
    >>> frames.complete, bytes(frames.frames["b"]), frames.checksums["b"] == crc32(b"i")
    (True, b'abcdefghi', True)
    """

    def __init__(self, sizes: Sequence[tuple[str, int]]) -> None:
        self._left = sum(size for _, size in sizes)
        data = buffer(self._left)
        self.frames: dict[str, memoryview] = {}
        self.checksums: dict[str, int] = {}
        at = 0
        for name, size in sizes:
            if name in self.frames:
                raise WireError(f"{name!r} is there twice.")
            self.frames[name] = data[at : at + size]
            at += size
        self._waiting = iter(self.frames.items())
        self._name, self._target, self._filled, self._checksum = "", memoryview(b""), 0, 0

    def add(self, piece: memoryview) -> None:
        """The next part."""
        if len(piece) > self._left:
            raise WireError("more came than was announced.")
        self._left -= len(piece)
        while len(piece):
            if self._filled == len(self._target):
                self._name, self._target = next(self._waiting)
                self._filled = self._checksum = 0
                continue
            step = min(len(piece), len(self._target) - self._filled)
            start, self._filled = self._filled, self._filled + step
            self._target[start : self._filled] = piece[:step]
            if self._filled > _SUMMED:
                self._checksum = crc32(self._target[max(start, _SUMMED) : self._filled], self._checksum)
            self.checksums[self._name] = self._checksum
            piece = piece[step:]

    @property
    def complete(self) -> bool:
        """Whether all of it has come."""
        return not self._left


def part(header: Any | None, data: bytes | memoryview) -> bytes:
    """A message of a header, or none, and data, as protobuf would write it.

    >>> wanted = messages()["PushPart"](data=b"abc")
    >>> part(None, b"abc") == wanted.SerializeToString()
    True
    """
    pieces: list[bytes | memoryview] = []
    if header is not None:
        text = header.SerializeToString()
        pieces += [b"\n", _varint(len(text)), text]
    if len(data):
        pieces += [b"\x12", _varint(len(data)), data]
    return b"".join(pieces)


def read_part(kind: str, message: bytes) -> tuple[Any | None, memoryview]:
    """The header, if there is one, and the data of a part; bulk data is not copied.

    >>> header, data = read_part("PushPart", part(None, b"abc"))
    >>> header, bytes(data)
    (None, b'abc')
    """
    bulk = _bulk(message)
    if bulk is not None:
        return None, bulk
    found = parsed(kind, message)
    return (found.header if found.HasField("header") else None), memoryview(found.data)


def _bulk(message: bytes) -> memoryview | None:
    """The data of a part that has nothing else."""
    view = memoryview(message)
    if len(view) > 1 and view[0] == _DATA:
        length = shift = 0
        for at in range(1, min(len(view), 11)):
            length |= (view[at] & 0x7F) << shift
            shift += 7
            if view[at] < 0x80:
                return view[at + 1 :] if at + 1 + length == len(view) else None
    return None


def read_pushes(message: bytes) -> list[tuple[Any | None, memoryview]]:
    """The header, if there is one, and the data of a part of a push, and of further pushes in the same message.

    >>> one = part(messages()["PushPart"].Header(sequence=1), b"abc")
    >>> two = part(messages()["PushPart"].Header(sequence=2), b"de")
    >>> [(header.sequence, bytes(data)) for header, data in read_pushes(next(together([one, two])))]
    [(1, b'abc'), (2, b'de')]
    """
    bulk = _bulk(message)
    if bulk is not None:
        return [(None, bulk)]
    found = parsed("PushPart", message)
    if len(found.more) > _MOST_TOGETHER or any(len(each.more) for each in found.more):
        raise WireError(f"a message can have {_MOST_TOGETHER} further pushes, and these none.")
    return [(e.header if e.HasField("header") else None, memoryview(e.data)) for e in (found, *found.more)]


def together(whole: Iterable[bytes]) -> Iterator[bytes]:
    """Messages of whole pushes, several in one as long as it is not large.

    >>> [len(message) for message in together([b"x" * 100_000] * 5)]
    [200004, 200004, 100000]
    """
    waiting: list[bytes] = []
    size = 0
    for message in whole:
        if waiting and (size + len(message) > _TOGETHER or len(waiting) > 3 * (_MOST_TOGETHER - 1)):
            yield b"".join(waiting)
            waiting, size = [], 0
        if waiting:
            waiting += [b"\x1a", _varint(len(message))]
        waiting.append(message)
        size += len(message)
    if waiting:
        yield b"".join(waiting)


def parsed(kind: str, message: bytes) -> Any:
    """A message of a kind; anything else raises :class:`~gradwire.errors.WireError`.

    >>> parsed("PushPart", b"junk")
    Traceback (most recent call last):
    gradwire.errors.WireError: 4 bytes are not a PushPart.
    """
    try:
        return messages()[kind].FromString(message)
    except Exception as error:  # protobuf's DecodeError, wherever this release has it
        raise WireError(f"{len(message)} bytes are not a {kind}.") from error


def announced(header: Any, frames: Mapping[str, Sequence[memoryview]]) -> list[memoryview]:
    """Pieces of frames, one after the other, each of which the header announces by its name and length.

    >>> header = messages()["PushPart"].Header()
    >>> pieces = announced(header, {"w": [memoryview(b"ab"), memoryview(b"c")]})
    >>> len(pieces), header.entries[0].length
    (2, 3)
    """
    for name, pieces in frames.items():
        header.entries.add(name=name, length=sum(map(len, pieces)))
    return [piece for pieces in frames.values() for piece in pieces]


def parts(header: Any, pieces: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """Messages of a header and pieces of data, joined or cut to about :data:`PART_BYTES`.

    >>> header = messages()["PushPart"].Header(worker="a")
    >>> [len(message) for message in parts(header, [b"x" * 10, b"y" * (PART_BYTES + 5)])]
    [17, 1048580, 7]
    """
    waiting: list[bytes | memoryview] = []
    size, first = 0, header
    for piece in pieces:
        view = memoryview(piece)
        if size and size + len(view) > PART_BYTES:
            yield part(first, b"".join(waiting))
            waiting, size, first = [], 0, None
        while len(view) > PART_BYTES:
            yield part(first, view[:PART_BYTES])
            view, first = view[PART_BYTES:], None
        waiting.append(view)
        size += len(view)
    if size or first is not None:
        yield part(first, b"".join(waiting))
