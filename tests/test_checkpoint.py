"""Checkpoints that cannot be written or loaded: one kind of error, on every rank at once, and nothing left behind."""

import os
import random
import signal
import subprocess
import time

import pytest

import gradwire
from tests import needs
from tests.workers.checkpoints import MARKERS, saving
from tests.workers.group import Group
from tests.workers.ranks import Cases, said, without_error

pytestmark = pytest.mark.timeout(600)

KINDS = ("stage 0", "stage 1", "stage 2", "compression", "replica")
TIMES = int(os.environ.get("GRADWIRE_FOREIGN_STATES", "15"))  # of each kind
KILLS = 6
SOON_S = 15  # a rank that waits for others does so for 20 s


def can_mount(folder):
    if os.geteuid() != 0:
        return False
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4096", "tmpfs", folder], capture_output=True)
    return mounted.returncode == 0 and subprocess.run(["umount", folder], capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    disk = folder / "disk"
    disk.mkdir()
    cases = {
        ("no space", where): ("no_space", {"folder": f"{folder}/{where}", "where": where})
        for where in ("COMPLETE", "rank-00001")
    }
    if can_mount(disk):
        cases["full disk"] = ("full_disk", {"folder": f"{folder}/full", "disk": str(disk)})
        cases["again", "full disk"] = ("saved_again", {"folder": "", "why": "full disk", "disk": str(disk)})
    how = {"folder": f"{folder}/distributed", "disk": str(disk) if can_mount(disk) else None}
    cases["distributed"] = ("distributed", how)
    for why in ("unsavable", "COMPLETE", "rank-00001"):
        cases["again", why] = ("saved_again", {"folder": f"{folder}/again-{why}", "why": why})
    cases["markers"] = ("markers", {"folder": f"{folder}/markers"})
    for seed, kind in enumerate(KINDS):
        how = {"folder": f"{folder}/{kind}", "kind": kind, "seed": seed, "times": TIMES}
        cases["foreign", kind] = ("foreign", how)
    with Cases(folder, cases, 2, "tests.workers.checkpoints") as ranks:
        yield ranks


def test_no_checkpoint_is_an_error_of_its_own():
    with pytest.raises(gradwire.CheckpointError, match="`latest_checkpoint` has found no complete checkpoint"):
        gradwire.load_checkpoint(None, None)


@pytest.mark.parametrize("where", ["COMPLETE", "rank-00001"])
def test_no_space_is_an_error_on_every_rank_at_once_and_leaves_nothing(two, where):
    for answer in without_error(two["no space", where]):
        kind, words, seconds = answer["said"]
        assert kind == "CheckpointError"
        assert where in words
        assert "No space left on device" in words
        assert seconds < SOON_S
        assert answer["left"] == []
        assert answer["again"]


def test_a_disk_that_is_full_before_the_marker(two):
    if "full disk" not in two:
        needs.skip("the right to mount a disk", needs.ROOT)
    for answer in without_error(two["full disk"]):
        kind, words, seconds = answer["said"]
        assert (kind, answer["left"]) == ("CheckpointError", [])
        assert "COMPLETE cannot be written" in words
        assert seconds < SOON_S


@pytest.mark.parametrize("why", ["unsavable", "COMPLETE", "rank-00001", "full disk"])
def test_a_failed_save_leaves_an_earlier_checkpoint_of_the_step(two, why):
    if ("again", why) not in two:
        needs.skip("the right to mount a disk", needs.ROOT)
    for answer in without_error(two["again", why]):
        kind, words, seconds = answer["said"]
        assert (kind, answer["stays"], answer["loaded"]) == ("CheckpointError", True, 1), words
        assert seconds < SOON_S
        assert ("got object at 'extra/save'" if why == "unsavable" else "No space left on device") in words
        assert (answer["loaded 3"], answer["loaded 4"], answer["files"]) == (3, 4, 3)


@pytest.mark.parametrize("why", ["unsavable", "damaged", "full disk"])
def test_a_failure_of_torchs_checkpoints_is_an_error_of_ours_on_every_rank(two, why):
    for answer in without_error(two["distributed"]):
        if why not in answer:
            needs.skip("the right to mount a disk", needs.ROOT)
        kind, words, seconds = answer[why]
        assert kind == "CheckpointError", words
        assert "/disk was not saved" in words if why == "full disk" else "/distributed" in words, words
        assert "Traceback" not in words
        assert seconds < SOON_S


@pytest.mark.full
def test_a_step_that_is_saved_again_can_be_loaded_whenever_the_ranks_are_killed(tmp_path):
    moments = random.Random(7)
    folders, counts = [tmp_path / str(number) for number in range(KILLS)], []
    for folder in folders:
        with Group(saving, folder, ranks=2) as group:
            time.sleep(moments.uniform(0, 0.1))
            for rank in moments.sample(group.ranks, 2):
                os.kill(rank.pid, signal.SIGKILL)
        counts.append(int((folder / "count").read_text()))
    cases = {"loaded": ("load_saved", {"folders": [str(folder / "saved") for folder in folders]})}
    for answer in said(tmp_path, cases, 2, "tests.workers.checkpoints")["loaded"]:
        assert isinstance(answer, list), answer
        pairs = list(zip(counts, answer, strict=True))
        assert all(found in (count, count + 1) for count, found in pairs), pairs


@pytest.mark.parametrize("name", [*MARKERS, "a pipe", "a folder", "a loop", "100 MB"])
def test_a_malformed_marker_is_named_on_every_rank(two, name):
    for answer in without_error(two["markers"]):
        kind, words, seconds = answer[name]
        assert kind == "CheckpointError", (name, words)
        assert "COMPLETE" in words
        assert seconds < SOON_S


@pytest.mark.parametrize("kind", KINDS)
def test_a_foreign_state_is_refused_on_every_rank(two, kind):
    ranks = two["foreign", kind]
    assert all(isinstance(answer, list) for answer in ranks), ranks
    refused = 0
    for one, other in zip(*ranks, strict=True):
        assert one[2] == other[2], (one, other)
        assert one[2] in ("", "CheckpointError"), one
        if one[2]:
            refused += 1
            assert all(".safetensors" in each[3] or "step-" in each[3] for each in (one, other)), (one, other)
            assert max(one[4], other[4]) < SOON_S, (one, other)
            if kind.startswith("stage"):
                assert one[5], one
                assert other[5], other
    assert refused > TIMES / 4
