"""FSDP2 between two hosts of a lab: the bytes that pass the interface, and the loss."""

import itertools
import os
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from gradwire import ConfigError
from gradwire.adapters import fsdp2
from gradwire.lab import Lab, unavailable
from tests.engines.program import EXAMPLES, LOOPBACK, ROOT

STEPS = int(os.environ.get("GRADWIRE_FSDP2_STEPS", "12"))
_COUNT = itertools.count()


def trained(*options):
    """Losses, the last one of the validation, and the bytes of host 0's interface."""
    if reason := unavailable():
        pytest.skip(reason)
    lines = []
    with Lab.up(2, None, name=f"fsdp2-{os.getpid()}-{next(_COUNT)}") as lab:
        before = lab.wire_bytes(0)
        command = [sys.executable, str(EXAMPLES / "fsdp2_charlm.py"), "--steps", str(STEPS), *options]
        outcome = lab.run(command, timeout_s=900, output=lambda rank, line: lines.append(line))
        sent = lab.wire_bytes(0) - before
    assert outcome.exit_status == 0, lines[-20:]
    text = "\n".join(lines)
    losses = [float(each) for each in re.findall(r"'loss': ([\d.]+)", text)]
    (validation,) = re.findall(r"'validation_loss': ([\d.]+)", text)
    return losses, float(validation), sent


@pytest.mark.timeout(1900)
def test_int8_takes_less_than_a_third_of_the_bytes_and_loses_nothing():
    plain_losses, plain, plain_bytes = trained("--plain")
    losses, reached, sent = trained()
    print(f"{STEPS} steps: {sent / plain_bytes:.3f} of the bytes, validation loss {reached} and plain {plain}")
    assert len(losses) == len(plain_losses) == STEPS
    assert sent < 0.3 * plain_bytes
    assert reached == pytest.approx(plain, rel=0.01)


def test_gradients_with_feedback_and_weights_as_they_are():
    """Every codec that can be cut; a state that is saved and taken back; against plain FSDP2, in two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.workers.fsdp2", "cpu"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **LOOPBACK}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.count("passed") == 2, done.stdout


def test_bad_arguments_are_named():
    with pytest.raises(ConfigError, match="`model` must be sharded by fully_shard; Linear has no such module"):
        fsdp2.compress(torch.nn.Linear(2, 2))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        model = torch.distributed.fsdp.fully_shard(torch.nn.Linear(2, 2), mesh=mesh)
        with pytest.raises(ConfigError, match="`weights` must be a codec of single elements"):
            fsdp2.compress(model, weights="lowrank:4")
        with pytest.raises(ConfigError, match="`gradients`: unknown codec 'auto'"):
            fsdp2.compress(model, "auto")
        with pytest.raises(ConfigError, match=r"`weights` must lose little, .* got 'topk:0\.1'"):
            fsdp2.compress(model, weights="topk:0.1")
        compression = fsdp2.compress(model)
        with pytest.raises(ConfigError, match="`model` compresses already"):
            fsdp2.compress(model)
        compression.close()
    finally:
        dist.destroy_process_group()
