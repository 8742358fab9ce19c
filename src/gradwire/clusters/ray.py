"""Ranks that are workers of Ray Train, and the gradient coordinator as actors."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradwire.adapters import Replica
from gradwire.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from gradwire.clusters.worker import Worker, check_training
from gradwire.collectives.rank import report
from gradwire.coordinator import CoordinatorClient, ServeSettings, serve
from gradwire.errors import ConfigError
from gradwire.extras import require

__all__ = ["Coordinator", "coordinator", "trainer"]


def trainer(
    work: Callable[[Worker], Any],
    *,
    workers: int,
    codec: str = "auto",
    use_gpu: bool = False,
    resources_per_worker: Mapping[str, float] | None = None,
    run_config: Any = None,
    **options: Any,
) -> Any:
    """A ``TorchTrainer`` of Ray Train whose workers each call ``work`` with a :class:`~gradwire.clusters.Worker`.

    Checkpoints of ``worker.save`` are in Ray's storage, and a training that lost workers goes on from the last one if
    ``run_config`` has ``FailureConfig(max_failures=...)``. What the first rank reports is printed at once; Ray itself
    is told the last of it with every checkpoint and at the end, for its own ``report`` takes up to two seconds.
    ``options`` are those of :func:`gradwire.compress`.

    >>> trainer(print, workers=0)
    Traceback (most recent call last):
    gradwire.errors.ConfigError: `workers` must be a whole number of at least 1; got 0.
    """
    check_training(work, workers, codec, options)
    train = require("ray.train", purpose="gradwire.clusters.ray")
    torch_train = require("ray.train.torch", purpose="gradwire.clusters.ray")

    def loop() -> None:
        def tell(values: dict[str, Any]) -> None:
            report(worker.rank, **values)  # Ray shows it where the trainer runs
            keeper.last |= values

        keeper = _RayKeeper()
        worker = Worker(codec, keeper, tell, options=options)
        try:
            work(worker)
            train.report(keeper.last)
        finally:
            worker.close()

    return torch_train.TorchTrainer(
        loop,
        scaling_config=train.ScalingConfig(
            num_workers=workers, use_gpu=use_gpu, resources_per_worker=dict(resources_per_worker or {"CPU": 1})
        ),
        torch_config=torch_train.TorchConfig(backend="nccl" if use_gpu else "gloo"),
        run_config=run_config,
    )


class _RayKeeper:
    """Checkpoints by Ray: every rank hands in its file, and Ray puts them into one folder."""

    def __init__(self) -> None:
        self.last: dict[str, Any] = {}  # what was reported

    def save(self, replica: Replica) -> None:
        train = require("ray.train", purpose="gradwire.clusters.ray")
        with tempfile.TemporaryDirectory() as folder:
            save_checkpoint(folder, replica, shared=False)  # Ray brings the files together
            train.report({**self.last, "steps": replica.steps}, checkpoint=train.Checkpoint.from_directory(folder))

    def restore(self, replica: Replica) -> bool:
        train = require("ray.train", purpose="gradwire.clusters.ray")
        last = train.get_checkpoint()
        if last is None:
            return False
        with last.as_directory() as folder:
            found = latest_checkpoint(folder)
            assert found is not None, "Ray keeps no checkpoint that was not complete"
            load_checkpoint(found, replica)
        return True


# The gradient coordinator: a server a shard, each in an actor.


def coordinator(
    settings: ServeSettings | None = None,
    *,
    shards: int = 1,
    optimizer: Any = None,
    resources_per_shard: Mapping[str, float] | None = None,
) -> Coordinator:
    """Start the gradient coordinator as Ray actors, one a shard of the model.

    ``settings`` are those of :func:`gradwire.serve`, but for the address: each actor serves at that of its node, at any
    free port. With a ``durability.folder`` each shard keeps its own below it, and an actor that dies is started again
    by Ray at the same address, with everything that was acknowledged; a restart on another node needs a folder that
    both reach, and another client.

    >>> coordinator(shards=0)
    Traceback (most recent call last):
    gradwire.errors.ConfigError: `shards` must be at least 1; got 0.
    """
    if not isinstance(shards, int) or shards < 1:
        raise ConfigError(f"`shards` must be at least 1; got {shards!r}.")
    ray = require("ray", purpose="gradwire.clusters.ray")
    told = settings or ServeSettings()
    lasting = told.durability.folder is not None
    resources = dict(resources_per_shard or {"CPU": 1})
    actor = ray.remote(
        num_cpus=resources.pop("CPU", 0),
        num_gpus=resources.pop("GPU", 0),
        resources=resources,
        max_restarts=-1 if lasting else 0,
        max_task_retries=-1 if lasting else 0,
    )(_Shard)
    actors = [actor.remote(told, number, optimizer) for number in range(shards)]
    return Coordinator(ray, actors, ray.get([each.address.remote() for each in actors]))


class Coordinator:
    """Actors that serve a model, each a shard of it.

    >>> Coordinator(None, [], ["10.0.0.1:5000", "10.0.0.2:5000"]).addresses
    ['10.0.0.1:5000', '10.0.0.2:5000']
    """

    def __init__(self, ray: Any, actors: list[Any], addresses: list[str]) -> None:
        self._ray, self.actors, self.addresses = ray, actors, addresses

    def client(self, **options: Any) -> CoordinatorClient:
        """A client of all shards; workers elsewhere make their own, with ``addresses``."""
        return CoordinatorClient(self.addresses if len(self.addresses) > 1 else self.addresses[0], **options)

    def stop(self) -> None:
        """Finish what is there, save, and end the actors."""
        for each in self.actors:
            self._ray.get(each.stop.remote())
            self._ray.kill(each)
        self.actors = []


class _Shard:
    """An actor."""

    def __init__(self, settings: ServeSettings, number: int, optimizer: Any) -> None:
        ray = require("ray", purpose="gradwire.clusters.ray")
        host, known = ray.util.get_node_ip_address(), None
        if settings.durability.folder is not None:
            folder = Path(settings.durability.folder) / f"shard-{number}"
            folder.mkdir(parents=True, exist_ok=True)
            known = folder / "address"
            settings = replace(settings, durability=replace(settings.durability, folder=str(folder / "model")))
        before = known.read_text() if known is not None and known.exists() else ""
        address = before if before.rpartition(":")[0] == host else f"{host}:0"
        self._server = serve(replace(settings, address=address), optimizer=optimizer)
        if known is not None:
            known.write_text(self._server.address)

    def address(self) -> str:
        return self._server.address

    def stop(self) -> None:
        self._server.stop()
