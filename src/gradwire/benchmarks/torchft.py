"""torchft's LocalSGD and DiLoCo, as its users set them up on processors: a lighthouse, and a store for each replica."""

from __future__ import annotations

import importlib
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore

from gradwire.collectives.sockets import own_address
from gradwire.errors import ConfigError

__all__ = ["TORCHFT", "torchft_rounds"]

TORCHFT: Final = re.compile(r"torchft (localsgd|diloco) (\d+)")
"""``torchft diloco 20``: a round every 20 steps."""

_TIMEOUT: Final = timedelta(seconds=600)
_OUTER: Final[dict[str, Any]] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}  # as DiLoCo's paper has it


@contextmanager
def torchft_rounds(kind: str, every: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """The context in which ``optimizer.step()`` also takes part in rounds; it gives torchft's manager."""
    try:
        torchft: Any = importlib.import_module("torchft")
        local_sgd: Any = importlib.import_module("torchft.local_sgd")
        coordination: Any = importlib.import_module("torchft.coordination")
        groups: Any = importlib.import_module("torchft.process_group")
    except ImportError as error:
        raise ConfigError(f"`--method torchft {kind} {every}` needs torchft: pip install torchft ({error}).") from error
    rank, ranks = dist.get_rank(), dist.get_world_size()
    address = own_address()[1]
    lighthouse = None
    if rank == 0:
        lighthouse = coordination.LighthouseServer(bind=f"{address}:0", min_replicas=ranks, join_timeout_ms=60_000)
    port = torch.tensor([int(lighthouse.address().rsplit(":", 1)[1]) if lighthouse is not None else 0])
    dist.broadcast(port, 0)
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=groups.ProcessGroupGloo(timeout=_TIMEOUT),
        load_state_dict=lambda state: model.load_state_dict(state),
        state_dict=model.state_dict,
        min_replica_size=ranks,
        use_async_quorum=False,
        timeout=_TIMEOUT,
        quorum_timeout=_TIMEOUT,
        connect_timeout=_TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        lighthouse_addr=f"http://{host}:{int(port)}",
        replica_id=f"replica_{rank}",
        hostname=address,
        init_sync=False,  # all replicas begin alike
    )
    if kind == "localsgd":
        context = local_sgd.LocalSGD(manager, model, optimizer, sync_every=every)
    else:
        outer = torch.optim.SGD(model.parameters(), **_OUTER)
        context = local_sgd.DiLoCo(manager, [model], optimizer, outer, sync_every=every, pin_memory=False)
    try:
        # It tells the others where its store is by the host's name, which those of a lab share.
        with patch.object(socket, "gethostname", lambda: address), context:
            yield manager
        dist.barrier()  # the lighthouse must outlive everybody's last round
    finally:
        manager.shutdown(wait=False)
        if lighthouse is not None:
            lighthouse.shutdown()
