"""Ranks that torchrun has started, on one machine or several, with restarts and changing numbers."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import torch.distributed as dist

from gradwire.clusters.stores import Store, join_group, tcp_store
from gradwire.clusters.worker import FolderKeeper, Worker, check_training
from gradwire.errors import ConfigError, PeerError

__all__ = ["join", "run"]

T = TypeVar("T")

_NEEDED: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_POLL_S: Final = 0.02


def run(
    work: Callable[[Worker], T],
    *,
    codec: str = "auto",
    checkpoints: str | Path | None = None,
    backend: str = "gloo",
    timeout_s: float = 300.0,
    **options: Any,
) -> T:
    """Train in a process that torchrun has started: join the others, call ``work`` with a worker, leave.

    ``checkpoints`` is a folder that all ranks share. With ``torchrun --max-restarts`` a training whose ranks were lost
    starts again, as many as are left, from the last checkpoint in it. ``options`` are those of
    :func:`gradwire.compress`. Returns what ``work`` returns.

    >>> run(lambda worker: worker.rank)
    Traceback (most recent call last):
    gradwire.errors.ConfigError: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT must be set: start the program by torchrun.
    """
    check_training(work, 1, codec, options)
    keeper = FolderKeeper(checkpoints) if checkpoints is not None else None
    join(backend, timeout_s=timeout_s)
    worker = Worker(codec, keeper, options={"timeout_s": timeout_s, **options})
    try:
        return work(worker)
    finally:
        worker.close()
        dist.destroy_process_group()


def join(backend: str = "gloo", *, timeout_s: float = 300.0) -> None:
    """``init_process_group`` for ranks of torchrun that may be restarted, and may have become more or fewer.

    torchrun keeps one store for all restarts, and what a group that has failed left in it misleads the next one: it
    hangs, or fails, in one of three restarts. Here every group has a part of the store of its own.

    >>> import os
    >>> os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    >>> join()
    >>> dist.get_world_size()
    1
    >>> dist.destroy_process_group()
    >>> for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"): del os.environ[name]
    """
    if any(name not in os.environ for name in _NEEDED):
        raise ConfigError(f"{', '.join(_NEEDED)} must be set: start the program by torchrun.")
    if dist.is_initialized():
        raise ConfigError("torch.distributed is initialized already: leave that to gradwire.clusters.torchrun.")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's own is there already
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = tcp_store(*where, master=rank == 0 and not kept, timeout_s=timeout_s)
    join_group(backend, store, _meet(store, rank, size, timeout_s), rank, size, timeout_s)


def _meet(store: Store, rank: int, size: int, timeout_s: float) -> str:
    """A name for this group that no other one has had, the same on all of its ranks.

    The number of restarts is none: agents of torchrun that came later count from zero. So each rank leaves a word that
    nobody else has, and the first rank answers it. Words of ranks that are no more are answered too, for nobody.
    """
    here = f"gradwire/{size}"
    if rank:
        word = secrets.token_hex(8)
        store.set(f"{here}/{rank}", word)
        name = str(store.get(f"{here}/{word}").decode())
        store.set(f"{name}/{rank}", "here")
        return name
    name, answered = f"{here}/{secrets.token_hex(8)}", dict[int, bytes]()
    missing, end = set(range(1, size)), time.monotonic() + timeout_s
    while missing:
        for each in sorted(missing):
            if store.check([f"{name}/{each}"]):
                missing.discard(each)
            elif store.check([f"{here}/{each}"]) and (left := store.get(f"{here}/{each}")) != answered.get(each):
                answered[each] = left
                store.set(f"{here}/{left.decode()}", name)
        if missing and time.monotonic() > end:
            raise PeerError(f"the ranks {sorted(missing)} of {size} have not come for {timeout_s:g} s.")
        time.sleep(_POLL_S if missing else 0)
    return name
