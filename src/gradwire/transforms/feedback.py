"""Error feedback: what an encode loses is added to the next one."""

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
class ErrorFeedback(SenderTransform):
    """Send e = x + decay * residual and keep e - decoded as the next residual.

    With ``decay=1`` nothing is ever lost: the decoded tensors and the residual add up to the inputs. The inner codec
    is made contractive first (an unbiased one is scaled down), or the residual would grow without bound.

    The state goes in and comes out; keep the old one until the step is taken. For a tensor with NaN or Inf the state
    comes back unchanged.

    >>> import gradwire, torch
    >>> ef = gradwire.codec("ef(topk:0.5)")
    >>> x = torch.tensor([3.0, 1.0])
    >>> state = ef.init(gradwire.TensorSpec.of(x))
    >>> payload, state = ef.encode(x, state)
    >>> ef.decode(payload), state["residual"]
    (tensor([3., 0.]), tensor([0., 1.]))
    """

    id: ClassVar[str] = "ef"
    decay: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("decay", 0 < self.decay <= 1, "in (0, 1]")
        object.__setattr__(self, "inner", self.inner.contractive())

    @classmethod
    def examples(cls) -> tuple[Codec, ...]:
        """Around every kind of codec."""
        strings: tuple[str, ...] = (
            "ef(int4)",
            "ef(int2)",
            "ef(sign)",
            "ef(topk:0.01)",
            "ef(topk:0.1+int4)",
            "ef(qsgd:4)",
        )
        strings += ("ef(randomk:0.1)", "ef(threshold:1)", "ef(rotate(int3))", "ef:decay=0.9(ternary)")
        return tuple(codec(s) for s in strings)

    def init(self, spec: TensorSpec, device: torch.device | str | None = None) -> State:
        """A residual of zeros."""
        return {"residual": zeros_like_spec(spec, device)}

    def encode(self, x: Tensor, state: State = EMPTY, key: Key = DEFAULT_KEY) -> tuple[Payload, State]:
        """Encode with the residual."""
        spec = TensorSpec.of(x)
        residual = state_tensor(self, state, "residual", x)
        payload, residual = self.inner.encode_feedback(x, residual, spec, key, self.decay)
        return payload, {"residual": residual}


@register
@dataclass(frozen=True)
class EF21(SenderTransform):
    """Send the compressed difference to an estimate that sender and receivers share (Richtárik et al., 2021).

    What a rank decodes is the change of its estimate; ``finish`` adds the mean change to the mean estimate, which is
    what the optimizer uses. Needs a contractive codec, which it makes of an unbiased one.

    >>> import gradwire, torch
    >>> ef21, x = gradwire.codec("ef21(topk:0.5)"), torch.tensor([3.0, 1.0])
    >>> state = ef21.init(gradwire.TensorSpec.of(x))
    >>> for _ in range(2):
    ...     payload, state = ef21.encode(x, state)
    ...     mean, state = ef21.finish(ef21.decode(payload), state)
    >>> mean
    tensor([3., 1.])
    """

    id: ClassVar[str] = "ef21"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "inner", self.inner.contractive())

    @classmethod
    def examples(cls) -> tuple[Codec, ...]:
        """Sparse and quantized."""
        return codec("ef21(topk:0.1)"), codec("ef21(int4)")

    def init(self, spec: TensorSpec, device: torch.device | str | None = None) -> State:
        """Estimates of zeros: this rank's, and the mean."""
        return {
            "estimate": zeros_like_spec(spec, device),
            "mean": zeros_like_spec(spec, device),
        }

    def encode(self, x: Tensor, state: State = EMPTY, key: Key = DEFAULT_KEY) -> tuple[Payload, State]:
        """Encode the difference to this rank's estimate."""
        spec = TensorSpec.of(x)
        estimate = state_tensor(self, state, "estimate", x)
        difference = x.detach().to(torch.float32) - estimate
        payload, _ = self.inner._payload(difference.reshape(-1), spec, key)
        if int(payload.nonfinite):
            return payload, state
        # The very sum a receiver makes, so that sender and receivers cannot drift apart.
        estimate = estimate + self.inner._values(payload).view(x.shape)
        return payload, {"estimate": estimate, "mean": state_tensor(self, state, "mean", x)}

    def finish(self, mean: Tensor, state: State) -> tuple[Tensor, State]:
        """Add the mean change to the mean estimate."""
        total = state_tensor(self, state, "mean", mean) + mean
        return total.clone(), {**state, "mean": total}  # what the caller does to its gradient must not reach the state


def for_training(what: str | Codec) -> Codec:
    """A codec as training uses it: biased ones get error feedback, unless they have 4 bits or more.

    >>> str(for_training("topk:0.01")), str(for_training("int4")), str(for_training("qsgd:16"))
    ('ef(topk:0.01)', 'int4', 'qsgd:16')
    """
    inner = codec(what)
    return ErrorFeedback(inner) if inner.wants_feedback else inner
