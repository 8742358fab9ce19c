"""torch's stores, by which the ranks of a group find each other."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gradwire.torch_internals import PrefixStore, TCPStore

__all__ = ["Store", "join_group", "tcp_store"]

Store = Any  # torch's type hints take no bytes, and know no host and port


def tcp_store(host: str, port: int, *, master: bool, timeout_s: float) -> Store:
    """A store that ``host`` has; ``master`` is who makes it there, at any free port if that is 0.

    >>> tcp_store("127.0.0.1", 0, master=True, timeout_s=10).port > 0
    True
    """
    return TCPStore(host, port, is_master=master, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def join_group(backend: str, store: Store, name: str, rank: int, size: int, timeout_s: float) -> None:
    """``init_process_group``, with the part of a store that has the group's name.

    >>> join_group("gloo", tcp_store("127.0.0.1", 0, master=True, timeout_s=10), "example", 0, 1, 10)
    >>> dist.get_world_size()
    1
    >>> dist.destroy_process_group()
    """
    part = PrefixStore(name, store)
    dist.init_process_group(backend, store=part, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))
