"""A payload and its bytes.

One encoded tensor is one frame. All integers are little-endian and unsigned; nothing in a frame is executed,
and nothing is allocated from a length that was not checked against the bytes at hand.

====== ===== ==========================================================================================
offset size  field
====== ===== ==========================================================================================
0      4     magic, ``GRDW``
4      4     CRC-32 (that of zlib) of every byte from offset 8 to the end of the frame
8      1     version, 1
9      1     flags; bit 0: the tensor held NaN or Inf (they were encoded as 0), do not use its values
10     2     H, length of the header: everything before the body
12     1     dtype of the tensor (codes below)
13     1     D, number of dimensions
14     1     P, number of parts
15     1     0
16     2     C, length of the codec string
18     2     0
20     4     key: bucket
24     8     key: seed
32     8     key: step
40     8     length of the frame, header and body
48     8 D   shape
…      8 P   parts: the highest byte is the dtype's code, the other seven the length in bytes
…      C     the codec, as the string ``gradwire.codec`` accepts, in ASCII
…           zeros up to a multiple of 8; here the header ends (H)
H            the parts, one after the other, without gaps, in order of falling item size (so each is aligned)
====== ===== ==========================================================================================

Codes: 0 uint8, 1 float16, 2 bfloat16, 3 float32, 4 int64. A tensor is one of 1, 2, 3. What the parts mean is
the codec's business: ``codec.layout(spec)`` names them and gives each one's exact length, or an upper bound.
The key is the random key the tensor was encoded with; codecs that share randomness need it to decode.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from gradwire.errors import ConfigError, NonFiniteError, WireError

try:
    from gradwire._native import crc32
except ImportError:  # a source tree that was not built: the same polynomial, so the same value, only slower
    from zlib import crc32  # type: ignore[assignment]

__all__ = [
    "MAX_DECODED_BYTES",
    "VERSION",
    "Key",
    "Payload",
    "TensorSpec",
    "crc32",
    "frame_header",
    "frame_pieces",
    "header_nbytes",
    "pack",
    "pack_into",
    "unpack",
]

MAGIC: Final = b"GRDW"
VERSION: Final = 1
MAX_DECODED_BYTES: Final = 1 << 30
"""Default limit on the tensor a frame may decode to: a few bytes can declare a huge sparse tensor.

Decoding takes working memory besides, up to about twenty times the tensor for codecs with randomness."""

_FIXED: Final = struct.Struct("<4sIBBHBBBBHHIQQQ")
_FLAGS_AT: Final = 9
_KEY: Final = struct.Struct("<IQQ")  # bucket, seed, step
_KEY_AT: Final = 20
_NON_FINITE: Final = 1
_DTYPES: Final = (torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.int64)
_CODES: Final = {dtype: code for code, dtype in enumerate(_DTYPES)}
FLOAT_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor: all a codec needs to lay out its parts.

    >>> TensorSpec((3, 4)).numel
    12
    >>> TensorSpec((3,), torch.float64)
    Traceback (most recent call last):
    gradwire.errors.ConfigError: `dtype` must be one of float32, float16, bfloat16; got float64.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.dtype not in FLOAT_DTYPES:
            allowed = ", ".join(_name(d) for d in FLOAT_DTYPES)
            raise ConfigError(f"`dtype` must be one of {allowed}; got {_name(self.dtype)}.")
        sizes = isinstance(self.shape, tuple) and all(isinstance(d, int) and d >= 0 for d in self.shape)
        if not sizes or len(self.shape) > 255:
            raise ConfigError(f"`shape` must be a tuple of at most 255 whole sizes, none negative; got {self.shape!r}.")

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor itself, not encoded."""
        return self.numel * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """Spec of a tensor; an error if it is one no codec takes."""
        if not isinstance(tensor, Tensor):
            raise ConfigError(f"`tensor` must be a torch.Tensor; got {type(tensor).__name__}.")
        if tensor.layout != torch.strided or tensor.is_meta:
            raise ConfigError(f"`tensor` must be dense and hold values; got {tensor.layout} on {tensor.device}.")
        return cls(tuple(tensor.shape), tensor.dtype)


