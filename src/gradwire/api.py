"""A tensor to bytes and back, in one call each."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gradwire import wire
from gradwire.codecs import Codec
from gradwire.codecs import codec as make_codec
from gradwire.codecs.base import DEFAULT_KEY, saturating
from gradwire.errors import ConfigError, WireError
from gradwire.kernels import ops
from gradwire.wire import Key, Payload, TensorSpec

__all__ = ["decode", "decode_payload", "encode"]


def encode(tensor: Tensor, codec: str | Codec, *, key: Key = DEFAULT_KEY) -> bytes:
    """Bytes of a tensor. They say which codec they are of, and decode anywhere.

    ``tensor`` is float32, float16 or bfloat16, of any shape; ``key`` is the source of random bits. Every call starts
    anew: to carry state from step to step, as error feedback does, use the codec's own ``encode``.

    >>> import torch
    >>> len(encode(torch.zeros(1000), "topk:0.01+int8"))
    120
    """
    encoder = make_codec(codec)
    payload, _ = encoder.encode(tensor, encoder.init(TensorSpec.of(tensor), tensor.device), key)
    payload.check_finite()
    return wire.pack(payload)


def decode(data: Any, *, max_bytes: int = wire.MAX_DECODED_BYTES) -> Tensor:
    """The tensor of bytes that :func:`encode` made, here or elsewhere.

    Anything that is not such bytes raises ``WireError``, as does a tensor of more than ``max_bytes``.

    >>> import torch
    >>> decode(encode(torch.tensor([[1.0, -2.0]]), "bf16"))
    tensor([[ 1., -2.]])
    """
    return decode_payload(wire.unpack(data, max_bytes=max_bytes))


def decode_payload(payload: Payload) -> Tensor:
    """The tensor of a payload that came from elsewhere, whatever its codec.

    >>> import torch
    >>> decode_payload(wire.unpack(encode(torch.ones(2), "bf16")))
    tensor([1., 1.])
    """
    try:
        decoder = make_codec(payload.codec)
        if str(decoder) != payload.codec:
            raise WireError(f"the payload's codec is {payload.codec!r}, which is not written as '{decoder}' is.")
        values = decoder._values(payload)
    except ConfigError as error:
        raise WireError(f"the payload's codec cannot be used here: {error}") from error
    if int(ops.count_nonfinite(values)):
        raise WireError(f"corrupt: a payload of {decoder} that says it is finite decodes to NaN or Inf.")
    return saturating(values, payload.spec.dtype).view(payload.spec.shape)
