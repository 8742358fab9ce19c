"""A server whose disk is full, or fails: it refuses pushes and says so, and goes on by itself when there is room."""

import errno
import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

import gradwire
from gradwire import CoordinatorClient, JournalError, PeerError, ServeSettings, serve
from gradwire.coordinator.journal import Journal, NoSpaceError
from gradwire.coordinator.protocol import messages
from gradwire.coordinator.settings import Durability
from tests.coordinator.pages import page
from tests.coordinator.test_attacks import channel_to, encoded, push_of, refusal, refusals, until

LARGE = 200_000  # numbers: 800 KB, of a disk of 4 MB


def served(folder, parameters=None, **kept):
    settings = ServeSettings(
        address="127.0.0.1:0", metrics="127.0.0.1:0", durability=Durability(folder=str(folder), **kept)
    )
    return serve(settings, parameters=parameters)


def ready(server):
    return page(server.metrics_address, "ready")[0]


def test_a_full_disk_is_waited_for(small_disk, caplog):
    caplog.set_level(logging.INFO, logger="gradwire.serve")
    folder = small_disk.folder / "store"
    server = served(folder, {"w": torch.zeros(LARGE)})
    with CoordinatorClient(server.address, codec="none", worker="a") as client:
        client.add_gradients({"w": torch.ones(LARGE)})
        small_disk.fill()
        with (
            CoordinatorClient(server.address, codec="none", worker="b", retry_s=1.0) as hasty,
            pytest.raises(JournalError, match=r"127\.0\.0\.1.*cannot be written: .*[nN]o "),
        ):
            hasty.add_gradients({"w": torch.ones(LARGE)})
        waiting = threading.Thread(target=client.add_gradients, args=({"w": torch.ones(LARGE)},))
        waiting.start()
        until(lambda: ready(server) == 503, 20)
        until(lambda: any("pushes are refused" in each.message for each in caplog.records), 20)
        status = client.status()[0]
        assert not status.ready
        assert "no room for" in status.trouble
        assert status.refused["NO_SPACE"] >= 2
        assert client.version == 1  # it is read meanwhile
        time.sleep(2.5)  # of more lines in the log
        small_disk.empty()
        waiting.join(60)
        assert not waiting.is_alive()
        until(lambda: ready(server) == 200, 20)
        assert torch.equal(client.read()[1]["w"], torch.full((LARGE,), -2.0))
        until(lambda: any("pushes are taken again" in each.message for each in caplog.records), 20)
    assert sum("pushes are refused" in each.message for each in caplog.records) == 1
    server.stop()
    with served(folder) as server, CoordinatorClient(server.address) as client:
        assert torch.equal(client.read()[1]["w"], torch.full((LARGE,), -2.0))


@pytest.mark.full
def test_room_is_noticed_when_no_push_comes(small_disk):
    with served(small_disk.folder / "store", {"w": torch.zeros(LARGE)}) as server:
        small_disk.fill()
        with (
            CoordinatorClient(server.address, codec="none", retry_s=0.1) as client,
            pytest.raises(JournalError),
        ):
            client.add_gradients({"w": torch.ones(LARGE)})
        assert ready(server) == 503
        small_disk.empty()
        until(lambda: ready(server) == 200, 20)


def test_a_snapshot_that_fails_makes_no_room(small_disk):
    """The new journal, which is begun for it, has room for its header and for little more."""
    with served(small_disk.folder / "store", {"w": torch.zeros(LARGE)}) as server:
        with CoordinatorClient(server.address, codec="none", retry_s=0.1) as client:
            client.add_gradients({"w": torch.ones(LARGE)})
            small_disk.fill()
            with pytest.raises(JournalError):
                client.add_gradients({"w": torch.ones(LARGE)})
            with (small_disk.folder / "ballast").open("r+b") as file:
                file.truncate(file.seek(0, os.SEEK_END) - 8192)
            with pytest.raises(PeerError, match="cannot be saved"):
                client.snapshot()
            assert ready(server) == 503
            small_disk.empty()
            until(lambda: ready(server) == 200, 20)


@pytest.mark.full
def test_records_of_a_run_go_on_too(small_disk, monkeypatch):
    monkeypatch.setattr("gradwire.coordinator.server._RECORD_S", 0.01)
    settings = ServeSettings(address="127.0.0.1:0", run_dir=str(small_disk.folder / "run"))
    with serve(settings, parameters={"w": torch.zeros(2)}):
        file = small_disk.folder / "run" / "coordinator.jsonl"
        until(lambda: file.exists() and len(file.read_bytes().splitlines()) > 2, 20)
        small_disk.fill()
        time.sleep(2.0)  # for many records
        before = file.stat().st_size
        small_disk.empty()
        until(lambda: file.stat().st_size > before, 20)
    assert all(isinstance(json.loads(line), dict) for line in file.read_text().splitlines())


