"""The other ranks of a torch.distributed process group."""

from __future__ import annotations

import atexit
import os
import time
from functools import cache
from importlib.util import find_spec
from typing import Final

import torch.distributed as dist

from gradwire.collectives.gloo import GlooPeers
from gradwire.collectives.processes import ProcessPeers, with_store
from gradwire.collectives.sockets import SocketPeers
from gradwire.errors import ConfigError
from gradwire.torch_internals import default_store

__all__ = ["connect"]

_LONGEST_S: Final = 1e6
_TRANSPORT: Final = "GRADWIRE_TRANSPORT"
_LEAVE_S: Final = 0.05


@cache
def _leave_in_peace() -> None:
    """Let the process end as it should, however it ends: registered once.

    A thread of gloo's drops the last collective's tensors, for which it needs the interpreter. If that is finalizing
    already, the process aborts ("terminate called without an active exception") and its launcher counts a training that
    is over as failed: one exit of three right after a collective, when something still holds the group.
    """
    atexit.register(time.sleep, _LEAVE_S)


def connect(group: dist.ProcessGroup | None = None, *, timeout_s: float = 300.0) -> ProcessPeers:
    """Connect to the ranks of a process group of any backend. Every rank of it must call this, in the same order.

    Messages go over TCP connections of gradwire's own, or over gloo's with ``GRADWIRE_TRANSPORT=gloo`` in the
    environment and where the native core is not built. A rank that is silent for ``timeout_s`` counts as stuck.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> connect().size
    1
    >>> dist.destroy_process_group()
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError("torch.distributed is not initialized: call torch.distributed.init_process_group first.")
    number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not number or not 0 < timeout_s <= _LONGEST_S:
        raise ConfigError(f"`timeout_s` must be above 0 and at most {_LONGEST_S:g}; got {timeout_s!r}.")
    transport = os.environ.get(_TRANSPORT) or ("sockets" if find_spec("gradwire._native") else "gloo")
    if transport not in ("sockets", "gloo"):
        raise ConfigError(f"{_TRANSPORT} must be 'sockets' or 'gloo'; got {transport!r}.")
    group = group if group is not None else dist.group.WORLD
    assert group is not None
    _leave_in_peace()
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)

    def meet() -> ProcessPeers:
        # The store counts, not the process: in a group that was made anew some ranks are older than others.
        call = default_store().add(f"gradwire/{group.group_name}/calls/{rank}", 1)
        name = f"gradwire/{group.group_name}/{call}"
        if transport == "gloo":
            return GlooPeers.of(rank, group, name, timeout_s)
        return SocketPeers.of(rank, len(ranks), group, name, timeout_s)

    return with_store(meet, timeout_s, f"rank {rank} cannot connect")
