"""A server that is lied to, flooded and fed garbage: it refuses, counts, says no secret, and goes on."""

import contextlib
import datetime
import gc
import ipaddress
import logging
import math
import os
import queue
import random
import socket
import struct
import threading
import time
import urllib.request
import zlib
from collections import Counter

import pytest
import torch

import gradwire
from gradwire import (
    AccessError,
    ConfigError,
    CoordinatorClient,
    NonFiniteError,
    PeerError,
    QueueFullError,
    ServeSettings,
)
from gradwire.coordinator.access import Worker, new_token, token_hash
from gradwire.coordinator.connection import Credentials
from gradwire.coordinator.protocol import messages, method
from gradwire.coordinator.protocol.parts import PART_BYTES, part
from gradwire.coordinator.receiver import Incoming
from gradwire.coordinator.rules import Model
from gradwire.coordinator.settings import Limits, ModelRules, Tls
from tests import needs

grpc = needs.module("grpc", "make test")
x509 = needs.module("cryptography.x509", "make test")

START = {"w": torch.linspace(-1, 1, 50).view(5, 10), "b": torch.zeros(10)}
ONES = {"w": torch.ones(5, 10), "b": torch.ones(10)}
PAYLOADS = int(os.environ.get("GRADWIRE_FUZZ", "800"))
SETTLED_S = 20  # longer than any answer takes


def served(parameters=START, **settings):
    return gradwire.serve(ServeSettings(address="127.0.0.1:0", **settings), parameters=parameters)


@contextlib.contextmanager
def channel_to(server):
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(server.address, options=options) as channel:
        yield channel


def refusals(server):
    return server._host.metrics.refusals


def until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


class Stream:
    """A stream of pushes, one raw message after the other."""

    def __init__(self, channel, metadata=()):
        self._messages = queue.SimpleQueue()
        start = channel.stream_stream(method("Push"), response_deserializer=messages()["PushReply"].FromString)
        self.call = start(iter(self._messages.get, None), timeout=SETTLED_S, metadata=metadata)
        self._replies = (each for reply in self.call for each in (reply, *reply.more))

    def send(self, *parts):
        for each in parts:
            self._messages.put(each)

    def reply(self):
        return next(self._replies, None)

    def end(self):
        self._messages.put(None)
        return list(self._replies)


def refusal(reply):
    return messages()["PushReply"].Refusal.Name(reply.refusal)


def answers(channel, *parts, metadata=()):
    """Reasons of a stream that sends these and ends."""
    stream = Stream(channel, metadata)
    stream.send(*parts)
    return [refusal(reply) for reply in stream.end()]


def header_of(frames, worker="raw", sequence=1, **fields):
    header = messages()["PushPart"].Header(worker=worker, sequence=sequence, **fields)
    for name, frame in frames:
        header.entries.add(name=name, length=len(frame))
    return header


def push_of(frames, **fields):
    frames = list(frames.items()) if isinstance(frames, dict) else frames
    return part(header_of(frames, **fields), b"".join(frame for _, frame in frames))


def encoded(gradients, codec="none"):
    return {name: gradwire.encode(tensor, codec) for name, tensor in gradients.items()}


def announcing(length, worker="raw"):
    header = messages()["PushPart"].Header(worker=worker, sequence=1)
    header.entries.add(name="w", length=length)
    return part(header, b"")


def resealed(frame):
    frame = bytearray(frame)
    struct.pack_into("<I", frame, 4, zlib.crc32(frame[8:]))
    return bytes(frame)


def code_of(call):
    """The status of a call, with what it said."""
    try:
        call()
    except grpc.RpcError as error:
        return error.code().name, error.details() or ""
    return "OK", ""


def unary(channel, name, data=b"", metadata=()):
    if name == "Pull":
        start = channel.unary_stream(method(name))
        return code_of(lambda: list(start(data, timeout=SETTLED_S, metadata=metadata)))
    if name == "SetModel":
        start = channel.stream_unary(method(name))
        return code_of(lambda: start(iter([data]), timeout=SETTLED_S, metadata=metadata))
    if name == "Push":
        start = channel.stream_stream(method(name))
        return code_of(lambda: list(start(iter([data]), timeout=SETTLED_S, metadata=metadata)))
    return code_of(lambda: channel.unary_unary(method(name))(data, timeout=SETTLED_S, metadata=metadata))


def still_serves(server, **who):
    """A push and a read, and the push is what has changed."""
    with CoordinatorClient(server.address, codec="none", retry_s=10, **who) as client:
        version, before = client.read()
        client.add_gradients(ONES, version=version)
        after_version, after = client.read()
    assert after_version == version + 1
    rate = server.settings.model.learning_rate
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name].add(ONES[name], alpha=-rate))


# Tokens.


@pytest.fixture
def secrets():
    return {name: new_token() for name in ("pusher", "reader", "both", "boss")}


@pytest.fixture
def guarded(secrets):
    roles = {"pusher": ("push",), "reader": ("read",), "both": ("push", "read"), "boss": ("admin",)}
    workers = tuple(Worker(name, token_hash(secrets[name]), each) for name, each in roles.items())
    with served(workers=workers, metrics="127.0.0.1:0") as server:
        yield server


