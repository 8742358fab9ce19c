"""The examples do what they say, and leave nothing behind."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

EXAMPLES = Path(__file__).parents[2] / "examples"


@contextlib.contextmanager
def running(name, *options):
    """An example; when it has ended, its server and its workers must have, too."""
    example = subprocess.Popen(
        [sys.executable, str(EXAMPLES / name), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # its workers are in the same group
    )
    try:
        yield example
        alone = ended_within(example.pid, seconds=5)
    finally:
        if example.poll() is None:
            example.terminate()  # it ends its own server and workers
            with contextlib.suppress(subprocess.TimeoutExpired):
                example.communicate(timeout=20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(example.pid, signal.SIGKILL)
        example.wait()
    assert alone, "a process is left"


def ended_within(group, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def number(pattern, text):
    found = re.search(pattern, text)
    assert found, f"{pattern!r} is not in\n{text}"
    return float(found[1])


def answers(text):
    """Whether the server that was announced still takes connections."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(number(r"server at 127\.0\.0\.1:(\d+)", text)))) == 0


def test_federated_digits():
    with running("federated_digits.py", "--target", "0.82", "--limit", "150", "--kill-server") as example:
        told, _ = example.communicate(timeout=250)
    assert example.returncode == 0, told
    assert "the server ended with status -9: started again" in told, told
    assert "Traceback" not in told, told
    assert number(r"test accuracy at the start ([\d.]+)", told) < 0.3
    assert number(r"final test accuracy ([\d.]+)", told) > 0.80, told
    assert number(r"worker-1 +90 +1 +(\d+)", told) == 2  # it was killed, and started again
    accepted = [int(each) for each in re.findall(r"worker-\d +\d+ +1 +\d +(\d+) ", told)]
    assert len(accepted) == 6  # of normal speed
    assert min(accepted) >= 1, told  # how many it had time for, a busy machine decides
    assert sum(accepted) >= 20, told
    assert number(r"applied (\d+) pushes", told) >= sum(accepted)
    assert not answers(told)


def test_actor_learner():
    with running("actor_learner.py", "--target", "100", "--limit", "60") as example:
        told, _ = example.communicate(timeout=200)
    assert example.returncode == 0, told
    assert "Traceback" not in told, told
    before = number(r"mean return at the start ([\d.]+)", told)
    assert before < 50
    assert number(r"mean return at the end ([\d.]+)", told) > before + 30, told
    assert not answers(told)


def test_an_example_that_is_ended_ends_everything():
    with running("actor_learner.py", "--target", "1000", "--limit", "1000") as example:
        told = ""
        for line in example.stdout:
            told += line
            if "version" in line:
                break
        assert answers(told)
        example.terminate()
        rest, _ = example.communicate(timeout=60)
    assert example.returncode == 143, told + rest
    assert not answers(told)
