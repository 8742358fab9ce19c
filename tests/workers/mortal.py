"""A rank that trains until something happens, and says what in a file. It is forked from a server that has torch."""

import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import gradwire
from gradwire import PeerError
from gradwire.collectives import agree, connect
from gradwire.collectives.rank import RENDEZVOUS, run_rank

from .base import leave


def live(folder, rank, ranks, settings):
    """The life of a rank. Its files: ``step-R`` once it trains, ``said-R`` with what ended that."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    if settings.get("port"):
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(settings["port"])}
    else:
        os.environ[RENDEZVOUS] = f"{folder}/rendezvous"
    errors = os.open(f"{folder}/stderr-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(errors, 2)
    way = {"train": train, "overtaken": overtaken}[settings.get("way", "train")]
    run_rank(lambda rank, ranks: way(Path(folder), rank, settings), timeout_s=settings["timeout_s"])


def overtaken(folder, rank, settings):
    """Rank 2 has sent to rank 1 all it waits for, and nothing to rank 0; rank 1 waits for rank 0 only."""
    peers = connect(timeout_s=settings["timeout_s"])
    agree(peers, "all is well")
    letter = torch.ones(1000, dtype=torch.uint8)
    if rank == 2:
        swap = peers.swap({}, 8, "the exchange")
        swap.send(1, letter)
        swap.wait()
        (folder / f"training-{rank}").touch()
        time.sleep(1000)
    started = time.monotonic()
    try:
        if rank == 1:
            peers.swap({2: 1000}, 8, "the exchange").wait()
        (folder / f"training-{rank}").touch()
        started = time.monotonic()
        peers.swap({2 if rank == 0 else 0: 1000}, 8, "the exchange").wait()
    except PeerError as error:
        leave(folder / f"said-{rank}", f"PeerError after {time.monotonic() - started:.1f} s in step 0: {error}")
        os._exit(1)  # like a program that did not expect it: with it go its connections, and the store if it kept it


class Slow(Dataset):
    """Its one sample never comes."""

    def __len__(self):
        return 1

    def __getitem__(self, _):
        time.sleep(1000)


kept = []


def fork(kind):
    """A child that lives on when the rank is killed; its process id, once it runs."""
    if kind == "loader":
        kept.append(iter(DataLoader(Slow(), num_workers=1, multiprocessing_context="fork")))  # it ends its workers
        return kept[0]._workers[0].pid
    if child := os.fork():
        return child
    time.sleep(1000)
    os._exit(0)


def train(folder, rank, settings):
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)), bucket_cap_mb=0.02
    )
    gradwire.compress(model, settings["codec"], timeout_s=settings["timeout_s"])
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank))
    if settings.get("child"):
        (folder / f"child-{rank}").write_text(str(fork(settings["child"])))
    step = 0
    started = time.monotonic()
    try:
        while True:
            started = time.monotonic()
            model.zero_grad()
            model(x).square().mean().backward()
            step += 1
            if step == 5:  # DDP has rebuilt its buckets: from here on all it sends goes through gradwire
                (folder / f"training-{rank}").touch()
    except Exception as error:
        name = "PeerError" if type(error) is PeerError else repr(type(error))
        leave(folder / f"said-{rank}", f"{name} after {time.monotonic() - started:.1f} s in step {step}: {error}")
