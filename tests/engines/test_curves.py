"""Same seeds, same data: every engine prints the same losses, to the last digit."""

import pytest

from tests.engines.program import example, torchrun
from tests.engines.test_spark import cluster  # noqa: F401 a fixture

STEPS = 30


@pytest.fixture(scope="module")
def expected():
    with torchrun("torchrun_digits.py", "--steps", STEPS) as program:
        losses = program.finish().losses
    assert sorted(losses) == list(range(1, STEPS + 1))
    return losses


def test_ray(expected):
    with example("ray_digits.py", "--steps", STEPS) as program:
        assert program.finish().losses == expected


def test_spark(expected, cluster):  # noqa: F811
    with example("spark_digits.py", "--steps", STEPS, "--master", cluster.url, env=cluster.env) as program:
        assert program.finish().losses == expected


def test_lightning(expected):
    with example("lightning_digits.py", "--steps", STEPS) as program:
        assert program.finish().losses == expected


def test_accelerate(expected):
    with torchrun("accelerate_digits.py", "--steps", STEPS) as program:
        assert program.finish().losses == expected
