"""Cases of the optimizers in docs/sharding.md, run by ranks that are real processes."""

import copy
import importlib

import torch
from torch.nn.parallel import DistributedDataParallel

from gradwire import GradientCompressionOptimizer, ShardedOptimizerBase

from .base import main_of_cases
from .ddp import Net, loss_of
from .sharded import checksum, configuration

RATIO = 0.3
STEPS = 24


def everything(model):
    return list(model.parameters())


def matrices(model):
    """Muon takes nothing else; the rest of the model is frozen."""
    for p in model.parameters():
        p.requires_grad_(p.dim() == 2)
    return [p for p in model.parameters() if p.requires_grad]


def torchs(name, **settings):
    return lambda model: getattr(torch.optim, name)(everything(model), **settings)


def package(module, name, parameters=everything, **settings):
    def make(model):
        found = importlib.import_module(module)
        if module == "heavyball":
            found.utils.compile_mode = None  # compiling it takes minutes
        return getattr(found, name)(parameters(model), **settings)

    return make


OPTIMIZERS = {
    "torch.optim.Adadelta": torchs("Adadelta", lr=0.5),
    "torch.optim.Adafactor": torchs("Adafactor", lr=0.02),
    "torch.optim.Adagrad": torchs("Adagrad", lr=0.02),
    "torch.optim.Adam": torchs("Adam", lr=3e-3),
    "torch.optim.AdamW": torchs("AdamW", lr=3e-3),
    "torch.optim.Adamax": torchs("Adamax", lr=3e-3),
    "torch.optim.ASGD": torchs("ASGD", lr=0.1),
    "torch.optim.Muon": lambda model: torch.optim.Muon(matrices(model), lr=0.01),
    "torch.optim.NAdam": torchs("NAdam", lr=3e-3),
    "torch.optim.RAdam": torchs("RAdam", lr=3e-3),
    "torch.optim.RMSprop": torchs("RMSprop", lr=1e-3),
    "torch.optim.Rprop": torchs("Rprop", lr=1e-3),
    "torch.optim.SGD": torchs("SGD", lr=0.05, momentum=0.9, nesterov=True),
    "heavyball.Muon": package("heavyball", "Muon", matrices, lr=0.01),
    "heavyball.SOAP": package("heavyball", "SOAP", lr=3e-3),
    "lion_pytorch.Lion": package("lion_pytorch", "Lion", lr=1e-3),
    "prodigyopt.Prodigy": package("prodigyopt", "Prodigy"),
    "schedulefree.AdamWScheduleFree": package("schedulefree", "AdamWScheduleFree", lr=0.01),
    "schedulefree.RAdamScheduleFree": package("schedulefree", "RAdamScheduleFree", lr=0.01),
    "schedulefree.SGDScheduleFree": package("schedulefree", "SGDScheduleFree", lr=0.5),
}


def mode(optimizer, name):
    """ScheduleFree must be told whether it trains."""
    if hasattr(optimizer, name):
        getattr(optimizer, name)()


def train(model, optimizer, rank, steps, start=0):
    torch.manual_seed(start)  # heavyball's Muon rounds at random
    mode(optimizer, "train")
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()


def final_loss(model, optimizer):
    """Of the same batches on every rank."""
    mode(optimizer, "eval")
    with torch.no_grad():
        return sum(loss_of(model, 1000 + batch, 0).item() for batch in range(32)) / 32


def tested(rank, name, stage):
    """As DDP with that optimizer, uncompressed and compressed; and a training that is saved and loaded on its way."""
    make = OPTIMIZERS[name]

    plain = Net()
    inner = make(plain)
    before = final_loss(plain, inner)
    train(DistributedDataParallel(plain), inner, rank, STEPS)
    after = final_loss(plain, inner)

    ours = Net()
    sharded = ShardedOptimizerBase(make(ours), configuration(stage=stage))
    train(ours, sharded, rank, STEPS)
    uncompressed = final_loss(ours, sharded)

    model = Net()
    straight = GradientCompressionOptimizer(make(model), configuration(stage=stage), RATIO)
    train(model, straight, rank, STEPS // 2)
    saved = straight.serialize()
    train(model, straight, rank, STEPS // 2, start=STEPS // 2)
    again = Net()
    other = GradientCompressionOptimizer(make(again), configuration(stage=stage), RATIO)
    train(again, other, rank, 2)  # somewhere else
    other.deserialize(saved)
    train(again, other, rank, STEPS // 2, start=STEPS // 2)
    found = {"straight": checksum(model), "resumed": checksum(again), "ratio": straight.traffic.ratio}
    exported = straight.full_state_dict()
    make(copy.deepcopy(model)).load_state_dict(exported)
    compressed = final_loss(model, straight)
    for optimizer in (sharded, straight, other):
        optimizer.close()
    return {"before": before, "ddp": after, "uncompressed": uncompressed, "compressed": compressed, **found,
            "parameters": checksum(model)}  # fmt: skip


CASES = {case.__name__: case for case in (tested,)}

if __name__ == "__main__":
    main_of_cases(CASES)
