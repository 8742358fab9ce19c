"""What test ranks share. A test rank is a real process in a real process group."""

import contextlib
import inspect
import json
import sys
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from gradwire.collectives.rank import run_rank


def leave(file, text):
    """Write a file that others look for: it is whole, or not there."""
    beside = file.with_name(f"{file.name}.writing")
    beside.write_text(text)
    beside.rename(file)


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


def main_of_cases(cases):
    """Run the cases that standard input names, and write what each returned, or its error, to the file of the answers.

    A case is a function of the rank, of the number of ranks if it asks for it, and of the arguments that are sent.
    """

    def body(rank, ranks):
        with Path(sys.argv[1]).open("w") as out:
            for line in sys.stdin:
                case, arguments = json.loads(line)
                told = {"ranks": ranks} if "ranks" in inspect.signature(cases[case]).parameters else {}
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        said = cases[case](rank, **told, **arguments)
                except Exception:
                    said = {"error": traceback.format_exc()}
                with contextlib.suppress(RuntimeError):
                    dist.barrier()
                print(json.dumps(said), file=out, flush=True)

    run_rank(body, timeout_s=30)
