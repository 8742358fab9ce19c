"""Workers as processes: what they say arrives, and one that dies is named."""

import os
import signal
import time
from pathlib import Path

import pytest

from gradwire import PeerError
from gradwire.clusters import run_workers
from tests.case import tiered

SETTINGS = {"codec": "int8", "epochs": 50, "batch_size": 16}


def child_of_rank(rank):
    """Process id of this process's child that runs a rank."""
    every_thread = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    children = [child for thread in every_thread for child in thread.read_text().split()]
    return next(int(p) for p in children if f"\0RANK={rank}\0" in Path(f"/proc/{p}/environ").read_text())


def alive(pid):
    return Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split(")")[1][:3]


@pytest.mark.parametrize("victim", tiered([0, 1], first=[1]))
def test_a_killed_worker_is_named_and_the_other_ended(victim):
    pids = []

    def train():
        for event in run_workers("gradwire.tasks.worker", SETTINGS, 2):
            if event["event"] == "step" and event["step"] == 3:
                pids.extend(child_of_rank(r) for r in range(2))
                os.kill(pids[victim], signal.SIGKILL)

    started = time.monotonic()
    with pytest.raises(PeerError, match=rf"^worker {victim} was killed by SIGKILL"):
        train()
    assert time.monotonic() - started < 45
    assert not any(alive(pid) for pid in pids)


@pytest.mark.full
def test_a_worker_that_cannot_start_is_named_with_its_last_words():
    with pytest.raises(PeerError, match=r"^worker \d exited with status 1: .*unknown codec 'nope'"):
        list(run_workers("gradwire.tasks.worker", {"codec": "nope"}, 2))


def test_the_worker_that_failed_is_blamed_not_the_one_that_noticed():
    with pytest.raises(PeerError, match=r"^worker 1 exited with status 1: ValueError: the real cause"):
        list(run_workers("tests.workers.failing", {}, 2))


@pytest.mark.full
def test_a_reader_that_stops_early_leaves_no_process():
    events = run_workers("gradwire.tasks.worker", SETTINGS, 2)
    next(e for e in events if e["event"] == "step")
    pids = [child_of_rank(r) for r in range(2)]
    events.close()
    assert not any(alive(pid) for pid in pids)
