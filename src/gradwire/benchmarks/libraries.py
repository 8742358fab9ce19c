"""Other libraries that do what our codecs do. None is a dependency: what is not installed does not take part.

torchao has affine integers and float8 of blocks, and for CUDA a float8 kernel; its functions are plain torch, meant to
be compiled, and are timed both ways. bitsandbytes has 8 bits of a block with any code, and NF4. Neither has signs,
sparse codes, fewer than 4 bits, or error feedback, which is put together here from what they have.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import warnings
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from importlib.metadata import version
from io import StringIO
from types import ModuleType
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from gradwire.benchmarks.peers import Parts, Peer
from gradwire.codecs import Codec, codec

__all__ = ["installed", "libraries"]

_LIBRARIES: Final = ("torchao", "bitsandbytes")


def installed() -> dict[str, str]:
    """Libraries that take part, and their versions.

    >>> set(installed()) <= {"torchao", "bitsandbytes"}
    True
    """
    return {name: version(name) for name in _LIBRARIES if importlib.util.find_spec(name) is not None}


def libraries(which: Codec, device: torch.device) -> dict[str, Peer]:
    """What the installed libraries have of a codec, by a name to print.

    >>> libraries(codec("topk:0.01"), torch.device("cpu"))
    {}
    """
    peers: dict[str, Peer] = {}
    integers = {codec("int8"): (8, 256), codec("int4"): (4, 128)}
    if "torchao" in installed() and (which in integers or which == codec("fp8:e4m3")):
        primitives = _quiet_import("torchao.quantization.quant_primitives")
        peers["torchao"] = (
            TorchaoInteger(primitives, *integers[which]) if which in integers else TorchaoFloat8(primitives)
        )
        if which not in integers and device.type == "cuda":
            peers["torchao kernel"] = TorchaoKernel(primitives, _quiet_import("torchao.kernel.blockwise_quantization"))
    if "bitsandbytes" in installed() and which in integers:
        peers["bitsandbytes"] = Bitsandbytes(_quiet_import("bitsandbytes.functional"), *integers[which], device)
    return peers


def _quiet_import(name: str) -> ModuleType:
    """Both libraries talk while they are imported: about kernels of other machines, and about what they deprecate."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    finally:
        logging.disable(before)


class TorchaoInteger(Peer):
    """torchao's affine quantization, symmetric, with bf16 scales; it leaves 4 bits unpacked: packed here."""

    def __init__(self, module: ModuleType, bits: int, block: int) -> None:
        super().__init__()
        self._ao, self._bits, self._block = module, bits, block
        self._limit = (1 << (bits - 1)) - 1

    def _quantize(self, x: Tensor) -> Parts:
        scale, zero = self._ao.choose_qparams_affine(
            x,
            self._ao.MappingType.SYMMETRIC,
            (self._block,),
            torch.int8,
            -self._limit,
            self._limit,
            scale_dtype=torch.bfloat16,
            zero_point_dtype=torch.int8,
        )
        codes = self._ao.quantize_affine(x, (self._block,), scale, zero, torch.int8, -self._limit, self._limit)
        return codes, scale, zero

    def _dequantize(self, parts: Parts) -> Tensor:
        codes, scale, zero = parts
        values: Tensor = self._ao.dequantize_affine(
            codes, (self._block,), scale, zero, torch.int8, -self._limit, self._limit
        )
        return values

    def _pack(self, parts: Parts) -> Parts:
        if self._bits == 8:
            return parts
        first, second = parts[0].view(2, -1)
        return (second * 16 + first, *parts[1:])

    def _unpack(self, parts: Parts) -> Parts:
        if self._bits == 8:
            return parts
        shifted = parts[0] + 8
        return (torch.cat([(shifted & 15) - 8, shifted >> 4]), *parts[1:])

    def encode(self, x: Tensor) -> Parts:
        """Quantize."""
        return self._pack(self._quantize(x))

    def encode_feedback(self, x: Tensor, residual: Tensor) -> Parts:
        """Quantize, dequantize, subtract."""
        parts = self._quantize(residual.add_(x))
        residual.sub_(self._dequantize(parts))
        return self._pack(parts)

    def decode(self, parts: Parts, out: Tensor) -> Tensor:
        """Dequantize, into a new tensor."""
        return self._dequantize(self._unpack(parts))

    def decode_add(self, payloads: Sequence[Parts], acc: Tensor) -> None:
        """Dequantize and add."""
        for parts in payloads:
            acc.add_(self._dequantize(self._unpack(parts)))


