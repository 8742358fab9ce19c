"""Nothing stays of a model that Accelerate, Transformers or Lightning trained: objects, descriptors and threads."""

import os
import subprocess
import sys

import pytest

from tests.engines.program import LOOPBACK, ROOT

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="descriptors are counted in /proc")


@pytest.mark.parametrize("engine", ["accelerate", "transformers", "lightning"])
def test_nothing_stays_of_three_trainings(tmp_path, engine):
    pytest.importorskip(engine)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.workers.engine_lifetimes", engine, str(tmp_path)]
    env = {**os.environ, **LOOPBACK}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.count("passed") == 2, done.stdout
