"""Ctrl-C: one line, status 130, and nobody left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


def descendants(process):
    """Processes below one, by their parents."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int(folder.joinpath("stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    return [child for child, parent in parents.items() if parent == process]


def alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "gradwire", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for(what, seconds=60.0):
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("to_all", [False, True], ids=["to the program", "to all, as a terminal does"])
def test_an_interrupted_training_ends_with_status_130_and_takes_its_workers_along(to_all):
    with start("train", "--steps", "100000") as training:
        workers = wait_for(lambda: len(found := descendants(training.pid)) == 2 and found)
        time.sleep(4.0)  # until they train
        (os.killpg if to_all else os.kill)(training.pid, signal.SIGINT)
        out, err = training.communicate(timeout=30)
    assert training.returncode == 130, err
    assert out == ""
    assert err.strip() == "interrupted"
    assert not any(alive(worker) for worker in workers)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(
    "arguments",
    [
        ("doctor", "--workers", "2"),
        ("bench", "codecs", "--elements", "20000000", "--no-compile"),
        ("bench", "train", "--rate", "none", "--workers", "2", "--method", "ddp", "--rounds", "1000"),
        ("plan", "--model", "charlm", "--simulate", "--hosts", "4096"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_an_interrupted_command_ends_with_status_130(arguments):
    with start(*arguments) as command:
        if arguments[0] == "doctor":
            wait_for(lambda: len(descendants(command.pid)) == 2)
        else:
            time.sleep(5.0)
        assert command.poll() is None
        os.kill(command.pid, signal.SIGINT)
        out, err = command.communicate(timeout=60)
    assert command.returncode == 130, err
    assert out == ""
    assert "interrupted" in err
    assert "Traceback" not in err