def test_whoever_has_no_token_or_a_wrong_one_is_refused_and_counted(guarded, secrets, caplog):
    caplog.set_level(logging.DEBUG)
    wrong, right = new_token(), secrets["both"]
    said = []
    for token in (wrong, None, right + "x", right[:-1]):
        with CoordinatorClient(guarded.address, token=token, retry_s=5) as client:
            for call in (client.read, client.status, lambda client=client: client.add_gradients(ONES)):
                with pytest.raises(AccessError) as error:
                    call()
                said.append(repr(error.value) + repr(error.getrepr()))
    assert refusals(guarded) == {"FORBIDDEN": 12}
    values = [
        f"Basic {right}",
        "Bearer",
        "Bearer ",
        "",
        right,
        f"Bearer {token_hash(right)}",
        f"Bearer {wrong}",
        f"Bearer  {right}",
    ]
    with channel_to(guarded) as channel:
        for value in values:
            for name in ("Describe", "Status", "Manage", "Pull", "Push", "SetModel"):
                code, text = unary(channel, name, metadata=(("authorization", value),))
                assert code == "UNAUTHENTICATED", (name, value)
                said.append(text)
        assert unary(channel, "Describe", metadata=(("authorization", f"bearer {right}"),))[0] == "OK"
    assert refusals(guarded) == {"FORBIDDEN": 12 + 6 * len(values)}
    with urllib.request.urlopen(f"http://{guarded.metrics_address}/metrics", timeout=5) as page:
        text = page.read().decode()
    assert f'gradwire_refused_total{{reason="FORBIDDEN"}} {12 + 6 * len(values)}\n' in text
    logged = caplog.text + "".join(f"{record.msg} {record.args}" for record in caplog.records)
    for secret in (wrong, right, right[:-1], token_hash(right)):
        assert secret not in "".join(said) + logged + text + repr(Credentials(token=secret))
    assert guarded._host.store.read()[0] == 0
    still_serves(guarded, token=right)


CALLS = {
    "push": lambda client: client.add_gradients(ONES),
    "read": lambda client: client.read(),
    "status": lambda client: client.status(),
    "set_model": lambda client: client.set_model_parameters(ONES),
    "set_mode": lambda client: client.set_parameters("ascent"),
    "clear": lambda client: client.clear_gradients(),
    "snapshot": lambda client: client.snapshot(),
    "drain": lambda client: client.drain(),
}


@pytest.mark.parametrize(
    ("name", "allowed"),
    [("pusher", {"push"}), ("reader", {"read", "status"}), ("both", {"push", "read", "status"}), ("boss", set(CALLS))],
)
def test_a_role_allows_what_it_says_and_nothing_else(guarded, secrets, name, allowed):
    for call, make in CALLS.items():
        before, counted = guarded._host.store.read(), refusals(guarded)["FORBIDDEN"]
        with CoordinatorClient(guarded.address, codec="none", token=secrets[name], retry_s=5) as client:
            if call in allowed:
                make(client)
                continue
            with pytest.raises(AccessError, match=f"'{name}' may not do this: it needs the role"):
                make(client)
        after = guarded._host.store.read()
        assert after[0] == before[0]
        assert all(torch.equal(after[1][each], before[1][each]) for each in START)
        assert refusals(guarded)["FORBIDDEN"] == counted + 1
    assert guarded._host.draining == ("drain" in allowed)


@pytest.mark.parametrize("worker", ["pusher", "bothx", "", "both-2", "/both", "Both", "b"])
def test_a_worker_cannot_push_under_the_name_of_another(guarded, secrets, worker):
    metadata = (("authorization", f"Bearer {secrets['both']}"),)
    with channel_to(guarded) as channel:
        expected = "FORBIDDEN" if worker else "INVALID"
        assert answers(channel, push_of(encoded(ONES), worker=worker), metadata=metadata) == [expected]
        assert answers(channel, push_of(encoded(ONES), worker="both/2"), metadata=metadata) == ["NONE"]
        assert answers(channel, push_of(encoded(ONES), worker="both"), metadata=metadata) == ["NONE"]
    assert set(guarded._host.workers) == {"both", "both/2"}
    assert refusals(guarded) == {expected: 1}


def test_a_worker_cannot_read_as_another(guarded, secrets):
    for name in ("pusher", "both/1"):
        who = {"token": secrets["both"], "worker": name, "weights": "int4", "retry_s": 5}
        with CoordinatorClient(guarded.address, **who) as client:
            if name == "both/1":
                client.read()
            else:
                with pytest.raises(AccessError, match="'both' may not push as 'pusher'"):
                    client.read()
    assert len(guarded._host.readers.copies) == 1


# TLS.


class Authority:
    """Who signs certificates, into files."""

    def __init__(self, folder, name):
        self.folder, self.name = folder, name
        self.key = self._new_key()
        self.subject = self._named(f"{name} authority")
        self.path = self._write("ca", self._signed(self.subject, self.key, authority=True))

    def issue(self, common_name, *, days=1):
        """A certificate and its key; with ``days`` below 0 it has expired."""
        key = self._new_key()
        file = f"{common_name}{days}".replace("/", "-")
        return self._write(file, self._signed(self._named(common_name), key, days=days)), self._write_key(file, key)

    def _new_key(self):
        from cryptography.hazmat.primitives.asymmetric import ec

        return ec.generate_private_key(ec.SECP256R1())

    def _named(self, name):
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])

    def _signed(self, subject, key, *, days=1, authority=False):
        from cryptography.hazmat.primitives import hashes

        now = datetime.datetime.now(datetime.timezone.utc)
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        built = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=3))
            .not_valid_after(now + datetime.timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        )
        if not authority:
            built = built.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return built.sign(self.key, hashes.SHA256())

    def _write(self, name, certificate):
        from cryptography.hazmat.primitives.serialization import Encoding

        path = self.folder / f"{self.name}-{name}.pem"
        path.write_bytes(certificate.public_bytes(Encoding.PEM))
        return str(path)

    def _write_key(self, name, key):
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

        path = self.folder / f"{self.name}-{name}.key"
        path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return str(path)


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("ours"), "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("theirs"), "theirs")


def tls_of(authority, *, mutual):
    certificate, key = authority.issue("localhost")
    return Tls(certificate, key, authority.path if mutual else None)


def credentials(authority, own=None, **more):
    certificate, key = own or (None, None)
    return Credentials(authority=authority.path, certificate=certificate, key=key, **more)


def test_a_client_that_cannot_trust_the_server_does_not_talk_to_it(ours, theirs):
    token = new_token()
    with served(tls=tls_of(ours, mutual=False), workers=(Worker("w", token_hash(token)),)) as server:
        for known in (Credentials(token=token), credentials(theirs, token=token)):
            with (
                CoordinatorClient(server.address, credentials=known, retry_s=1) as client,
                pytest.raises(PeerError, match="cannot be reached"),
            ):
                client.read()
        other_name = credentials(ours, token=token, server_name="example.org")
        with CoordinatorClient(server.address, credentials=other_name, retry_s=1) as client, pytest.raises(PeerError):
            client.read()
        with CoordinatorClient(server.address, credentials=credentials(ours), retry_s=5) as client:
            with pytest.raises(AccessError):
                client.read()
        still_serves(server, credentials=credentials(ours, token=token))
        assert refusals(server) == {"FORBIDDEN": 1}


