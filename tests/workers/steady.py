"""A rank that trains with ``optimize`` for a while, and may be stopped or killed meanwhile."""

import json
import os
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from gradwire import GradientCompressionOptimizer, OptimizationData, ShardingConfiguration, StragglerPolicy

from .base import leave
from .ddp import Net, loss_of
from .sharded import checksum


def live(folder, rank, ranks, settings):
    """Train; leave in the folder that training has begun, and at the end what came of it."""
    torch.set_num_threads(1)
    folder = Path(folder)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=30),
        )
        leave(folder / f"result-{rank}", json.dumps(train(folder, rank, settings)))
    except Exception as error:
        leave(folder / f"said-{rank}", f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    os._exit(0)


def train(folder, rank, settings):
    model = Net()
    policy = StragglerPolicy(**settings["policy"]) if settings.get("policy") is not None else None
    config = ShardingConfiguration(
        stage=settings.get("stage", 1), bucket_bytes=40_000, timeout_s=settings.get("timeout_s", 20), stragglers=policy
    )
    optimizer = GradientCompressionOptimizer(
        torch.optim.AdamW(model.parameters(), lr=3e-3), config, settings.get("ratio", 0.1)
    )
    losses = {}
    catch_up = optimizer._catch_up

    def slow_to_look():
        """Look for the others' next step when they have ended."""
        if settings.get("slow_at_end") == rank and optimizer.rounds == settings["steps"]:
            time.sleep(2.0)
        catch_up()

    optimizer._catch_up = slow_to_look

    def batch(step):
        if step == settings.get("first", 0) + 1:
            (folder / f"training-{rank}").write_text("")
        time.sleep(settings["pause_s"])
        return step

    def loss(model, step):
        value = loss_of(model, step, rank)
        losses[step] = value.item()
        return value

    data = OptimizationData(
        model, loss, batch, steps=settings["steps"], checkpoints=settings.get("checkpoints"),
        checkpoint_every=settings.get("every", 5),
    )  # fmt: skip
    result = optimizer.optimize(data)
    return {"parameters": checksum(model), "seconds": result.seconds, "metrics": result.metrics, "steps": result.steps,
            "resumed_from": result.resumed_from, "computed": len(result.losses),
            "losses": result.losses[-5:]}  # fmt: skip
