"""Cases of sharded optimizers, run by ranks that are real processes."""

import contextlib
import copy
import math
import os
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import (
    ConfigError,
    GradientCompressionOptimizer,
    NonFiniteError,
    ShardedOptimizerBase,
    ShardingConfiguration,
)

from .base import main_of_cases
from .ddp import Branches, Net, batch, loss_of

TIMEOUT_S = 20


class Lion(torch.optim.Optimizer):
    """As third parties write them: signs of an interpolation, no foreach."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                one, two = group["betas"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_((state["exp_avg"] * one + p.grad * (1 - one)).sign_(), alpha=-group["lr"])
                state["exp_avg"].mul_(two).add_(p.grad, alpha=1 - two)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=3e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.01),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=3e-3, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=3e-3, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.02),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.02),
    "lion": lambda p: Lion(p, lr=1e-3),
}


def checksum(model):
    found = 0
    for p in model.parameters():
        found = zlib.crc32(p.detach().numpy().tobytes(), found)
    return f"{found:08x}"


def configuration(**changes):
    return ShardingConfiguration(**{"timeout_s": TIMEOUT_S, "bucket_bytes": 40_000, **changes})


def wrapped(model, optimizer="adamw", ratio=None, flags=(True, False), **changes):
    inner = OPTIMIZERS[optimizer](model.parameters())
    if ratio is None:
        return ShardedOptimizerBase(inner, configuration(**changes))
    return GradientCompressionOptimizer(inner, configuration(**changes), ratio, *flags)


def train(model, optimizer, rank, steps, start=0, **arguments):
    losses = []
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss = loss_of(model, step, rank, **arguments)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def like_ddp(rank, optimizer, stage, steps=50, partition="auto"):
    plain, ours = Net(), Net()
    replica, inner = DistributedDataParallel(plain), OPTIMIZERS[optimizer](plain.parameters())
    train(replica, inner, rank, steps)
    sharded = wrapped(ours, optimizer, stage=stage, partition=partition)
    train(ours, sharded, rank, steps)
    pairs = list(zip(plain.parameters(), ours.parameters(), strict=True))
    return {
        "equal": all(torch.equal(a, b) for a, b in pairs),
        "largest": max(float((a - b).abs().max()) for a, b in pairs),
        "whole": sharded.whole,
        "parameters": checksum(ours),
    }


def trained(rank, steps=60, **how):
    """Loss, bits and bytes of a training."""
    model = Net()
    optimizer = wrapped(model, **how)
    losses = train(model, optimizer, rank, steps)
    traffic = optimizer.traffic
    legs = {
        "gradients": traffic.gradient_bytes / max(1, traffic.dense_gradient_bytes),
        "weights": traffic.weight_bytes / max(1, traffic.dense_weight_bytes),
    }
    return {"parameters": checksum(model), "first": losses[0], "last": sum(losses[-5:]) / 5, "legs": legs,
            "ratio": traffic.ratio}  # fmt: skip


def accumulated(rank, stage, auto):
    """Two half batches, as one whole one."""
    one, two = Net(), Net()
    once = wrapped(one, "sgd", stage=stage)
    twice = wrapped(two, "sgd", stage=stage, auto_sync_gradients=auto)
    for step in range(5):
        x, target = batch(step, rank)
        once.zero_grad()
        nn.functional.cross_entropy(one(x), target).backward()
        once.step()
        twice.zero_grad()
        with twice.no_sync():
            (nn.functional.cross_entropy(two(x[:4]), target[:4]) / 2).backward()
        (nn.functional.cross_entropy(two(x[4:]), target[4:]) / 2).backward()
        twice.step()
    pairs = zip(one.parameters(), two.parameters(), strict=True)
    return {"parameters": checksum(two), "largest": max(float((a - b).abs().max()) for a, b in pairs)}


def twice_without_no_sync(rank):
    model = Net()
    made = wrapped(model)  # kept: without it nothing is sent
    try:
        for _ in range(2):
            loss_of(model, 0, rank).backward()
    except ConfigError as error:
        return str(error)
    return f"no error in step {made.steps}"


def clipped(rank, stage, how):
    """As clip_grad_norm_ of plain DDP's gradients."""
    plain, ours = Net(), Net()
    replica, inner = DistributedDataParallel(plain), OPTIMIZERS["sgd"](plain.parameters())
    config = {"configured": {"clip_norm": 0.05}, "value": {"clip_value": 0.001}}.get(how, {})
    optimizer, norms = wrapped(ours, "sgd", stage=stage, **config), []
    for step in range(5):
        inner.zero_grad()
        loss_of(replica, step, rank).backward()
        if how == "value":
            nn.utils.clip_grad_value_(plain.parameters(), 0.001)
            norm = torch.zeros(())
        else:
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        inner.step()
        optimizer.zero_grad()
        loss_of(ours, step, rank).backward()
        mine = optimizer.clip_grad_norm_(0.05) if how == "called" else float(norm)
        norms.append(abs(mine - float(norm)))
        optimizer.step()
    pairs = zip(plain.parameters(), ours.parameters(), strict=True)
    largest = max(float((a - b).abs().max()) for a, b in pairs)
    return {"parameters": checksum(ours), "largest": largest, "norms": max(norms)}


