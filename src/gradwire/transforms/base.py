"""What transforms share: a codec made from a codec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.codecs.base import Codec, Laws, Layout, Part, State
from gradwire.codecs.registry import codec
from gradwire.errors import ConfigError
from gradwire.wire import Key, Payload, TensorSpec

__all__ = ["SenderTransform", "is_stateful", "state_tensor", "zeros_like_spec"]


def is_stateful(inner: Codec) -> bool:
    """Whether a codec carries anything from step to step."""
    return bool(inner.init(TensorSpec((1,))))


@dataclass(frozen=True)
class SenderTransform(Codec):
    """A codec that changes what is sent, not how it is read: its payloads are the inner codec's.

    The receiver needs no state to decode them and does not know of the transform.
    """

    inner: Codec

    def __post_init__(self) -> None:
        object.__setattr__(self, "inner", codec(self.inner))
        super().__post_init__()
        self._require("inner", not is_stateful(self.inner), "a codec without state of its own")

    @property
    def wants_feedback(self) -> bool:
        """No: a transform takes care of the error, or leaves it to the one around it."""
        return False

    def laws(self, spec: TensorSpec) -> Laws:
        """Those of the inner codec, of a single encode from fresh state."""
        return self.inner.laws(spec)

    def bound(self, x: Tensor, spec: TensorSpec, key: Key) -> Tensor:
        """That of the inner codec, of a single encode from fresh state."""
        return self.inner.bound(x, spec, key)

    def layout(self, spec: TensorSpec) -> Layout:
        """That of the inner codec."""
        return self.inner.layout(spec)

    def sends(self, step: int) -> Codec:
        """What the inner codec sends."""
        return self.inner.sends(step)

    def _payload(
        self, flat: Tensor, spec: TensorSpec, key: Key, residual: Tensor | None = None, decay: float = 1.0
    ) -> tuple[Payload, Tensor | None]:
        return self.inner._payload(flat, spec, key, residual, decay)

    def _values(self, payload: Payload) -> Tensor:
        return self.inner._values(payload)

    def _sum_into(self, payloads: Sequence[Payload], out: Tensor, *, add: bool) -> None:
        self.inner._sum_into(payloads, out, add=add)

    def _checked_parts(self, payload: Payload) -> tuple[Tensor, ...]:
        return self.inner._checked_parts(payload)

    # A sender transform has no parts of its own; nothing below is reached.

    def _parts(self, spec: TensorSpec) -> tuple[Part, ...]:
        raise NotImplementedError

    def _encode(self, x: Tensor, spec: TensorSpec, key: Key) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def _decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, key: Key) -> Tensor:
        raise NotImplementedError


def zeros_like_spec(spec: TensorSpec, device: torch.device | str | None) -> Tensor:
    """Float32 zeros in the shape of a tensor."""
    if not isinstance(spec, TensorSpec):
        raise ConfigError(f"`spec` must be a TensorSpec; got {type(spec).__name__}.")
    return torch.zeros(spec.shape, device=device)


def state_tensor(owner: Codec, state: State, name: str, like: Tensor) -> Tensor:
    """A float32 tensor of a state; an error if the state is not this codec's."""
    value = state.get(name) if isinstance(state, Mapping) else None
    if not isinstance(value, Tensor) or value.shape != like.shape:
        found = tuple(value.shape) if isinstance(value, Tensor) else f"{type(state).__name__} without it"
        raise ConfigError(
            f"`state` of '{owner}' must hold {name!r} of shape {tuple(like.shape)}; got {found}. "
            "States come from `codec.init(spec)`, and from each `codec.encode`."
        )
    return value
