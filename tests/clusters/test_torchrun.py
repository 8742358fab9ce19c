"""Trainings that go on with other ranks, and groups that meet in a store that others have used."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire import CheckpointError, ConfigError, PeerError
from gradwire.clusters import Worker, torchrun
from gradwire.clusters.worker import FolderKeeper

ROOT = Path(__file__).parents[2]


def start(folder, ranks, steps, **env):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "tests.workers.replica", str(folder), str(steps)]
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"} | env
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)


def run(folder, ranks, steps):
    """What each rank told."""
    done = start(folder, ranks, steps)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return [json.loads((folder / f"told-{steps}-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.full
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


@pytest.mark.full
def test_folders_that_are_not_shared_are_noticed_before_a_checkpoint_counts(tmp_path):
    done = start(tmp_path, 2, 2, APART="1")
    assert done.returncode != 0
    assert "the first rank does not see the files of ranks [1]" in done.stderr
    assert not list(tmp_path.glob("*/*/COMPLETE"))


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


@pytest.mark.parametrize(
    ("work", "options", "message"),
    [
        (None, {}, "`work` must be a function of a worker; got NoneType"),
        (print, {"codec": "inte8"}, "unknown codec 'inte8'"),
        (print, {"codec": object()}, "`codec` must be a string such as 'int8' or 'auto'; got object"),
        (print, {"nosuch": 1}, r"`options` must be those of gradwire.compress: feedback, .*; got \['nosuch'\]"),
        (print, {"checkpoints": 5}, "`checkpoints` must be the path of a folder; got int"),
    ],
)
def test_bad_arguments_are_named_before_anything_starts(work, options, message):
    with pytest.raises(ConfigError, match=message):
        torchrun.run(work, **options)


@pytest.fixture
def worker():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    made = Worker("int4")
    yield made
    made.close()
    dist.destroy_process_group()


def test_what_cannot_be_prepared_or_reported_is_named(worker):
    model, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for arguments, message in (
        (("net", optimizer), "`model` must be a module that is not wrapped yet; got str"),
        ((model, None), "`optimizer` must be one of torch's; got NoneType"),
        ((other, optimizer), "`optimizer` must be of the model's parameters; it has others"),
    ):
        with pytest.raises(ConfigError, match=message):
            worker.prepare(*arguments)
    with pytest.raises(ConfigError, match="`also` must be objects by name, or None; got list"):
        worker.prepare(model, optimizer, also=[1])
    with pytest.raises(ConfigError, match="what is reported must be numbers and strings"):
        worker.report(loss=torch.ones(1))


def test_a_loss_of_the_inner_model_is_refused(worker):
    model = torch.nn.Linear(4, 4)
    replica = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    replica.learn(replica.model(torch.ones(1, 4)).sum())
    before = model.weight.detach().clone()
    with pytest.raises(ConfigError, match=r"`loss` must be computed with replica\.model"):
        replica.learn(model(torch.ones(1, 4)).sum())
    assert torch.equal(model.weight, before)
    with pytest.raises(ConfigError, match="`loss` must be a tensor; got float"):
        replica.learn(3.0)


def test_a_checkpoint_of_something_else_is_refused(worker, tmp_path):
    model = torch.nn.Linear(4, 4)
    replica = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    path = gradwire.save_checkpoint(tmp_path, replica)
    for size, kind, message in (
        (4, torch.optim.Adam, "is of SGD; this is Adam"),
        (5, torch.optim.SGD, "another model"),
    ):
        other = torch.nn.Linear(size, size)
        with pytest.raises(CheckpointError, match=message):
            gradwire.load_checkpoint(path, worker.prepare(other, kind(other.parameters(), lr=0.1)))


def test_a_folder_that_cannot_be_written_to_is_named_at_the_start(worker, tmp_path):
    (tmp_path / "file").write_text("")
    worker._keeper = FolderKeeper(tmp_path / "file")
    model = torch.nn.Linear(4, 4)
    with pytest.raises(ConfigError, match=r"`checkpoints` must be a folder that can be written to; .*file cannot"):
        worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
