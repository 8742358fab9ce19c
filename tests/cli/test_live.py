"""The terminal view, of what real workers wrote, on a real terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest


def on_a_terminal(command: list[str], seconds: float) -> str:
    """All that a command writes to a terminal of 120 columns."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"COLUMNS": "120", "LINES": "30", "TERM": "xterm-256color"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    seen, end = b"", time.monotonic() + seconds
    while time.monotonic() < end:
        if select.select([ours], [], [], 0.2)[0]:
            try:
                seen += os.read(ours, 1 << 16)
            except OSError:  # the other end is closed
                break
        elif process.poll() is not None:
            break
    process.wait(timeout=30)
    os.close(ours)
    assert process.returncode == 0
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.decode())


@pytest.mark.full
def test_a_training_is_seen_while_it_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train = ["train", "--steps", "60", "--codec", "int4", "--run-dir", str(folder)]
    seen = on_a_terminal([sys.executable, "-m", "gradwire", *train], 200)
    assert "digits, int4, 2 workers" in seen
    steps = {int(step) for step in re.findall(r"step (\d+) of 60", seen)}
    assert len(steps) >= 3  # it moved
    assert re.search(r"\d:\d\d left", seen)
    assert re.search(r"loss\s+\d\.\d{4}\s+█", seen)
    assert re.search(r"\d+ ms computing\s+\d+ ms waiting\s+\d+ ms encoding", seen)
    assert re.search(r"0\.13\d of float32's", seen)
    assert re.search(r"worker\s+step\s+a step\s+computing\s+encoding\s+waiting\s+decoding\s+sent", seen)
    for rank in range(2):
        assert re.search(rf"{rank}\s+\d+\s+\d+ ms\s+\d+ ms", seen)
    assert "test accuracy" in seen.rpartition("left")[2]  # the result stays, the view does not
    assert f"gradwire dash {folder}" in seen.replace("\r\n", "")


def test_a_run_is_not_mixed_into_another(tmp_path: Path) -> None:
    (tmp_path / "rank-0.jsonl").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "gradwire", "train", "--steps", "2", "--run-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 2
    assert "`--run-dir` must be a new folder" in done.stderr.replace("\n", " ")
    assert (tmp_path / "rank-0.jsonl").read_text() == ""
