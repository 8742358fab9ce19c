"""A model on the disk: nothing that was acknowledged is lost, nothing is applied twice, replays are exact."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import gradwire
from gradwire import ConfigError, JournalError, StaleGradientError, Staleness
from gradwire.coordinator.journal import repair
from gradwire.coordinator.push import Push
from gradwire.coordinator.rules import Model
from gradwire.coordinator.store import Store

START = {"w": torch.linspace(-1, 1, 50).view(5, 10), "b": torch.zeros(10)}


def push(worker, sequence, codec="int4", **settings):
    generator = torch.Generator().manual_seed(1000 * sequence + sum(worker.encode()))
    gradients = {name: 0.1 * torch.randn(tensor.shape, generator=generator) for name, tensor in START.items()}
    return Push(worker, sequence, {n: gradwire.encode(g, codec) for n, g in gradients.items()}, **settings)


def plain(parameters):
    return Model(parameters)


def adam(parameters):
    return Model(parameters, optimizer=lambda p: torch.optim.Adam(p, lr=0.01))


def averaging(parameters):
    return Model(parameters, average_over=3)


def same(one, other):
    assert one[0] == other[0]
    assert all(torch.equal(one[1][name], other[1][name]) for name in one[1])


@pytest.mark.parametrize("make", [plain, adam, averaging])
@pytest.mark.parametrize("every", [3, 1000])
def test_a_store_that_is_opened_again_goes_on_bit_for_bit(tmp_path, make, every):
    with Store(tmp_path / "straight", make, START, snapshot_every=every) as store:
        for number in range(1, 21):
            store.push(push("a", number))
        expected = store.read()
    for number in range(1, 21):
        with Store(tmp_path / "again", make, START, snapshot_every=every) as store:
            store.push(push("a", number))
    with Store(tmp_path / "again", make) as store:
        same(store.read(), expected)


def test_what_is_read_before_and_after_is_the_same_wherever_it_was_left(tmp_path):
    """At every moment a copy of the folder is a store with all that was acknowledged."""
    with Store(tmp_path / "store", adam, START, snapshot_every=4) as store:
        for number in range(1, 15):
            store.push(push("a", number))
            shutil.copytree(tmp_path / "store", tmp_path / f"copy-{number}")
            with Store(tmp_path / f"copy-{number}", adam) as copy:
                same(copy.read(), store.read())


def test_a_snapshot_that_was_never_finished_loses_nothing(tmp_path):
    with Store(tmp_path, plain, START) as store:
        for number in range(1, 4):
            store.push(push("a", number))
        shutil.copytree(tmp_path, tmp_path.parent / "before")
        store.snapshot()
        store.push(push("a", 4))
        expected = store.read()
    # As if it had ended between the new journal and the snapshot.
    shutil.copy(tmp_path / "journal-0000000001", tmp_path.parent / "before" / "journal-0000000001")
    with Store(tmp_path.parent / "before", plain) as store:
        same(store.read(), expected)
        assert store.replayed == 4


def test_a_push_that_is_sent_again_is_applied_once(tmp_path):
    with Store(tmp_path, plain, START, snapshot_every=2) as store:
        assert [store.push(push("a", 1)), store.push(push("b", 1)), store.push(push("a", 1))] == [1, 2, 1]
        before = store.read()
    with Store(tmp_path, plain) as store:
        assert store.push(push("a", 1)) == 1
        assert store.push(push("b", 1)) == 2
        same(store.read(), before)


def test_the_mode_of_a_push_is_the_same_in_any_case(tmp_path):
    for folder in (tmp_path, tmp_path):  # the second replays what the first has applied
        with Store(folder, Model, {"w": torch.zeros(2)}) as store:
            store.push(Push("a", 1, {"w": gradwire.encode(torch.ones(2), "none")}, mode="Ascent"))
            assert store.read()[1]["w"].tolist() == [1.0, 1.0]


def test_bad_pushes_are_refused_before_they_are_written(tmp_path):
    with Store(tmp_path, lambda p: Model(p, staleness=Staleness(bound=1)), START) as store:
        for _ in range(3):
            store.push(push("a", store.read()[0] + 1))
        size = (tmp_path / "journal-0000000000").stat().st_size
        with pytest.raises(StaleGradientError):
            store.push(push("b", 1, version=0))
        with pytest.raises(ConfigError, match=r"`gradients\['x'\]` is not one of the parameters"):
            store.push(Push("b", 1, {"x": gradwire.encode(torch.ones(2), "none")}))
        with pytest.raises(gradwire.WireError):
            store.push(Push("b", 1, {"b": b"junk"}))
        with pytest.raises(gradwire.NonFiniteError):
            store.push(Push("b", 1, {"b": nan_frame()}))
        assert (tmp_path / "journal-0000000000").stat().st_size == size
        assert store.push(push("b", 1, version=2)) == 4


def nan_frame():
    codec = gradwire.codec("none")
    payload, _ = codec.encode(torch.full((10,), float("nan")))
    return bytes(gradwire.wire.pack(payload))


def test_stores_that_cannot_be_opened(tmp_path):
    with Store(tmp_path, plain) as store, pytest.raises(ConfigError, match="there are no parameters"):
        store.read()
    with pytest.raises(ConfigError, match="cannot be replayed"):
        Store(tmp_path / "c", lambda p: Model(p, staleness=Staleness(rule="compensate")), START)
    with pytest.raises(ConfigError, match="`snapshot_every` must be a whole number of at least 1; got 0"):
        Store(tmp_path / "d", plain, START, snapshot_every=0)
    with Store(tmp_path / "e", plain, START) as store:
        store.push(push("a", 1))
    next((tmp_path / "e").glob("snapshot-*")).unlink()
    with pytest.raises(JournalError, match="has a journal, but no snapshot"):
        Store(tmp_path / "e", plain, START)


def test_a_folder_is_of_one_store_at_a_time(tmp_path):
    with Store(tmp_path, plain, START), pytest.raises(JournalError, match="is in use by another server"):
        Store(tmp_path, plain)
    with Store(tmp_path, plain) as store:
        assert store.read()[0] == 0
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"`folder` .* cannot be used"):
        Store(tmp_path / "file", plain, START)


def test_a_journal_is_not_replayed_by_other_rules(tmp_path):
    with Store(tmp_path, plain, START, rules="a") as store:
        store.push(push("a", 1))
    with pytest.raises(JournalError, match="was written by a server with other rules"):
        Store(tmp_path, adam, rules="b")
    with Store(tmp_path, plain, rules="a") as store:
        store.snapshot()
    with Store(tmp_path, adam, rules="b") as store:
        store.push(push("a", 2))


def test_a_damaged_snapshot_is_named(tmp_path):
    with Store(tmp_path, plain, START):
        pass
    path = next(tmp_path.glob("snapshot-*"))
    whole = path.read_bytes()
    for damaged in (b"junk", whole[:-1], whole[:-6] + b"?" + whole[-5:]):
        path.write_bytes(damaged)
        with pytest.raises(JournalError, match=r"snapshot-0000000000-.*\.safetensors is damaged"):
            Store(tmp_path, plain)
    path.write_bytes(whole)  # and the folder was let go of each time
    with Store(tmp_path, plain) as store:
        assert store.read()[0] == 0


def test_a_journal_that_is_missing_is_told(tmp_path):
    with Store(tmp_path, plain, START) as store:
        store.push(push("a", 1))
        store.snapshot()
        store.push(push("a", 2))
    (tmp_path / "journal-0000000001").unlink()
    with pytest.raises(JournalError, match="journal-0000000001 is missing"):
        Store(tmp_path, plain)
    (tmp_path / "journal-0000000001").touch()
    with Store(tmp_path, plain) as store:
        assert store.read()[0] == 1


def test_what_is_kept_by_a_repair_is_applied_once(tmp_path):
    with Store(tmp_path, plain, START) as store:
        for number in range(1, 11):
            store.push(push("a", number))
    journal = tmp_path / "journal-0000000000"
    damaged = bytearray(journal.read_bytes())
    damaged[len(damaged) // 2] ^= 0xFF
    journal.write_bytes(damaged)
    with pytest.raises(JournalError, match="gradwire serve repair"):
        Store(tmp_path, plain)
    kept, _ = repair(journal)
    with Store(tmp_path, plain) as store:
        assert store.read()[0] == store.replayed == kept
        store.snapshot()


def test_zeros_at_the_end_are_cut(tmp_path):
    """As a loss of power may leave them: the file was made longer, and not written."""
    with Store(tmp_path, plain, START) as store:
        for number in range(1, 4):
            store.push(push("a", number))
    for zeros in (1, 8, 100):
        with (tmp_path / "journal-0000000000").open("ab") as file:
            file.write(bytes(zeros))
        with Store(tmp_path, plain) as store:
            assert store.replayed == 3


def test_many_threads_and_snapshots_meanwhile(tmp_path):
    with Store(tmp_path, plain, START, fsync="off", snapshot_every=37) as store:

        def work(name):
            for number in range(1, 101):
                store.push(push(name, number, "none"))

        threads = [threading.Thread(target=work, args=(f"worker-{each}",)) for each in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        version, _ = expected = store.read()
    assert version == 600
    with Store(tmp_path, plain) as store:
        same(store.read(), expected)


def test_a_new_session_takes_over_and_the_old_one_is_told(tmp_path):
    with Store(tmp_path, plain, START) as store:
        assert store.push(push("a", 7, session=1)) == 1
        assert store.push(push("a", 1, session=2)) == 2
        with pytest.raises(gradwire.PeerError, match="worker 'a' has begun session 2 since; one of session 1 cannot"):
            store.push(push("a", 8, session=1))
    with Store(tmp_path, plain) as store:
        assert (store.last_session("a"), store.last_session("b")) == (2, 0)
        assert store.push(push("a", 1, session=2)) == 2
        assert store.read()[0] == 2


@pytest.mark.parametrize("folder", [None, "store"])
def test_other_parameters_and_cleared_averages_are_kept(tmp_path, folder):
    path = None if folder is None else tmp_path / folder
    with Store(path, averaging) as store:
        assert store.empty
        assert store.replace(START) == 0
        assert [store.push(push("a", number)) for number in range(1, 6)] == [0, 0, 1, 1, 1]
        assert store.clear() == 2
        other = {"w": torch.ones(5, 10), "b": torch.ones(10)}
        assert [store.push(push("a", number)) for number in range(6, 8)] == [1, 1]
        assert store.replace(other) == 2
        assert store.push(push("a", 8)) == 2
        expected = store.read()
        same((2, other), expected)
    if path is not None:
        with Store(path, averaging) as store:
            same(store.read(), expected)
            assert [store.push(push("a", number)) for number in range(8, 11)] == [2, 2, 3]


SERVER = """
import json, sys, threading
sys.path.insert(0, sys.argv[2])
import torch
torch.set_num_threads(1)
from tests.coordinator.test_store import START, adam, push
from gradwire.coordinator.store import Store
store = Store(sys.argv[1], adam, START, snapshot_every=23)
lock = threading.Lock()
def work(worker, number):
    while True:
        store.push(push(worker, number))
        with lock:
            print(json.dumps([worker, number]), flush=True)
        number += 1
