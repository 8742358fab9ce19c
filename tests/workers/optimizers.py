"""Cases of the optimizers in docs/sharding.md, run by ranks that are real processes."""

import copy
import importlib
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire import ConfigError, GradientCompressionOptimizer, OptimizationData, ShardedOptimizerBase

from .base import main_of_cases
from .ddp import Net, batch, loss_of
from .sharded import checksum, configuration

RATIO = 0.3
STEPS = 16


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
    "prodigyopt.Prodigy": package("prodigyopt", "Prodigy", d0=1e-5),
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
        return sum(loss_of(model, 1000 + number, 0).item() for number in range(32)) / 32


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
    train(again, other, rank, 1)  # somewhere else
    other.deserialize(saved)
    train(again, other, rank, STEPS // 2, start=STEPS // 2)
    found = {"straight": checksum(model), "resumed": checksum(again), "ratio": straight.traffic.ratio}
    compressed = final_loss(model, straight)
    for optimizer in (sharded, straight, other):
        optimizer.close()
    return {"before": before, "ddp": after, "uncompressed": uncompressed, "compressed": compressed, **found,
            "parameters": checksum(model)}  # fmt: skip


def handed_over(rank, name):
    """A state of stage 1 goes on at stage 0, and in the optimizer itself."""
    make, divided = OPTIMIZERS[name], Net()
    sharded = ShardedOptimizerBase(make(divided), configuration(stage=1))
    train(divided, sharded, rank, STEPS // 2)
    plain, replicated = copy.deepcopy(divided), Net()
    inner = make(plain)
    inner.load_state_dict(sharded.full_state_dict())
    other = ShardedOptimizerBase(make(replicated), configuration(stage=0))
    other.load_state_dict(sharded._everyones_states())
    for model, optimizer in ((divided, sharded), (replicated, other), (DistributedDataParallel(plain), inner)):
        train(model, optimizer, rank, STEPS // 2, start=STEPS // 2)
    return {"parameters": checksum(divided), "replicated": checksum(replicated), "plain": checksum(plain)}


class Counting(torch.optim.SGD):
    """Keeps things in its groups, and in states with numbers as keys."""

    def __init__(self, params, lr=0.1, weight_decay=0.0):
        super().__init__(params, lr=lr, weight_decay=weight_decay)
        for group in self.param_groups:
            group.update(k=0, path=0.0)

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            group["path"] += group["lr"]
            group["lr"] *= 0.5
            for p in group["params"]:
                self.state[p].setdefault(0, {"seen": {1}})["seen"].add(group["k"])
        super().step(closure)


def in_groups(rank, stage):
    """What a step, a scheduler and the user set in groups, in turn."""
    model = Net()
    inner = Counting(model.parameters(), lr=1.0)
    before = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 1.0)  # of the optimizer that is wrapped then
    optimizer = ShardedOptimizerBase(inner, configuration(stage=stage))
    group, seen = optimizer.param_groups[0], []
    for step in range(4):
        if step == 2:
            group["lr"] = 0.25
            inner.param_groups[0]["weight_decay"] = 0.1
        train(model, optimizer, rank, 1, start=step)
        seen.append([group["k"], group["path"], group["lr"], group["weight_decay"]])
    before.step()
    seen.append(optimizer.param_groups[0]["lr"])
    whole = [id(p) for p in group["params"]] == [id(p) for p in model.parameters()]
    saved = optimizer.serialize()
    again = Net()
    other = ShardedOptimizerBase(Counting(again.parameters(), lr=1.0), configuration(stage=stage))
    other.deserialize(saved)
    state = next(iter(other.state.values()))
    return {"parameters": checksum(again), "again": checksum(model), "seen": seen, "whole": whole,
            "state": {str(key): sorted(each["seen"]) for key, each in state.items()},
            "loaded": [other.param_groups[0][name] for name in ("k", "path", "lr")]}  # fmt: skip


class Measuring(torch.optim.SGD):
    """As D-Adaptation does: a step size from the gradients of all parameters, from some step on."""

    def __init__(self, params, lr=0.1, begin=1):
        super().__init__(params, lr=lr)
        self.defaults["begin"] = begin
        for group in self.param_groups:
            group.update(begin=begin, k=0)

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            if group["k"] >= group["begin"]:
                group["d"] = sum(float(p.grad.abs().sum()) for p in group["params"] if p.grad is not None)
        super().step(closure)


def measuring(rank, stage, begin):
    model = Net()
    try:
        optimizer = ShardedOptimizerBase(Measuring(model.parameters(), begin=begin), configuration(stage=stage))
    except ConfigError as error:
        return {"words": str(error), "steps": 0}
    try:
        train(model, optimizer, rank, 20)
    except ConfigError as error:
        return {"words": str(error), "steps": optimizer.rounds}
    return {"words": "no error", "steps": optimizer.rounds}


class Hooked(torch.optim.SGD):
    """What it keeps of a parameter cannot be saved."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["when"] = print


def unsaved(rank, stage):
    model = Net()
    optimizer = ShardedOptimizerBase(Hooked(model.parameters(), lr=0.1), configuration(stage=stage))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, optimizer, rank, 3)
    try:
        optimizer.state_dict()
    except ConfigError as error:
        return {"warned": [str(each.message) for each in caught], "refused": str(error)}
    return {"refused": "no error"}


def switched(rank, stage):
    """Weights for evaluation are on all ranks, and those for training come back."""
    model = Net()
    inner = importlib.import_module("schedulefree").AdamWScheduleFree(model.parameters(), lr=0.01)
    optimizer = GradientCompressionOptimizer(inner, configuration(stage=stage), RATIO)
    train(model, optimizer, rank, 4)
    with optimizer.full_precision():
        training = torch.cat([p.detach().view(-1) for p in model.parameters()])
    found = []
    for name in ("eval", "eval", "train"):
        before = optimizer.metrics()["sent_bytes"]
        getattr(optimizer, name)()
        vector = torch.cat([p.detach().view(-1) for p in model.parameters()])
        found.append([float((vector - training).abs().max()), optimizer.metrics()["sent_bytes"] - before])
    plain = ShardedOptimizerBase(torch.optim.SGD(Net().parameters(), lr=0.1), configuration())
    plain.train()
    plain.eval()
    plain.train(False)
    return {"parameters": checksum(model), "found": found}


def whole_run(rank, stage):
    """``optimize`` validates with the weights for evaluation."""
    model, modes = Net(), []
    inner = importlib.import_module("schedulefree").AdamWScheduleFree(model.parameters(), lr=0.01)
    optimizer = GradientCompressionOptimizer(inner, configuration(stage=stage), RATIO)

    def validate(model):
        modes.append(inner.param_groups[0]["train_mode"])
        return sum(loss_of(model, 1000 + number, 0).item() for number in range(8)) / 8

    data = OptimizationData(
        model, lambda model, pair: nn.functional.cross_entropy(model(pair[0]), pair[1]), lambda step: batch(step, rank),
        steps=6, validate=validate, validate_every=2,
    )  # fmt: skip
    result = optimizer.optimize(data)
    return {"parameters": checksum(model), "modes": modes, "training": inner.param_groups[0]["train_mode"],
            "validations": result.validations}  # fmt: skip


def fewer_matrices(rank, stage, ratio):
    """One matrix, of which one rank owns everything."""
    torch.manual_seed(0)
    plain, ours = (nn.Linear(64, 64, bias=False) for _ in range(2))
    ours.load_state_dict(plain.state_dict())
    inner = torch.optim.Muon(plain.parameters(), lr=0.02)
    made = torch.optim.Muon(ours.parameters(), lr=0.02)
    optimizer = GradientCompressionOptimizer(made, configuration(stage=stage), ratio)
    for step in range(10):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * step + rank))
        for model, stepped in ((DistributedDataParallel(plain), inner), (ours, optimizer)):
            stepped.zero_grad()
            loss = (model(x) - x).square().mean()
            loss.backward()
            stepped.step()
    again = optimizer.serialize()
    optimizer.deserialize(again)
    traffic = optimizer.traffic
    dist.barrier()
    distance = float((plain.weight - ours.weight).norm() / plain.weight.norm())
    return {"parameters": checksum(ours), "ratio": traffic.ratio, "gradient_bytes": traffic.gradient_bytes,
            "weight_bytes": traffic.weight_bytes, "distance": distance}  # fmt: skip


CASES = {
    case.__name__: case
    for case in (tested, handed_over, in_groups, measuring, unsaved, switched, whole_run, fewer_matrices)
}

if __name__ == "__main__":
    main_of_cases(CASES)
