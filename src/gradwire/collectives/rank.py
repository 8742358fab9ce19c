"""One rank as a process: joining the group, and leaving it."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, NoReturn

import torch
import torch.distributed as dist

__all__ = ["RENDEZVOUS", "report", "run_rank"]

RENDEZVOUS: Final = "GRADWIRE_RENDEZVOUS"
"""Environment variable with the path of the file through which ranks of one machine find each other; without it they
meet as torchrun says, by MASTER_ADDR and MASTER_PORT."""


def report(rank: int, **event: Any) -> None:
    """Print an event as a line of JSON, if this is rank 0: ``run_workers`` reads them."""
    if rank == 0:
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()


def run_rank(body: Callable[[int, int], None], *, timeout_s: float = 60.0) -> NoReturn:
    """Join the process group the environment describes, run ``body(rank, ranks)``, and end the process.

    The process ends without finalizing the interpreter: gloo's own thread may still hold the last reference to a
    tensor, and dropping it then aborts the process (seen in one of seven runs).
    """
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    status = 1
    try:
        file = os.environ.get(RENDEZVOUS)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{file}" if file else "env://",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=timeout_s),
        )
        body(rank, ranks)
        dist.destroy_process_group()
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
