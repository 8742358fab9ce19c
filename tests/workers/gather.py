"""A rank that reduces tensors, some of them wrong on purpose."""

import json
import zlib

import torch

import gradwire
from gradwire import GradwireError, Key
from gradwire.collectives import Gather, agree, connect, run

from .base import main


def body(settings, rank, ranks):
    peers = connect(timeout_s=30)
    return json.dumps([reduce(peers, 8 * i, case, rank, ranks) for i, case in enumerate(settings["cases"])])


def reduce(peers, tag, settings, rank, ranks):
    codec = gradwire.codec(settings["codec"])
    step = 1
    x = torch.randn(300, generator=torch.Generator().manual_seed(rank)).view(15, 20)
    match settings.get("wrong") if rank == 1 else None:
        case "codec":
            codec = gradwire.codec("int8:block=64")
        case "step":
            step = 2
        case "form":
            codec = gradwire.codec("bf16")
        case "sum":
            pass
        case "nan":
            x[3, 3] = torch.nan
        case "shape":
            x = x.view(20, 15)
    if settings.get("wrong") == "sum":
        x = torch.full((15, 20), 3e38)
    gather = Gather(peers, codec)
    state = gather.init(gradwire.TensorSpec.of(x))
    try:
        if settings.get("wrong") == "codec":
            agree(peers, str(codec), tag)
        reduced = run(gather.reduce(x, state, Key(0, step, 7), tag))
    except GradwireError as error:
        return f"{type(error).__name__}: {error}"
    distance = 0.0
    if settings["codec"] == "none":
        xs = [torch.randn(300, generator=torch.Generator().manual_seed(r)).view(15, 20) for r in range(ranks)]
        distance = float((sum(xs) / ranks - reduced.mean).abs().max())
    return f"{zlib.crc32(reduced.mean.numpy().tobytes())} {reduced.sent_bytes} {reduced.dense_sent_bytes} {distance}"


if __name__ == "__main__":
    main(body)
