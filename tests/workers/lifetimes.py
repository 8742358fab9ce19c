"""A rank that makes things, trains with them, and looks at what stays of them: objects, descriptors and threads."""

import copy
import gc
import io
import os
import tempfile
import threading
import time
import weakref
from contextlib import contextmanager, suppress
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel

import gradwire
from gradwire.adapters import fsdp2
from gradwire.collectives import processes

from .base import main_of_cases
from .ddp import TIMEOUT_S, Net, compressed, ddp, hooks, loss_of, parameters, sgd, train

ROUNDS, PATIENCE_S = 2, 20


# What ranks make: a function returns it by name; what is to be closed is "closes".


def compression(rank, codec, transport="sockets", steps=3, telemetry=False, fails=False):
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {"GRADWIRE_TRANSPORT": transport}):
        model = ddp()
        made = gradwire.compress(model, codec, timeout_s=TIMEOUT_S, telemetry=folder if telemetry else None)
        train(model, sgd(model), range(steps), rank)
        if telemetry:
            made.telemetry.flush()
        if fails:
            with suppress(gradwire.NonFiniteError):
                (loss_of(model, 0, rank) * (float("nan") if rank == 1 else 1.0)).backward()
    return {"model": model, "parameter": model.module.layers[0].weight, "closes": made}


def auto(rank):
    return compression(rank, gradwire.Auto(patience_s=0.0), steps=15, telemetry=True)


def unclosable(rank):
    """Plain DDP, for comparison."""
    model = ddp()
    train(model, sgd(model), range(3), rank)
    return {"model": model, "parameter": model.module.layers[0].weight}


def replica(rank):
    model, made = compressed("int4")
    optimizer = sgd(model)
    made = gradwire.Replica(model, optimizer, made)
    for step in range(3):
        made.learn(loss_of(model, step, rank))
    return {"model": model, "optimizer": optimizer, "closes": made}


def sharded_model(rank):
    model = Net()
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    model = fully_shard(model, mesh=mesh)
    made = fsdp2.compress(model, "int4", "int8", timeout_s=TIMEOUT_S)
    train(model, sgd(model), range(3), rank)
    return {"model": model, "closes": made}


def optimizer(rank, make):
    model = Net()
    made = OPTIMIZERS[make](model)
    train(model, made, range(4), rank)
    return {"model": model, "closes": made}


OPTIMIZERS = {
    "GradientCompressionOptimizer": lambda m: gradwire.GradientCompressionOptimizer(torch.optim.Adam(m.parameters())),
    "ShardedOptimizerBase": lambda m: gradwire.ShardedOptimizerBase(sgd(m), gradwire.ShardingConfiguration(stage=0)),
    "LocalAccumulation": lambda m: gradwire.LocalAccumulation(sgd(m), 2, timeout_s=TIMEOUT_S),
    "LocalSGD": lambda m: gradwire.LocalSGD(sgd(m), 2, timeout_s=TIMEOUT_S),
    "DiLoCo": lambda m: gradwire.DiLoCo(sgd(m), 4, fragments=2, overlap=1, timeout_s=TIMEOUT_S),
    "DeMo": lambda m: gradwire.DeMo(m.parameters(), timeout_s=TIMEOUT_S),
}


def all_reduce_parameter(rank):
    ranks = dist.get_world_size()
    exchange = gradwire.ProcessGroupExchange.of(timeout_s=TIMEOUT_S)
    made, weights = gradwire.AllReduceParameter(1, ranks, 1000, exchange=exchange), torch.zeros(1000)
    made.init(weights)
    made.put_gradients(torch.ones(1000))
    made.aggregate_gradient_partition(ranks)
    made.send_weight_partition()
    made.get_weights(weights).result()
    return {"exchange": exchange, "closes": made}


MAKERS = {
    each.__name__: each
    for each in (compression, auto, unclosable, replica, sharded_model, optimizer, all_reduce_parameter)
}


# The cases. Each returns something for JSON.


def beyond(before):
    """Descriptors and threads that were not there before. Threads take a moment to end."""
    end = time.monotonic() + PATIENCE_S
    while (more := _beyond(before)) != NOTHING and time.monotonic() < end:
        time.sleep(0.01)
    return more


