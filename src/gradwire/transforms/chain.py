"""``a+b``: fewer values, then each of them smaller."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.codecs.base import Carrier, Codec, Laws, Part
from gradwire.codecs.registry import codec, register
from gradwire.codecs.sparse import Scattered
from gradwire.errors import ConfigError, WireError
from gradwire.kernels import ops
from gradwire.transforms.base import SenderTransform
from gradwire.wire import Key, Payload, TensorSpec


@register
@dataclass(frozen=True)
class Chain(Codec):
    """A carrier (sparse or low rank) whose values travel through another codec.

    >>> import gradwire, torch
    >>> data = gradwire.encode(torch.tensor([0.1, -3.0, 2.0, 0.2]), "topk:0.5+int8")
    >>> gradwire.decode(data)
    tensor([ 0.0000, -3.0076,  1.9893,  0.0000])
    """

    id: ClassVar[str] = "chain"
    carrier: Codec
    values: Codec

    def __post_init__(self) -> None:
        object.__setattr__(self, "carrier", codec(self.carrier))
        object.__setattr__(self, "values", codec(self.values))
        if not isinstance(self.carrier, Carrier):
            raise ConfigError(
                f"before '+' must stand a sparse or low-rank codec, such as topk:0.01; got {self.carrier}."
            )
        if isinstance(self.values, Carrier | Chain | SenderTransform) or not self.values._exact:
            raise ConfigError(f"after '+' must stand a codec that keeps every value, such as int8; got {self.values}.")

    def __str__(self) -> str:
        return f"{self.carrier}+{self.values}"

    @classmethod
    def examples(cls) -> tuple[Codec, ...]:
        """Every kind of carrier, and every kind of values."""
        strings: tuple[str, ...] = (
            "topk:0.01+int8",
            "topk:0.1+sign",
            "blocktopk:0.05,block=64+int4",
            "randomk:0.1+int4",
        )
        strings += ("threshold:1+int8", "threshold:1+fp16", "lowrank:4+int8", "topk:0.1+rotate(int4)")
        strings += ("randomk:0.1,unbiased=true+int8:rounding=stochastic",)
        return tuple(codec(s) for s in strings)

    @property
    def _carrier(self) -> Carrier:
        assert isinstance(self.carrier, Carrier)
        return self.carrier

    @property
    def _exact(self) -> bool:  # type: ignore[override]
        return self.carrier._exact and self.values._exact

    def laws(self, spec: TensorSpec) -> Laws:
        """Of ‖x‖², the carrier keeps a share of which the values keep a share."""
        a, b = self.carrier.laws(spec), self.values.laws(TensorSpec((self._carrier._count(spec),)))
        contraction = variance = None
        if a.exact_bytes and a.contraction is not None and b.contraction is not None:
            contraction = a.contraction * b.contraction
        if a.variance is not None and b.variance is not None:
            variance = a.variance + (1 + a.variance) * b.variance
        return Laws(
            unbiased=a.unbiased and b.unbiased,
            contraction=contraction,
            variance=variance,
            keeps_zeros=a.keeps_zeros and b.keeps_zeros,
            random=a.random or b.random,
            exact_bytes=a.exact_bytes and b.exact_bytes,
        )

    def contractive(self) -> Codec:
        """Both halves contractive."""
        return dataclasses.replace(self, carrier=self.carrier.contractive(), values=self.values.contractive())

    def bound(self, x: Tensor, spec: TensorSpec, key: Key) -> Tensor:
        """What the carrier drops, and what its values lose."""
        values, structure, _ = self._carrier._split(x, spec, key)
        errors = self.values.bound(values, TensorSpec((values.numel(),)), key).to(torch.float32)
        dropped = self.carrier.bound(x, spec, key)
        return dropped + self._carrier._propagate(errors, values, structure, spec, key)

    def _parts(self, spec: TensorSpec) -> tuple[Part, ...]:
        inner = self.values._parts(TensorSpec((self._carrier._count(spec),)))
        values = tuple(dataclasses.replace(part, name=f"values.{part.name}") for part in inner)
        return self._carrier._structure(spec) + values

    def _encode(self, x: Tensor, spec: TensorSpec, key: Key) -> tuple[Tensor, ...]:
        values, structure, _ = self._carrier._split(x, spec, key)
        return structure + self.values._encode(values, TensorSpec((values.numel(),)), key)

    def _encode_with(
        self, x: Tensor, residual: Tensor | None, decay: float, spec: TensorSpec, key: Key
    ) -> tuple[tuple[Tensor, ...], Tensor, Tensor | None]:
        e, nonfinite = ops.accumulate(x, residual, decay)
        values, structure, places = self._carrier._split(e, spec, key)
        values_spec = TensorSpec((values.numel(),))
        inner = self.values._encode(values, values_spec, key)
        rest = None
        if residual is not None:
            sent = self.values._decode(inner, values_spec, key)
            rest = self._carrier._leave(e, values, sent, places, spec, key)
        return structure + inner, nonfinite, rest

    def _decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, key: Key) -> Tensor:
        values, structure = self._received(parts, spec, key)
        return self._carrier._join(values, structure, spec, key)

    def _sum_into(self, payloads: Sequence[Payload], out: Tensor, *, add: bool) -> None:
        if not isinstance(self.carrier, Scattered):
            super()._sum_into(payloads, out, add=add)
            return
        received = [self._received(self._checked_parts(each), each.spec, each.key) for each in payloads]
        self.carrier._scatter_into(payloads, received, out, add=add)

    def _received(self, parts: tuple[Tensor, ...], spec: TensorSpec, key: Key) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The decoded values, and the structure."""
        split = len(self._carrier._structure(spec))
        structure, inner = parts[:split], parts[split:]
        values_spec = TensorSpec((self._carrier._actual_count(structure, spec),))
        sizes = [part.numel for part in self.values._parts(values_spec)]
        if sizes != [part.numel() for part in inner]:
            raise WireError(
                f"{self.values} of {values_spec.numel} values has parts of {sizes} items; "
                f"got {[part.numel() for part in inner]}."
            )
        return self.values._decode(inner, values_spec, key), structure
