"""What a training sees of the rank that runs it, whatever engine has started it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.adapters import Replica, compress
from gradwire.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from gradwire.collectives import method
from gradwire.collectives.peers import tell
from gradwire.collectives.rank import report
from gradwire.errors import ConfigError

__all__ = ["FolderKeeper", "Keeper", "Worker", "check_training"]

_TAG: Final = 3


def check_training(work: object, workers: object, codec: object, options: Mapping[str, Any]) -> None:
    """Raise :class:`~gradwire.errors.ConfigError` unless this can be run: before anything is started for it.

    >>> check_training(print, 0, "int4", {})
    Traceback (most recent call last):
    gradwire.errors.ConfigError: `workers` must be a whole number of at least 1; got 0.
    """
    if not callable(work):
        raise ConfigError(f"`work` must be a function of a worker; got {type(work).__name__}.")
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
        raise ConfigError(f"`workers` must be a whole number of at least 1; got {workers!r}.")
    if not isinstance(codec, str):
        raise ConfigError(f"`codec` must be a string such as 'int8' or 'auto'; got {type(codec).__name__}.")
    if codec != "auto":
        method(codec)
    known = {name for name, each in signature(compress).parameters.items() if each.kind is Parameter.KEYWORD_ONLY}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ConfigError(f"`options` must be those of gradwire.compress: {', '.join(sorted(known))}; got {unknown}.")


class Keeper(Protocol):
    """Where the checkpoints of a training are. Every rank calls its methods, between steps."""

    def save(self, replica: Replica) -> None:
        """Keep a replica as it is now."""
        ...

    def restore(self, replica: Replica) -> bool:
        """Bring a replica to where it was last kept; false if it never was."""
        ...


class FolderKeeper:
    """Checkpoints in a folder that all ranks reach under one name.

    >>> FolderKeeper("checkpoints").folder.name
    'checkpoints'
    """

    def __init__(self, folder: str | Path) -> None:
        if not isinstance(folder, str | os.PathLike):
            raise ConfigError(f"`checkpoints` must be the path of a folder; got {type(folder).__name__}.")
        self.folder = Path(folder)

    def save(self, replica: Replica) -> None:
        """A checkpoint of this step; the last two stay."""
        save_checkpoint(self.folder, replica)

    def restore(self, replica: Replica) -> bool:
        """From the last complete one."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            writable = os.access(self.folder, os.W_OK)
        except OSError:
            writable = False
        able = tell(replica.peers, "" if writable else "no", _TAG, "the search for a checkpoint")
        if any(able):
            ranks = [rank for rank, each in enumerate(able) if each]
            raise ConfigError(
                f"`checkpoints` must be a folder that can be written to; {self.folder} cannot by ranks {ranks}."
            )
        last = latest_checkpoint(self.folder)
        found = tell(replica.peers, "" if last is None else last.name, _TAG, "the search for a checkpoint")
        if len(set(found)) > 1:
            raise ConfigError(
                f"`checkpoints` {self.folder} must be a folder that all ranks share; the last checkpoint in it is, by "
                f"rank: {', '.join(each or 'none' for each in found)}."
            )
        if last is None:
            return False
        load_checkpoint(last, replica)
        return True


class Worker:
    """A rank of a training: who it is, and what makes a model and an optimizer train together with the other ranks.

    Engines make it and hand it to the function that trains: :func:`gradwire.clusters.torchrun.run`,
    :func:`gradwire.clusters.ray.trainer` and :func:`gradwire.clusters.spark.run` take the same one. torch's process
    group is there by then.

    >>> import torch, torch.distributed as dist
    >>> def train(worker):
    ...     model = torch.nn.Linear(128, 64)
    ...     replica = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ...     while replica.steps < 2:  # a restarted training begins at the step that was saved
    ...         loss = replica.learn(replica.model(torch.ones(1, 128)).square().mean())
    ...         worker.report(step=replica.steps)
    ...         worker.save(replica)
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> train(Worker("int4"))
    {"step": 1}
    {"step": 2}
    >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        codec: str,
        keeper: Keeper | None = None,
        tell: Callable[[dict[str, Any]], None] | None = None,
        rows: Iterable[Any] = (),
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.rows = rows
        """What the engine has given this rank to train on: the rows of its partition, on Spark."""
        self._codec, self._keeper, self._options = codec, keeper, dict(options or {})
        self._tell = tell
        self._replicas: list[Replica] = []

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, also: Mapping[str, Any] | None = None
    ) -> Replica:
        """Wrap a model in DDP, compress its gradients, and go on from the last checkpoint if there is one.

        ``also`` are further objects to be saved, such as a scheduler or a scaler.
        """
        if isinstance(model, DistributedDataParallel) or not isinstance(model, nn.Module):
            raise ConfigError(f"`model` must be a module that is not wrapped yet; got {type(model).__name__}.")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(f"`optimizer` must be one of torch's; got {type(optimizer).__name__}.")
        own = set(model.parameters())
        if not all(each in own for group in optimizer.param_groups for each in group["params"]):
            raise ConfigError("`optimizer` must be of the model's parameters; it has others.")
        parameter = next(model.parameters(), None)
        devices = [parameter.device] if parameter is not None and parameter.device.type == "cuda" else None
        wrapped = DistributedDataParallel(model, device_ids=devices)
        replica = Replica(wrapped, optimizer, compress(wrapped, self._codec, **self._options), also)
        self._replicas.append(replica)
        if self._keeper is not None:
            self._keeper.restore(replica)
        return replica

    def save(self, replica: Replica) -> None:
        """Keep a checkpoint, if the engine was told to; every rank calls it, between steps."""
        if self._keeper is not None:
            self._keeper.save(replica)

    def report(self, **values: Any) -> None:
        """Tell whoever watches, of the first rank: numbers and strings, by name."""
        try:
            json.dumps(values)
        except TypeError as error:
            raise ConfigError(f"what is reported must be numbers and strings: {error}; got {values!r:.200}.") from None
        if self._tell is None:
            report(self.rank, **values)
        else:
            self._tell(values)

    def close(self) -> None:
        """End the connections of what was prepared; engines call it."""
        while self._replicas:
            self._replicas.pop().close()
