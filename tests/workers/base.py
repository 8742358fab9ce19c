"""What test ranks share. A test rank is a real process in a real process group, started by ``run_workers``."""

import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist


def main(body):
    """Run ``body(settings, rank, ranks)`` on every rank; rank 0 prints every rank's returned text as one event."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    rendezvous = f"file://{os.environ['GRADWIRE_RENDEZVOUS']}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=ranks, timeout=timedelta(seconds=30))
    said = body(json.loads(sys.argv[1]), rank, ranks)
    line = torch.zeros(4096, dtype=torch.uint8)
    text = said.encode()
    line[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    lines = [torch.zeros_like(line) for _ in range(ranks)]
    dist.all_gather(lines, line)
    if rank == 0:
        print(json.dumps([bytes(one.tolist()).rstrip(b"\0").decode() for one in lines]))
    dist.destroy_process_group()
