"""How people exchange gradients with DDP today: torch's own hooks, and one as written by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.nn.parallel import DistributedDataParallel

from gradwire.errors import ConfigError

__all__ = ["PEERS", "attach", "bucket_cap_mb"]

_TOPK_DENSITY: Final = 0.01
POWERSGD_START: Final = 10
"""Steps before PowerSGD starts; torch's default of 1,000 is longer than the trainings here."""

# Renamed in torch 2.13; the old name warns there, the new one is missing before.
_all_gather: Final = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _plain(model: DistributedDataParallel, start: int) -> None:
    """DDP as it comes."""


def _fp16(model: DistributedDataParallel, start: int) -> None:
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)


def _bf16(model: DistributedDataParallel, start: int) -> None:
    # Under its own name DDP refuses it without NCCL.
    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        return default_hooks.bf16_compress_hook(state, bucket)

    _register(model, None, hook)


def _powersgd(rank: int, model: DistributedDataParallel, start: int) -> None:
    state = powerSGD_hook.PowerSGDState(None, rank, start_powerSGD_iter=max(2, start))
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def _quantized(model: DistributedDataParallel, start: int) -> None:
    vars(quantization_hooks)["dist"] = _GlooGather()
    model.register_comm_hook(None, quantization_hooks.quantization_pertensor_hook)


class _GlooGather:
    """torch.distributed as torch's quantization hooks expect it: with gloo they end in an IndexError, for its future
    of an all-gather holds the tensors and not a list of them.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_gather(self, tensors: list[Tensor], *arguments: Any, **options: Any) -> Any:
        work = dist.all_gather(tensors, *arguments, **options)
        future = work.get_future().then(lambda done: [torch.stack(done.value())])
        return type("Work", (), {"get_future": lambda self: future})()


def _topk(model: DistributedDataParallel, start: int) -> None:
    """Top-k with error feedback, as one writes it: torch.topk of the bucket, all-gather of values and indices."""
    residuals: dict[int, Tensor] = {}

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        gradient, ranks = bucket.buffer(), dist.get_world_size()
        residual = residuals.get(bucket.index())
        if residual is None or residual.shape != gradient.shape:  # buckets are rebuilt once
            residual = residuals[bucket.index()] = torch.zeros_like(gradient)
        residual += gradient
        kept = torch.topk(residual.abs(), max(1, int(_TOPK_DENSITY * residual.numel())), sorted=False).indices
        values = residual[kept]
        residual[kept] = 0
        all_values = torch.empty(ranks * len(values))
        all_indices = torch.empty(ranks * len(values), dtype=torch.int32)
        _all_gather(all_values, values)
        _all_gather(all_indices, kept.int())
        gradient.zero_().index_add_(0, all_indices.long(), all_values, alpha=1 / ranks)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(gradient)
        return done

    _register(model, None, hook)


def _register(model: DistributedDataParallel, state: Any, hook: Callable[..., Any]) -> None:
    # DDP wants to see the types themselves, and annotations are postponed here.
    hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}  # type: ignore[attr-defined]
    model.register_comm_hook(state, hook)


PEERS: Final[dict[str, Callable[[DistributedDataParallel, int], None]]] = {
    "ddp": _plain,
    "ddp fp16": _fp16,
    "ddp bf16": _bf16,
    "ddp powersgd 1": functools.partial(_powersgd, 1),
    "ddp powersgd 2": functools.partial(_powersgd, 2),
    "ddp powersgd 4": functools.partial(_powersgd, 4),
    "ddp int8": _quantized,
    "ddp topk 1%": _topk,
}
"""The peers by name."""


def bucket_cap_mb(name: str) -> float | None:
    """Hooks that chain collectives need a single bucket: with gloo those of two run in any order, and abort or hang."""
    return 1000.0 if name.startswith("ddp powersgd") or name == "ddp int8" else None


def attach(name: str, model: DistributedDataParallel, start: int = POWERSGD_START) -> None:
    """Give a model the hook of a peer.

    >>> attach("nothing", None)
    Traceback (most recent call last):
    gradwire.errors.ConfigError: `name` must be one of ddp, ddp fp16, ...
    """
    if name not in PEERS:
        raise ConfigError(f"`name` must be one of {', '.join(PEERS)}; got {name!r}.")
    PEERS[name](model, start)
