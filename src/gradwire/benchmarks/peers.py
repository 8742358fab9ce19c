"""What a practitioner would write instead of our codecs, in plain torch.

Same work, same quality: blocks, scale dtypes, packed codes and residuals are those of the codec, and a test compares
the errors. The peers may do what is fair and fast: they update the residual in place and need tensors of whole blocks;
tuned, intermediate results go to a workspace that is allocated once. What is sent is a new tensor each time, as
ours is. They do not look for NaN and Inf, which ours do.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Final, TypeAlias

import torch
from torch import Tensor

from gradwire.codecs import Codec, codec, randomk, topk
from gradwire.codecs.sparse import kept_count

__all__ = ["Parts", "Peer", "Rotation", "in_torch", "select_top"]

Parts: TypeAlias = tuple[Tensor, ...]

_TINY: Final = 1e-30  # the smallest scale of a block: its reciprocal is finite


class Peer(ABC):
    """Another way to do what a codec does. ``work``, two rows of the tensor's length, is free to be overwritten.

    Without ``work`` every step makes a new tensor, which is how ``torch.compile`` wants it.
    """

    feedback: ClassVar[bool] = True  # whether it has `encode_feedback`
    compiles: ClassVar[bool] = True

    def __init__(self, work: Tensor | None = None) -> None:
        self._work = work

    def _room(self, like: Tensor, row: int = 0) -> Tensor | None:
        """A place for a float32 result of that shape; None: make a new one."""
        return None if self._work is None else self._work[row][: like.numel()].view(like.shape)

    @abstractmethod
    def encode(self, x: Tensor) -> Parts:
        """What would be sent of a flat tensor."""

    @abstractmethod
    def encode_feedback(self, x: Tensor, residual: Tensor) -> Parts:
        """What would be sent of x + residual; the residual becomes what is lost."""

    @abstractmethod
    def decode(self, parts: Parts, out: Tensor) -> Tensor:
        """The tensor, in ``out`` if the library can write there."""

    @abstractmethod
    def decode_add(self, payloads: Sequence[Parts], acc: Tensor) -> None:
        """Add the tensors to ``acc``."""


class _Blocks(Peer):
    """Codes times a scale a block; subclasses quantize and pack."""

    block: ClassVar[int] = 128
    packed: ClassVar[bool] = False  # several codes a byte

    @abstractmethod
    def _quantize(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Unscaled values as float32, and the scales as they travel."""

    @abstractmethod
    def _pack(self, values: Tensor) -> Tensor:
        """Codes of unscaled values, which may be overwritten."""

    @abstractmethod
    def _unpack(self, codes: Tensor, out: Tensor) -> Tensor:
        """The unscaled values, written to ``out``."""

    def encode(self, x: Tensor) -> Parts:
        values, scale = self._quantize(x.view(-1, self.block))
        return self._pack(values), scale

    def encode_feedback(self, x: Tensor, residual: Tensor) -> Parts:
        rows = residual.add_(x).view(-1, self.block)
        values, scale = self._quantize(rows)
        rows.addcmul_(values, scale.float(), value=-1)
        return self._pack(values), scale

    def _values(self, parts: Parts) -> Tensor:
        """The values of a payload; where a code is a byte, as one expression for a compiler."""
        codes, scale = parts
        if self.packed:
            room = torch.empty(scale.numel() * self.block, device=codes.device)
            return self._unpack(codes, room).view(-1, self.block).mul_(scale.float()).view(-1)
        return (codes.to(torch.float32).view(-1, self.block) * scale.float()).view(-1)

    def decode(self, parts: Parts, out: Tensor) -> Tensor:
        if self._work is None:
            return out.copy_(self._values(parts))
        codes, scale = parts
        self._unpack(codes, out).view(-1, self.block).mul_(scale.float())
        return out

    def decode_add(self, payloads: Sequence[Parts], acc: Tensor) -> None:
        for parts in payloads:
            room = self._room(acc)
            if room is None:
                acc.add_(self._values(parts))
            else:
                codes, scale = parts
                values = self._unpack(codes, room).view(-1, self.block)
                acc.view(-1, self.block).addcmul_(values, scale.float())

    def _absmax(self, rows: Tensor) -> Tensor:
        if self._work is None:
            return rows.abs().amax(1, keepdim=True).clamp(min=_TINY)
        # Two reductions that write next to nothing are faster than a tensor of magnitudes.
        return torch.maximum(rows.amax(1, keepdim=True), rows.amin(1, keepdim=True).neg_()).clamp_(min=_TINY)