def scheduled(rank, stage):
    """Param groups of their own learning rates, and a scheduler."""
    results = []
    for sharded in (False, True):
        model = Net()
        groups = [
            {"params": list(model.layers[:2].parameters()), "lr": 1e-2},
            {"params": list(model.layers[2:].parameters()), "weight_decay": 0.1},
        ]
        inner = torch.optim.AdamW(groups, lr=1e-3)
        optimizer = ShardedOptimizerBase(inner, configuration(stage=stage)) if sharded else inner
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[1e-2, 3e-3], total_steps=20)
        replica = model if sharded else DistributedDataParallel(model)
        for step in range(15):
            optimizer.zero_grad()
            loss_of(replica, step, rank).backward()
            optimizer.step()
            scheduler.step()
        results.append(torch.cat([p.detach().view(-1) for p in model.parameters()]))
    return {"equal": torch.equal(*results), "parameters": checksum(model)}


def with_closure(rank):
    one, two = Net(), Net()
    plain, closed = wrapped(one), wrapped(two)
    train(one, plain, rank, 3)
    told = []
    for step in range(3):

        def closure(step=step):
            closed.zero_grad()
            loss = loss_of(two, step, rank)
            loss.backward()
            return loss

        told.append(float(closed.step(closure)))
    return {"parameters": checksum(one), "again": checksum(two), "losses": told}


