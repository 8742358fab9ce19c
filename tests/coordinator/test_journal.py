"""Journals: what is acknowledged is there, whatever happens after."""

import os
import random
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire import ConfigError, JournalError
from gradwire.coordinator.journal import Journal, NoSpaceError, Records, repair

RECORDS = [b"one", b"two" * 100, bytes(range(256)), b"\0" * 50, b"five"]


MB = int(os.environ.get("GRADWIRE_JOURNAL_MB", "4"))  # of attacks
HEADER, HEAD = 44, 16  # bytes of a journal's header, and of a record's


def read_journal(path):
    return [bytes(record) for record in Records(path)]


def old_journal(path, records=RECORDS):
    """As earlier versions wrote it."""
    frames = [struct.pack("<II", len(record), zlib.crc32(record)) + record for record in records]
    path.write_bytes(b"".join([b"GWJRNL01", *frames]))
    return path.read_bytes()


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
        assert [bytes(record) for record in journal] == [*RECORDS, b"six"]
    assert read_journal(path) == [*RECORDS, b"six"]


def test_a_torn_end_is_cut_wherever_it_is(path):
    data = written(path)
    ends = [HEADER]
    for record in RECORDS:
        ends.append(ends[-1] + HEAD + len(record))
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
@given(place=st.integers(HEADER, 800), bit=st.integers(0, 7))
def test_damage_in_the_middle_is_refused_and_repaired(tmp_path_factory, place, bit):
    path = tmp_path_factory.mktemp("damage") / "journal"
    data = bytearray(written(path))
    last = len(data) - HEAD - len(RECORDS[-1])
    place = HEADER + (place - HEADER) % (last - HEADER)
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
    with pytest.raises(JournalError, match="is not a journal: it does not begin with GWJRNL02"):
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


@pytest.mark.full
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

        monkeypatch.setattr(os, "writev", full)
        for _ in range(2):
            with pytest.raises(JournalError, match=r"cannot be written: .*No space left on device"):
                journal.append(b"two")
        monkeypatch.undo()
    assert read_journal(path) == [b"one"]


def test_a_full_disk_leaves_no_half_record_and_the_journal_goes_on(path):
    """A real one, as far as the system can tell: a file may not be longer than this."""
    with Journal(path) as journal:
        journal.append(b"one")
        whole = path.stat().st_size
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (whole + 1000, hard))
        try:
            for _ in range(2):
                with pytest.raises(NoSpaceError, match=r"cannot be written: .*File too large"):
                    journal.append(b"x" * 2000)
                assert path.stat().st_size == whole
            assert "no room for 2000 bytes" in journal.trouble
            assert not journal.probe()
            journal.append(b"two")  # there is room for this one
            assert journal.short == 2000
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert journal.probe()
        assert not journal.trouble
        journal.append(b"three")
    assert read_journal(path) == [b"one", b"two", b"three"]


@pytest.mark.parametrize("fsync", ["each", "interval"])
def test_nothing_is_acknowledged_after_an_fsync_that_failed(path, fsync, monkeypatch):
    """The next fsync may succeed without the pages that were lost by the first."""
    journal, calls = Journal(path, fsync=fsync, interval_s=0.01), []
    journal.append(b"one")

    def failing(descriptor):
        calls.append(descriptor)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", failing)
    ticket = journal.write(b"two")
    if fsync == "each":
        with pytest.raises(JournalError, match=r"cannot be written: .*Input/output error"):
            journal.wait(ticket)
    else:
        journal._thread.join(10)
    monkeypatch.undo()
    told = []
    assert not journal.then(ticket, told.append)  # as when it is sent again
    assert "Input/output error" in str(told[0])
    with pytest.raises(JournalError, match=r"cannot be written: .*Input/output error"):
        journal.append(b"three")
    assert "closed for good" in journal.trouble
    assert not journal.probe()
    with pytest.raises(JournalError, match=r"cannot be written: .*Input/output error"):
        journal.close()
    assert len(calls) == 1


def test_a_torn_end_is_found_in_one_pass(path):
    """A record in which each byte may be the begin of another one, to a reader that tries them all."""
    begin = len(written(path))
    with Journal(path) as journal:
        journal.append(b"\0\0\x08\0" * (MB << 18))

    def check():
        began = time.monotonic()
        assert sum(1 for _ in Records(path)) == len(RECORDS)
        seconds = time.monotonic() - began
        print(f"{MB} MB torn: {seconds:.3f} s")
        assert seconds < 20

    os.truncate(path, path.stat().st_size - 1)  # its header is whole
    check()
    with path.open("r+b") as file:  # and its header was not written
        file.seek(begin)
        file.write(bytes(HEAD))
    check()
    os.truncate(path, begin + HEAD - 1)
    check()


def test_a_record_that_holds_a_journal_is_no_record_of_this_one(path, tmp_path):
    """What is in a record is a worker's: it must not make a torn end look like damage."""
    written(path)
    other = written(tmp_path / "other")
    with Journal(path) as journal:
        journal.append(path.read_bytes() + other)
    path.write_bytes(path.read_bytes()[:-3])
    assert read_journal(path) == RECORDS


def test_journals_have_identities(path, tmp_path):
    written(path)
    with Journal(tmp_path / "next", previous=Records(path).identity) as journal:
        assert journal.identity != Records(path).identity
    assert Records(tmp_path / "next").previous == Records(path).identity
    assert Records(path).previous == ""
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    with pytest.raises(JournalError, match=r"the checksum of its header does not fit.*make an empty file of that name"):
        Journal(path)


def test_a_journal_of_an_earlier_version_is_read(path):
    data = old_journal(path)
    assert read_journal(path) == RECORDS
    assert Records(path).identity == ""
    with pytest.raises(JournalError, match="is of an earlier version, and can be read only"):
        Journal(path)
    path.write_bytes(data + bytes(20))
    assert read_journal(path) == RECORDS
    path.write_bytes(data[:-1])
    with pytest.raises(JournalError, match=r"after 4 records, and is of an earlier version.* gradwire serve repair "):
        read_journal(path)
    assert repair(path) == (4, 11)
    assert read_journal(path) == RECORDS[:-1]


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
