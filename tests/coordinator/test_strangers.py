"""Callers that take what a server has, without a token or with one: they get little of it, and not for long.

``GRADWIRE_STRANGERS=1100`` for as many of them as descriptors that a server has by default.
"""

import contextlib
import errno
import os
import queue
import resource
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import gradwire
from gradwire import CoordinatorClient, QueueFullError, ServeSettings
from gradwire.coordinator.access import new_token, token_hash
from gradwire.coordinator.connection import Credentials
from gradwire.coordinator.connections import Connections, _Connection, _duplicate
from gradwire.coordinator.protocol import HEALTH, messages, method
from gradwire.coordinator.protocol.parts import part
from gradwire.coordinator.settings import Limits
from tests import needs
from tests.coordinator.http2 import RawConnection
from tests.coordinator.pages import page
from tests.coordinator.test_attacks import encoded, push_of, refusals, until

grpc = needs.module("grpc", "make test")

STRANGERS = int(os.environ.get("GRADWIRE_STRANGERS", "150"))
DESCRIPTORS = STRANGERS - 76  # that a server may have: fewer than there are strangers
SIZE = 20_000  # numbers of the model
PULL = bytes(5)  # a message without bytes: exact parameters
PROGRAM = """
import resource, sys, torch
if descriptors := int(sys.argv[3]):
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
from gradwire.coordinator.server import Server
from gradwire.coordinator.settings import load_settings
model = {"w": torch.zeros(int(sys.argv[2]))}
Server(load_settings(sys.argv[1]), parameters=model).run(lambda s: print(s.address, s.metrics_address, flush=True))
"""


class Served:
    """A server in a process of its own, with a worker that has a token."""

    def __init__(self, folder, *, limits="", durability="", size=SIZE, descriptors=None, open_to_all=False):
        self.token = new_token()
        worker = f'[[workers]]\nname = "w"\ntoken_sha256 = "{token_hash(self.token)}"\nroles = ["push", "read"]\n'
        settings = Path(folder) / "serve.toml"
        settings.write_text(
            f'address = "127.0.0.1:0"\nmetrics = "127.0.0.1:0"\n[limits]\n{limits}\n[durability]\n{durability}\n'
            + ("" if open_to_all else worker)
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(settings), str(size), str(descriptors or 0)],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address, self.metrics = self.process.stdout.readline().split()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def client(self, **settings):
        credentials = Credentials(token=self.token)
        return CoordinatorClient(self.address, codec="none", credentials=credentials, **{"retry_s": 30, **settings})

    @property
    def metadata(self):
        return (("authorization", f"Bearer {self.token}"),)

    @property
    def resident_mb(self):
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6

    def ready(self):
        return page(self.metrics, "ready")[0]


@contextlib.contextmanager
def connections(address, count, token=None):
    made = [RawConnection(address, token) for _ in range(count)]
    try:
        yield made
    finally:
        for each in made:
            each.close()


@contextlib.contextmanager
def room_for(descriptors):
    """Descriptors for this process, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, descriptors), hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def gone(made, seconds):
    """How many of these connections the server has ended within so many seconds."""
    end = time.monotonic() + seconds
    left = list(made)
    while left and time.monotonic() < end:
        left = [each for each in left if not each.ended(0.01)]
    return len(made) - len(left)


def test_silent_connections_do_not_stop_pushes_or_the_journal(tmp_path):
    """More strangers than the server has descriptors: journals are begun, snapshots saved, pushes acknowledged."""
    kept = f'folder = "{tmp_path / "store"}"\nsnapshot_every = 5'
    with (
        room_for(STRANGERS + 200),
        Served(tmp_path, durability=kept, limits="call_s = 2", descriptors=DESCRIPTORS) as server,
    ):
        with server.client() as client, connections(server.address, STRANGERS) as strangers:
            for _ in range(30):
                client.add_gradients({"w": torch.ones(SIZE)})
                time.sleep(0.02)
            assert client.read()[0] == 30
            assert server.ready() == 200
            assert gone(strangers, 30) == STRANGERS
            client.add_gradients({"w": torch.ones(SIZE)})
        with server.client() as late:
            assert late.read()[0] == 31


@pytest.mark.full
def test_an_identified_connection_may_be_idle_and_a_stranger_s_may_not(tmp_path):
    with Served(tmp_path, limits="call_s = 0.5") as server, server.client(retry_s=0.1) as client:
        client.read()
        with connections(server.address, 2) as strangers:
            for each in strangers:
                each.call("Describe")  # without a token: an answer is no identity
            assert gone(strangers, 20) == 2
        with connections(server.address, 1, server.token) as workers:
            stream = workers[0].call("Describe")
            workers[0].send(stream, bytes(5))
            time.sleep(1.5)
            assert gone(workers, 0.1) == 0
        client.read()  # on the connection of before: it would be tried again for too short a time


def no_descriptor(*_):
    raise OSError(errno.EMFILE, "Too many open files")


def test_a_sweep_that_could_not_look_is_made_up_for(monkeypatch):
    """Without a descriptor to list the others by; and copies of descriptors that belong to a file now are closed."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)), listening.accept()[0]:
            guard = Connections(port, most=80, most_per_address=80, stranger_s=0.1)
            assert guard.sweep() == 0
            time.sleep(0.2)
            with monkeypatch.context() as patch:
                patch.setattr(os, "listdir", no_descriptor)
                assert guard.sweep() == 0
            assert guard.sweep() == 1
            assert guard.sweep() == 0
    with open(os.devnull) as file:
        before = os.listdir("/proc/self/fd")
        with pytest.raises(OSError, match="no longer"):
            _duplicate(file.fileno(), "socket:[1]")
        assert len(os.listdir("/proc/self/fd")) == len(before)