class _AbsmaxInteger(_Blocks):
    limit: ClassVar[int]

    def _quantize(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        scale = (self._absmax(rows) / self.limit).to(torch.bfloat16)
        # No clamp: the scale is off by 2**-9 at most, and limit * (1 + 2**-9) still rounds to the limit.
        return torch.mul(rows, scale.float().reciprocal_(), out=self._room(rows)).round_(), scale


class Int8(_AbsmaxInteger):
    """Blocks of 256, bf16 scales, a byte a value."""

    block = 256
    limit = 127

    def _pack(self, values: Tensor) -> Tensor:
        return values.to(torch.int8)

    def _unpack(self, codes: Tensor, out: Tensor) -> Tensor:
        return out.copy_(codes.view(-1))


class Int4(_AbsmaxInteger):
    """Blocks of 128, bf16 scales; a byte holds a value of the first half and one of the second, a + 16 b."""

    limit = 7
    packed = True

    def _pack(self, values: Tensor) -> Tensor:
        first, second = values.view(2, -1)
        both: Tensor = first.add_(second, alpha=16)  # packed as floats: one pass less than as bytes
        return both.to(torch.int8)

    def _unpack(self, codes: Tensor, out: Tensor) -> Tensor:
        first, second = out.view(2, -1)
        shifted = codes + 8
        first.copy_((shifted & 15).sub_(8))
        second.copy_(shifted >> 4)
        return out


class _Packed24(_Blocks):
    """Codes of 3 or 6 bits, as many as fit into three bytes: digits of a 24-bit number, which float32 holds exactly."""

    bits: ClassVar[int]

    def _pack(self, values: Tensor) -> Tensor:
        digits = values.view(24 // self.bits, -1)
        number = digits[-1]
        for digit in reversed(digits[:-1].unbind()):
            number = torch.add(digit, number, alpha=1 << self.bits)
        return number.to(torch.int32).view(torch.uint8).view(-1, 4)[:, :3].contiguous()

    def _unpack(self, codes: Tensor, out: Tensor) -> Tensor:
        low, middle, high = codes.to(torch.int32).unbind(1)
        number = (low | middle << 8 | high << 16) << 8 >> 8  # the sign of 24 bits becomes that of 32
        half = 1 << (self.bits - 1)
        for digit in out.view(24 // self.bits, -1).unbind():
            value = ((number + half) & (2 * half - 1)) - half
            digit.copy_(value)
            number = (number - value) >> self.bits
        return out

    def _values(self, parts: Parts) -> Tensor:
        codes, scale = parts
        values = self._unpack(codes, torch.empty(codes.numel() * 8 // self.bits, device=codes.device))
        return (values.view(-1, self.block) * scale.float()).view(-1)


class Int3(_Packed24):
    """Blocks of 128, bf16 scales of least squared error (four rounds of codes, then scale), 3 bits a value."""

    bits = 3
    limit: ClassVar[int] = 3

    def _quantize(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        room = self._room(rows)
        scale = torch.abs(rows, out=room).mean(1, keepdim=True).clamp_(min=_TINY)
        scale.mul_(0.75)
        for _ in range(4):
            codes = self._codes(rows, scale, room)
            scale = torch.linalg.vecdot(rows, codes)[:, None] / torch.linalg.vecdot(codes, codes)[:, None]
            scale.nan_to_num_(_TINY).clamp_(min=_TINY)
        stored = scale.to(torch.bfloat16)
        return self._codes(rows, stored.float(), room), stored

    def _codes(self, rows: Tensor, scale: Tensor, room: Tensor | None) -> Tensor:
        return torch.mul(rows, scale.reciprocal(), out=room).round_().clamp_(-self.limit, self.limit)


class QSGD(_Packed24):
    """Blocks of 128, float32 norms, 16 levels with stochastic rounding, 6 bits a value."""

    feedback = False
    bits = 6
    levels: ClassVar[int] = 16

    def _quantize(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        scale = torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp_(min=_TINY) / self.levels
        noise = self._room(rows, 1)
        noise = torch.rand_like(rows) if noise is None else noise.uniform_()
        return torch.mul(rows, scale.reciprocal(), out=self._room(rows)).add_(noise).floor_(), scale


class Float8(_Blocks):
    """Blocks of 128, bf16 scales, e4m3 as torch rounds it."""

    def _codes(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        scale = (self._absmax(rows) / 448).to(torch.bfloat16)
        # No clamp: all up to 464 rounds to 448.
        return torch.mul(rows, scale.float().reciprocal_(), out=self._room(rows)).to(torch.float8_e4m3fn), scale

    def encode(self, x: Tensor) -> Parts:
        return self._codes(x.view(-1, self.block))

    def encode_feedback(self, x: Tensor, residual: Tensor) -> Parts:
        rows = residual.add_(x).view(-1, self.block)
        codes, scale = self._codes(rows)
        room = self._room(rows)
        rows.addcmul_(codes.to(torch.float32) if room is None else room.copy_(codes), scale.float(), value=-1)
        return codes, scale

    def _quantize(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def _pack(self, values: Tensor) -> Tensor:
        raise NotImplementedError

    def _unpack(self, codes: Tensor, out: Tensor) -> Tensor:
        return out.copy_(codes.view(-1))


class Sign(_Blocks):
    """Blocks of 128, the mean magnitude as a bf16 scale, eight signs to a byte."""

    packed = True

    def __init__(self, work: Tensor | None = None) -> None:
        super().__init__(work)
        self._signs: Tensor | None = None

    def _scale(self, rows: Tensor) -> Tensor:
        return torch.abs(rows, out=self._room(rows)).mean(1, keepdim=True).to(torch.bfloat16)

    def encode(self, x: Tensor) -> Parts:
        return self._pack(x), self._scale(x.view(-1, self.block))

    def encode_feedback(self, x: Tensor, residual: Tensor) -> Parts:
        rows = residual.add_(x).view(-1, self.block)
        scale, signs = self._scale(rows), self._pack(residual)
        rows.sub_(torch.copysign(scale.float(), rows, out=self._room(rows)))
        return signs, scale

    def _quantize(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def _pack(self, values: Tensor) -> Tensor:
        # The product moves the lowest bits of eight bytes into the uppermost byte, the first one to its lowest bit.
        gathered = (values < 0).view(torch.int64) * 0x0102040810204080
        return gathered.view(torch.uint8).view(-1, 8)[:, 7].contiguous()

    def _unpack(self, codes: Tensor, out: Tensor) -> Tensor:
        if self._signs is None:
            self._signs = _signs_of_bytes(out.device)
        return _write_signs(codes, self._signs, out)


def _signs_of_bytes(device: torch.device) -> Tensor:
    """1 or -1 for each bit of each byte, the lowest first."""
    bits = (torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)) & 1
    return 1.0 - 2.0 * bits.to(torch.float32)


def _write_signs(data: Tensor, table: Tensor, out: Tensor) -> Tensor:
    """1 or -1 for each bit of the bytes: from a table, or on a GPU, where that is slow, by arithmetic."""
    if data.is_cuda:
        shifts = torch.arange(8, device=data.device, dtype=torch.uint8)
        return out.copy_(((data[:, None] >> shifts) & 1).view(-1)).mul_(-2.0).add_(1.0)
    torch.index_select(table, 0, data.int(), out=out.view(-1, 8))
    return out


class PlainInt4(Int4):
    """The same with neighbours in a byte, as bytes."""

    def _pack(self, values: Tensor) -> Tensor:
        codes = (values + self.limit).to(torch.uint8).view(-1, 2)
        return codes[:, 0] | codes[:, 1] << 4

    def _unpack(self, codes: Tensor, out: Tensor) -> Tensor:
        values = torch.stack([codes & 15, codes >> 4], dim=1)
        return out.copy_(values.view(-1).to(torch.float32) - self.limit)


class FusedInt4(Int4):
    """The same, in the form that compiles to the fastest code."""

    def _values(self, parts: Parts) -> Tensor:
        codes, scale = parts
        shifted = codes + 8
        return (torch.cat([(shifted & 15) - 8, shifted >> 4]).view(-1, self.block) * scale.float()).view(-1)

    def decode_add(self, payloads: Sequence[Parts], acc: Tensor) -> None:
        """Of several payloads, each half has a sum of its own."""
        if len(payloads) == 1:
            return super().decode_add(payloads, acc)
        halves = acc.view(2, -1, self.block)
        first, second = halves[0], halves[1]
        for codes, scale in payloads:
            shifted, scales = (codes + 8).view(-1, self.block), scale.float().view(2, -1, 1)
            first = first + ((shifted & 15) - 8) * scales[0]
            second = second + (shifted >> 4) * scales[1]
        halves[0].copy_(first)
        halves[1].copy_(second)


class FusedSign(Sign):
    """The same, in the form that compiles to the fastest code: bit i of byte j of a block is element 16 i + j."""

    def _pack(self, values: Tensor) -> Tensor:
        negative = (values < 0).view(-1, 8, self.block // 8)
        bits = negative[:, 0].to(torch.int32)
        for i in range(1, 8):
            bits = bits + negative[:, i].to(torch.int32) * (1 << i)
        return bits.to(torch.uint8)

    def _values(self, parts: Parts) -> Tensor:
        codes, scale = parts
        shifts = torch.arange(8, device=codes.device, dtype=torch.int32)[None, :, None]
        signs = 1 - 2 * ((codes.to(torch.int32)[:, None] >> shifts) & 1).to(torch.float32)
        return (signs.reshape(-1, self.block) * scale.float()).view(-1)


class Half(Peer):
    """Sixteen bits, as torch rounds them."""

    def __init__(self, dtype: torch.dtype, work: Tensor | None = None) -> None:
        super().__init__(work)
        self._dtype = dtype

    def encode(self, x: Tensor) -> Parts:
        """Convert."""
        return (x.to(self._dtype),)

    def encode_feedback(self, x: Tensor, residual: Tensor) -> Parts:
        """Convert, and subtract."""
        sent = residual.add_(x).to(self._dtype)
        residual.sub_(sent)
        return (sent,)

    def decode(self, parts: Parts, out: Tensor) -> Tensor:
        """Convert back."""
        return out.copy_(parts[0])

    def decode_add(self, payloads: Sequence[Parts], acc: Tensor) -> None:
        """Convert back and add."""
        for (sent,) in payloads:
            acc.add_(sent)


class _Sparse(Peer):
    def __init__(self, density: float, work: Tensor | None = None) -> None:
        super().__init__(work)
        self._density = density

    @abstractmethod
    def _select(self, x: Tensor) -> Tensor:
        """Indices of what is sent."""

    def encode(self, x: Tensor) -> Parts:
        indices = self._select(x)
        return x[indices], indices.to(torch.int32)

    def encode_feedback(self, x: Tensor, residual: Tensor) -> Parts:
        indices = self._select(residual.add_(x))
        values = residual[indices]
        residual.index_fill_(0, indices, 0.0)
        return values, indices.to(torch.int32)

    def decode(self, parts: Parts, out: Tensor) -> Tensor:
        values, indices = parts
        return out.zero_().index_copy_(0, indices.long(), values)

    def decode_add(self, payloads: Sequence[Parts], acc: Tensor) -> None:
        for values, indices in payloads:
            acc.scatter_add_(0, indices.long(), values)


class TopK(_Sparse):
    """The largest magnitudes by ``torch.topk``, with 32-bit indices."""

    def _select(self, x: Tensor) -> Tensor:
        return select_top(x, kept_count(self._density, x.numel()), self._room(x))


class RandomK(_Sparse):
    """One random element of each of k stretches."""

    def _select(self, x: Tensor) -> Tensor:
        count = kept_count(self._density, x.numel())
        stride = x.numel() // count
        starts = torch.arange(0, count * stride, stride, device=x.device)
        return starts.add_(torch.randint(stride, (count,), device=x.device))


def select_top(x: Tensor, count: int, room: Tensor | None = None) -> Tensor:
    """Indices of the largest magnitudes, in no order.

    >>> select_top(torch.tensor([1.0, -3.0, 2.0]), 1)
    tensor([1])
    """
    return torch.topk(torch.abs(x, out=room), count, sorted=False).indices


def in_torch(which: Codec, work: Tensor | None = None, *, fused: bool = False) -> Peer | None:
    """The codec in plain torch; None if nobody wrote it.

    With a workspace it allocates nothing but its results; ``fused`` is the form that a compiler makes most of.

    >>> peer = in_torch(codec("int8"))
    >>> [part.dtype for part in peer.encode(torch.randn(1024))]
    [torch.int8, torch.bfloat16]
    """
    blocks: dict[str, type[_Blocks]] = {"int8": Int8, "int3": Int3, "qsgd": QSGD, "fp8:e4m3": Float8}
    blocks |= {"int4": FusedInt4, "sign": FusedSign} if fused else {"int4": Int4, "sign": Sign}
    if work is None and not fused:
        blocks["int4"] = PlainInt4
    for name, peer in blocks.items():
        if which == codec(name):
            return peer(work)
    if which.id in ("fp16", "bf16"):
        return Half(torch.float16 if which.id == "fp16" else torch.bfloat16, work)
    if isinstance(which, topk.TopK):
        return TopK(which.density, work)
    if isinstance(which, randomk.RandomK) and not which.unbiased:
        return RandomK(which.density, work)
    return None


_SIDE: Final = 32  # a block of 1024 is a square of this side


def _hadamard(device: torch.device) -> Tensor:
    """The orthonormal Hadamard matrix of half a block's logarithm: that of a block is its Kronecker square."""
    matrix = torch.ones(1, 1, device=device)
    while matrix.shape[0] < _SIDE:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(_SIDE)


class Rotation:
    """Random signs and a Hadamard transform of blocks of 1024, as two products with a matrix of 32: fewer passes.

    >>> x = torch.randn(4096)
    >>> bool(torch.isclose(Rotation(x.device)(x).norm(), x.norm(), rtol=1e-5))
    True
    """

    def __init__(self, device: torch.device, work: Tensor | None = None) -> None:
        self._signs, self._matrix, self._work = _signs_of_bytes(device), _hadamard(device), work

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate with fresh signs."""
        first, second = (torch.empty_like(x), None) if self._work is None else self._work[:, : x.numel()]
        random = torch.randint(-(2**63), 2**63 - 1, (x.numel() // 64,), device=x.device).view(torch.uint8)
        flipped = _write_signs(random, self._signs, first).mul_(x).view(-1, _SIDE)
        columns = torch.mm(flipped, self._matrix, out=None if second is None else second.view(-1, _SIDE))
        return torch.matmul(self._matrix, columns.view(-1, _SIDE, _SIDE)).view(-1)
