"""A model on the disk: nothing that was acknowledged is lost, nothing is applied twice, replays are exact."""

import json
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import pytest
import torch

import gradwire
from gradwire import ConfigError, JournalError, StaleGradientError, Staleness
from gradwire.coordinator.journal import Records, repair
from gradwire.coordinator.push import Push
from gradwire.coordinator.rules import Model
from gradwire.coordinator.store import Store
from gradwire.tree import from_file, to_bytes

JOURNAL_MB = int(os.environ.get("GRADWIRE_JOURNAL_MB", "192"))  # of a restart
ROOT = Path(__file__).parent.parent.parent
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


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def short_names(folder):
    """Without the checksums of snapshots."""
    return [name[:19] for name in names(folder)]


def test_the_snapshot_of_one_model_and_the_journal_of_another_are_refused(tmp_path):
    for name, value in (("a", 1.0), ("b", 2.0)):
        with Store(tmp_path / name, plain, {"w": torch.full((5, 10), value), "b": torch.zeros(10)}) as store:
            store.push(push("a", 1))
    shutil.copy(tmp_path / "b" / "journal-0000000000", tmp_path / "a" / "journal-0000000000")
    with pytest.raises(
        JournalError, match=r"journal-0000000000 does not belong to .*/a/snapshot-0000000000-.*other id"
    ):
        Store(tmp_path / "a", plain)


def test_a_journal_of_the_model_that_took_the_place_of_another_is_refused(tmp_path):
    """Also in one folder, where the numbers fit: files of a backup, and files of today."""
    with Store(tmp_path / "today", plain, START) as store:
        store.push(push("a", 1))
        shutil.copytree(tmp_path / "today", tmp_path / "backup")
        store.replace({name: torch.ones_like(tensor) for name, tensor in START.items()})
        store.push(push("a", 2))
    (old,) = (tmp_path / "backup").glob("snapshot-0000000000-*")
    new = tmp_path / "today" / "journal-0000000001"
    (tmp_path / "numbered").mkdir()
    shutil.copy(old, tmp_path / "numbered" / old.name.replace("0000000000", "0000000001"))
    shutil.copy(new, tmp_path / "numbered")
    with pytest.raises(JournalError, match=r"journal-0000000001 does not belong to .*snapshot-0000000001"):
        Store(tmp_path / "numbered", plain)
    shutil.copy(new, tmp_path / "backup")
    with pytest.raises(JournalError, match=r"journal-0000000001 does not belong to .*journal-0000000000"):
        Store(tmp_path / "backup", plain)


def test_parameters_whose_snapshot_was_never_finished_were_never_set(tmp_path):
    folder, before = tmp_path / "store", tmp_path / "before"
    with Store(folder, plain, START) as store:
        store.push(push("a", 1))
        expected = store.read()
        shutil.copytree(folder, before)
        store.replace({name: torch.ones_like(tensor) for name, tensor in START.items()})
        shutil.copy(folder / "journal-0000000001", before)
    with Store(before, plain) as store:
        same(store.read(), expected)
        store.push(push("a", 2))
    with Store(before, plain) as store:
        assert store.read()[0] == store.replayed == 2


