"""Accelerate and Transformers: accumulation, and residuals in their checkpoints."""

import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from tests.engines.program import LOOPBACK, ROOT, torchrun


@pytest.mark.parametrize("worker", ["accelerate_rank", "transformers_rank"])
def test_residuals_are_in_the_checkpoint(tmp_path, worker):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", f"tests.workers.{worker}", str(tmp_path / "state")]
    env = {**os.environ, **LOOPBACK}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.count("passed") == 2, done.stdout


def test_the_trainers_example_learns():
    with torchrun("transformers_digits.py", "--steps", 60) as program:
        told = "".join(program.finish().printed)
    losses = [float(each) for each in re.findall(r"'loss': '([\d.]+)'", told)]
    assert len(losses) == 60
    assert losses[-1] < 0.5 * losses[0]