def scaled(rank, stage, auto, ratio=None):
    """A GradScaler whose scale overflows on one rank in the third step: all skip it, and all scales agree."""
    model = Net()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    given = {"scaler": scaler} if auto else {}
    optimizer = wrapped(model, ratio=ratio, stage=stage, auto_sync_gradients=auto, **given)
    plain, reference = Net(), None
    reference = wrapped(plain, ratio=ratio, stage=stage)
    scales = []
    for step in range(6):
        optimizer.zero_grad()
        loss = loss_of(model, step, rank) * (math.inf if step == 2 and rank == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        if step != 2:
            reference.zero_grad()
            loss_of(plain, step, rank).backward()
            reference.step()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return {"parameters": checksum(model), "scales": scales, "steps": optimizer.steps, "skipped": optimizer.skipped,
            "largest": max(float((a - b).abs().max()) for a, b in pairs)}  # fmt: skip


def scaled_without_telling(rank):
    model = Net()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = wrapped(model)
    scaler.scale(loss_of(model, 0, rank)).backward()
    try:
        scaler.step(optimizer)
    except ConfigError as error:
        return str(error)
    return "no error"


def branches(rank, stage, unused):
    """A part of the model that no rank uses on some steps, or only one rank: as plain DDP treats it."""
    plain, ours = Branches(), Branches()
    replica = DistributedDataParallel(plain, find_unused_parameters=True)
    inner, optimizer = OPTIMIZERS["adamw"](plain.parameters()), wrapped(ours, stage=stage)
    for step in range(8):
        middle = step % 3 != 1 if unused == "by all" else (step % 3 != 1 or rank == 0)
        inner.zero_grad()
        loss_of(replica, step, rank, middle).backward()
        inner.step()
        optimizer.zero_grad()
        loss_of(ours, step, rank, middle).backward()
        optimizer.step()
    pairs = zip(plain.parameters(), ours.parameters(), strict=True)
    return {"parameters": checksum(ours), "largest": max(float((a - b).abs().max()) for a, b in pairs)}


def no_gradients(rank):
    """A rank without any gradient does not leave the others waiting."""
    model = Net()
    optimizer = wrapped(model, "sgd")
    for step in range(3):
        optimizer.zero_grad()
        if rank != 1 or step != 1:
            loss_of(model, step, rank).backward()
        optimizer.step()
    return {"parameters": checksum(model), "steps": optimizer.steps}


def nonfinite(rank, stage, policy, ratio):
    model = Net()
    optimizer = wrapped(model, ratio=ratio, stage=stage, nonfinite=policy)
    train(model, optimizer, rank, 2)
    before, words = optimizer.state_dict(), "no error"
    before = gradwire.tree.from_bytes(gradwire.tree.to_bytes(before))
    weights = checksum(model)
    optimizer.zero_grad()
    (loss_of(model, 2, rank) * (math.nan if rank == 1 else 1.0)).backward()
    try:
        optimizer.step()
    except NonFiniteError as error:
        words = str(error)
    after = optimizer.state_dict()
    kept = all(
        gradwire.tree.equal(before[name], after[name]) for name in ("pieces", "residuals", "owned", "codec_states")
    )
    unchanged = weights == checksum(model)
    train(model, optimizer, rank, 2, start=3)
    return {"parameters": checksum(model), "words": words, "kept": kept, "unchanged": unchanged,
            "skipped": optimizer.skipped}  # fmt: skip


def resumed(rank, folder, how, stage, ratio=0.1, optimizer="adamw", **more):
    """Six steps; and three, a checkpoint, and three more in a new optimizer."""
    model = Net()
    straight = wrapped(model, optimizer, ratio=ratio, stage=stage, **more)
    train(model, straight, rank, 3)
    saved = straight.serialize() if how == "bytes" else straight.state_dict()
    if how == "torch":
        torch.save(saved, f"{folder}/{rank}")
        saved = torch.load(f"{folder}/{rank}", weights_only=True)
    elif how == "dict":
        saved = gradwire.tree.from_bytes(gradwire.tree.to_bytes(saved))
    train(model, straight, rank, 3, start=3)
    again = Net()
    other = wrapped(again, optimizer, ratio=ratio, stage=stage, **more)
    train(again, other, rank, 1)  # somewhere else
    (other.deserialize if how == "bytes" else other.load_state_dict)(saved)
    train(again, other, rank, 3, start=3)
    return {"parameters": checksum(model), "again": checksum(again), "steps": [straight.steps, other.steps]}


def saved(rank, folder, stage, ratio, optimizer="adamw", steps=3, feedback=True, **more):
    model = Net()
    made = wrapped(model, optimizer, ratio=ratio, stage=stage, feedback=feedback, **more)
    train(model, made, rank, steps)
    Path(f"{folder}/saved-{rank}").write_bytes(made.serialize())
    residual = sum(float(r.double().sum()) for r in made.state_dict()["residuals"].values())
    owned = sum(float(r["residual"].double().sum()) for r in made.state_dict()["owned"].values())
    full = made.full_state_dict()
    with made.full_precision():
        exact = [p.detach().double().sum().item() for p in model.parameters()]
    moments = sum(float(v.double().sum()) for s in full["state"].values() for v in s.values() if torch.is_tensor(v))
    return {"parameters": checksum(model), "residual": residual, "owned": owned, "moments": moments, "exact": exact}


def loaded(rank, folder, before, stage, ratio, optimizer="adamw", feedback=True, **more):
    model = Net()
    made = wrapped(model, optimizer, ratio=ratio, stage=stage, feedback=feedback, **more)
    states = [Path(f"{folder}/saved-{r}").read_bytes() for r in range(before)]
    made.deserialize(states)
    start = checksum(model)
    residual = sum(float(r.double().sum()) for r in made.state_dict()["residuals"].values())
    full = made.full_state_dict()
    moments = sum(float(v.double().sum()) for s in full["state"].values() for v in s.values() if torch.is_tensor(v))
    with made.full_precision():
        exact = [p.detach().double().sum().item() for p in model.parameters()]
    losses = train(model, made, rank, 20, start=3)
    return {"start": start, "residual": residual, "moments": moments, "parameters": checksum(model), "exact": exact,
            "losses": [losses[0], sum(losses[-5:]) / 5], "steps": made.steps}  # fmt: skip


def words_of(call):
    try:
        call()
    except (ConfigError, gradwire.WireError) as error:
        return str(error)
    return "no error"


def refused(rank, folder):
    """What is said of states that cannot be loaded."""

    model = Net()
    made = wrapped(model, ratio=0.1)
    train(model, made, rank, 1)
    state = made.state_dict()
    other = {**state, "ranks": 7}
    alike = {**state, "rank": state["rank"] + 1}
    sgd = wrapped(Net(), "sgd", ratio=0.1)
    small = ShardedOptimizerBase(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), configuration())
    return {
        "ranks": words_of(lambda: made.load_state_dict(other)),
        "rank": words_of(lambda: made.load_state_dict(alike)),
        "wrapped": words_of(lambda: sgd.load_state_dict(state)),
        "shapes": words_of(lambda: small.load_state_dict(state)),
        "junk": words_of(lambda: made.deserialize(b"junk")),
        "nothing": words_of(lambda: made.load_state_dict({})),
        "missing": words_of(lambda: made.load_state_dict({k: v for k, v in state.items() if k != "pieces"})),
    }


