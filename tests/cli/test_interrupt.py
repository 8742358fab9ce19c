"""Ctrl-C: one line, status 130, and nobody left behind."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.case import tiered


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


@contextlib.contextmanager
def started(*arguments, stderr=subprocess.PIPE):
    """A command as a terminal starts it: nohup, or a shell's &, would have it ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what is handled here is a child's default
    try:
        command = subprocess.Popen(
            [sys.executable, "-m", "gradwire", *arguments],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    with command:
        try:
            yield command
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(command.pid, signal.SIGKILL)


def wait_for(what, seconds=60.0):
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(
    "to_all", tiered([False, True], first=[True]), ids=["to the program", "to all, as a terminal does"]
)
def test_an_interrupted_training_ends_with_status_130_and_takes_its_workers_along(to_all):
    with started("train", "--steps", "100000") as training:
        workers = wait_for(lambda: len(found := descendants(training.pid)) == 2 and found)
        time.sleep(4.0)  # until they train
        (os.killpg if to_all else os.kill)(training.pid, signal.SIGINT)
        out, err = training.communicate(timeout=30)
    assert training.returncode == 130, err
    assert out == ""
    assert err.strip() == "interrupted"
    assert not any(alive(worker) for worker in workers)


@pytest.mark.full
@pytest.mark.parametrize(
    ("shown", "arguments"),
    [
        ("measuring links", ("doctor", "--workers", "2")),
        ("preparing", ("bench", "codecs", "--elements", "20000000", "--no-compile")),
        ("starting", ("bench", "train", "--rate", "loopback", "--workers", "2", "--method", "ddp", "--rounds", "1000")),
        ("measuring", ("plan", "--model", "charlm", "--simulate", "--hosts", "4096")),
    ],
    ids=lambda words: words if isinstance(words, str) else " ".join(words[:2]),
)
def test_an_interrupted_command_ends_with_status_130(shown, arguments):
    terminal = Terminal()
    with started(*arguments, stderr=terminal.side) as command:
        os.close(terminal.side)
        seen = terminal.shows(shown)
        os.kill(command.pid, signal.SIGINT)
        out, _ = command.communicate(timeout=60)
    assert seen, terminal.text[-500:]
    assert terminal.shows("interrupted"), terminal.text[-500:]
    assert "Traceback" not in terminal.text
    assert command.returncode == 130
    assert out == ""


class Terminal:
    """What a program shows to a person, as it comes."""

    def __init__(self):
        self.end, self.side = pty.openpty()
        self.text = ""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        with contextlib.suppress(OSError):  # the other side is closed
            while data := os.read(self.end, 4096):
                self.text += data.decode(errors="replace")

    def shows(self, words, seconds=60.0):
        end = time.monotonic() + seconds
        while words not in self.text and time.monotonic() < end:
            time.sleep(0.05)
        return words in self.text
