"""``dgc(...)``: momentum correction for sparse codecs (deep gradient compression, Lin et al., 2018)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.codecs.base import DEFAULT_KEY, EMPTY, Codec, State
from gradwire.codecs.registry import codec, register
from gradwire.transforms.base import SenderTransform, state_tensor, zeros_like_spec
from gradwire.wire import Key, Payload, TensorSpec


@register
@dataclass(frozen=True)
class MomentumCorrection(SenderTransform):
    """Accumulate velocity instead of gradients, and forget it where it was sent.

    u = momentum * u + x; v = v + u; send the codec's part of v and take it out of v; where something was sent,
    u = 0 (factor masking). Use it with plain SGD: the momentum lives here, not in the optimizer.

    >>> import gradwire, torch
    >>> dgc, x = gradwire.codec("dgc:momentum=0.5(topk:0.5)"), torch.tensor([3.0, 1.0])
    >>> state = dgc.init(gradwire.TensorSpec.of(x))
    >>> payload, state = dgc.encode(x, state)
    >>> payload, state = dgc.encode(torch.zeros(2), state)
    >>> dgc.decode(payload), state["velocity"]
    (tensor([0.0000, 1.5000]), tensor([0., 0.]))
    """

    id: ClassVar[str] = "dgc"
    momentum: float = field(default=0.9, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("momentum", 0 <= self.momentum < 1, "in [0, 1)")
        object.__setattr__(self, "inner", self.inner.contractive())

    @classmethod
    def examples(cls) -> tuple[Codec, ...]:
        """With exact and with quantized values, and with warm-up."""
        return tuple(codec(s) for s in ("dgc(topk:0.01)", "dgc(topk:0.1+int8)", "dgc(warmup:40(topk:0.01))"))

    def init(self, spec: TensorSpec, device: torch.device | str | None = None) -> State:
        """Velocity and accumulation of zeros."""
        return {
            "velocity": zeros_like_spec(spec, device),
            "unsent": zeros_like_spec(spec, device),
        }

    def encode(self, x: Tensor, state: State = EMPTY, key: Key = DEFAULT_KEY) -> tuple[Payload, State]:
        """Encode the accumulated velocity."""
        spec = TensorSpec.of(x)
        velocity = state_tensor(self, state, "velocity", x) * self.momentum + x.detach().to(torch.float32)
        before = state_tensor(self, state, "unsent", x)
        payload, unsent = self.inner.encode_feedback(velocity, before, spec, key)
        if int(payload.nonfinite):
            return payload, state
        sent = self.inner._values(payload).view(x.shape) != 0
        return payload, {"velocity": torch.where(sent, 0.0, velocity), "unsent": unsent}