def test_a_certificate_says_who_a_worker_is(ours):
    workers = (Worker("w1"), Worker("r1", roles=("read",)))
    with served(tls=tls_of(ours, mutual=True), workers=workers) as server:
        still_serves(server, credentials=credentials(ours, ours.issue("w1")))
        assert {name.partition("/")[0] for name in server._host.workers} == {"w1"}
        reader = credentials(ours, ours.issue("r1"))
        with CoordinatorClient(server.address, credentials=reader, retry_s=5) as client:
            assert client.read()[0] == 1
            with pytest.raises(AccessError, match="'r1' may not do this"):
                client.add_gradients(ONES)
        mine = credentials(ours, ours.issue("w1"))
        with CoordinatorClient(server.address, credentials=mine, worker="r1", retry_s=5) as client:
            with pytest.raises(AccessError, match="'w1' may not push as 'r1'"):
                client.add_gradients(ONES)
        assert refusals(server) == {"FORBIDDEN": 2}


def test_certificates_that_prove_nothing_are_refused(ours, theirs):
    with served(tls=tls_of(ours, mutual=True), workers=(Worker("w1"),)) as server:
        expired, foreign = ours.issue("w1", days=-1), theirs.issue("w1")
        for own in (None, expired, foreign):
            with (
                CoordinatorClient(server.address, credentials=credentials(ours, own), retry_s=1) as client,
                pytest.raises(PeerError, match="cannot be reached"),
            ):
                client.read()
        assert not refusals(server)
        for name in ("w2", "w1 ", "W1", "w1/1"):
            unknown = credentials(ours, ours.issue(name))
            with (
                CoordinatorClient(server.address, credentials=unknown, retry_s=5) as client,
                pytest.raises(AccessError, match="the certificate's name is not known here"),
            ):
                client.read()
        assert refusals(server) == {"FORBIDDEN": 4}
        still_serves(server, credentials=credentials(ours, ours.issue("w1")))


def test_a_certificate_does_not_stand_in_for_the_token_of_a_worker(ours):
    token = new_token()
    workers = (Worker("by-token", token_hash(token)), Worker("by-certificate"))
    with served(tls=tls_of(ours, mutual=True), workers=workers) as server:
        named = credentials(ours, ours.issue("by-token"))
        with CoordinatorClient(server.address, credentials=named, retry_s=5) as client, pytest.raises(AccessError):
            client.read()
        still_serves(server, credentials=credentials(ours, ours.issue("any"), token=token))


def test_tokens_and_certificates_can_be_mixed(ours):
    """Everybody shows a certificate; whoever has a token is known by that."""
    token = new_token()
    workers = (Worker("by-token", token_hash(token)), Worker("by-certificate"))
    with served(tls=tls_of(ours, mutual=True), workers=workers) as server:
        still_serves(server, credentials=credentials(ours, ours.issue("any"), token=token))
        still_serves(server, credentials=credentials(ours, ours.issue("by-certificate")))
        alone = credentials(ours, token=token)
        with CoordinatorClient(server.address, credentials=alone, retry_s=1) as client, pytest.raises(PeerError):
            client.read()


@pytest.mark.parametrize("address", ["0.0.0.0:7070", "[::]:7070", "192.168.1.5:1", "example.org:7070", "127.0.0.1.x:1"])
def test_an_address_that_others_reach_needs_tls_or_workers(address):
    with pytest.raises(ConfigError, match="nobody would be asked who they are"):
        ServeSettings(address=address)
    assert ServeSettings(address=address, workers=(Worker("w", token_hash("x")),)).address == address


# More than is allowed.


def test_a_push_that_is_announced_too_large_is_refused_before_there_is_room_for_it(monkeypatch):
    made, real = [], Incoming.of
    monkeypatch.setattr(Incoming, "of", lambda header, limits: made.append(header) or real(header, limits))
    lengths = [1_000_001, 1 << 40, (1 << 63) - 1, (1 << 64) - 1]
    with served(limits=Limits(push_mb=1.0)) as server, channel_to(server) as channel:
        for length in lengths:
            assert answers(channel, announcing(length)) == ["TOO_LARGE"]
        halves = messages()["PushPart"].Header(worker="raw", sequence=1)
        for name in ("w", "b"):
            halves.entries.add(name=name, length=600_000)
        assert answers(channel, part(halves, b"")) == ["TOO_LARGE"]
        assert not made
        assert refusals(server) == {"TOO_LARGE": len(lengths) + 1}
        still_serves(server)
        assert len(made) == 1


def test_a_push_for_which_there_is_no_memory_is_refused_and_counted(caplog):
    with served(limits=Limits(push_mb=1e12)) as server, channel_to(server) as channel:
        got = answers(channel, announcing(1 << 55))
        assert server._host.queued == 0
        still_serves(server)
        assert not errors_in(caplog)
        assert len(got) == 1
        assert refusals(server) == {got[0]: 1}


