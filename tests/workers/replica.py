"""A rank that trains a while, or goes on from where others were: FOLDER STEPS."""

import json
import os
import sys
from pathlib import Path

import torch

from gradwire.clusters import torchrun
from gradwire.tree import equal


def owed(state, ranks):
    """What a rank has kept back of all parameters, as a summand of its gradient."""
    total = 0.0
    for each in state["states"].values():
        total += each["residual"].double().sum().item()
        total += ranks * each["owned"].double().sum().item() if "owned" in each else 0.0
    return total + sum(each.double().sum().item() for each in state["carried"].values())


def train(worker):
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    replica = worker.prepare(model, optimizer, also={"scheduler": scheduler})
    state = replica.compression.state_dict()
    told = {"began": replica.steps, "kept": owed(state, worker.size), "weights": weights(model)}
    told |= {"rate": optimizer.param_groups[0]["lr"], "adam": len(optimizer.state)}
    while replica.steps < steps:
        generator = torch.Generator().manual_seed(100 * replica.steps + worker.rank)
        x = torch.randn(16, 64, generator=generator)
        replica.learn((replica.model(x) - x).square().mean())
        scheduler.step()
    worker.save(replica)
    worker.save(replica)  # again, at the same step
    assert equal(replica.compression.state_dict(), replica.compression.state_dict())
    told |= {"owed": owed(replica.compression.state_dict(), worker.size), "after": weights(model)}
    (folder / f"told-{steps}-{worker.rank}.json").write_text(json.dumps(told))


def weights(model):
    return sum(p.detach().double().sum().item() for p in model.parameters())


if __name__ == "__main__":
    name = f"checkpoints{os.environ['RANK']}" if os.environ.get("APART") else "checkpoints"
    torchrun.run(train, codec="ef(int2)", checkpoints=Path(sys.argv[1]) / name, timeout_s=60)