def synchronized(rank, stage):
    """Optimizer state that one rank has changed."""
    model = Net()
    made = wrapped(model, stage=stage)
    train(model, made, rank, 2)
    before = made.full_state_dict()
    if rank == 1:
        for state in made.wrapped.state.values():
            state["step"] += 5
            if stage == 0:
                state["exp_avg"].mul_(3)
    made.synchronize_optimizer_state()
    after = made.full_state_dict()
    # Of a parameter in pieces, all owners have what the first has.
    agreed = all(
        float(piece["state"]["step"]) == float(after["state"][int(place)]["step"])
        for place, pieces in made.state_dict()["pieces"].items()
        for piece in pieces
    )
    train(model, made, rank, 2, start=2)
    same = all(
        torch.equal(before["state"][p][name], after["state"][p][name])
        for p in before["state"]
        for name in ("exp_avg", "exp_avg_sq")
    )
    return {"parameters": checksum(model), "same": same, "agreed": agreed}


def exported(rank, stage):
    """The whole state, taken over by the plain optimizer."""
    model = Net()
    made = wrapped(model, stage=stage, gradients="none", weights="none")
    train(model, made, rank, 3)
    plain = Net()
    plain.load_state_dict(model.state_dict())
    inner = OPTIMIZERS["adamw"](plain.parameters())
    inner.load_state_dict(made.full_state_dict())
    replica = DistributedDataParallel(plain)
    train(replica, inner, rank, 3, start=3)
    train(model, made, rank, 3, start=3)
    return {"parameters": checksum(model), "again": checksum(plain)}


def wrapped_after_training(rank, stage):
    """An optimizer that has moments already."""
    one, two = Net(), Net()
    for model in (one, two):
        inner = OPTIMIZERS["adamw"](model.parameters())
        replica = DistributedDataParallel(model)
        train(replica, inner, rank, 3)
        if model is one:
            train(replica, inner, rank, 3, start=3)
        else:
            train(model, ShardedOptimizerBase(inner, configuration(stage=stage)), rank, 3, start=3)
    return {"parameters": checksum(two), "again": checksum(one)}


def first_ranks_weights(rank):
    torch.manual_seed(rank)
    model = nn.Linear(20, 20)
    made = ShardedOptimizerBase(torch.optim.SGD(model.parameters(), lr=0.1), configuration())
    return {"parameters": checksum(model), "steps": made.steps}


def scaled_gradients(rank):
    """Two ranks whose gradients are scaled 1 and 2 step like one rank at 1.5."""
    model, alone = Net(), Net()
    made, plain = wrapped(model, "sgd"), OPTIMIZERS["sgd"](alone.parameters())
    for step in range(3):
        made.zero_grad()
        (loss_of(model, step, 0) * (rank + 1)).backward()
        made.step()
        plain.zero_grad()
        (loss_of(alone, step, 0) * 1.5).backward()
        plain.step()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return {"parameters": checksum(model), "largest": max(float((a - b).abs().max()) for a, b in pairs)}