def test_many_pushes_in_one_message_do_not_hold_up_the_others():
    each = push_of([])
    message = each + (b"\x1a" + varint(len(each)) + each) * (2_000_000 // (len(each) + 2))
    with served() as server, channel_to(server) as channel, channel_to(server) as other:
        assert unary(other, "Describe")[0] == "OK"
        stream, slowest = Stream(channel), 0.0
        stream.send(message)
        end = time.monotonic() + 3
        while time.monotonic() < end:
            begin = time.monotonic()
            assert unary(other, "Describe")[0] == "OK"
            slowest = max(slowest, time.monotonic() - begin)
        stream.call.cancel()
        stream.send(None)
        assert slowest < 0.5
        still_serves(server)


def test_more_entries_than_the_model_has_are_refused():
    frame = gradwire.encode(START["b"], "none")
    with served() as server, channel_to(server) as channel:
        for count in (3, 50_000):
            frames = [(str(each), b"") for each in range(count - 1)] + [("b", frame)]
            assert answers(channel, push_of(frames)) == ["TOO_LARGE"]
        assert answers(channel, push_of([])) == ["INVALID"]
        assert refusals(server) == {"TOO_LARGE": 2, "INVALID": 1}
        still_serves(server)


def test_a_stream_goes_on_after_a_push_that_was_too_large():
    with served(limits=Limits(push_mb=1.0)) as server, channel_to(server) as channel:
        rest = [part(None, bytes(500_000)) for _ in range(4)]
        got = answers(channel, announcing(2_000_000), *rest, push_of(encoded(ONES)), push_of(encoded(ONES), sequence=2))
        assert got == ["TOO_LARGE", "NONE", "NONE"]


@pytest.mark.parametrize("name", ["Push", "SetModel", "Describe", "Manage", "Status", "Pull"])
def test_a_message_above_the_limit_ends_its_call_and_not_the_server(name):
    with served() as server, channel_to(server) as channel:
        assert unary(channel, name, bytes(2 * PART_BYTES + 1))[0] == "RESOURCE_EXHAUSTED"
        assert unary(channel, "Describe", metadata=(("x", "y" * 100_000),))[0] == "RESOURCE_EXHAUSTED"
        stream = Stream(channel)
        stream.send(announcing(3 * PART_BYTES), bytes(2 * PART_BYTES + 1))
        assert code_of(stream.end)[0] == "RESOURCE_EXHAUSTED"
        until(lambda: server._host.queued == 0)
        still_serves(server)


def test_a_worker_that_pushes_too_often_is_told_to_wait():
    with served(limits=Limits(pushes_per_s=2.0)) as server, channel_to(server) as channel:
        got = [answers(channel, push_of(encoded(ONES), sequence=number)) for number in range(1, 8)]
        assert got[:4] == [["NONE"]] * 4
        assert got[-1] == ["RATE"]
        assert refusals(server) == {"RATE": got.count(["RATE"])}
        assert answers(channel, push_of(encoded(ONES), worker="other")) == ["NONE"]
        assert server._host.store.read()[0] == got.count(["NONE"]) + 1


def test_a_client_that_pushes_too_often_waits_or_is_told():
    with served(limits=Limits(pushes_per_s=5.0)) as server:
        with CoordinatorClient(server.address, codec="none", retry_s=10) as client:
            begin = time.monotonic()
            for _ in range(13):
                client.add_gradients(ONES)
            assert time.monotonic() - begin > 0.3
        assert server._host.store.read()[0] == 13
        assert refusals(server)["RATE"] > 0
    with served(limits=Limits(pushes_per_s=0.5)) as server:
        with CoordinatorClient(server.address, codec="none", retry_s=0.5) as client:
            client.add_gradients(ONES)
            with pytest.raises(QueueFullError, match=r"may push 0\.5 times a second"):
                client.add_gradients(ONES)
        assert server._host.store.read()[0] == 1


def test_a_rate_below_one_in_two_seconds_lets_the_first_push_through():
    with served(limits=Limits(pushes_per_s=0.25)) as server, channel_to(server) as channel:
        assert answers(channel, push_of(encoded(ONES))) == ["NONE"]
        assert answers(channel, push_of(encoded(ONES), sequence=2)) == ["RATE"]


def test_pushes_beyond_the_queue_are_refused_until_there_is_room():
    with served(limits=Limits(queue=2)) as server, channel_to(server) as channel:
        data = b"".join(encoded(ONES).values())
        held = [Stream(channel), Stream(channel)]
        for number, stream in enumerate(held):
            stream.send(part(header_of(list(encoded(ONES).items()), worker=f"held-{number}"), b""))
        until(lambda: server._host.queued == 2)
        assert answers(channel, push_of(encoded(ONES))) == ["FULL"]
        with CoordinatorClient(server.address, retry_s=0.3) as client:
            with pytest.raises(QueueFullError, match="at most 2 may"):
                client.add_gradients(ONES)
        assert refusals(server)["FULL"] > 1
        held[0].send(part(None, data))
        assert refusal(held[0].reply()) == "NONE"
        still_serves(server)
        held[1].call.cancel()
        held[0].end()
        until(lambda: server._host.queued == 0)
        assert set(refusals(server)) == {"FULL", "INCOMPLETE"}  # the second was cancelled in the middle


def test_there_can_be_too_many_workers():
    with served(limits=Limits(workers=3)) as server, channel_to(server) as channel:
        got = [answers(channel, push_of(encoded(ONES), worker=f"w{each}")) for each in range(5)]
        assert got == [["NONE"]] * 3 + [["TOO_LARGE"]] * 2
        assert answers(channel, push_of(encoded(ONES), worker="w0", sequence=2)) == ["NONE"]
        assert refusals(server) == {"TOO_LARGE": 2}
        assert set(server._host.workers) == {"w0", "w1", "w2"}


def test_there_can_be_too_many_calls():
    with served(limits=Limits(streams=4)) as server, channel_to(server) as channel:
        held = [Stream(channel) for _ in range(4)]
        for number, stream in enumerate(held):
            stream.send(push_of(encoded(ONES), worker=f"w{number}"))
            assert refusal(stream.reply()) == "NONE"
        assert unary(channel, "Describe")[0] == "RESOURCE_EXHAUSTED"
        for stream in held:
            stream.end()
        until(lambda: unary(channel, "Describe")[0] == "OK")
        still_serves(server)


def test_a_worker_that_always_names_the_first_version_takes_no_room_for_it():
    with served() as server, channel_to(server) as channel:
        frames = encoded(ONES, "int8")
        got = answers(channel, *(push_of(frames, sequence=number, version=0) for number in range(1, 2101)))
        assert got == ["NONE"] * 2100
        assert sum(server._host.metrics.ages.values()) == 2100
        assert len(server._host.metrics.ages) <= 1100


def test_there_can_be_too_many_readers_of_compressed_parameters():
    """``limits.workers`` is how many names are kept track of, and those of readers are names."""
    request = messages()["PullRequest"]
    with served(limits=Limits(workers=10)) as server, channel_to(server) as channel:
        for number in range(30):
            unary(channel, "Pull", request(reader=f"r{number}", codec="int4").SerializeToString())
        assert len(server._host.readers.copies) <= 10


# Slow ones.


def test_a_push_whose_rest_does_not_come_is_ended_while_others_are_served():
    with served(limits=Limits(push_s=0.5)) as server, channel_to(server) as channel:
        begin = time.monotonic()
        slow = [Stream(channel) for _ in range(8)]
        for number, stream in enumerate(slow):
            stream.send(announcing(100_000, worker=f"slow-{number}"))
            if number % 2:
                stream.send(part(None, bytes(100)))
        until(lambda: server._host.queued == 8)
        with CoordinatorClient(server.address, codec="none", retry_s=5) as client:
            for _ in range(20):
                client.add_gradients(ONES)
        assert time.monotonic() - begin < SETTLED_S
        assert [[refusal(reply) for reply in stream.call] for stream in slow] == [["INCOMPLETE"]] * 8
        assert 0.4 < time.monotonic() - begin < SETTLED_S
        assert refusals(server) == {"INCOMPLETE": 8}
        assert server._host.queued == 0
        assert server._host.store.read()[0] == 20
        for stream in slow:
            stream.end()


def test_a_push_that_is_cut_off_is_answered():
    with served() as server, channel_to(server) as channel:
        whole = push_of(encoded(ONES))
        assert answers(channel, announcing(1000)) == ["INCOMPLETE"]
        assert answers(channel, whole, announcing(1000, worker="other"), part(None, bytes(999))) == [
            "NONE",
            "INCOMPLETE",
        ]
        assert server._host.store.read()[0] == 1


def test_a_stream_between_two_pushes_may_take_its_time():
    with served(limits=Limits(push_s=0.2)) as server, channel_to(server) as channel:
        stream = Stream(channel)
        for number in (1, 2):
            stream.send(push_of(encoded(ONES), sequence=number))
            assert refusal(stream.reply()) == "NONE"
            time.sleep(0.6)
        assert stream.end() == []
        assert not refusals(server)


def test_parameters_whose_rest_does_not_come_are_ended_and_their_sender_is_told():
    header = messages()["ModelPart"].Header(structure="dict")
    header.entries.add(name="w", length=1000)
    with served(limits=Limits(push_s=0.5)) as server, channel_to(server) as channel:
        waiting = queue.SimpleQueue()
        waiting.put(part(header, b""))
        begin = time.monotonic()
        call = channel.stream_unary(method("SetModel")).future(iter(waiting.get, None), timeout=2 * SETTLED_S)
        code = code_of(call.result)[0]
        waiting.put(None)
        assert refusals(server) == {"SLOW": 1}
        assert code != "DEADLINE_EXCEEDED"
        assert time.monotonic() - begin < SETTLED_S


@pytest.mark.parametrize("sent", [b"", b"PRI * HTTP/2.0\r\n", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + bytes(100)])
def test_a_connection_that_says_nothing_or_nonsense_is_closed(sent):
    with served(limits=Limits(call_s=0.5)) as server:
        host, _, port = server.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=SETTLED_S) as connection:
            connection.sendall(sent)
            still_serves(server)
            begin = time.monotonic()
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(1000):
                    pass
            assert time.monotonic() - begin < SETTLED_S