@dataclass(frozen=True)
class Key:
    """Where a tensor stands in a run; all random bits are drawn from a counter keyed by it.

    Ranks that use the same key draw the same bits; ``fold`` makes keys that do not.

    >>> Key(seed=1, step=10, bucket=2).fold(3) == Key(seed=1, step=10, bucket=2).fold(4)
    False
    """

    seed: int = 0
    step: int = 0
    bucket: int = 0

    def __post_init__(self) -> None:
        for name, bits in (("seed", 64), ("step", 56), ("bucket", 32)):
            value = getattr(self, name)
            if not isinstance(value, int) or not 0 <= value < 1 << bits:
                raise ConfigError(f"`Key({name}=...)` must be a whole number in [0, 2**{bits}); got {value!r}.")

    def fold(self, number: int) -> Key:
        """Key of another stream of random bits, for example one a rank (splitmix64 of the seed)."""
        mask = (1 << 64) - 1
        z = (self.seed + 0x9E3779B97F4A7C15 * (number + 1)) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return Key(z ^ (z >> 31), self.step, self.bucket)


@dataclass(frozen=True, eq=False)
class Payload:
    """An encoded tensor: what travels, and what is needed to decode it.

    >>> import gradwire
    >>> payload, _ = gradwire.codec("int8").encode(torch.ones(4))
    >>> payload.codec, payload.spec.shape, [len(part) for part in payload.parts]
    ('int8', (4,), [1, 4])
    """

    codec: str  # as gradwire.codec() accepts it
    spec: TensorSpec
    key: Key
    parts: tuple[Tensor, ...]  # each 1-D and contiguous, in the order of the codec's layout
    nonfinite: Tensor  # how many values were NaN or Inf, -1: some; 0-d on the tensor's device, so CUDA need not wait

    @property
    def body_nbytes(self) -> int:
        """Bytes of the parts, without the header."""
        return sum(part.numel() * part.dtype.itemsize for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the frame: ``len(pack(payload))``."""
        return header_nbytes(self.codec, len(self.spec.shape), len(self.parts)) + self.body_nbytes

    def check_finite(self) -> None:
        """Raise :class:`NonFiniteError` if the encoded tensor held NaN or Inf."""
        count = int(self.nonfinite)
        if count < 0:
            raise NonFiniteError("the sender found NaN or Inf in the tensor.")
        if count:
            raise NonFiniteError(f"{count} of {self.spec.numel} values are NaN or Inf.")


def header_nbytes(codec: str, ndim: int, parts: int) -> int:
    """Length of a frame's header.

    >>> header_nbytes("int8", ndim=1, parts=2)
    80
    """
    return -(-(_FIXED.size + 8 * (ndim + parts) + len(codec)) // 8) * 8


def pack(payload: Payload) -> bytes:
    """Bytes of a payload, decodable anywhere by :func:`unpack` and the codec they name.

    >>> import gradwire
    >>> payload, _ = gradwire.codec("int8").encode(torch.ones(4))
    >>> len(pack(payload)) == payload.nbytes == 86
    True
    """
    frame = bytearray(payload.nbytes)
    pack_into(payload, torch.frombuffer(frame, dtype=torch.uint8))
    return bytes(frame)


def pack_into(payload: Payload, out: Tensor) -> int:
    """Write the frame of a payload to the start of ``out``, bytes on the CPU; return its length.

    >>> import gradwire
    >>> payload, _ = gradwire.codec("int8").encode(torch.ones(4))
    >>> out = torch.empty(100, dtype=torch.uint8)
    >>> pack_into(payload, out)
    86
    """
    lengths = [part.numel() * part.dtype.itemsize for part in payload.parts]
    parts = tuple((part.dtype, length) for part, length in zip(payload.parts, lengths, strict=True))
    header = frame_header(payload.codec, payload.spec, parts, payload.key)
    total = len(header) + sum(lengths)
    if out.dtype != torch.uint8 or out.dim() != 1 or out.device.type != "cpu" or out.numel() < total:
        raise ConfigError(f"`out` must be {total} bytes on the CPU, flat; got {tuple(out.shape)} {out.dtype}.")
    frame = out.numpy().data
    offset = len(header)
    frame[:offset] = header
    for part, length in zip(payload.parts, lengths, strict=True):
        if length:
            out[offset : offset + length] = part.contiguous().view(torch.uint8)
        offset += length
    frame[_FLAGS_AT] = _NON_FINITE if int(payload.nonfinite) else 0
    struct.pack_into("<I", frame, 4, crc32(frame[8:total]))
    return total


def frame_pieces(payload: Payload) -> list[memoryview]:
    """The frame of a payload on the CPU in pieces that are to be sent one after the other, its parts not copied.

    >>> import gradwire
    >>> payload, _ = gradwire.codec("int8").encode(torch.ones(4))
    >>> b"".join(frame_pieces(payload)) == pack(payload)
    True
    """
    flat = [part.contiguous().view(-1).view(torch.uint8).numpy().data for part in payload.parts if part.numel()]
    parts = tuple((part.dtype, part.numel() * part.dtype.itemsize) for part in payload.parts)
    header = bytearray(frame_header(payload.codec, payload.spec, parts, payload.key))
    header[_FLAGS_AT] = _NON_FINITE if int(payload.nonfinite) else 0
    checksum = crc32(memoryview(header)[8:])
    for piece in flat:
        checksum = crc32(piece, checksum)
    struct.pack_into("<I", header, 4, checksum)
    return [memoryview(header), *flat]


def frame_header(codec: str, spec: TensorSpec, parts: tuple[tuple[torch.dtype, int], ...], key: Key) -> bytes:
    """Header of a frame with such parts, each a dtype and bytes; checksum and flags are zeros still.

    >>> len(frame_header("int8", TensorSpec((4,)), ((torch.bfloat16, 2), (torch.uint8, 4)), Key()))
    80
    """
    header = bytearray(_header_of(codec, spec, parts))
    _KEY.pack_into(header, _KEY_AT, key.bucket, key.seed, key.step)
    return bytes(header)


@functools.lru_cache(maxsize=4096)
def _header_of(codec: str, spec: TensorSpec, parts: tuple[tuple[torch.dtype, int], ...]) -> bytes:
    """The same for all keys; a training asks for the same few every step."""
    name = codec.encode("ascii")
    length = header_nbytes(codec, len(spec.shape), len(parts))
    if length >= 1 << 16:
        raise ConfigError(f"the codec string is too long for a payload: {len(name)} characters.")
    header = bytearray(length)
    counts = (length, _CODES[spec.dtype], len(spec.shape), len(parts), 0, len(name), 0)
    total = length + sum(nbytes for _, nbytes in parts)
    _FIXED.pack_into(header, 0, MAGIC, 0, VERSION, 0, *counts, 0, 0, 0, total)
    tables = [*spec.shape, *(_CODES[dtype] << 56 | nbytes for dtype, nbytes in parts)]
    struct.pack_into(f"<{len(tables)}Q", header, _FIXED.size, *tables)
    start = _FIXED.size + 8 * len(tables)
    header[start : start + len(name)] = name
    return bytes(header)


def unpack(
    data: Any,
    *,
    max_bytes: int = MAX_DECODED_BYTES,
    padded: bool = False,
    copy: bool = True,
    checksum: int | None = None,
) -> Payload:
    """Payload of a frame. Every field is checked before it is used; the parts are copies, or parts of ``data``.

    ``data`` is ``bytes`` or anything with a buffer. A frame of more than ``max_bytes`` decoded is refused. With
    ``padded`` more bytes may follow the frame, as in a buffer of the layout's size. ``checksum`` is the CRC-32 of all
    bytes from offset 8 on, if it is known already.

    >>> import gradwire
    >>> unpack(gradwire.encode(torch.ones(4), "int8")).spec
    TensorSpec(shape=(4,), dtype=torch.float32)
    """
    if not isinstance(max_bytes, int) or max_bytes < 0:
        raise ConfigError(f"`max_bytes` must be a whole number of bytes; got {max_bytes!r}.")
    try:
        view = memoryview(data).cast("B")
    except (TypeError, ValueError, BufferError):
        raise ConfigError(f"`data` must be bytes-like and contiguous; got {type(data).__name__}.") from None
    if len(view) < _FIXED.size:
        raise WireError(f"truncated: a payload has at least {_FIXED.size} bytes; got {len(view)}.")
    fixed = _FIXED.unpack_from(view)
    magic, crc, version, flags, header, dtype, ndim, parts, zero, codec_length, zero2 = fixed[:11]
    bucket, seed, step, total = fixed[11:]
    if magic != MAGIC:
        raise WireError(f"not a gradwire payload: it starts with {bytes(magic)!r}, not {MAGIC!r}.")
    if version != VERSION:
        raise WireError(f"unknown version: this gradwire reads version {VERSION}; got {version}.")
    if padded and _FIXED.size <= total <= len(view):
        view = view[:total]
    if total != len(view):
        problem = "truncated" if total > len(view) else "oversized"
        raise WireError(f"{problem}: the header says {total} bytes; got {len(view)}.")
    actual = crc32(view[8:]) if checksum is None else checksum
    if actual != crc:
        raise WireError(f"corrupt: the checksum in the header is {crc:08x}, that of the bytes {actual:08x}.")

    tables_end = _FIXED.size + 8 * (ndim + parts)
    if header != -(-(tables_end + codec_length) // 8) * 8 or header > total:
        raise WireError(f"corrupt header: its length of {header} does not fit its own fields.")
    if zero or zero2 or flags & ~_NON_FINITE or any(view[tables_end + codec_length : header]):
        raise WireError("corrupt header: a reserved field is not zero.")
    tables = struct.unpack_from(f"<{ndim + parts}Q", view, _FIXED.size)
    shape, entries = tuple(tables[:ndim]), tables[ndim:]
    spec = _spec(shape, dtype, max_bytes)
    try:
        codec = bytes(view[tables_end : tables_end + codec_length]).decode("ascii")
    except UnicodeDecodeError:
        raise WireError("corrupt header: the codec string is not ASCII.") from None
    if not codec.isprintable():
        raise WireError("corrupt header: the codec string is not printable.")
    if step >= 1 << 56:
        raise WireError(f"corrupt header: the step must be below 2**56; got {step}.")
    nonfinite = torch.tensor(-1 if flags & _NON_FINITE else 0, device="cpu")
    return Payload(codec, spec, Key(seed, step, bucket), _parts(view[header:], entries, copy), nonfinite)


def _spec(shape: tuple[int, ...], dtype: int, max_bytes: int) -> TensorSpec:
    if dtype >= len(_DTYPES) or _DTYPES[dtype] not in FLOAT_DTYPES:
        raise WireError(f"corrupt header: unknown tensor dtype code {dtype}.")
    spec = TensorSpec(shape, _DTYPES[dtype])
    # Of an empty tensor too: no tensor can have the shape (0, 2**63).
    if math.prod(d for d in shape if d) * spec.dtype.itemsize > max_bytes:
        raise WireError(
            f"oversized: the header declares a tensor of shape {shape}, {spec.nbytes} bytes; "
            f"the limit is {max_bytes} (`max_bytes`)."
        )
    return spec


def _parts(body: memoryview, entries: Sequence[int], copy: bool) -> tuple[Tensor, ...]:
    codes, lengths = [e >> 56 for e in entries], [e & ((1 << 56) - 1) for e in entries]
    if sum(lengths) != len(body):
        raise WireError(f"corrupt header: its parts have {sum(lengths)} bytes, the body {len(body)}.")
    if any(c >= len(_DTYPES) for c in codes):
        raise WireError(f"corrupt header: unknown part dtype code {max(codes)}.")
    dtypes = [_DTYPES[c] for c in codes]
    sizes = [d.itemsize for d in dtypes]
    if sizes != sorted(sizes, reverse=True) or any(n % s for n, s in zip(lengths, sizes, strict=True)):
        raise WireError("corrupt header: parts must be whole items, in order of falling item size.")
    if not len(body):
        return tuple(torch.empty(0, dtype=d, device="cpu") for d in dtypes)
    buffer = torch.frombuffer(bytearray(body) if copy else body, dtype=torch.uint8)
    return tuple(chunk.view(d) for chunk, d in zip(torch.split(buffer, lengths), dtypes, strict=True))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
