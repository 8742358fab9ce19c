"""A rank of a group that others leave, by SIGKILL, and join."""

import json
import os
import signal
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from gradwire import PeerError

from .base import leave
from .ddp import Net, checksum, loss_of
from .local import made

FAILS, JOINED, END = 3, 7, 14  # times every parameter has been exchanged: one dies then, one joins, and all end


def times(settings, number):
    return number * settings["how"].get("fragments", 1)


def live(folder, rank, ranks, settings):
    """Train in one group after another; leave in the folder what came of it."""
    (Path(folder) / f"training-{rank}").touch()
    torch.set_num_threads(1)
    folder = Path(folder)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        said = newcomer(folder, settings) if rank == 3 else member(folder, rank, settings)
        leave(folder / f"result-{rank}", json.dumps(said))
    except Exception as error:
        leave(folder / f"said-{rank}", f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    os._exit(0)


def meet(folder, generation, rank, ranks):
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous-{generation}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=40),
    )


def one_step(model, optimizer, step, rank):
    optimizer.zero_grad()
    loss = loss_of(model, step, rank)
    loss.backward()
    optimizer.step()
    return loss.item()


def die(optimizer, how, after_s=0.0):
    """At once, or when this rank's part of the exchange is on its way."""
    if how == "exchange":
        exchange = optimizer._exchanges["differences"]
        start = exchange.start

        def started(*arguments):
            start(*arguments)
            time.sleep(after_s)
            os.kill(os.getpid(), signal.SIGKILL)

        exchange.start = started
    else:
        os.kill(os.getpid(), signal.SIGKILL)


def member(folder, rank, settings):
    meet(folder, 0, rank, 3)
    model = Net()
    optimizer = made(model, "diloco", "sgd", every=3, outer_momentum=0.5, **settings["how"])
    losses, faults, kept, step = [], [], True, 0
    while optimizer.round < times(settings, JOINED):
        if rank == 1 and optimizer.round >= times(settings, FAILS) and optimizer.steps % 3 == 2:
            die(optimizer, settings["die"], settings.get("after_s", 0.0))
        try:
            losses.append(one_step(model, optimizer, step, rank))
        except PeerError as error:
            faults.append(str(error))
            local = checksum(model.parameters())
            meet(folder, 1, rank // 2, 2)
            before = optimizer.round
            optimizer.regroup()
            kept = optimizer.round > before or local == checksum(model.parameters())
        step += 1
    meet(folder, 2, 1 + rank // 2, 3)
    optimizer.regroup()
    return finished(model, optimizer, step, rank, losses, times(settings, END)) | {"faults": faults, "kept": kept}


def newcomer(folder, settings):
    meet(folder, 2, 0, 3)
    model = Net()
    with torch.no_grad():
        model.layers[0].weight.zero_()
    optimizer = made(model, "diloco", "sgd", every=3, outer_momentum=0.5, join=True, **settings["how"])
    joined_at = optimizer.round
    return finished(model, optimizer, 0, 3, [], times(settings, END)) | {"joined_at": joined_at}


def finished(model, optimizer, step, rank, losses, end):
    while optimizer.round < end:
        losses.append(one_step(model, optimizer, step, rank))
        step += 1
    optimizer.synchronize()
    said = {"agreed": checksum(optimizer.agreed), "parameters": checksum(model.parameters()), "losses": losses,
            "round": optimizer.round, "steps": optimizer.steps}  # fmt: skip
    optimizer.close()
    return said