def test_at_every_step_of_a_change_the_folder_has_the_model_before_or_after_it(tmp_path, monkeypatch):
    """Copies of the folder, before and after each thing that is done to its files, are stores."""
    folder, copies, states = tmp_path / "store", [], []

    def copy():
        copies.append((len(states), tmp_path / f"copy-{len(copies)}"))
        shutil.copytree(folder, copies[-1][1])

    def copying(owner, name):
        original = getattr(owner, name)

        def call(*arguments, **named):
            copy()
            result = original(*arguments, **named)
            copy()
            return result

        monkeypatch.setattr(owner, name, call)

    def state(store):
        return store.mode, store.there().waiting, store.read()

    ones = {name: torch.ones_like(tensor) for name, tensor in START.items()}
    with Store(folder, averaging, START) as store:
        for number in range(1, 5):
            store.push(push("a", number))
        states.append(state(store))
        for owner, name in ((os, "writev"), (os, "fsync"), (Path, "replace"), (Path, "unlink")):
            copying(owner, name)
        for change in (
            store.snapshot,
            lambda: store.push(push("a", 5)),
            lambda: store.set_mode("ascent"),
            lambda: store.replace(ones),
            lambda: store.push(push("a", 6)),
            store.clear,
            lambda: store.push(push("a", 7)),
            store.snapshot,
        ):
            change()
            states.append(state(store))
    monkeypatch.undo()
    assert {number for number, _ in copies} >= set(range(1, 9))
    for number, path in copies:
        with Store(path, averaging) as found:
            mode, waiting, read = state(found)
        near = [each for each in states[number - 1 : number + 1] if each[:2] == (mode, waiting)]
        assert any(each[2][0] == read[0] and torch.equal(each[2][1]["w"], read[1]["w"]) for each in near)


def as_an_earlier_version_wrote_it(folder):
    """Snapshots without an identity, and journals of another format."""
    for path in folder.glob("snapshot-*"):
        state = from_file(path)
        del state["identity"]
        data = to_bytes(state)
        path.unlink()
        (folder / f"{path.name[:19]}-{zlib.crc32(data):08x}.safetensors").write_bytes(data)
    for path in folder.glob("journal-*"):
        records = [bytes(record) for record in Records(path)]
        frames = [struct.pack("<II", len(record), zlib.crc32(record)) + record for record in records]
        path.write_bytes(b"".join([b"GWJRNL01", *frames]))


def test_a_folder_of_an_earlier_version_is_taken_over(tmp_path):
    with Store(tmp_path / "now", adam, START) as store:
        for number in range(1, 6):
            store.push(push("a", number))
        expected = store.read()
    shutil.copytree(tmp_path / "now", tmp_path / "then")
    as_an_earlier_version_wrote_it(tmp_path / "then")
    with Store(tmp_path / "then", adam) as store:
        same(store.read(), expected)
        assert store.replayed == 5
        store.push(push("a", 6))
        expected = store.read()
    assert short_names(tmp_path / "then") == ["journal-0000000001", "lock", "snapshot-0000000001"]
    with Store(tmp_path / "then", adam) as store:
        same(store.read(), expected)
        assert store.replayed == 1


def test_leftovers_of_a_process_that_was_killed_are_removed(tmp_path):
    folder, before = tmp_path / "store", tmp_path / "before"
    with Store(folder, plain, START) as store:
        store.push(push("a", 1))
        shutil.copytree(folder, before)
        store.snapshot()
        store.push(push("a", 2))
    shutil.copytree(before, folder, dirs_exist_ok=True)  # what the snapshot has made superfluous
    for leftover in (".snapshot-0000000002-0a1b2c3d.safetensors.123", ".journal-0000000003.77"):
        (folder / leftover).write_bytes(b"half of it")
    (folder / "notes.txt").touch()
    with Store(folder, plain) as store:
        assert (store.read()[0], store.replayed) == (2, 1)
    assert short_names(folder) == ["journal-0000000001", "lock", "notes.txt", "snapshot-0000000001"]


def test_a_snapshot_is_due_by_bytes_too(tmp_path):
    size = len(push("a", 1, "none").to_bytes())
    with Store(tmp_path, plain, START, snapshot_mb=3.5 * size / 1e6) as store:
        for number in range(1, 5):
            assert "journal-0000000000" in names(tmp_path)
            store.push(push("a", number, "none"))
        assert "journal-0000000000" not in names(tmp_path)
    with Store(tmp_path / "large", plain, {"w": torch.zeros(20_000_000)}) as store:
        assert store._most_bytes == 4 * 80_000_000
    with Store(tmp_path / "small", plain, START) as store:
        assert store._most_bytes == 256_000_000
    with pytest.raises(ConfigError, match="`snapshot_mb` must be above 0; got 0"):
        Store(tmp_path / "none", plain, START, snapshot_mb=0)