def different(rank, what):
    model = Net()
    changes = {"stage": {"stage": 2 if rank else 1}, "ratio": {"ratio": 0.2 if rank else 0.1}}[what]
    try:
        wrapped(model, **{"ratio": 0.1, **changes})
    except gradwire.PeerError as error:
        return str(error)
    return "no error"


def half(rank, stage):
    """Parameters in bfloat16, with masters in float32."""
    model = Net().to(torch.bfloat16)
    made = wrapped(model, ratio=0.3, stage=stage)
    losses = []
    for step in range(40):
        made.zero_grad()
        x, target = batch(step, rank)
        loss = nn.functional.cross_entropy(model(x.to(torch.bfloat16)).float(), target)
        loss.backward()
        made.step()
        losses.append(loss.item())
    found = 0
    for p in model.parameters():
        found = zlib.crc32(p.detach().view(torch.uint8).numpy().tobytes(), found)
    return {"parameters": found, "first": losses[0], "last": sum(losses[-5:]) / 5}


def memory(rank, stage):
    """Bytes of optimizer state here, over those of the whole."""
    model = Net()
    made = wrapped(model, stage=stage)
    train(model, made, rank, 1)
    mine = sum(v.numel() * v.element_size() for s in made.wrapped.state.values() for v in s.values() if v.dim())
    whole = 2 * sum(p.numel() * 4 for p in model.parameters())
    return {"share": mine / whole, "gradients": sum(p.grad is not None for p in model.parameters())}


def compiled(rank):
    model = Net()
    made = wrapped(model, ratio=0.15)
    losses = train(torch.compile(model), made, rank, 4)
    return {"parameters": checksum(model), "losses": losses}


def stopped(rank):
    """One rank asks all to stop."""
    model = Net()
    made = wrapped(model)
    for step in range(10):
        if rank == 1 and step == 4:
            made.request_stop()
        train(model, made, rank, 1, start=step)
        if made.stop_agreed:
            break
    return {"steps": made.steps}


def optimized(rank, how, folder):
    """A whole run by ``optimize``."""
    model = Net()
    made = wrapped(model, ratio=0.2)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*batch(0, rank, size=40)), batch_size=8, shuffle=False
    )

    def loss(model, pair):
        return nn.functional.cross_entropy(model(pair[0]), pair[1])

    values = iter([3.0, 2.0, 2.5, 2.6, 1.0, 1.0, 1.0, 1.0])
    settings = {
        "epochs": {"batches": loader, "epochs": 3},
        "steps": {"batches": loader, "steps": 7},
        "function": {"batches": lambda step: batch(step, rank), "steps": 6},
        "patience": {"batches": lambda step: batch(step, rank), "steps": 50, "validate_every": 2, "patience": 2,
                     "validate": lambda model: next(values) if rank == 0 else -float(made.rounds)},
        "asked": {"batches": lambda step: batch(step, rank), "steps": 50,
                  "on_step": lambda step, loss: rank == 1 and step == 3},
        "empty": {"batches": [], "epochs": 2},
    }[how]  # fmt: skip
    try:
        result = made.optimize(gradwire.OptimizationData(model, loss, **settings))
    except ConfigError as error:
        return {"words": str(error)}
    return {"steps": result.steps, "losses": len(result.losses), "ended": result.ended, "parameters": checksum(model),
            "ratio": result.sent_bytes / result.dense_bytes, "validations": result.validations,
            "best": result.best}  # fmt: skip


def resumed_epochs(rank, folder):
    """A loader that is iterated anew goes on where it was, and so do torch's random numbers."""

    def run(steps, where):
        torch.manual_seed(5)
        model = nn.Sequential(Net(), nn.Dropout(0.2))
        made = wrapped(model, ratio=0.2)
        data = [batch(step, rank) for step in range(5)]
        how = {"epochs": 4} if steps is None else {"steps": steps}
        result = made.optimize(
            gradwire.OptimizationData(
                model, lambda m, pair: nn.functional.cross_entropy(m(pair[0]), pair[1]), data, checkpoints=where,
                checkpoint_every=7, **how,
            )
        )  # fmt: skip
        return checksum(model), result.resumed_from

    straight, _ = run(None, f"{folder}/straight")
    run(9, f"{folder}/broken")
    again, came_from = run(None, f"{folder}/broken")
    return {"parameters": straight, "again": again, "from": came_from}


