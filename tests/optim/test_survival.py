"""Ranks that are killed or stopped while a sharded optimizer trains."""

import json
import os
import random
import signal
import time

import pytest

from gradwire import CheckpointError, PeerError, latest_checkpoint, with_retries
from tests.case import tiered
from tests.workers import steady
from tests.workers.group import Group

pytestmark = pytest.mark.timeout(600)
PAUSE_S = 5.0


def group(folder, ranks, **settings):
    return Group(steady.live, folder, ranks, **settings)


def finished(group, timeout_s=120):
    """What every rank reached, or PeerError if one says it cannot go on."""
    end = time.monotonic() + timeout_s
    while any(rank.is_alive() for rank in group.ranks):
        assert time.monotonic() < end, [group.said(rank) for rank in range(group.size)]
        time.sleep(0.02)
    files = [group.folder / f"result-{rank}" for rank in range(group.size)]
    if not all(file.exists() for file in files):
        raise PeerError(str([group.said(rank) for rank in range(group.size)]))
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize(("kills", "steps"), tiered([(2, 160), (20, 240)], first=[(2, 160)]))
def test_runs_that_are_killed_end_with_the_weights_of_an_undisturbed_one(tmp_path, kills, steps):
    """SIGKILLs at random moments, of random ranks, checkpoints every few steps."""
    moments, ranks = random.Random(5), 3
    how = {"steps": steps, "pause_s": 0.01, "every": 4}
    with group(tmp_path / "undisturbed", ranks, **how) as undisturbed:
        expected = finished(undisturbed)
    starts, done = [], 0

    def attempt(number):
        nonlocal done
        found = latest_checkpoint(tmp_path / "checkpoints")
        first = int(found.name.split("-")[1]) if found else 0
        starts.append(first)
        how_now = {**how, "checkpoints": str(tmp_path / "checkpoints"), "first": first}
        with group(tmp_path / str(number), ranks, **how_now) as killed:
            if done < kills:
                while done % 2 and latest_checkpoint(tmp_path / "checkpoints") == found:
                    time.sleep(0.005)  # every other time there is something new to go on from
                time.sleep(moments.uniform(0, 0.25))
                victim = killed.ranks[moments.randrange(ranks)]
                if victim.is_alive():
                    os.kill(victim.pid, signal.SIGKILL)
                    done += 1
            return finished(killed)

    found = with_retries(attempt, retry_times=2 * kills)
    assert done == kills
    assert len({rank["parameters"] for rank in [*expected, *found]}) == 1
    assert starts == sorted(starts)
    assert starts[-1] > 0
    # Another number of ranks goes on from there.
    more = {**how, "steps": steps + 20, "checkpoints": str(tmp_path / "checkpoints"), "first": steps}
    with group(tmp_path / "two", 2, **more) as two:
        found = finished(two)
    assert [rank["resumed_from"] for rank in found] == [steps, steps]
    assert len({rank["parameters"] for rank in found}) == 1


def paused_run(folder, policy):
    """Four ranks, one of which stands still for five seconds."""
    moments = random.Random(7)
    with group(folder, 4, steps=200, pause_s=0.04, policy=policy) as paused:
        time.sleep(moments.uniform(1.0, 2.0))
        pid = paused.ranks[moments.randrange(4)].pid
        os.kill(pid, signal.SIGSTOP)
        time.sleep(PAUSE_S)
        os.kill(pid, signal.SIGCONT)
        return finished(paused)


@pytest.mark.full
def test_a_straggler_is_left_out_and_counted(tmp_path):
    with group(tmp_path / "undisturbed", 4, steps=200, pause_s=0.04) as undisturbed:
        expected = finished(undisturbed)
    left_out = paused_run(tmp_path / "policy", {})
    waited_for = paused_run(tmp_path / "none", None)
    assert len({rank["parameters"] for rank in left_out}) == 1
    assert all(rank["steps"] == 200 for rank in left_out)
    computed = sorted(rank["computed"] for rank in left_out)
    assert computed[0] < 180
    assert computed[1:] == [200, 200, 200]
    assert sorted(rank["metrics"]["dropped"] for rank in left_out)[1] >= 200 - computed[0]
    # Without the policy: correct, and merely slower.
    assert {rank["parameters"] for rank in waited_for} == {rank["parameters"] for rank in expected}
    assert all(rank["metrics"]["dropped"] == 0 for rank in waited_for)


def test_ranks_that_are_done_do_not_fail_one_that_is_not(tmp_path):
    with group(tmp_path / "group", 3, steps=20, pause_s=0.01, policy={}, slow_at_end=1) as done:
        assert [rank["steps"] for rank in finished(done)] == [20, 20, 20]


def test_a_rank_that_dies_is_named_with_the_policy_as_well(tmp_path):
    with group(tmp_path / "group", 3, steps=1000, pause_s=0.01, policy={}) as killed:
        os.kill(killed.ranks[1].pid, signal.SIGKILL)
        said = killed.survivors_of(1, 30)
    assert all("the exchange of slices failed: rank 1 is gone" in words for words in said), said


def test_an_incomplete_checkpoint_is_not_taken(tmp_path):
    (tmp_path / "step-0000000005").mkdir()
    (tmp_path / "step-0000000005" / "rank-00000-of-00001.safetensors").write_bytes(b"")
    assert latest_checkpoint(tmp_path) is None
    assert issubclass(CheckpointError, RuntimeError)
