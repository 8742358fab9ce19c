"""What is timed: a model, how it is trained with each method, and what that method counts."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.adapters import compress
from gradwire.benchmarks import hooks
from gradwire.benchmarks.torchft import TORCHFT, torchft_rounds
from gradwire.collectives import Method, PowerSGD, method
from gradwire.errors import ConfigError
from gradwire.optim import (
    DeMo,
    DiLoCo,
    GradientCompressionOptimizer,
    LocalAccumulation,
    LocalSGD,
    ShardingConfiguration,
)
from gradwire.optim.elementwise import settings_of
from gradwire.planner import Event, Plan
from gradwire.tasks import Task

__all__ = ["AGAIN", "AUTO", "COMPUTE", "SHARDING_PEERS", "Rig", "check_method", "make_rig", "powersgd_of"]

COMPUTE: Final = "compute only"
"""The method that sends nothing."""

AUTO: Final = "auto"
"""The method that chooses among the others."""

SHARDING_PEERS: Final = ("zero", "deepspeed 1", "deepspeed 2")
"""Optimizers whose state is sharded: torch's ZeroRedundancyOptimizer in DDP, and DeepSpeed's stages."""

AGAIN: Final = " again"
"""After a method's name: the same once more, which shows what a comparison can tell."""

_ROUNDS: Final = re.compile(r"(accumulate|localsgd|diloco|demo)(?::(.*))?")
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
    plan: Callable[[], Plan | None] = _nothing  # of ``auto``
    events: Callable[[], list[Event]] = list  # what ``auto`` has done
    rounds: Callable[[], int] = field(default_factory=lambda: count().__next__)  # another number when all hold the same


def powersgd_of(name: str) -> PowerSGD | None:
    """The PowerSGD a name stands for, if it is one of ours."""
    name = name.removesuffix(AGAIN)
    how = method(name) if _is_codec(name) else None
    return how if isinstance(how, PowerSGD) else None


def _is_codec(name: str) -> bool:
    """Whether a name is that of a codec, or should be."""
    others = (AUTO, *hooks.PEERS, *SHARDING_PEERS)
    return name not in others and not any(kind.fullmatch(name) for kind in (_SHARDED, _ROUNDS, TORCHFT))


def check_method(name: str) -> None:
    """Raise :class:`~gradwire.errors.ConfigError` unless a method has that name.

    >>> check_method("sharded 0.1 stage 2")
    >>> check_method("diloco:every=20,codec=int4")
    >>> check_method("ddp again")  # the same method a second time: how far apart are these two?
    """
    if name == AUTO + AGAIN:
        raise ConfigError(f"`--method` must not be {name!r}: what 'auto' finds, the other one would take up.")
    name = name.removesuffix(AGAIN)
    if rounds := _ROUNDS.fullmatch(name):
        _options(rounds[1], rounds[2])
    if _is_codec(name):
        if name.startswith("sharded"):
            raise ConfigError(f"`--method` must be like 'sharded 0.1' or 'sharded 0.1 stage 2'; got {name!r}.")
        method(name)


@contextmanager
def make_rig(task: Task, name: str, start: int | None) -> Iterator[Rig]:
    """A fresh training by a method; ``start`` is the step at which PowerSGD begins, if it is not to be its own."""
    name = name.removesuffix(AGAIN)
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
    elif peer := TORCHFT.fullmatch(name):
        optimizer = task.optimizer(model)
        with torchft_rounds(peer[1], int(peer[2]), model, optimizer) as manager:
            yield Rig(model, model, _stepping(optimizer), rounds=manager.current_step)
    elif rounds := _ROUNDS.fullmatch(name):
        yield from _local_update(task, model, rounds[1], rounds[2])
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
        how: str | Method = name if name == AUTO else method(name)
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
            lambda: compression.plan,
            lambda: compression.events,
        )
        compression.close()


def _options(kind: str, text: str | None) -> dict[str, Any]:
    """``every=20,codec=topk:0.03+int2``, as arguments."""
    options: dict[str, Any] = {}
    for part in filter(None, (text or "").split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"`--method {kind}:...` must be name=value, with commas between; got {part!r}.")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    if "every" not in options and kind != "demo":
        raise ConfigError(f"`--method {kind}:every=...` must say how many steps are between exchanges; got {text!r}.")
    return options


def _local_update(task: Task, model: nn.Module, kind: str, text: str | None) -> Iterator[Rig]:
    options = _options(kind, text)
    try:
        optimizer: LocalAccumulation | LocalSGD | DiLoCo | DeMo
        if kind == "demo":
            optimizer = DeMo(model.parameters(), **{"lr": task.learning_rate, **options}, timeout_s=_TIMEOUT_S)
        else:
            wrapper = {"accumulate": LocalAccumulation, "localsgd": LocalSGD, "diloco": DiLoCo}[kind]
            optimizer = wrapper(task.optimizer(model), **options, timeout_s=_TIMEOUT_S)
    except TypeError as error:
        raise ConfigError(f"`--method {kind}:{text}`: {error}.") from None
    yield Rig(model, model, _stepping(optimizer), lambda: optimizer.traffic.last_bytes, rounds=lambda: optimizer.round)
    optimizer.close()


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