class TorchaoFloat8(Peer):
    """torchao's float8 with float32 scales of blocks of 128."""

    block: ClassVar[int] = 128

    def __init__(self, module: ModuleType) -> None:
        super().__init__()
        # Not public, but there is no other blockwise float8 of torchao that runs on a CPU.
        self._scale_of, self._quantize = module._choose_scale_float8, module._quantize_affine_float8
        self._dequantize = module._dequantize_affine_float8

    def _parts(self, rows: Tensor) -> Parts:
        scale = self._scale_of(rows, [1, self.block], torch.float8_e4m3fn)
        return self._quantize(rows, scale, torch.float8_e4m3fn), scale

    def encode(self, x: Tensor) -> Parts:
        """Quantize."""
        return self._parts(x.view(-1, self.block))

    def encode_feedback(self, x: Tensor, residual: Tensor) -> Parts:
        """Quantize, dequantize, subtract."""
        rows = residual.add_(x).view(-1, self.block)
        parts = self._parts(rows)
        rows.sub_(self._dequantize(*parts, torch.float32))
        return parts

    def decode(self, parts: Parts, out: Tensor) -> Tensor:
        """Dequantize, into a new tensor."""
        values: Tensor = self._dequantize(*parts, torch.float32)
        return values.view(-1)

    def decode_add(self, payloads: Sequence[Parts], acc: Tensor) -> None:
        """Dequantize and add."""
        for parts in payloads:
            acc.view(-1, self.block).add_(self._dequantize(*parts, torch.float32))


class TorchaoKernel(TorchaoFloat8):
    """The same format by torchao's kernel for CUDA."""

    compiles = False

    def __init__(self, primitives: ModuleType, kernels: ModuleType) -> None:
        super().__init__(primitives)
        self._kernel = kernels.fp8_blockwise_act_quant

    def _parts(self, rows: Tensor) -> Parts:
        codes, scale = self._kernel(rows, self.block)
        return codes, scale


class Bitsandbytes(Peer):
    """bitsandbytes: 8 bits with its linear code, 4 bits as NF4; float32 scales. Its kernels are compiled already."""

    compiles = False

    def __init__(self, module: ModuleType, bits: int, block: int, device: torch.device) -> None:
        super().__init__()
        self._bnb, self._bits, self._block = module, bits, block
        self._code = module.create_linear_map(signed=True, total_bits=8).to(device)

    def _quantize(self, x: Tensor) -> Parts:
        if self._bits == 8:
            codes, state = self._bnb.quantize_blockwise(x, code=self._code, blocksize=self._block)
        else:
            codes, state = self._bnb.quantize_4bit(x, blocksize=self._block, quant_type="nf4")
        return codes, state.absmax

    def _dequantize(self, parts: Parts, out: Tensor) -> Tensor:
        """Into ``out`` on CUDA; on the CPU the library has no kernel that writes to a given tensor."""
        codes, scale = parts
        target = out if out.is_cuda else None
        values: Any
        if self._bits == 8:
            values = self._bnb.dequantize_blockwise(
                codes, absmax=scale, code=self._code, blocksize=self._block, out=target
            )
        else:
            state = self._bnb.QuantState(
                scale, shape=out.shape, dtype=out.dtype, blocksize=self._block, quant_type="nf4"
            )
            values = self._bnb.dequantize_4bit(codes, state, out=target)
        return out if values is None else values.view(-1)

    def encode(self, x: Tensor) -> Parts:
        """Quantize."""
        return self._quantize(x)

    def encode_feedback(self, x: Tensor, residual: Tensor) -> Parts:
        """Quantize, dequantize, subtract."""
        parts = self._quantize(residual.add_(x))
        residual.sub_(self._dequantize(parts, torch.empty_like(x) if x.is_cuda else x))
        return parts

    def decode(self, parts: Parts, out: Tensor) -> Tensor:
        """Dequantize."""
        return self._dequantize(parts, out)

    def decode_add(self, payloads: Sequence[Parts], acc: Tensor) -> None:
        """Dequantize and add."""
        for parts in payloads:
            acc.add_(self._dequantize(parts, torch.empty_like(acc) if acc.is_cuda else acc))
