"""Clients that push as fast as they can, for so many seconds: each says how often it was acknowledged.

usage: python -m gradwire.benchmarks.coordinator_worker JSON
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

import torch

from gradwire import CoordinatorClient

__all__: list[str] = []


def _main(asked: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    gradients = {"w": torch.ones(asked["numel"])}
    counts = [0] * asked["clients"]
    start, end = threading.Barrier(asked["clients"] + 1), [0.0]

    def work(place: int) -> None:
        with CoordinatorClient(asked["address"], codec=asked["codec"], window=asked["window"]) as client:
            client.add_gradients(gradients)
            start.wait()
            while time.monotonic() < end[0]:
                client.add_gradients(gradients)
                counts[place] += 1

    threads = [threading.Thread(target=work, args=(place,)) for place in range(asked["clients"])]
    for thread in threads:
        thread.start()
    print(json.dumps({"ready": True}), flush=True)  # noqa: T201
    sys.stdin.readline()  # all processes begin at the same time
    end[0] = time.monotonic() + asked["seconds"]
    start.wait()
    for thread in threads:
        thread.join()
    print(json.dumps({"counts": counts}), flush=True)  # noqa: T201


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
