"""Ray: a real head with two workers, in a network namespace that has nothing but loopback."""

import os
import signal

import pytest

ray = pytest.importorskip("ray")

from tests.engines.program import example, processes  # noqa: E402

STEPS = 60


def test_a_worker_that_is_killed_is_replaced(tmp_path):
    options = ("--steps", STEPS, "--storage")
    with example("ray_digits.py", *options, tmp_path / "one") as undisturbed:
        undisturbed.finish()
    with example("ray_digits.py", *options, tmp_path / "two") as program:
        program.wait_for_step(25)
        os.kill(processes(r"ray::.*TrainWorker")[-1], signal.SIGKILL)
        program.finish()
    assert program.retaken >= 1
    assert sorted(program.losses) == list(range(1, STEPS + 1))
    assert program.losses[STEPS] == pytest.approx(undisturbed.losses[STEPS], abs=0.3)
    assert program.accuracy == pytest.approx(undisturbed.accuracy, abs=0.05)


def test_the_coordinator_is_actors():
    with example("ray_coordinator.py", "--pushes", 40) as program:
        program.finish()
    assert program.accuracy > 0.7
    assert "'accepted': [40, 40]" in program.text()
