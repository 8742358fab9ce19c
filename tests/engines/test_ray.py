"""Ray: a real head with two workers, in a network namespace that has nothing but loopback."""

import os
import signal
import subprocess
import sys

import pytest

ray = pytest.importorskip("ray")

from tests.engines.program import assert_went_on, example, processes  # noqa: E402

STEPS = 100


def test_a_worker_that_is_killed_is_replaced(tmp_path):
    options = ("--steps", STEPS, "--storage")
    with example("ray_digits.py", *options, tmp_path / "one") as undisturbed:
        undisturbed.finish()
    with example("ray_digits.py", *options, tmp_path / "two") as program:
        program.wait_for_step(50)
        os.kill(processes(r"ray::.*TrainWorker")[-1], signal.SIGKILL)
        program.finish()
    assert_went_on(program, undisturbed, STEPS, least=10)  # Ray hears of a checkpoint a second or two later


def test_the_coordinator_is_actors():
    with example("ray_coordinator.py", "--pushes", 40) as program:
        program.finish()
    assert program.accuracy > 0.7
    assert "'accepted': [40, 40]" in program.text()


def test_a_shard_of_the_coordinator_that_dies_comes_back_with_what_it_had(tmp_path):
    program = (
        "import ray, torch\n"
        "from gradwire import ServeSettings\n"
        "from gradwire.clusters.ray import coordinator\n"
        "from gradwire.coordinator.settings import Durability\n"
        "ray.init(num_cpus=4, include_dashboard=False)\n"
        f"servers = coordinator(ServeSettings(durability=Durability(folder={str(tmp_path)!r})), shards=2)\n"
        "with servers.client(codec='none') as client:\n"
        "    client.set_model_parameters({'w': torch.zeros(1000)})\n"
        "    client.add_gradients({'w': torch.ones(1000)})\n"
        "    ray.kill(servers.actors[0], no_restart=False)\n"
        "    client.add_gradients({'w': torch.ones(1000)})\n"
        "    assert ray.get(servers.actors[0].address.remote()) == servers.addresses[0]\n"
        "    print('found', set(client.read()[1]['w'].tolist()))\n"
        "servers.stop()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=150)
    assert "found {-2.0}" in done.stdout, done.stdout + done.stderr[-3000:]
