"""Trainings that go on with other ranks, and groups that meet in a store that others have used."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from gradwire import ConfigError, PeerError
from gradwire.clusters import torchrun

ROOT = Path(__file__).parents[2]


def run(folder, ranks, steps):
    """What each rank told."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "tests.workers.replica", str(folder), str(steps)]
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return [json.loads((folder / f"told-{steps}-{rank}.json").read_text()) for rank in range(ranks)]


def test_a_training_goes_on_with_fewer_ranks_and_with_more(tmp_path):
    before, began = None, 0
    for ranks, steps in ((3, 4), (3, 6), (1, 8), (2, 10)):
        told = run(tmp_path, ranks, steps)
        assert {each["began"] for each in told} == {began}
        assert len({each["after"] for each in told}) == 1  # all hold the same
        if before is not None:
            assert all(each["weights"] == before[0]["after"] for each in told)
            assert all(each["rate"] == pytest.approx(0.01 * 0.1 ** (began // 2)) for each in told)
            assert all(each["adam"] == 4 for each in told)
            kept = [
                sum(each[name] for each in these) / len(these) for these, name in ((told, "kept"), (before, "owed"))
            ]
            assert kept[0] == pytest.approx(kept[1], abs=1e-4)  # of the mean: nothing is lost, nothing comes twice
            if len(before) == ranks:
                assert [each["kept"] for each in told] == [each["owed"] for each in before]
        before, began = told, steps


def meet(store, sizes):
    """Names that ranks agree on, each a thread."""
    names = {}

    def rank(number, size):
        names[number] = torchrun._meet(store, number, size, 5.0)

    threads = [threading.Thread(target=rank, args=(each, sizes)) for each in range(sizes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return names


def test_every_group_has_a_name_of_its_own_in_a_store_that_others_have_used():
    store = dist.HashStore()
    for rank in (1, 2):
        store.set(f"gradwire/3/{rank}", "a word of a rank that is no more")
    found = [meet(store, size) for size in (3, 3, 2, 3, 1)]
    assert [len(names) for names in found] == [3, 3, 2, 3, 1]
    assert all(len(set(names.values())) == 1 for names in found)
    assert len({names[0] for names in found}) == 5


def test_ranks_that_do_not_come_are_named():
    with pytest.raises(PeerError, match=r"the ranks \[1, 2\] of 3 have not come for 0\.1 s"):
        torchrun._meet(dist.HashStore(), 0, 3, 0.1)


def test_a_program_that_torchrun_has_not_started_is_told_so(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match="RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT must be set: start the program"):
        torchrun.run(print)