def test_a_journal_goes_on_when_no_other_can_be_opened(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Store(tmp_path, plain, START) as store:
        store.push(push("a", 1))
        before = names(tmp_path)
        with open(os.devnull) as lowest:
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest.fileno(), limits[1]))
        try:
            with pytest.raises(JournalError, match=r"journal-0000000001 cannot be begun: .*Too many open files"):
                store.snapshot()
            assert store.push(push("a", 2)) == 2
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert names(tmp_path) == before
        store.snapshot()
        assert store.push(push("a", 3)) == 3
        expected = store.read()
    with Store(tmp_path, plain) as store:
        same(store.read(), expected)
        assert store.replayed == 1


def test_a_full_disk_loses_nothing_and_leaves_nothing(small_disk):
    start, folder = {"w": torch.zeros(100_000), "b": torch.zeros(10)}, small_disk.folder / "store"
    gradients = {"w": gradwire.encode(torch.ones(100_000), "none")}
    with Store(folder, averaging, start) as store:
        for number in range(1, 6):
            store.push(Push("a", number, gradients))
        before = names(folder)
        small_disk.fill()
        for attempt in (store.snapshot, lambda: store.replace(start), store.clear, lambda: store.set_mode("ascent")):
            with pytest.raises(JournalError, match="No space left on device"):
                attempt()
            assert store.mode == "descent"
            assert names(folder) == before
        with pytest.raises(JournalError, match=r"cannot be written: .*No space left on device"):
            store.push(Push("a", 6, gradients))
        assert store.trouble
        assert not store.snapshot_due
        small_disk.empty()
        store.probe()
        assert not store.trouble
        assert store.read()[0] == 1
        assert store.push(Push("a", 6, gradients)) == 2  # of the average that was not cleared
        expected = store.read()
    with Store(folder, averaging) as store:
        same(store.read(), expected)
        store.snapshot()
    assert short_names(folder) == ["journal-0000000001", "lock", "snapshot-0000000001"]


