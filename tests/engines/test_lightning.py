"""Lightning: accumulation, clipping, precision, and residuals in its checkpoints."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("lightning")

from tests.engines.program import LOOPBACK, ROOT


def run(folder, codec, precision="32-true", steps=8, resume="no"):
    command = [sys.executable, "-m", "tests.workers.lightning_rank", str(folder), codec, precision, str(steps), resume]
    env = {**os.environ, **LOOPBACK, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_replicas_stay_the_same_with_accumulation_clipping_and_precision(tmp_path, precision):
    one, two = run(tmp_path, "int8", precision)
    assert one["steps"] == two["steps"] == 8
    assert one["sum"] == two["sum"]
    assert 0 < one["logged"]["gradwire/sent_mb"] < 0.1
    assert one["logged"]["gradwire/saved"] > 0.5


def test_residuals_are_in_the_checkpoint(tmp_path):
    before = run(tmp_path, "topk:0.05", steps=4)
    assert all(each["residual"] != 0 for each in before)
    assert before[0]["residual"] != before[1]["residual"]
    after = run(tmp_path, "topk:0.05", steps=8, resume="yes")
    assert [each["kept"] for each in after] == [each["residual"] for each in before]
    assert all(each["steps"] == 8 for each in after)