# Values that are none.


def test_nan_is_refused_and_counted():
    nan = {name: tensor.clone() for name, tensor in ONES.items()}
    nan["b"][3] = math.nan
    frames = {name: gradwire.wire.pack(gradwire.codec("none").encode(tensor)[0]) for name, tensor in nan.items()}
    with served() as server, channel_to(server) as channel:
        assert answers(channel, push_of(frames)) == ["NONFINITE"]
        assert refusals(server) == {"NONFINITE": 1}
        assert server._host.store.read()[0] == 0
        still_serves(server)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("codec", ["none", "bf16", "int8", "topk:0.5", "randomk:0.5"])
def test_a_frame_that_says_it_is_finite_and_is_not_is_refused(codec, value):
    frame = bytearray(gradwire.encode(torch.full((10,), 2.0), codec))
    start = int.from_bytes(frame[10:12], "little")
    kind = frame[48 + 8 * frame[13] + 7]
    bits = struct.pack("<f", value)
    frame[start : start + (4 if kind == 3 else 2)] = bits if kind == 3 else bits[2:]
    with served() as server, channel_to(server) as channel:
        assert answers(channel, push_of({"b": resealed(frame)})) == ["INVALID"]
        assert refusals(server) == {"INVALID": 1}
        assert torch.equal(server._host.store.read()[1]["b"], START["b"])


def flagged(tensor):
    return gradwire.wire.pack(gradwire.codec("none").encode(tensor)[0])


def test_a_frame_with_the_flag_that_does_not_fit_is_invalid():
    with served() as server, channel_to(server) as channel:
        nan = torch.full((11,), math.nan)
        assert answers(channel, push_of({"b": flagged(nan)})) == ["INVALID"]
        assert answers(channel, push_of({"b": flagged(nan[:10])}, sequence=2)) == ["NONFINITE"]


@pytest.mark.parametrize("flag", [True, False])
def test_parameters_with_nan_are_refused_whatever_their_flag_says(flag):
    frame = bytearray(gradwire.encode(torch.zeros(10), "none"))
    frame[9], frame[-4:] = flag, struct.pack("<f", math.nan)
    header = messages()["ModelPart"].Header(structure="dict")
    header.entries.add(name="b", length=len(frame))
    with served() as server, channel_to(server) as channel:
        assert unary(channel, "SetModel", part(header, resealed(frame)))[0] == "INVALID_ARGUMENT"
        still_serves(server)


def test_parameters_that_have_become_infinite_are_told_to_every_reader():
    with served() as server, channel_to(server) as channel:
        huge = encoded({"b": torch.full((10,), 3e38)})
        answers(channel, push_of(huge), push_of(huge, sequence=2))
        with CoordinatorClient(server.address, retry_s=5) as client:
            with pytest.raises(NonFiniteError):
                client.read()
            asked = messages()["PullRequest"](reader="r", codec="int8")
            first, *_ = channel.unary_stream(method("Pull"))(asked.SerializeToString(), timeout=SETTLED_S)
            asked.copy = messages()["PullPart"].FromString(first).header.copy
            assert unary(channel, "Pull", asked.SerializeToString())[0] == "INVALID_ARGUMENT"
            client.set_model_parameters(dict(START))
        still_serves(server)