def test_a_snapshot_that_failed_is_tried_again_later_and_counts_what_was_before(tmp_path, monkeypatch):
    with Store(tmp_path, plain, START, snapshot_every=3) as store:
        for number in range(1, 3):
            store.push(push("a", number))

        def full(self, number, identity, state):
            raise JournalError("the model cannot be saved: No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(Store, "_save", full)
            with pytest.raises(JournalError, match="the model cannot be saved"):
                store.push(push("a", 3))
            for _ in range(2):  # without one more journal each time
                with pytest.raises(JournalError, match="the model cannot be saved"):
                    store.snapshot()
            assert short_names(tmp_path)[:2] == ["journal-0000000000", "journal-0000000001"]
            assert store.push(push("a", 4)) == 4
            assert not store.snapshot_due  # for a minute
        store._not_before = 0.0
        assert store.snapshot_due
        store.push(push("a", 5))
        assert not store.snapshot_due
        assert short_names(tmp_path) == ["journal-0000000002", "lock", "snapshot-0000000002"]
        expected = store.read()
    with Store(tmp_path, plain) as store:
        same(store.read(), expected)


def test_a_model_that_may_have_been_saved_or_not_ends_the_journal(tmp_path, monkeypatch):
    """Its name may not be on the disk, and it is there: a restart may find it or not."""
    store = Store(tmp_path, plain, START)
    store.push(push("a", 1))

    def torn(path, data):
        path.write_bytes(data)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("gradwire.coordinator.store.write_whole", torn)
    with pytest.raises(JournalError, match=r"the model cannot be saved: .*Input/output error"):
        store.replace(START)
    monkeypatch.undo()
    with pytest.raises(JournalError, match="it is not known whether another model was saved"):
        store.push(push("a", 2))
    assert "closed for good" in store.trouble
    with pytest.raises(JournalError, match="it is not known"):
        store.close()


@pytest.mark.parametrize("last", [2**63 - 1, 2**63 - 2, 2**62 + 5, 2**61])
def test_no_session_is_so_high_that_none_can_follow(tmp_path, last):
    with Store(tmp_path, plain, START) as store:
        store.push(push("a", 99, session=last))
        before = last
        for version in (2, 3, 4):
            session = store.last_session("a") + 1
            assert session < 2**63
            assert store.push(push("a", 1, session=session)) == version
            with pytest.raises(gradwire.PeerError, match="has begun session"):
                store.push(push("a", 100, session=before))
            before = session
    with Store(tmp_path, plain) as store:
        assert store.push(push("a", 1, session=max(time.time_ns(), store.last_session("a") + 1))) == 5


RESTART = """
import json, resource, sys, time
import torch
torch.set_num_threads(1)
from gradwire.coordinator.push import Push, decoded
from gradwire.coordinator.rules import Model
from gradwire.coordinator.store import Store
import gradwire

def memory(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1000 for line in file if line.startswith(name))

folder, limit_mb, size = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
gradwire.decode(gradwire.encode(torch.ones(100_000), "none"))
before = memory("VmRSS")
data = int((memory("VmData") + limit_mb) * 1000 * 1024)
resource.setrlimit(resource.RLIMIT_DATA, (data, data))
began = time.monotonic()
store = Store(folder, Model)
seconds = time.monotonic() - began
peak = memory("VmHWM")
record = bytearray(Push("a", 1, {"0": gradwire.encode(torch.ones(size), "none")}).to_bytes())
began, model = time.monotonic(), Model({"0": torch.zeros(size)})
for _ in range(store.replayed):
    model.take(decoded("gradients", Push.from_bytes(record).gradients, model.parameters), "descent")
applying = time.monotonic() - began
print(json.dumps([store.replayed, peak - before, seconds, applying]))
store.close()
"""


def restarted(folder, tensors, pushes, limit_mb, codec="none", size=250_000):
    """Start a store again that has so many pushes in its journal, in a process that may take so much memory more."""
    gradients = {str(n): gradwire.encode(torch.ones(size), codec) for n in range(tensors)}
    start = {name: torch.zeros(size) for name in gradients}
    with Store(folder, plain, start, fsync="off", snapshot_every=1_000_000, snapshot_mb=1e9) as store:
        for number in range(1, pushes + 1):
            store.push(Push("a", number, gradients))
    command = [sys.executable, "-c", RESTART, str(folder), str(limit_mb), str(size)]
    told = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=ROOT)
    replayed, grown_mb, seconds, applying = json.loads(told.stdout)
    print(
        f"{pushes} pushes to {4e-6 * tensors * size:.0f} MB: {seconds:.2f} s, {applying:.2f} s to apply them; "
        f"memory grew by {grown_mb:.0f} MB"
    )
    assert grown_mb < limit_mb
    return replayed, seconds, applying


@pytest.mark.full
def test_a_restart_decodes_one_tensor_at_a_time(tmp_path):
    """With memory for the model, for one push as it travels, and 64 MB."""
    model_mb, push_mb = 192, 48
    restarted(tmp_path, 24, 3, model_mb + push_mb + 64, "int8", 2_000_000)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_restart_takes_little_more_memory_than_the_model_and_little_more_time_than_applying(tmp_path):
    """``GRADWIRE_JOURNAL_MB=1000``: with memory for the model and 256 MB, and 5 s more than it takes to apply it."""
    replayed, seconds, applying = restarted(tmp_path, 1, JOURNAL_MB, 128 if JOURNAL_MB < 1000 else 256)
    assert replayed == JOURNAL_MB
    assert seconds < applying + (5 if JOURNAL_MB >= 1000 else 60)  # where others run too, a wide margin


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


@pytest.mark.full
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