def damaged(rank, folder, what):
    """What is said of checkpoints that are not whole; every rank says something."""
    model = Net()
    made = wrapped(model, ratio=0.2)
    train(model, made, rank, 2)
    path = gradwire.save_checkpoint(folder, made, {"epoch": 1})
    dist.barrier()
    if rank == 0:
        file = path / f"rank-0000{1 if what == 'other' else 0}-of-00002.safetensors"
        if what == "marker":
            (path / "COMPLETE").unlink()
        elif what == "junk marker":
            (path / "COMPLETE").write_text("[1]")
        elif what == "gone":
            file.unlink()
        elif what == "changed":
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(data)
        else:
            file.write_bytes(file.read_bytes()[:-7])
    dist.barrier()
    try:
        gradwire.load_checkpoint(path, made)
    except gradwire.CheckpointError as error:
        return str(error)
    except gradwire.PeerError as error:
        return f"PeerError: {error}"
    return "no error"


def kept(rank, folder):
    """Old checkpoints go, the last ones stay."""
    model = Net()
    made = wrapped(model, ratio=0.2)
    for step in range(4):
        train(model, made, rank, 1, start=step)
        gradwire.save_checkpoint(folder, made, keep=2)
    dist.barrier()
    return sorted(path.name for path in Path(folder).glob("step-*"))


def partitioned(rank, codec, transport):
    """``AllReduceParameter`` between processes."""
    given = {}
    if transport != "default":
        os.environ["GRADWIRE_TRANSPORT"] = transport
        try:
            given["exchange"] = gradwire.ProcessGroupExchange.of(timeout_s=TIMEOUT_S)
        finally:
            del os.environ["GRADWIRE_TRANSPORT"]
    torch.manual_seed(0)
    parameter = gradwire.AllReduceParameter(3, dist.get_world_size(), 1001, compress=codec, **given)
    local = torch.randn(1001)
    where = parameter.init(local)
    for step in range(5):
        torch.manual_seed(100 * step + rank)
        parameter.put_gradients(torch.randn(1001))
        parameter.aggregate_gradient_partition(dist.get_world_size())
        parameter.clip_l2_norm(5.0)
        parameter.weight_partition.sub_(parameter.gradient_partition, alpha=0.1)
        parameter.send_weight_partition()
        parameter.get_weights(local).result()
    parameter.close()
    return {"parameters": f"{zlib.crc32(local.numpy().tobytes()):08x}", "where": where}


def over_gloo(rank, stage):
    """Where the native core is not built."""
    os.environ["GRADWIRE_TRANSPORT"] = "gloo"
    try:
        model = Net()
        made = wrapped(model, ratio=0.2, stage=stage)
    finally:
        del os.environ["GRADWIRE_TRANSPORT"]
    train(model, made, rank, 5)
    other = Net()
    train(other, wrapped(other, ratio=0.2, stage=stage), rank, 5)
    return {"parameters": checksum(model), "again": checksum(other)}


def distributed_checkpoint(rank, folder, act, stage):
    """By torch.distributed.checkpoint."""
    model = Net()
    made = wrapped(model, ratio=0.1, stage=stage)
    if act == "save":
        train(model, made, rank, 3)
        gradwire.save_distributed_checkpoint(folder, made)
        return {"parameters": checksum(model)}
    gradwire.load_distributed_checkpoint(folder, made)
    start = checksum(model)
    train(model, made, rank, 2, start=3)
    return {"start": start, "parameters": checksum(model), "steps": made.steps}