# Malformed ones.


def test_a_malformed_push_is_counted_once():
    with served() as server, channel_to(server) as channel:
        assert answers(channel, b"\xff\xff\xff") == ["INVALID"]
        assert refusals(server) == {"INVALID": 1}


@pytest.mark.parametrize("name", ["Describe", "Manage", "Status", "Pull"])
def test_a_malformed_call_is_refused_and_counted_and_is_no_failure_of_the_server(name, caplog):
    with served() as server, channel_to(server) as channel:
        assert unary(channel, name, b"\xff\xff\xff")[0] == "INVALID_ARGUMENT"
        assert refusals(server) == {"INVALID": 1}
        assert not errors_in(caplog)


def errors_in(caplog):
    gc.collect()  # a task whose error nobody has asked for says so when it goes
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize(
    "parts",
    [
        lambda whole, data: [b""],
        lambda whole, data: [part(None, b"data")],
        lambda whole, data: [whole, part(None, b"more")],
        lambda whole, data: [announcing(100), announcing(100)],
        lambda whole, data: [announcing(100), part(None, bytes(101))],
        lambda whole, data: [push_of([("w", data), ("w", data)])],
        lambda whole, data: [push_of({"unknown": data})],
        lambda whole, data: [push_of({"b": data})],
        lambda whole, data: [push_of({"w": data[:-1]})],
        lambda whole, data: [push_of({"w": data + b"\0"})],
        lambda whole, data: [push_of({"w": b""})],
        lambda whole, data: [push_of({"w": data}, version=1 << 63)],
        lambda whole, data: [push_of({"w": data}, worker="x" * 201)],
        lambda whole, data: [push_of({"w": data}, worker="a\nb")],
        lambda whole, data: [push_of({"w": gradwire.encode(ONES["w"].bfloat16(), "none")})],
    ],
)
def test_pushes_that_make_no_sense_are_refused_once_each(parts):
    data = gradwire.encode(ONES["w"], "none")
    sent = parts(push_of({"w": data}), data)
    with served() as server, channel_to(server) as channel:
        got = answers(channel, *sent)
        applied = got.count("NONE")
        assert got == ["NONE"] * applied + ["INVALID"]
        assert refusals(server) == {"INVALID": 1}
        assert server._host.store.read()[0] == applied
        still_serves(server)


@pytest.mark.parametrize("number", [1 << 63, (1 << 64) - 1])
def test_numbers_after_which_none_could_come_are_refused(number):
    with served() as server, channel_to(server) as channel:
        assert answers(channel, push_of(encoded(ONES), worker="w", session=number)) == ["INVALID"]
        assert answers(channel, push_of(encoded(ONES), worker="w", sequence=number)) == ["INVALID"]
        still_serves(server)


@pytest.mark.parametrize("sent", [b"", b"\xff" * 5000, b"GET " + b"x" * 70_000, b"POST /metrics HTTP/1.1\r\n\r\n"])
def test_the_page_of_metrics_survives_whoever_calls_it(sent):
    with served(metrics="127.0.0.1:0") as server:
        host, _, port = server.metrics_address.rpartition(":")
        with contextlib.ExitStack() as stack:
            for _ in range(4):
                connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=5))
                with contextlib.suppress(OSError):
                    connection.sendall(sent)
            with urllib.request.urlopen(f"http://{server.metrics_address}/ready", timeout=5) as page:
                assert page.read() == b"ready\n"
        still_serves(server)