def test_limits_of_connections_are_for_each_address_and_for_all():
    """Of strangers the oldest end first, of an address that has too many the newest."""
    guard, now = Connections(1, most=80, most_per_address=16, stranger_s=1000), time.monotonic()
    ours = {f"a{n}": _Connection(f"10.0.0.1 {n}", now + n) for n in range(10)}
    ours |= {f"b{n}": _Connection(f"10.0.0.2 {n}", now + n, known=True) for n in range(18)}
    ours |= {"c": _Connection("10.0.0.3 1", now)}
    assert set(guard._surplus(ours)) == {*(f"a{n}" for n in range(8)), "b16", "b17"}
    many = {f"{host}": _Connection(f"10.0.1.{host} 1", now + host) for host in range(12)}
    assert set(guard._surplus(many)) == {"0", "1"}


@pytest.mark.full
def test_new_workers_come_in_while_strangers_come_again_and_again(tmp_path):
    """More strangers than connections, to a server with so few descriptors that an eighth of them is few, too."""
    long = "call_s = 100"  # so that strangers end for being too many alone
    with (
        room_for(500),
        Served(tmp_path, limits=long, descriptors=256) as server,
        contextlib.ExitStack() as strangers,
    ):
        stop = threading.Event()

        def come_again():
            held = [None] * 300
            while not stop.is_set():
                for place, each in enumerate(held):
                    if each is None or each.ended(0.0001):
                        with contextlib.suppress(OSError), contextlib.closing(each or contextlib.ExitStack()):
                            held[place] = RawConnection(server.address, source=f"127.0.0.{2 + place % 4}")
            for each in held:
                each.close()

        coming = threading.Thread(target=come_again)
        coming.start()
        strangers.callback(coming.join)
        strangers.callback(stop.set)
        time.sleep(2)
        for _ in range(3):
            with server.client(retry_s=90) as client:
                client.add_gradients({"w": torch.ones(SIZE)})


@pytest.mark.full
def test_health_checks_that_take_no_answer_hold_no_place(tmp_path):
    """They are open to everybody: also from a worker's address, they leave place for its calls."""
    with Served(tmp_path, limits="streams = 300\nstreams_per_address = 100") as server:
        with contextlib.ExitStack() as held:
            for number in range(8):
                stranger = RawConnection(server.address, window=0, source=f"127.0.0.{1 + number % 3}")
                held.callback(stranger.close)
                with contextlib.suppress(OSError):  # the server has ended it
                    for _ in range(100):
                        stranger.call("Check", HEALTH)
            for _ in range(5):
                with server.client(retry_s=0.5) as client:
                    client.add_gradients({"w": torch.ones(SIZE)})


def test_a_push_that_stops_in_its_first_message_is_refused():
    """Cut, and then either ended or held back."""
    whole = push_of(encoded({"w": torch.ones(SIZE)}))
    message = b"\0" + len(whole).to_bytes(4, "big") + whole
    settings = ServeSettings(address="127.0.0.1:0", limits=Limits(call_s=1.0))
    with gradwire.serve(settings, parameters={"w": torch.zeros(SIZE)}) as server:
        with connections(server.address, 4) as held:
            for each, (sent, ends) in zip(held, ((3, True), (1000, True), (1000, False), (0, True)), strict=True):
                stream = each.call("Push")
                each.send(stream, message[:sent])
                if ends:
                    each.end(stream)
            until(lambda: refusals(server) == {"INCOMPLETE": 4}, 20)


