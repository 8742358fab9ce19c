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
from gradwire.coordinator.rules import Model
from gradwire.coordinator.store import Push, Store

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
    with pytest.raises(ConfigError, match="has no store: give the parameters to begin with"):
        Store(tmp_path, plain)
    with pytest.raises(ConfigError, match="cannot be replayed"):
        Store(tmp_path / "c", lambda p: Model(p, staleness=Staleness(rule="compensate")), START)
    with pytest.raises(ConfigError, match="`snapshot_every` must be a whole number of at least 1; got 0"):
        Store(tmp_path / "d", plain, START, snapshot_every=0)
    with Store(tmp_path / "e", plain, START) as store:
        store.push(push("a", 1))
    (tmp_path / "e" / "snapshot-0000000000.safetensors").unlink()
    with pytest.raises(JournalError, match="has a journal, but no snapshot"):
        Store(tmp_path / "e", plain, START)


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
        found, applied = store.read(), {worker: last for worker, (last, _) in store._acknowledged.items()}
    assert all(applied[worker] >= last for worker, last in acknowledged.items())
    assert found[0] == sum(applied.values())  # each once: a worker's numbers have no gaps
    with Store(tmp_path / "copy", adam) as again:
        same(again.read(), found)
