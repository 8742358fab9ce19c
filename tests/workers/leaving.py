"""A rank that trains until another fails it, and ends as a user's script does: by the error, uncaught.

usage: python -m tests.workers.leaving FOLDER CODEC TIMEOUT_S [late]; its files: ``training-R`` once it trains,
``stopped-R`` with the time on the machine's clock and the error. ``late``: it compresses only once there is a file
``go``, and ``training-R`` is there before.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire

from .base import leave


def main():
    folder, codec, timeout_s = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Linear(64, 64))
    step = 0
    try:
        if sys.argv[4:] == ["late"]:
            (folder / f"training-{rank}").touch()
            while not (folder / "go").exists():
                time.sleep(0.01)
        gradwire.compress(model, codec, timeout_s=timeout_s)
        while True:
            model.zero_grad()
            model(torch.randn(8, 64)).square().mean().backward()
            step += 1
            if step == 5:
                (folder / f"training-{rank}").touch()
    except Exception as error:
        # The clock counts from the start of the machine, the same for all of its processes.
        leave(folder / f"stopped-{rank}", f"{time.monotonic()} {type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main()
