"""What is timed: a model, how it is trained with each method, and what that method counts."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.adapters import compress
from gradwire.benchmarks import hooks
from gradwire.collectives import PowerSGD, method
from gradwire.errors import ConfigError
from gradwire.optim import GradientCompressionOptimizer, ShardingConfiguration
from gradwire.optim.elementwise import settings_of
from gradwire.tasks import Task

__all__ = ["COMPUTE", "SHARDING_PEERS", "Rig", "check_method", "make_rig", "powersgd_of"]

COMPUTE: Final = "compute only"
"""The method that sends nothing."""

SHARDING_PEERS: Final = ("zero", "deepspeed 1", "deepspeed 2")
"""Optimizers whose state is sharded: torch's ZeroRedundancyOptimizer in DDP, and DeepSpeed's stages."""

_SHARDED: Final = re.compile(r"sharded (0?\.\d+|1)(?: stage (\d))?")
_TIMEOUT_S: Final = 300.0


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class Rig:
    """A training."""

    model: nn.Module
    replica: nn.Module  # what the loss is computed with
    step: Callable[[Tensor], None]  # from a loss to new weights
    sent_bytes: Callable[[], int | None] = _nothing  # of the last step
    wire_bytes: Callable[[], int | None] = _nothing  # so far, as the kernel counts them


def powersgd_of(name: str) -> PowerSGD | None:
    """The PowerSGD a name stands for, if it is one of ours."""
    if name in hooks.PEERS or name in SHARDING_PEERS or _SHARDED.fullmatch(name):
        return None
    how = method(name)
    return how if isinstance(how, PowerSGD) else None


def check_method(name: str) -> None:
    """Raise :class:`~gradwire.errors.ConfigError` unless a method has that name.

    >>> check_method("sharded 0.1 stage 2")
    """
    if name not in hooks.PEERS and name not in SHARDING_PEERS and not _SHARDED.fullmatch(name):
        if name.startswith("sharded"):
            raise ConfigError(f"`--method` must be like 'sharded 0.1' or 'sharded 0.1 stage 2'; got {name!r}.")
        method(name)


@contextmanager
def make_rig(task: Task, name: str, start: int | None) -> Iterator[Rig]:
    """A fresh training by a method; ``start`` is the step at which PowerSGD begins, if it is not to be its own."""
    model = task.model()
    sharded = _SHARDED.fullmatch(name)
    if name == COMPUTE:
        yield Rig(model, model, _stepping(task.optimizer(model)))
    elif name in hooks.PEERS:
        replica = DistributedDataParallel(model, bucket_cap_mb=hooks.bucket_cap_mb(name))
        hooks.attach(name, replica, hooks.POWERSGD_START if start is None else start)
        yield Rig(model, replica, _stepping(task.optimizer(model)))
    elif name == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when it is imported

        inner = task.optimizer(model)
        zero = ZeroRedundancyOptimizer(model.parameters(), type(inner), **settings_of(inner))
        yield Rig(model, DistributedDataParallel(model), _stepping(zero))
    elif name.startswith("deepspeed"):
        with redirect_stdout(sys.stderr):  # where it logs; ours has the results
            rig = _deepspeed(task, model, int(name.split()[1]))
        yield rig
    elif sharded:
        config = ShardingConfiguration(stage=int(sharded[2] or 1), timeout_s=_TIMEOUT_S)  # type: ignore[arg-type]
        ours = GradientCompressionOptimizer(task.optimizer(model), config, float(sharded[1]))
        yield Rig(
            model,
            model,
            _stepping(ours),
            lambda: ours.traffic.gradient_bytes + ours.traffic.weight_bytes,
            lambda: ours.exchange.peers.wire_bytes,
        )
        ours.close()
    else:
        how = method(name)
        if isinstance(how, PowerSGD) and start is not None:
            how = PowerSGD(how.rank, how.factors, start, how.alternate)
        replica = DistributedDataParallel(model)
        compression = compress(replica, how, timeout_s=_TIMEOUT_S)
        yield Rig(
            model,
            replica,
            _stepping(task.optimizer(model)),
            lambda: compression.traffic.sent_bytes,
            lambda: compression.wire_bytes,
        )
        compression.close()


def _stepping(optimizer: torch.optim.Optimizer) -> Callable[[Tensor], None]:
    def step(loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def _deepspeed(task: Task, model: nn.Module, stage: int) -> Rig:
    try:
        deepspeed: Any = importlib.import_module("deepspeed")
    except ImportError as error:
        raise ConfigError(f"`--method deepspeed {stage}` needs deepspeed: pip install deepspeed ({error}).") from error
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=task.optimizer(model),
        config={
            "train_micro_batch_size_per_gpu": task.batch_size,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        },
    )

    def step(loss: Tensor) -> None:
        engine.backward(loss)
        engine.step()

    return Rig(model, engine, step)
