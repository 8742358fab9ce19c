"""One rank of ``gradwire bench exchange``, as a process: ``python -m gradwire.benchmarks.exchange_worker SETTINGS``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist

from gradwire.codecs import codec
from gradwire.collectives import Pipeline, TwoStage, connect
from gradwire.collectives.base import STAGES
from gradwire.collectives.rank import report, run_rank
from gradwire.wire import Key, TensorSpec

__all__ = ["GLOO", "Settings", "main"]

GLOO: Final = "gloo all_to_all"
"""The peer: the same bytes by torch's own call, twice."""

_MANY: Final = 1 << 20
_BUCKETS: Final = 4  # that a tensor is exchanged in, as a model's gradients are


@dataclass(frozen=True)
class Settings:
    """What the ranks exchange: tensors whose payloads have about so many bytes a rank, in each codec."""

    codecs: list[str]
    nbytes: int
    rounds: int


def main() -> None:
    """Run as the rank the environment says."""
    settings = Settings(**json.loads(sys.argv[1]))
    run_rank(lambda rank, ranks: _run(settings, rank, ranks), timeout_s=600)


def _run(settings: Settings, rank: int, ranks: int) -> None:
    torch.set_num_threads(1)
    peers, tag, pipeline = connect(timeout_s=300), 0, Pipeline()
    contenders: dict[str, Callable[[], int]] = {}

    def two_stage(collective: TwoStage, x: torch.Tensor) -> int:
        nonlocal tag
        under_way = []
        for bucket in torch.tensor_split(x, _BUCKETS):
            tag += STAGES
            under_way.append(pipeline.submit(collective.reduce(bucket, {}, Key(step=tag), tag, bucket)))
        return sum(each.result().sent_bytes for each in under_way)

    for name in settings.codecs:
        collective = TwoStage(peers, codec(name))
        per_element = codec(name).layout(TensorSpec((_MANY,))).body_nbytes / _MANY
        x = torch.randn(int(settings.nbytes / per_element * ranks / (2 * (ranks - 1))))
        contenders[name] = lambda collective=collective, x=x: two_stage(collective, x)  # type: ignore[misc]
    each = settings.nbytes // (2 * (ranks - 1))
    out, into = torch.zeros(each * ranks, dtype=torch.uint8), torch.empty(each * ranks, dtype=torch.uint8)

    def gloo() -> int:
        for _ in range(2):
            dist.all_to_all_single(into, out)
        return 2 * each * (ranks - 1)

    contenders[GLOO] = gloo
    for number in range(settings.rounds + 1):  # the first is to warm up
        for name, exchange in contenders.items():
            dist.barrier()
            started = time.perf_counter()
            sent = exchange()
            seconds = torch.tensor(time.perf_counter() - started)
            dist.all_reduce(seconds)
            if number:
                report(rank, event="exchange", contender=name, seconds=float(seconds) / ranks, sent_bytes=sent)


if __name__ == "__main__":
    main()
