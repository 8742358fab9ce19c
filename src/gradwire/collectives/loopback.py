"""A collective of one rank: what goes in comes out, through the codec."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.codecs import Codec, State
from gradwire.collectives.base import Reduced
from gradwire.wire import Key

__all__ = ["Loopback"]


@dataclass(frozen=True)
class Loopback:
    """The mean over one rank, with everything a codec does to it and no communication."""

    def agree(self, what: str) -> None:
        """One rank always agrees with itself."""

    def reduce(self, x: Tensor, codec: Codec, state: State, key: Key) -> _Done:
        """Encode and decode."""
        payload, state = codec.encode(x, state, key)
        payload.check_finite()
        total = torch.zeros(payload.spec.shape)
        codec.decode_add(payload, total)
        mean, state = codec.finish(total, state)
        return _Done(Reduced(mean, state, 0, 0, 0))


@dataclass(frozen=True)
class _Done:
    result: Reduced

    def wait(self) -> Reduced:
        return self.result
