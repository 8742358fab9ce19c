"""How an optimizer is sharded, and how its ranks talk."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch.distributed as dist

from gradwire.errors import ConfigError
from gradwire.sharding import StragglerPolicy

__all__ = ["ShardingConfiguration"]


@dataclass(frozen=True)
class ShardingConfiguration:
    """What is divided among the ranks of a process group.

    ``stage`` 0: nothing, every rank has the whole optimizer state. 1: the optimizer's state. 2: gradients too; a
    gradient is freed as soon as it is sent.

    ``auto_sync_gradients``: gradients are sent while ``backward`` still runs; accumulate under
    ``optimizer.no_sync()``. Otherwise they are sent by ``optimizer.step()``.

    ``gradients`` and ``weights`` name codecs to use instead of those that a compression ratio asks for.
    ``partition`` says what a rank owns: slices of ``"elements"``, whole ``"tensors"``, which optimizers need that look
    at a whole matrix (Adafactor), or ``"auto"``: elements if a trial of the optimizer shows that they make no
    difference. An optimizer that cannot be tried needs ``"tensors"``, or stage 0.

    >>> ShardingConfiguration.low_bandwidth().bucket_bytes > ShardingConfiguration.high_bandwidth().bucket_bytes
    True
    """

    process_group: dist.ProcessGroup | None = None
    stage: Literal[0, 1, 2] = 1
    bucket_bytes: int = 8 << 20
    auto_sync_gradients: bool = True
    gradients: str | None = None
    weights: str | None = None
    feedback: bool = True
    partition: Literal["auto", "elements", "tensors"] = "auto"
    clip_norm: float | None = None  # of the mean gradient, over all ranks
    clip_value: float | None = None  # of each element of the mean gradient
    nonfinite: Literal["raise", "skip"] = "raise"  # what a step with NaN or Inf does, on every rank
    scaler: Any = field(default=None, compare=False)  # a torch.amp.GradScaler, if gradients are scaled
    stragglers: StragglerPolicy | None = None
    seed: int = 0
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        group, scaled = self.process_group, self.scaler is None or callable(getattr(self.scaler, "get_scale", None))
        for name, right, allowed in (
            ("process_group", isinstance(group, dist.ProcessGroup | None), "a torch.distributed.ProcessGroup, or None"),
            ("stage", self.stage in (0, 1, 2) and not isinstance(self.stage, bool), "0, 1 or 2"),
            ("scaler", scaled, "a torch.amp.GradScaler, or None"),
            ("feedback", isinstance(self.feedback, bool), "True or False"),
            ("auto_sync_gradients", isinstance(self.auto_sync_gradients, bool), "True or False"),
            ("gradients", isinstance(self.gradients, str | None), "the name of a codec, or None"),
            ("weights", isinstance(self.weights, str | None), "the name of a codec, or None"),
            ("bucket_bytes", isinstance(self.bucket_bytes, int) and self.bucket_bytes >= 1024, "at least 1024"),
            ("partition", self.partition in ("auto", "elements", "tensors"), "'auto', 'elements' or 'tensors'"),
            ("clip_norm", _positive(self.clip_norm), "above 0, or None"),
            ("clip_value", _positive(self.clip_value), "above 0, or None"),
            ("nonfinite", self.nonfinite in ("raise", "skip"), "'raise' or 'skip'"),
            ("seed", isinstance(self.seed, int) and 0 <= self.seed < 1 << 64, "a whole number in [0, 2**64)"),
            ("stragglers", isinstance(self.stragglers, StragglerPolicy | None), "a StragglerPolicy, or None"),
            ("stage", self.stage != 0 or self.stragglers is None, "1 or 2 to leave out stragglers"),
        ):
            if not right:
                raise ConfigError(f"`{name}` must be {allowed}; got {getattr(self, name)!r}.")

    @classmethod
    def default(cls, **changes: Any) -> ShardingConfiguration:
        """Optimizer state sharded, gradients sent beside ``backward``."""
        return replace(cls(), **changes)

    @classmethod
    def high_bandwidth(cls, **changes: Any) -> ShardingConfiguration:
        """For 10 Gbit/s and more: small buckets that start early, weights in 16 bits."""
        return replace(cls(bucket_bytes=4 << 20, weights="bf16"), **changes)

    @classmethod
    def low_bandwidth(cls, **changes: Any) -> ShardingConfiguration:
        """For 100 Mbit/s and less: large buckets, gradients sharded too."""
        return replace(cls(bucket_bytes=32 << 20, stage=2), **changes)


def _positive(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf)