@pytest.mark.full
def test_calls_whose_request_never_comes_hold_no_place(tmp_path):
    """Without a token a call is refused before its request; with one it has ``call_s``."""
    count = STRANGERS
    with Served(tmp_path, limits=f"streams = {count - 20}\ncall_s = 3") as server, server.client() as client:
        for metadata, status in (((), "UNAUTHENTICATED"), (server.metadata, "ABORTED")):
            waiting, held = queue.SimpleQueue(), []
            with contextlib.ExitStack() as channels:
                for _ in range(0, count // 2, 75):  # a connection may have so many calls
                    alone = (("grpc.use_local_subchannel_pool", 1),)
                    channel = channels.enter_context(grpc.insecure_channel(server.address, alone))
                    call = channel.stream_unary(method("Describe"))
                    held += [call.future(iter(waiting.get, None), metadata=metadata, timeout=99) for _ in range(75)]
                assert {each.code().name for each in held} == {status}
                for _ in held:
                    waiting.put(None)
            client.add_gradients({"w": torch.ones(SIZE)})


@pytest.mark.full
def test_requests_that_stop_just_short_of_the_limit_take_no_memory(tmp_path):
    """64 KiB of a stranger at most: a request is read after its caller was identified."""
    almost = part(None, bytes((2 << 20) - 100))
    almost = b"\0" + len(almost).to_bytes(4, "big") + almost[:-50]
    with Served(tmp_path) as server, server.client() as client:
        client.add_gradients({"w": torch.ones(SIZE)})
        before = server.resident_mb
        with connections(server.address, STRANGERS) as strangers:
            for each in strangers:
                with contextlib.suppress(OSError):  # the server has ended it
                    each.send(each.call("Push"), almost, seconds=0.02)
                    each.send(each.call("Status"), almost, seconds=0.02)
            assert server.resident_mb - before < 10 + STRANGERS / 16
            client.add_gradients({"w": torch.ones(SIZE)})


@pytest.mark.full
def test_parameters_that_are_not_taken_are_bounded(tmp_path):
    """Readers of one version share a copy of the parameters, and wait when there is no room for another."""
    readers, size, most = max(40, STRANGERS // 5), 2_000_000, 64
    with Served(tmp_path, size=size, limits=f"reader_mb = {most}") as server, server.client() as client:
        client.read()
        before = server.resident_mb
        largest = before
        with connections(server.address, readers, server.token) as held:
            for number, each in enumerate(held):
                each.send(each.call("Pull"), PULL)
                if number % 8 == 0:  # another version for those that come
                    client.add_gradients({"w": torch.ones(size)})
                largest = max(largest, server.resident_mb)
            assert largest - before < most + 60
        client.read()


@pytest.mark.full
def test_readers_of_compressed_parameters_are_bounded(tmp_path):
    """Their copies, frames, and the changes that are being encoded."""
    size, most = 4_000_000, 320
    with Served(tmp_path, size=size, limits=f"reader_mb = {most}") as server, server.client() as client:
        client.add_gradients({"w": torch.ones(size)})
        client.read()
        before, end = server.resident_mb, time.monotonic() + 6
        largest = before

        def follow(number):
            with server.client(worker=f"w/{number}", weights="int8") as reader:
                while time.monotonic() < end:
                    reader.read()

        with ThreadPoolExecutor(8) as readers:
            following = [readers.submit(follow, number) for number in range(8)]
            while time.monotonic() < end:
                client.add_gradients({"w": torch.ones(size)})
                largest = max(largest, server.resident_mb)
            for each in following:
                each.result()
        assert largest - before < most + 60


@pytest.mark.full
def test_a_reader_that_takes_nothing_is_ended(tmp_path):
    with Served(tmp_path, limits="reader_mb = 0.001\ncall_s = 1") as server, server.client() as client:
        with connections(server.address, 1, server.token) as (held,):
            held.send(held.call("Pull"), PULL)
            held.ended(0.5)  # it takes what its window lets through, and says no more
            client.read()  # for which there is no room before


def test_a_reader_for_which_there_is_no_room_waits_and_is_then_refused():
    limits = Limits(reader_mb=1.0, call_s=1.0)
    with gradwire.serve(
        ServeSettings(address="127.0.0.1:0", limits=limits), parameters={"w": torch.zeros(3_000_000)}
    ) as server:
        with connections(server.address, 1) as (held,), CoordinatorClient(server.address, retry_s=0.5) as client:
            held.send(held.call("Pull"), PULL)
            while not server._host.readers.nbytes:
                time.sleep(0.01)
            with pytest.raises(QueueFullError, match=r"readers have taken 14 MB, and may take 1: .*`reader_mb`"):
                client.read()
        with CoordinatorClient(server.address) as client:
            client.read()
        assert server._host.readers.nbytes == 0


@pytest.mark.full
def test_whoever_takes_no_answers_is_ended(tmp_path):
    """Refused pushes are answered; a worker that does not read the answers is not read any more, and ended."""
    header = messages()["PushPart"].Header(worker="stranger")  # not its name: refused
    small = part(header, b"")
    message = small + b"".join(b"\x1a" + bytes([len(small)]) + small for _ in range(64))
    message = b"\0" + len(message).to_bytes(4, "big") + message
    with Served(tmp_path, limits="call_s = 1") as server, server.client() as client:
        client.read()
        before = server.resident_mb
        with connections(server.address, 1, server.token) as (held,):
            stream = held.call("Push")
            end = time.monotonic() + 40
            while time.monotonic() < end and (sent := held.send(stream, message * 200, seconds=3)):
                assert server.resident_mb - before < 40
            assert sent == 0
        client.read()


@pytest.mark.full
def test_a_server_of_its_own_process_takes_the_descriptors_it_may_have():
    program = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
from gradwire.coordinator.connections import raise_descriptor_limit
raise_descriptor_limit(200)
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    for limits, expected in ((("128", "1000"), "456 1000"), (("128", "300"), "300 300"), (("900", "1000"), "900 1000")):
        ran = subprocess.run([sys.executable, "-c", program, *limits], capture_output=True, text=True, check=True)
        assert ran.stdout.strip() == expected
