"""The gradients of a model become their mean over all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from zlib import crc32

import torch
from torch import Tensor, nn

from gradwire.codecs import Codec, State, codec
from gradwire.collectives import Collective, Reduced
from gradwire.transforms import for_training
from gradwire.wire import Key, TensorSpec

__all__ = ["GradientReducer", "Traffic"]

SMALL: Final = 4096
"""Tensors below this many elements, and vectors, travel together in float32: they cost a message, not bytes."""


@dataclass(frozen=True)
class Traffic:
    """Bytes this rank sent in a step, and what a float32 ring all-reduce would have taken."""

    sent_bytes: int
    dense_sent_bytes: int


class GradientReducer:
    """Reduces the gradients of named parameters: matrices one by one in a codec, the small rest together in float32.

    The codec gets error feedback where it needs it, unless ``feedback`` is false. States are kept by parameter name
    and replaced only after every bucket of the step has arrived, so a failed step loses nothing.

    >>> import torch, gradwire
    >>> from gradwire.collectives.loopback import Loopback
    >>> model = torch.nn.Linear(128, 64)
    >>> model(torch.ones(1, 128)).sum().backward()
    >>> reducer = GradientReducer(dict(model.named_parameters()), "int4", Loopback())
    >>> reducer.reduce(step=0)
    Traffic(sent_bytes=0, dense_sent_bytes=0)
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        what: str | Codec,
        collective: Collective,
        *,
        seed: int = 0,
        feedback: bool = True,
    ) -> None:
        self.codec = for_training(what) if feedback else codec(what)
        self.collective = collective
        self.seed = seed
        self.large = {n: p for n, p in parameters.items() if p.dim() > 1 and p.numel() >= SMALL}
        self.small = {n: p for n, p in parameters.items() if n not in self.large}
        # Sizes on the wire follow from codec and shapes: once these agree, no rank can send what another cannot take.
        shapes = {name: (*p.shape, p.dtype) for name, p in parameters.items()}
        collective.agree(
            f"codec {self.codec}, {len(shapes)} parameters with checksum {crc32(repr(shapes).encode()):08x}"
        )
        self.states: dict[str, State] = {n: self.codec.init(TensorSpec.of(p)) for n, p in self.large.items()}

    def reduce(self, step: int) -> Traffic:
        """Replace every gradient by the mean over all ranks. A missing gradient counts as zeros."""
        dense = codec("none")
        together = torch.cat(
            [_gradient(p).reshape(-1).to(torch.float32) for p in self.small.values()] or [torch.empty(0)]
        )
        pending = [self.collective.reduce(together, dense, {}, Key(self.seed, step, 0))]
        for bucket, (name, parameter) in enumerate(self.large.items(), start=1):
            key = Key(self.seed, step, bucket)
            pending.append(self.collective.reduce(_gradient(parameter), self.codec, self.states[name], key))
        results = [p.wait() for p in pending]
        self._apply(results)
        return Traffic(sum(r.sent_bytes for r in results), sum(r.dense_sent_bytes for r in results))

    def _apply(self, results: list[Reduced]) -> None:
        offset = 0
        for parameter in self.small.values():
            _set(parameter, results[0].mean[offset : offset + parameter.numel()])
            offset += parameter.numel()
        for (name, parameter), result in zip(self.large.items(), results[1:], strict=True):
            _set(parameter, result.mean)
            self.states[name] = result.state


def _gradient(parameter: nn.Parameter) -> Tensor:
    return parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)


def _set(parameter: nn.Parameter, mean: Tensor) -> None:
    parameter.grad = mean.view(parameter.shape).to(parameter.dtype)