def _beyond(before):
    """Not less than nothing: the last threads of what was made first may have been there before."""
    there = now()
    names = sorted(each.name for each in there[1] - before[1])
    more = [max(0, there[i] - before[i]) for i in (0, 2)]
    return {"descriptors": more[0], "threads": names, "native_threads": more[1]}


NOTHING = {"descriptors": 0, "threads": [], "native_threads": 0}


def now():
    return len(os.listdir("/proc/self/fd")), set(threading.enumerate()), len(os.listdir("/proc/self/task"))


@contextmanager
def uncollected():
    """Without Python's garbage collector, as far as it is not called."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def lives(rank, maker, **arguments):
    """What stays when nobody closes anything; and after ``close``: while all is there, and what that alone keeps."""

    def make():
        made = MAKERS[maker](rank, **arguments)
        known.append({name: weakref.ref(each) for name, each in made.items()})
        return made

    known = []
    del make()["model" if maker == "unclosable" else "closes"]  # torch makes some things once, and keeps them
    with uncollected():
        known.clear()
        before = now()
        for _ in range(ROUNDS):
            make()
        told = {"at_once": alive(known), "deleted": left(known, before)}
        if maker == "unclosable":
            return told
        known.clear()
        before, made = now(), [make() for _ in range(ROUNDS)]
        made = [closed(each) for each in made]
        told["closed"] = beyond(before)
        made = [each["closes"] for each in made]
        told["keeps"] = left(known, before)["alive"]
        del made
        return {**told, "after": left(known, before)}


def closed(made):
    made["closes"].close()
    return made


def left(known, before):
    gc.collect()
    return {"alive": alive(known), **beyond(before)}


def alive(known):
    return sorted({name for each in known for name, reference in each.items() if reference() is not None})


def deadlines(rank):
    """A thread that calls what is late ends with what it calls it for."""
    before = now()
    made = processes._Deadlines()
    made.take(made.add(60.0, lambda: None))
    waiting = [each.name for each in now()[1] - before[1]]
    del made
    return {"waiting": waiting, **beyond(before)}


def closed_for_good(rank, codec):
    """What a step says after ``close``; what was kept back can still be saved."""
    model, made = compressed(codec)
    train(model, sgd(model), range(3), rank)
    before = sorted(made.state_dict()["states"])
    moved = made.traffic.sent_bytes, made.wire_bytes
    made.close()
    after = made.traffic.sent_bytes, made.wire_bytes
    try:
        train(model, sgd(model), range(1), rank)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    else:
        said = "nothing"
    same = sorted(made.state_dict()["states"]) == before
    return {"said": said, "same": same, "moved": moved[0] == after[0] and moved[1] <= after[1]}


def copies(rank, how, codec):
    """A copy of a compressed model trains as plain DDP does, can be compressed itself, and leaves the first alone."""
    model, first = compressed(codec)
    plain = ddp()
    train(model, sgd(model), range(3), rank)
    copied = COPIES[how](model)
    plain.module.load_state_dict(model.module.state_dict())
    train(copied, sgd(copied), range(3, 6), rank)
    train(plain, sgd(plain), range(3, 6), rank)
    told = {"as_plain": parameters(copied) == parameters(plain), "hooks": [hooks(model), hooks(copied)]}
    told["rounds"] = first.rounds
    second = gradwire.compress(copied, "int8", timeout_s=TIMEOUT_S)
    for each in (model, copied):
        train(each, sgd(each), range(6, 8), rank)
    told |= {"each": [first.rounds, second.rounds], "method": [first.method, second.method]}
    told["parameters"] = [parameters(model), parameters(copied)]
    first.close()
    second.close()
    return told


def written(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def averaged(model):
    average = AveragedModel(model)
    average.update_parameters(model)
    return average.module


COPIES = {"deepcopy": copy.deepcopy, "save": written, "average": averaged}


if __name__ == "__main__":
    main_of_cases({each.__name__: each for each in (lives, deadlines, closed_for_good, copies)})
