"""What test ranks share. A test rank is a real process in a real process group, started by ``run_workers``."""

import json
import sys

import torch
import torch.distributed as dist

from gradwire.collectives.rank import run_rank


def main(body):
    """Run ``body(settings, rank, ranks)`` on every rank; rank 0 prints every rank's returned text as one event."""

    def say(rank, ranks):
        text = body(json.loads(sys.argv[1]), rank, ranks).encode()
        line = torch.zeros(8192, dtype=torch.uint8)
        line[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        lines = [torch.zeros_like(line) for _ in range(ranks)]
        dist.all_gather(lines, line)
        if rank == 0:
            print(json.dumps([bytes(one.tolist()).rstrip(b"\0").decode() for one in lines]))

    run_rank(say, timeout_s=30)