class Garbage:
    """Pushes that are almost right: seeded, so that what was found once is found again."""

    CODECS = (
        "none",
        "bf16",
        "int8",
        "int4",
        "sign",
        "ternary",
        "topk:0.2",
        "topk:0.2+int8",
        "randomk:0.5",
        "lowrank:1",
    )
    NUMBERS = (0, 1, 2, 47, 48, 255, 1 << 16, 1 << 31, (1 << 31) - 1, 1 << 32, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)

    def __init__(self, seed, worker):
        self.draw, self.worker, self.made = random.Random(seed), worker, 0
        generator = torch.Generator().manual_seed(seed)
        self.frames = {
            name: [
                gradwire.encode(torch.randn(like.shape, generator=generator), codec)
                for codec in self.CODECS
                for _ in range(3)
            ]
            for name, like in START.items()
        }
        self.strange = [gradwire.encode(torch.ones(shape), "int8") for shape in ((0,), (), (10, 5), (1000,))]
        self.strange.append(gradwire.encode(torch.ones(10, dtype=torch.bfloat16), "none"))
        self.strange.append(gradwire.wire.pack(gradwire.codec("none").encode(torch.full((10,), math.nan))[0]))

    def number(self):
        draw = self.draw
        return draw.choice([draw.choice(self.NUMBERS), draw.getrandbits(draw.randint(1, 64)), draw.randrange(400)])

    def changed(self, data):
        """Bytes that were damaged on their way."""
        draw, data = self.draw, bytearray(data)
        kind = draw.randrange(7)
        at = draw.randrange(len(data) + 1)
        if kind <= 1:
            for _ in range(draw.randint(1, 8)):
                if data:
                    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        elif kind == 2:
            del data[at:]
        elif kind == 3:
            data[at:at] = draw.randbytes(draw.randint(1, 40))
        elif kind == 4:
            other = draw.choice(draw.choice(list(self.frames.values())))
            data[at : at + draw.randrange(60)] = other[draw.randrange(len(other)) :]
        elif kind == 5:
            data[at : at + 8] = struct.pack("<Q", self.number())
        else:
            data = bytearray(draw.randbytes(draw.randrange(300)))
        return bytes(data)

    def frame(self, name):
        """A frame, right or not; half of those that are not have a checksum that fits."""
        draw = self.draw
        frame = draw.choice(self.frames[name])
        if draw.random() < 0.1:
            frame = draw.choice(self.strange)
        if draw.random() < 0.55:
            return frame
        damaged = bytearray(frame)
        kind = draw.randrange(6)
        header = int.from_bytes(frame[10:12], "little")
        if kind == 0 and len(frame) > header:
            for _ in range(draw.randint(1, 6)):
                damaged[draw.randrange(header, len(frame))] = draw.randrange(256)
        elif kind == 1:
            tables = 48 + 8 * (frame[13] + frame[14])
            damaged[tables + draw.randrange(max(1, header - tables))] = draw.choice(b"0123456789.,:+-()=abeiknort")
        elif kind == 2:
            struct.pack_into("<Q", damaged, 48 + 8 * draw.randrange(max(1, frame[13] + frame[14])), self.number())
        elif kind == 3:
            at = draw.choice([8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 39])
            damaged[at] = draw.randrange(256)
        else:
            damaged = bytearray(self.changed(frame))
        if len(damaged) >= 48 and draw.random() < 0.7:
            if draw.random() < 0.7:
                struct.pack_into("<Q", damaged, 40, len(damaged))
            return resealed(damaged)
        return bytes(damaged)

    def header(self, frames):
        draw = self.draw
        header = header_of(frames, f"{self.worker}-{self.made // 50}", self.made, session=1)
        if draw.random() < 0.3:
            header.version = draw.choice([0, 1, 1000, 1 << 40, self.number()])
        if draw.random() < 0.75:
            return header
        kind = draw.randrange(8)
        entry = draw.choice(list(header.entries)) if header.entries else header.entries.add()
        if kind == 0:
            entry.length = self.number()
        elif kind == 1:
            entry.length = max(0, entry.length + draw.choice([-1, 1, -8, 8]))
        elif kind == 2:
            entry.name = draw.choice(["w", "b", "", "x" * 5000, "b\0", "\u202eb", "W"])
        elif kind == 3:
            for _ in range(draw.choice([1, 2, 300])):
                header.entries.add(name=draw.choice(["w", "b", "c"]), length=draw.choice([0, 1, self.number()]))
        elif kind == 4:
            del header.entries[:]
        elif kind == 5:
            header.worker = draw.choice(["", "\n", "a" * 201, "/", f"{self.worker}/{draw.randrange(9)}", "\U0001f600"])
        else:  # under another name: a session from the future would end this one
            header.worker = f"{self.worker}-extreme-{draw.randrange(40)}"
            header.session, header.sequence = self.number(), self.number()
        return header

    def push(self):
        """Messages of one push."""
        draw = self.draw
        self.made += 1
        names = draw.choice([["w"], ["b"], ["w", "b"], ["b", "w"]])
        frames = [(name, self.frame(name)) for name in names]
        header, data = self.header(frames), b"".join(frame for _, frame in frames)
        if draw.random() < 0.06:
            data = self.changed(data)
        sent = [part(header, data)]
        if draw.random() < 0.1:
            at = draw.randrange(len(data) + 1)
            sent = [part(header, data[:at]), part(None, data[at:])]
            kind = draw.randrange(6)
            if kind == 0:
                sent.reverse()
            elif kind == 1:
                sent.insert(draw.randrange(3), draw.choice(sent))
            elif kind == 2:
                del sent[draw.randrange(2)]
        if draw.random() < 0.08:
            more = b"".join(self.push())
            sent[-1] += b"\x1a" + varint(len(more) if draw.random() < 0.9 else self.number()) + more
        if draw.random() < 0.12:
            at = draw.randrange(len(sent))
            sent[at] = self.changed(sent[at])
        return sent


def varint(number):
    digits = bytearray()
    while number > 0x7F:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*digits, number])


def parsed(message):
    try:
        return messages()["PushPart"].FromString(message)
    except Exception:
        return None


def answered_at_once(sent):
    """Whether one answer is due before anything else is sent: all that was announced is there."""
    if len(sent) > 1:
        return False
    message = parsed(sent[0])
    if message is None or not (message.HasField("header") or message.more):
        return True
    return not message.more and sum(entry.length for entry in message.header.entries) <= len(message.data)


def pushes_in(sent):
    """Headers by sequence, each with its data: parts until there is what was announced."""
    found = []
    for message in [each for whole in map(parsed, sent) if whole is not None for each in (whole, *whole.more)]:
        if message.HasField("header"):
            found.append([message.header, message.data])
        elif found:
            header, data = found[-1]
            if len(data) < sum(entry.length for entry in header.entries):
                found[-1][1] += message.data
    return {header.sequence: (header, data) for header, data in reversed(found)}  # of one that comes again, the first


class Attacker(threading.Thread):
    """Sends garbage, and keeps account of every answer."""

    def __init__(self, channel, seed, count):
        super().__init__(daemon=True)
        self.channel, self.count, self.garbage = channel, count, Garbage(seed, f"attacker-{seed}")
        self.reasons, self.applied, self.repeated = Counter(), [], 0
        self.malformed = self.streams = self.sent = 0
        self.wrong = []
        self._stream = None

    def run(self):
        try:
            while self.sent < self.count:
                sent = self.garbage.push()
                self._account(sent, self._at_once(sent) if answered_at_once(sent) else self._alone(sent))
                self.sent += 1
        except Exception as error:
            self.wrong.append(repr(error))
        finally:
            self._leave()

    def _new(self):
        self.streams += 1
        return Stream(self.channel)

    def _leave(self):
        if self._stream is not None:
            self.wrong += [f"more than one answer: {reply}" for reply in self._stream.end()]
            self._stream = None

    def _at_once(self, sent):
        for _ in range(2):
            fresh = self._stream is None
            self._stream = self._stream or self._new()
            self._stream.send(*sent)
            reply = self._stream.reply()
            if reply is not None:
                return [reply]
            self._leave()
            if fresh:
                break
        self.wrong.append(f"no answer to {sent}")
        return []

    def _alone(self, sent):
        stream = self._new()
        stream.send(*sent)
        replies = stream.end()
        if not replies:
            self.wrong.append(f"no answer to {sent}")
        return replies

    def _account(self, sent, replies):
        for reply in replies:
            if reply.refusal:
                self.reasons[refusal(reply)] += 1
                self.malformed += "are not a PushPart" in reply.message
            elif reply.applied:
                header, data = pushes_in(sent)[reply.sequence]
                self.applied.append((reply.version, [(entry.name, entry.length) for entry in header.entries], data))
            else:
                self.repeated += 1