def edited(rank, how, stage):
    """Gradients that are changed between backward and step, when all buckets but the last have been sent."""
    model = Net()
    optimizer = wrapped(model, "sgd", stage=stage)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    loss = loss_of(model, 0, rank)
    (scaler.scale(loss) if how == "unscaled" else loss).backward()
    try:
        if how == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 1e-9)
            optimizer.step()
        elif how == "zeroed":
            model.layers[0].weight.grad.zero_()
            optimizer.step()
        else:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
    except ConfigError as error:
        return str(error)
    return "no error"


def unscaled_and_clipped(rank, stage):
    """The usual recipe: scale, unscale, clip, step."""
    plain, ours = Net(), Net()
    replica, inner = DistributedDataParallel(plain), OPTIMIZERS["sgd"](plain.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = wrapped(ours, "sgd", stage=stage, scaler=scaler)
    for step in range(4):
        inner.zero_grad()
        loss_of(replica, step, rank).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        inner.step()
        optimizer.zero_grad()
        scaler.scale(loss_of(ours, step, rank)).backward()
        scaler.unscale_(optimizer)
        optimizer.clip_grad_norm_(0.05)
        scaler.step(optimizer)
        scaler.update()
    pairs = zip(plain.parameters(), ours.parameters(), strict=True)
    return {"parameters": checksum(ours), "largest": max(float((a - b).abs().max()) for a, b in pairs)}


def replaced_weights(rank, stage):
    """``model.load_state_dict`` after wrapping, and in the middle."""
    model = Net()
    made = wrapped(model, "sgd", ratio=0.1, stage=stage)
    largest = 0.0
    for step in range(2):
        other = {name: torch.full_like(value, 0.25 + step) for name, value in model.state_dict().items()}
        model.load_state_dict(other)
        for group in made.param_groups:
            group["lr"] = 1e-12
        train(model, made, rank, 1, start=step)
        largest = max(largest, *(float((p - (0.25 + step)).abs().max()) for p in model.parameters()))
    return {"parameters": checksum(model), "largest": largest}


def frozen(rank, stage):
    plain, ours = Net(), Net()
    for model in (plain, ours):
        model.layers[1].requires_grad_(False)
    before = ours.layers[1].weight.clone()
    replica = DistributedDataParallel(plain)
    inner = OPTIMIZERS["adamw"](plain.parameters())
    train(replica, inner, rank, 4)
    made = wrapped(ours, stage=stage)
    train(ours, made, rank, 4)
    equal = all(torch.equal(a, b) for a, b in zip(plain.parameters(), ours.parameters(), strict=True))
    # As the plain optimizer saves it.
    taken_over = Net()
    taken_over.layers[1].requires_grad_(False)
    taken_over.load_state_dict(ours.state_dict())
    other = OPTIMIZERS["adamw"](taken_over.parameters())
    other.load_state_dict(made.full_state_dict())
    train(DistributedDataParallel(taken_over), other, rank, 1, start=4)
    train(ours, made, rank, 1, start=4)
    return {"frozen_unchanged": torch.equal(before, ours.layers[1].weight), "equal": equal,
            "parameters": checksum(ours), "again": checksum(taken_over)}  # fmt: skip


class Unusual(nn.Module):
    """A number, nothing, a tied matrix, and an embedding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0))
        self.embedding = nn.Embedding(50, 16)
        self.out = nn.Linear(16, 50, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x):
        return self.out(torch.tanh(self.embedding(x)) * self.scale) + self.nothing.sum()


def unusual_parameters(rank):
    plain, ours = Unusual(), Unusual()
    replica, inner = DistributedDataParallel(plain), OPTIMIZERS["adamw"](plain.parameters())
    made = wrapped(ours, bucket_bytes=1024)
    for step in range(5):
        x = torch.randint(50, (20,), generator=torch.Generator().manual_seed(10 * step + rank))
        for model, optimizer in ((replica, inner), (ours, made)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), x.flip(0)).backward()
            optimizer.step()
    made.deserialize(made.serialize())
    pairs = zip(plain.parameters(), ours.parameters(), strict=True)
    return {"parameters": checksum(ours), "equal": all(torch.equal(a, b) for a, b in pairs)}


def misused(rank):
    model = Net()
    made = wrapped(model)
    data = gradwire.OptimizationData(Net(), lambda m, b: m(b).mean(), lambda step: torch.ones(1, 32), steps=1)
    said = {
        "add_param_group": words_of(lambda: made.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})),
        "deepcopy": words_of(lambda: copy.deepcopy(made)),
        "pickle": words_of(lambda: copy.copy(made)),
        "twice": words_of(lambda: ShardedOptimizerBase(made)),
        "clip": words_of(lambda: made.clip_grad_norm_(math.nan)),
        "nothing": words_of(lambda: made.load_state_dict(None)),
        "text": words_of(lambda: made.deserialize("x")),
        "codec": words_of(lambda: wrapped(model, ratio=0.1, gradients="bogus")),
        "model": words_of(lambda: made.optimize(data)),
    }
    made.close()
    made.close()
    said["closed"] = [words_of(made.step), words_of(made.state_dict), words_of(lambda: made.load_state_dict({}))]
    return said


def changed_inside(rank, stage):
    """What is said of things done to the wrapped optimizer, and whether the refused step left the weights alone."""

    def extra():
        return nn.Parameter(torch.zeros(3))

    changes = {
        "loaded": lambda inner, whole: inner.load_state_dict(whole),
        "state": lambda inner, whole: setattr(inner, "state", dict(inner.state)),
        "appended": lambda inner, whole: inner.param_groups[0]["params"].append(extra()),
        "taken": lambda inner, whole: inner.param_groups[0]["params"].pop(),
        "group": lambda inner, whole: inner.add_param_group({"params": [extra()]}),
    }
    found = {}
    for what, change in changes.items():
        model = Net()
        made = wrapped(model, stage=stage)
        train(model, made, rank, 2)
        change(made.wrapped, made.full_state_dict())
        before, saved = checksum(model), ""
        with contextlib.suppress(KeyError, ValueError):
            saved = words_of(made.state_dict)
        words = words_of(lambda model=model, made=made: train(model, made, rank, 1))
        found[what] = [words, words == saved, checksum(model) == before]
        made.close()
    return found


def uneven_loaders(rank):
    model = Net()
    made = wrapped(model)
    batches = [batch(step, rank) for step in range(3 + 2 * rank)]
    result = made.optimize(
        gradwire.OptimizationData(
            model, lambda m, pair: nn.functional.cross_entropy(m(pair[0]), pair[1]), batches, epochs=2
        )
    )
    return {"parameters": checksum(model), "steps": result.steps}


def different_steps(rank):
    model = Net()
    made = wrapped(model)
    try:
        made.optimize(gradwire.OptimizationData(model, lambda m, b: m(b).mean(), lambda s: torch.ones(1, 32), 3 + rank))
    except gradwire.PeerError as error:
        return str(error)
    return "no error"


def buffers(rank, folder):
    """BatchNorm's statistics go on where they were."""

    def run(steps, where):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 16), nn.BatchNorm1d(16), nn.Linear(16, 10))
        made = ShardedOptimizerBase(torch.optim.SGD(model.parameters(), lr=0.1), configuration())
        made.optimize(
            gradwire.OptimizationData(
                model, lambda m, pair: nn.functional.cross_entropy(m(pair[0]), pair[1]), lambda s: batch(s, rank),
                steps=steps, checkpoints=where, checkpoint_every=4,
            )
        )  # fmt: skip
        return [model[1].running_mean.tolist(), int(model[1].num_batches_tracked), checksum(model)]

    straight = run(10, f"{folder}/bn-straight")
    run(5, f"{folder}/bn")
    return {"straight": straight, "again": run(10, f"{folder}/bn")}


CASES = {
    case.__name__: case
    for case in (
        like_ddp, trained, accumulated, twice_without_no_sync, clipped, scheduled, with_closure, scaled,
        scaled_without_telling, branches, no_gradients, nonfinite, resumed, saved, loaded, refused, synchronized,
        exported, wrapped_after_training, first_ranks_weights, scaled_gradients, different, half, memory, compiled,
        stopped, optimized, resumed_epochs, damaged, kept, partitioned, over_gloo, distributed_checkpoint,
        edited, unscaled_and_clipped, replaced_weights, frozen, unusual_parameters, misused, changed_inside,
        uneven_loaders,        different_steps, buffers,
    )
}  # fmt: skip

if __name__ == "__main__":
    main_of_cases(CASES)
