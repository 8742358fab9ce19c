"""Ranks that are barrier tasks of Spark, each with the rows of its partition."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from secrets import token_hex
from typing import Any, Final, TypeVar

import torch.distributed as dist

from gradwire.clusters.board import Board
from gradwire.clusters.stores import join_group
from gradwire.clusters.worker import FolderKeeper, Worker, check_training
from gradwire.errors import ConfigError
from gradwire.extras import require

__all__ = ["run"]

T = TypeVar("T")

_LISTEN_S: Final = 0.1


def run(
    work: Callable[[Worker], T],
    data: Any,
    *,
    workers: int,
    codec: str = "auto",
    checkpoints: str | Path | None = None,
    notify: Callable[[dict[str, Any]], Any] = lambda _: None,
    timeout_s: float = 300.0,
    **options: Any,
) -> T:
    """Train on Spark: in as many barrier tasks as ``workers``, each with its part of a DataFrame or RDD as its rows.

    Call it in the driver. ``work`` gets a :class:`~gradwire.clusters.Worker`; the tasks run at the same time, and
    Spark starts all of them again if one is lost: they go on from the last checkpoint. Checkpoints are in the memory of
    the driver, so no file system need be shared; give ``checkpoints``, a folder that all machines reach, if they are
    too large for that. ``notify`` is called with what the first rank reports. ``options`` are those of
    :func:`gradwire.compress`. Returns what ``work`` returned on the first rank. All tasks must fit into the cluster at
    once; Spark waits some ten minutes for that.

    >>> run(print, None, workers=0)
    Traceback (most recent call last):
    gradwire.errors.ConfigError: `workers` must be a whole number of at least 1; got 0.
    """
    check_training(work, workers, codec, options)
    if not callable(notify):
        raise ConfigError(f"`notify` must be a function of what is reported; got {type(notify).__name__}.")
    require("pyspark", purpose="gradwire.clusters.spark")
    rows = data if hasattr(data, "mapPartitions") else getattr(data, "rdd", None)
    if rows is None or not hasattr(rows, "mapPartitions"):
        raise ConfigError(f"`data` must be a DataFrame or an RDD; got {type(data).__name__}.")
    if rows.getNumPartitions() != workers:
        rows = rows.repartition(workers)
    context = rows.context
    if context.master.startswith("local") and context.defaultParallelism < workers:
        raise ConfigError(
            f"`workers` must be at most {context.defaultParallelism} on {context.master}, for all tasks run at the "
            f"same time; got {workers}."
        )
    board = Board.open(context.getConf().get("spark.driver.host"), timeout_s)
    address = board.address
    folder = None if checkpoints is None else str(checkpoints)

    def task(part: Iterable[Any]) -> Iterator[tuple[int, T]]:
        return _task(work, part, address, codec, folder, timeout_s, options)

    ended = threading.Event()
    listener = threading.Thread(target=_listen, args=(board, notify, ended), daemon=True, name="gradwire-spark")
    listener.start()
    try:
        # By a shuffle: Spark tries a barrier stage again only if another stage follows it.
        results: dict[int, T] = dict(rows.barrier().mapPartitions(task).partitionBy(1).collect())
    finally:
        ended.set()
        listener.join()
    return results[0]


def _listen(board: Board, notify: Callable[[dict[str, Any]], Any], ended: threading.Event) -> None:
    last = False
    while not last:
        last = ended.wait(_LISTEN_S)
        for values in board.heard():
            notify(values)


def _task(
    work: Callable[[Worker], T],
    rows: Iterable[Any],
    address: tuple[str, int],
    codec: str,
    checkpoints: str | None,
    timeout_s: float,
    options: Mapping[str, Any],
) -> Iterator[tuple[int, T]]:
    """One rank."""
    context = require("pyspark", purpose="gradwire.clusters.spark").BarrierTaskContext.get()
    board = Board.reach(*address, timeout_s)
    group = context.allGather(token_hex(8))[0]  # the first rank's: no group before had it
    rank, size = context.partitionId(), len(context.getTaskInfos())
    join_group("gloo", board.store, f"group/{group}", rank, size, timeout_s)
    keeper = board if checkpoints is None else FolderKeeper(checkpoints)
    worker = Worker(codec, keeper, board.say if rank == 0 else _quiet, rows, {"timeout_s": timeout_s, **options})
    try:
        result = work(worker)
    finally:
        worker.close()
        dist.destroy_process_group()
    yield rank, result


def _quiet(values: dict[str, Any]) -> None:
    """Only the first rank is heard."""