def applied_in_order(pushes, learning_rate):
    """What the model must be, by the answers alone."""
    model = Model({name: tensor.clone() for name, tensor in START.items()}, learning_rate=learning_rate)
    for version, entries, data in sorted(pushes, key=lambda push: push[0]):
        gradients, at = {}, 0
        for name, length in entries:
            gradients[name] = gradwire.decode(data[at : at + length])
            at += length
        assert at == len(data)
        model.take(gradients, "descent")
        assert model.version == version
    return model


def resident_bytes():
    """Without what is kept for the next large tensor, which has a limit of its own."""
    gc.collect()
    with contextlib.suppress(ImportError):
        from gradwire._native import release_memory

        release_memory()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.timeout(1200)
def test_any_garbage_is_refused_and_counted_and_the_model_is_what_was_acknowledged(caplog):
    """With a rate at which no number of finite gradients makes the parameters infinite."""
    rate, threads = 1e-6, 2
    begin = time.monotonic()
    settings = {"model": ModelRules(learning_rate=rate), "limits": Limits(workers=1_000_000)}
    with served(**settings) as server, channel_to(server) as channel:
        attackers = []
        for first, last in ((0, PAYLOADS // 5), (PAYLOADS // 5, PAYLOADS)):
            share = (last - first) // threads
            wave = [Attacker(channel, seed, share) for seed in range(len(attackers), len(attackers) + threads)]
            for attacker in wave:
                attacker.start()
            for attacker in wave:
                attacker.join()
            attackers += wave
            if first == 0:
                early = resident_bytes()
        grown = resident_bytes() - early
        assert [problem for attacker in attackers for problem in attacker.wrong] == []

        reasons = sum((attacker.reasons for attacker in attackers), Counter())
        pushes = [push for attacker in attackers for push in attacker.applied]
        malformed = sum(attacker.malformed for attacker in attackers)
        counts, counted = server._host.metrics.counts, Counter(refusals(server))
        print(
            f"\n{sum(attacker.sent for attacker in attackers)} payloads on {sum(a.streams for a in attackers)} streams "
            f"in {time.monotonic() - begin:.1f} s: {len(pushes)} applied, {counts['repeated']} repeated, "
            f"{dict(reasons)} refused, {malformed} of them no message at all; "
            f"memory grew by {grown / 1e6:.1f} MB"
        )
        assert counted == reasons
        assert set(reasons) == {"INVALID", "TOO_LARGE", "NONFINITE", "SUPERSEDED", "INCOMPLETE"}
        assert counts["applied"] == len(pushes) > PAYLOADS / 20
        assert counts["repeated"] == sum(attacker.repeated for attacker in attackers)
        assert sum(reasons.values()) > PAYLOADS / 4

        version, parameters = server._host.store.read()
        expected = applied_in_order(pushes, rate)
        assert version == expected.version
        for name, tensor in parameters.items():
            assert torch.equal(tensor, expected.parameters[name])
            assert bool(torch.isfinite(tensor).all())
        assert server._host.queued == 0
        assert grown < 100e6
        still_serves(server)
    assert errors_in(caplog) == []


@pytest.mark.timeout(600)
def test_any_garbage_in_other_calls_changes_nothing():
    """Of what is no message at all, see the test of malformed calls."""
    garbage, draw, known = Garbage(100, "caller"), random.Random(100), messages()
    requests = {
        "Describe": known["DescribeRequest"](worker="caller"),
        "Status": known["StatusRequest"](),
        "Pull": known["PullRequest"](reader="caller", codec="int4", copy=1, since=3),
        "Manage": known["ManageRequest"](mode="up"),
    }
    codes, replaced = Counter(), 0
    with served(limits=Limits(push_mb=1.0)) as server, channel_to(server) as channel:
        for _ in range(max(300, PAYLOADS // 10)):
            name = draw.choice([*requests, "SetModel"])
            if name == "SetModel":
                header = known["ModelPart"].Header(structure=draw.choice(["dict", "dict", "list", "x"]))
                frames = [(each, garbage.frame(each)) for each in START]
                for each, frame in frames:
                    header.entries.add(name=each, length=draw.choice([len(frame), len(frame), garbage.number()]))
                data = part(header, b"".join(frame for _, frame in frames))
                data = garbage.changed(data) if draw.random() < 0.3 else data
            else:
                if name == "Pull":
                    requests[name].codec = draw.choice(
                        ["int4", "ef(" * 300, "x" * 5000, "topk:0.1+" * 90, "none", "\0"]
                    )
                    requests[name].copy = garbage.number()
                    requests[name].reader = draw.choice(["caller", "", "\n", "y" * 300])
                data = requests[name].SerializeToString()
                data = garbage.changed(data) if draw.random() < 0.5 else data
            if name == "Manage" and not harmless(data):
                continue
            code, text = unary(channel, name, data)
            codes["malformed" if "DecodeError" in text else code] += 1
            replaced += name == "SetModel" and code == "OK"
        print(f"\n{dict(codes)}, {replaced} of them other parameters")
        assert set(codes) <= {"OK", "INVALID_ARGUMENT", "malformed"}
        assert sum(refusals(server).values()) == codes["INVALID_ARGUMENT"] > 30
        version, parameters = server._host.store.read()
        assert version == replaced > 0
        assert all(bool(torch.isfinite(tensor).all()) for tensor in parameters.values())
        with CoordinatorClient(server.address, codec="none", retry_s=5) as client:
            client.set_model_parameters(START)
        still_serves(server)


def harmless(data):
    """Whether a request to manage would not end the server, or turn it around, rightly."""
    try:
        request = messages()["ManageRequest"].FromString(data)
    except Exception:
        return True
    return not request.drain and request.mode.lower() not in ("descent", "ascent")
