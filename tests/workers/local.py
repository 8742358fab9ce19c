"""Cases of optimizers that talk less often, run by ranks that are real processes."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire import DeMo, DiLoCo, LocalAccumulation, LocalSGD, NonFiniteError, PeerError
from gradwire.tree import from_bytes, to_bytes

from .base import main_of_cases
from .ddp import Net, checksum, distance, loss_of, train

TIMEOUT_S = 20


def made(model, kind, optimizer="sgd", **how):
    how = {"timeout_s": TIMEOUT_S, **how}
    if kind == "demo":
        return DeMo(model.parameters(), **{"lr": 3e-3, **how})
    kinds = {"accumulation": LocalAccumulation, "local": LocalSGD, "diloco": DiLoCo}
    inner = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        "plain": lambda p: torch.optim.SGD(p, lr=0.05),
        "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3),
    }
    return kinds[kind](inner[optimizer](model.parameters()), **{"every": 4, **how})


def agreed(model, optimizer):
    """What all ranks must hold alike."""
    return checksum(optimizer.agreed if hasattr(optimizer, "agreed") else model.parameters())


def trained(rank, kind, steps=16, **how):
    """Every rank begins with other weights, and sees other data."""
    model = Net()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01 * rank)
    optimizer, losses, seen = made(model, kind, **how), [], []
    for step in range(steps):
        losses += train(model, optimizer, [step], rank)
        if optimizer.round > len(seen):
            seen.append(agreed(model, optimizer))
    traffic = optimizer.traffic
    said = {
        "agreed": seen,
        "losses": losses,
        "round": optimizer.round,
        "steps": optimizer.steps,
        "traffic": [traffic.last_bytes, traffic.sent_bytes, traffic.dense_bytes],
    }
    optimizer.close()
    return said


def like_ddp(rank, kind, steps=12, **how):
    plain, ours = Net(), Net()
    train(DistributedDataParallel(plain), torch.optim.SGD(plain.parameters(), lr=0.05), range(steps), rank)
    optimizer = made(ours, kind, "plain", **how)
    train(ours, optimizer, range(steps), rank)
    optimizer.close()
    return {"parameters": checksum(ours.parameters()), "distance": distance(plain.parameters(), ours.parameters())}


def nonfinite(rank, kind, **how):
    """Rank 1 goes astray: everybody hears of it in the step of the next exchange, which changes nothing."""
    model = Net()
    optimizer = made(model, kind, **how)
    train(model, optimizer, range(7), rank)
    said, before = "", ""
    for step in range(7, 20):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        if rank == 1 and step == 7:
            model.layers[1].weight.grad.fill_(torch.nan)
        before, rounds = agreed(model, optimizer), optimizer.round
        try:
            optimizer.step()
        except NonFiniteError as error:
            said = str(error)
            break
    found = {"said": said, "steps": optimizer.steps, "agreed": agreed(model, optimizer), "round": optimizer.round,
             "unchanged": before == agreed(model, optimizer) and rounds == optimizer.round}  # fmt: skip
    if hasattr(optimizer, "rollback"):
        optimizer.rollback()
    losses = train(model, optimizer, range(20, 50), rank)
    optimizer.close()
    return found | {"losses": losses}


def resumed(rank, kind, at, steps=14, **how):
    """Go on from bytes, in the middle of a round, as if nothing had happened."""
    model = Net()
    optimizer = made(model, kind, **how)
    train(model, optimizer, range(at), rank)
    data = to_bytes(optimizer.state_dict())
    train(model, optimizer, range(at, steps), rank)
    expected, traffic = checksum(model.parameters()), optimizer.traffic
    optimizer.close()
    with torch.random.fork_rng():
        other = Net()
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    second = made(other, kind, **how)
    second.load_state_dict(from_bytes(data))
    train(other, second, range(at, steps), rank)
    same = traffic == second.traffic and optimizer.round == second.round
    second.close()
    return {"expected": expected, "found": checksum(other.parameters()), "counters": same}


def different(rank, kind, **how):
    """Ranks with other settings are told so."""
    try:
        made(Net(), kind, every=4 + rank, **how)
    except PeerError as error:
        return {"said": str(error)}
    return {"said": "nothing"}


def scheduled(rank):
    """A scheduler on the wrapper, and closures."""
    model = nn.Linear(4, 2)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = LocalSGD(inner, every=2, codec="none", timeout_s=TIMEOUT_S)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(1, 4)).square().sum()
        loss.backward()
        return loss

    losses = []
    for _ in range(3):
        losses.append(optimizer.step(closure).item())
        scheduler.step()
    optimizer.close()
    return {
        "rate": inner.param_groups[0]["lr"],
        "losses": losses,
        "shared": inner.param_groups is optimizer.param_groups,
    }


CASES = {each.__name__: each for each in (trained, like_ddp, nonfinite, resumed, different, scheduled)}

if __name__ == "__main__":
    main_of_cases(CASES)