@pytest.mark.full
def test_room_is_noticed_where_a_file_to_append_to_cannot_be_given_room(small_disk, monkeypatch):
    """As on ext2, where C's library writes zeros instead: that is refused for a descriptor that appends."""
    give_room = os.posix_fallocate

    def refusing(descriptor, start, nbytes):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND:
            raise OSError(errno.EBADF, "Bad file descriptor")
        give_room(descriptor, start, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", refusing)
    with Journal(small_disk.folder / "journal") as journal:
        for noticed_by in (journal.probe, lambda: journal.append(bytes(500_000)) or not journal.trouble):
            small_disk.fill()
            with pytest.raises(NoSpaceError):
                journal.append(bytes(500_000))
            assert not journal.probe()
            small_disk.empty()
            assert noticed_by()


def test_pushes_behind_one_that_had_no_room_do_not_come_before_it(small_disk):
    """A small one would fit, and the large one would then be taken for one that had been applied."""
    with served(small_disk.folder / "store", {"w": torch.zeros(LARGE), "b": torch.zeros(2)}) as server:
        with CoordinatorClient(server.address, codec="none", window=8) as client:
            client.add_gradients({"b": torch.ones(2)})
            client.flush()
            with (small_disk.folder / "ballast").open("wb") as file:
                file.write(bytes((4 << 20) - 800_000 - 600_000))  # with the snapshot, there is no room for a large push
            for _ in range(3):
                client.add_gradients({"w": torch.ones(LARGE)})
                client.add_gradients({"b": torch.ones(2)})
            until(lambda: refusals(server)["NO_SPACE"], 20)
            assert client.version == 1
            small_disk.empty()
            client.flush()
            found = client.read()[1]
        assert torch.equal(found["w"], torch.full((LARGE,), -3.0))
        assert torch.equal(found["b"], torch.full((2,), -4.0))


def test_a_stop_on_a_full_disk_says_so_and_loses_nothing(small_disk):
    folder = small_disk.folder / "store"
    server = served(folder, {"w": torch.zeros(LARGE)})
    with CoordinatorClient(server.address, codec="none") as client:
        client.add_gradients({"w": torch.ones(LARGE)})
    small_disk.fill()
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(JournalError, match=r"No space left on device.* What was acknowledged is in the journal"):
        server.stop()
    server.stop()
    assert sorted(path.name for path in folder.iterdir()) == before
    small_disk.empty()
    with served(folder) as server, CoordinatorClient(server.address) as client:
        assert torch.equal(client.read()[1]["w"], torch.full((LARGE,), -1.0))


@pytest.mark.full
@pytest.mark.timeout(120)
def test_the_command_ends_on_a_full_disk_with_an_error_and_no_traceback(small_disk, tmp_path):
    file = tmp_path / "serve.toml"
    file.write_text(f'address = "127.0.0.1:0"\n[durability]\nfolder = "{small_disk.folder / "store"}"\n')
    command = [sys.executable, "-m", "gradwire", "serve", "--config", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        try:
            address = run.stdout.readline().split()[2].rstrip(",")
            with CoordinatorClient(address, codec="none") as client:
                client.set_model_parameters({"w": torch.zeros(LARGE)})
                client.add_gradients({"w": torch.ones(LARGE)})
            small_disk.fill()
            os.kill(run.pid, signal.SIGTERM)
            _, said = run.communicate(timeout=60)
        finally:
            run.kill()
    assert run.returncode == 1
    assert "error: " in said
    assert "No space left on device" in said
    assert "Traceback" not in said


def test_after_an_fsync_that_failed_nothing_is_acknowledged(tmp_path, monkeypatch):
    server = served(tmp_path / "store", {"w": torch.zeros(3)})
    with CoordinatorClient(server.address, codec="none", retry_s=1.0) as client:
        client.add_gradients({"w": torch.ones(3)})
        sync, failed = os.fdatasync, []

        def failing_once(descriptor):
            if not failed:
                failed.append(descriptor)
                raise OSError(5, "Input/output error")
            sync(descriptor)

        monkeypatch.setattr(os, "fdatasync", failing_once)
        for _ in range(3):
            with pytest.raises(gradwire.PeerError, match=r"cannot be written: .*Input/output error"):
                client.add_gradients({"w": torch.ones(3)})
        assert ready(server) == 503
        assert "closed for good" in client.status()[0].trouble
        with pytest.raises(gradwire.GradwireError, match=r"cannot be written: .*Input/output error"):
            client.snapshot()
    with pytest.raises(JournalError, match=r"cannot be written: .*Input/output error"):
        server.stop()
    monkeypatch.undo()
    with served(tmp_path / "store") as server, CoordinatorClient(server.address) as client:
        assert client.read()[0] >= 1


def test_a_session_near_the_highest_number_locks_no_worker_out(tmp_path):
    gradients = {"w": torch.ones(3)}
    with served(tmp_path / "store", {"w": torch.zeros(3)}) as server:
        for number, session in enumerate((2**63 - 1, 2**62, 2**63 - 1)):
            with channel_to(server) as channel:
                push = channel.stream_stream(
                    "/gradwire.coordinator.v1.Coordinator/Push",
                    response_deserializer=messages()["PushReply"].FromString,
                )
                message = push_of(encoded(gradients), worker=f"a{number}", session=session)
                assert [refusal(each) for each in push(iter([message]))] == ["NONE"]
            for _ in range(2):
                with CoordinatorClient(server.address, codec="none", worker=f"a{number}") as client:
                    client.add_gradients(gradients)
        assert server.version == 9