for worker, number in json.loads(sys.argv[3]).items():
    threading.Thread(target=work, args=(worker, number), daemon=True).start()
threading.Event().wait()
"""


@pytest.mark.timeout(300)
def test_nothing_that_was_acknowledged_is_lost_or_applied_twice(tmp_path):
    """kill -9 at random moments, four workers that send again what was not acknowledged."""
    draw, root = random.Random(2), str(Path(__file__).parent.parent.parent)
    acknowledged = dict.fromkeys(["a", "b", "c", "d"], 0)
    for _ in range(8):
        again = {worker: last + 1 for worker, last in acknowledged.items()}
        command = [sys.executable, "-c", SERVER, str(tmp_path / "store"), root, json.dumps(again)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            lines = [server.stdout.readline()]
            time.sleep(draw.uniform(0, 0.25))
            os.kill(server.pid, signal.SIGKILL)
            lines += server.stdout.read().splitlines(keepends=True)
        for worker, number in (json.loads(line) for line in lines if line.endswith("\n")):
            acknowledged[worker] = max(acknowledged[worker], number)
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    with Store(tmp_path / "store", adam) as store:
        found, applied = store.read(), {worker: last.sequence for worker, last in store._last.items()}
    assert all(applied[worker] >= last for worker, last in acknowledged.items())
    assert found[0] == sum(applied.values())  # each once: a worker's numbers have no gaps
    with Store(tmp_path / "copy", adam) as again:
        same(again.read(), found)
