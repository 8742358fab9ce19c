"""``warmup:steps(...)``: a sparse codec that starts dense."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from gradwire.codecs.base import Codec, Layout
from gradwire.codecs.registry import codec, register
from gradwire.errors import ConfigError
from gradwire.transforms.base import SenderTransform
from gradwire.transforms.chain import Chain
from gradwire.wire import Key, Payload, TensorSpec


@register
@dataclass(frozen=True)
class WarmUp(SenderTransform):
    """Start dense and quarter the density stage by stage: 25%, 6.25%, ... down to the codec's own.

    The step is that of the key, so all ranks are in the same stage and a resumed run continues in its own.

    >>> import gradwire
    >>> warmup = gradwire.codec("warmup:400(topk:0.001)")
    >>> [str(warmup.stage(step)) for step in (0, 100, 350, 400)]
    ['topk:0.25', 'topk:0.0625', 'topk:0.00390625', 'topk:0.001']
    """

    id: ClassVar[str] = "warmup"
    steps: int
    start: float = field(default=0.25, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("steps", self.steps >= 1, "at least 1")
        self._require("start", 0 < self.start <= 1, "in (0, 1]")
        self._require("inner", hasattr(_sparse(self.inner), "density"), "a codec with a density, such as topk:0.001")

    @classmethod
    def examples(cls) -> tuple[Codec, ...]:
        """Plain and chained."""
        return codec("warmup:40(topk:0.01)"), codec("warmup:40(topk:0.01+int8)")

    @property
    def wants_feedback(self) -> bool:
        """As the codec inside: a warm-up keeps nothing of what is not sent."""
        return self.inner.wants_feedback

    def contractive(self) -> Codec:
        """The inner codec contractive."""
        return dataclasses.replace(self, inner=self.inner.contractive())

    @functools.cached_property
    def _stages(self) -> tuple[Codec, ...]:
        sparse: Any = _sparse(self.inner)
        stages, density = [], self.start
        while density > sparse.density:
            warm = dataclasses.replace(sparse, density=density)
            stages.append(dataclasses.replace(self.inner, carrier=warm) if isinstance(self.inner, Chain) else warm)
            density /= 4
        return (*stages, self.inner)

    def stage(self, step: int) -> Codec:
        """The codec in use at a step."""
        warm = len(self._stages) - 1
        return self._stages[min(warm, step * warm // self.steps)]

    def sends(self, step: int) -> Codec:
        """The stage."""
        return self.stage(step)

    def layout(self, spec: TensorSpec) -> Layout:
        """That of the densest stage: an upper bound."""
        layouts = [stage.layout(spec) for stage in self._stages]
        return dataclasses.replace(max(layouts, key=lambda layout: layout.nbytes), exact=len(layouts) == 1)

    def _payload(
        self, flat: Tensor, spec: TensorSpec, key: Key, residual: Tensor | None = None, decay: float = 1.0
    ) -> tuple[Payload, Tensor | None]:
        return self.stage(key.step)._payload(flat, spec, key, residual, decay)

    def _values(self, payload: Payload) -> Tensor:
        return self._stage_of(payload)._values(payload)

    def _sum_into(self, payloads: Sequence[Payload], out: Tensor, *, add: bool) -> None:
        for payload in payloads:
            self._stage_of(payload)._sum_into([payload], out, add=add)
            add = True

    def _checked_parts(self, payload: Payload) -> tuple[Tensor, ...]:
        return self._stage_of(payload)._checked_parts(payload)

    def _stage_of(self, payload: Payload) -> Codec:
        for stage in self._stages:
            if str(stage) == payload.codec:
                return stage
        stages = ", ".join(str(stage) for stage in self._stages)
        raise ConfigError(f"`payload` was encoded with {payload.codec!r}, no stage of this warm-up: {stages}.")


def _sparse(inner: Codec) -> Codec:
    return inner.carrier if isinstance(inner, Chain) else inner
