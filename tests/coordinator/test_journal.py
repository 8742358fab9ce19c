"""Journals: what is acknowledged is there, whatever happens after."""

import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire import ConfigError, JournalError
from gradwire.coordinator.journal import Journal, read_journal, repair

RECORDS = [b"one", b"two" * 100, bytes(range(256)), b"\0" * 50, b"five"]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal"


def written(path, records=RECORDS, **how):
    with Journal(path, **how) as journal:
        for record in records:
            journal.append(record)
    return path.read_bytes()


@pytest.mark.parametrize("fsync", ["each", "interval", "off"])
def test_records_come_back_and_more_can_be_added(path, fsync):
    written(path, fsync=fsync)
    with Journal(path, fsync=fsync) as journal:
        assert journal.records == 5
        journal.append(b"six")
        assert list(journal) == [*RECORDS, b"six"]
    assert read_journal(path) == [*RECORDS, b"six"]


def test_a_torn_end_is_cut_wherever_it_is(path):
    data = written(path)
    ends = [8]
    for record in RECORDS:
        ends.append(ends[-1] + 8 + len(record))
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        whole = sum(end <= cut for end in ends[1:])
        assert read_journal(path) == RECORDS[:whole]
        with Journal(path) as journal:
            journal.append(b"after")
        assert read_journal(path) == [*RECORDS[:whole], b"after"]


def test_a_last_record_of_which_only_some_pages_were_written_is_cut(path):
    data = bytearray(written(path))
    data[-3] ^= 1
    path.write_bytes(data)
    assert read_journal(path) == RECORDS[:-1]
    path.write_bytes(bytes(data[: -len(b"five")]) + b"\0" * 4)
    assert read_journal(path) == RECORDS[:-1]


@settings(max_examples=150, deadline=None)
@given(place=st.integers(8, 480), bit=st.integers(0, 7))
def test_damage_in_the_middle_is_refused_and_repaired(tmp_path_factory, place, bit):
    path = tmp_path_factory.mktemp("damage") / "journal"
    data = bytearray(written(path))
    last = len(data) - 8 - len(RECORDS[-1])
    place = 8 + (place - 8) % (last - 8)
    data[place] ^= 1 << bit
    path.write_bytes(data)
    with pytest.raises(JournalError, match=r"is damaged at byte \d+, after \d records.* gradwire serve repair "):
        read_journal(path)
    with pytest.raises(JournalError, match="is damaged"):
        Journal(path)
    left, cut = repair(path)
    assert read_journal(path) == RECORDS[:left]
    assert cut > 0
    assert path.with_name("journal.damaged").read_bytes() == bytes(data)


def test_something_else_is_not_a_journal(path):
    path.write_bytes(b"something else entirely")
    with pytest.raises(JournalError, match="is not a journal: it does not begin with GWJRNL01"):
        Journal(path)


@pytest.mark.parametrize("fsync", ["each", "interval"])
def test_many_threads(path, fsync):
    with Journal(path, fsync=fsync, interval_s=0.01) as journal:

        def work(number):
            for each in range(50):
                journal.append(struct.pack("<II", number, each))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = [struct.unpack("<II", record) for record in read_journal(path)]
    assert len(found) == 400
    for number in range(8):
        assert [each for who, each in found if who == number] == list(range(50))


WRITER = """
import sys
from gradwire.coordinator.journal import Journal
journal = Journal(sys.argv[1], sys.argv[2])
number = journal.records
while True:
    journal.append(b"%d " % number + b"x" * (number % 3000))
    print(number, flush=True)
    number += 1
"""


@pytest.mark.parametrize("fsync", ["each", "interval", "off"])
def test_what_a_killed_process_has_acknowledged_is_there(path, fsync):
    draw, acknowledged = random.Random(1), -1
    for _ in range(4):
        command = [sys.executable, "-c", WRITER, str(path), fsync]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert int(writer.stdout.readline()) == acknowledged + 1
            time.sleep(draw.uniform(0, 0.1))
            os.kill(writer.pid, signal.SIGKILL)
            lines = writer.stdout.read().splitlines(keepends=True)
        told = [int(line) for line in lines if line.endswith("\n")]
        acknowledged = max([acknowledged + 1, *told])
        found = read_journal(path)
        assert [int(record.split()[0]) for record in found] == list(range(len(found)))
        assert len(found) > acknowledged
        acknowledged = len(found) - 1


def test_a_full_disk_is_said_to_all(path, monkeypatch):
    with Journal(path) as journal:
        journal.append(b"one")

        def full(descriptor, data):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "write", full)
        for _ in range(2):
            with pytest.raises(JournalError, match=r"cannot be written: .*No space left on device"):
                journal.append(b"two")
        monkeypatch.undo()
    assert read_journal(path) == [b"one"]


def test_bad_arguments(path):
    with pytest.raises(ConfigError, match="`fsync` must be 'each', 'interval' or 'off'; got 'never'"):
        Journal(path, "never")
    with pytest.raises(ConfigError, match="`interval_s` must be above 0; got 0"):
        Journal(path, interval_s=0)
    journal = Journal(path)
    with pytest.raises(ConfigError, match="`record` must have from 1 to"):
        journal.append(b"")
    journal.close()
    journal.close()
    with pytest.raises(JournalError, match="is closed"):
        journal.append(b"late")
