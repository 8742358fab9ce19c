"""A language model of characters, sharded by FSDP2, its gradients and weights in int8 on the wire.

    torchrun --nproc-per-node 2 examples/fsdp2_charlm.py
    torchrun --nproc-per-node 2 examples/fsdp2_charlm.py --plain      # without gradwire, to compare

Needs: pip install gradwire
"""

import argparse
import os

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire
from gradwire.clusters import torchrun
from gradwire.tasks import CharLM

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--plain", action="store_true")
given = parser.parse_args()

torchrun.join()
torch.set_num_threads(1)
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
task = CharLM()
model, mesh = task.model(), init_device_mesh("cpu", (ranks,))
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
compression = None if given.plain else gradwire.fsdp2.compress(model, gradients="int8", weights="int8")
optimizer = task.optimizer(model)
for step in range(given.steps):
    inputs, targets = task.batch(step, rank, ranks)
    loss = task.loss(model, inputs, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print({"step": step + 1, "loss": round(loss.item(), 4)}, flush=True)
reached = task.validate(model)
if rank == 0:
    print({"validation_loss": round(reached.loss, 4)})
if compression is not None:
    print({"rank": rank, "sent_mb": round(compression.sent_bytes / 1e6, 1)})
    compression.close()
torch.distributed.destroy_process_group()
