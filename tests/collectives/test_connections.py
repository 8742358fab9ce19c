"""Connections of our own between ranks: what is sent arrives, and whoever is gone or silent is noticed."""

import contextlib
import gc
import math
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire import ConfigError, PeerError
from gradwire.collectives import agree, connect, sockets
from gradwire.collectives.gloo import GlooPeers
from gradwire.collectives.sockets import SocketPeers
from tests import needs
from tests.case import tiered

from .threads import on_every_rank, results

Connections = needs.module("gradwire._native", "make test, with a C++ compiler").Connections

pytestmark = pytest.mark.timeout(60)

LONG_S = 20  # never waited for, unless something is wrong
MB = 1 << 20
HEADER = struct.Struct("<QQ")  # tag, bytes
BEAT, FAREWELL = (HEADER.pack(0, 0xBEA7000067726164 + kind) for kind in (0, 1))


def pair():
    """Ranks 0 and 1, connected."""
    one, two = socket.socketpair()
    return Connections([(1, one.detach())]), Connections([(0, two.detach())])


def with_socket():
    """Rank 0, and the plain socket of rank 1."""
    one, two = socket.socketpair()
    two.settimeout(LONG_S)
    return Connections([(1, one.detach())]), two


def noise(nbytes, seed=0):
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def send(connections, rank, tag, data):
    return connections.send(rank, tag, data.data_ptr(), data.numel(), data)


def frame(tag, data):
    return HEADER.pack(tag, data.numel()) + data.numpy().tobytes()


def read(plain, nbytes=1 << 40, pause_s=0.0):
    """So many bytes, or all until the other side ends the connection."""
    got = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while len(got) < nbytes and (more := plain.recv(min(nbytes - len(got), 300_000))):
            got += more
            time.sleep(pause_s)
    return bytes(got)


@contextlib.contextmanager
def after(seconds, act, *arguments):
    """Does something on another thread while the block runs, and has done it when the block ends."""
    timer = threading.Timer(seconds, act, arguments)
    timer.start()
    try:
        yield
    finally:
        timer.join()


@contextlib.contextmanager
def takes(at_least_s, at_most_s=10.0):
    """Bounds from above are wide: the machine may be busy."""
    begin = time.monotonic()
    yield
    assert at_least_s <= time.monotonic() - begin < at_most_s


class Owner:
    """Something whose end can be seen."""


def test_tags_are_received_in_any_order():
    zero, one = pair()
    tags = [0, 1, 7, 2**32, 2**64 - 1]
    for tag in tags:
        send(zero, 1, tag, noise(100, seed=tag % 1000))
    for tag in reversed(tags):
        assert torch.equal(one.receive(0, tag, LONG_S), noise(100, seed=tag % 1000))


def test_messages_of_one_tag_keep_their_order():
    zero, one = pair()
    for i in range(50):
        send(zero, 1, 3, torch.tensor([i], dtype=torch.uint8))
        send(zero, 1, 4, torch.tensor([100 + i], dtype=torch.uint8))
    for tag, first in ((4, 100), (3, 0)):
        assert [int(one.receive(0, tag, LONG_S)) for _ in range(50)] == list(range(first, first + 50))


def test_a_message_of_no_bytes_is_a_message():
    zero, one = pair()
    for tag in (1, 2):
        send(zero, 1, tag, noise(0))
    for tag in (2, 1):
        got = one.receive(0, tag, LONG_S)
        assert got.shape == (0,)
        assert got.dtype == torch.uint8
    assert one.receive(0, 1, 0.01) is None


def test_ranks_may_send_much_to_each_other_before_either_receives():
    zero, one = pair()
    there, back = noise(20 * MB, 1), noise(20 * MB, 2)
    # All on one thread: if a send waited for its receiver, nobody would be left to receive.
    tickets = send(zero, 1, 0, there), send(one, 0, 0, back)
    assert torch.equal(one.receive(0, 0, LONG_S), there)
    assert torch.equal(zero.receive(1, 0, LONG_S), back)
    assert zero.flush(1, tickets[0], LONG_S)
    assert one.flush(0, tickets[1], LONG_S)


def test_many_threads_may_use_the_connections_at_once():
    ranks = pair()

    def swap(rank, tag):
        mine, theirs = noise(200_000, 2 * tag + rank), noise(200_000, 2 * tag + 1 - rank)
        ticket = send(ranks[rank], 1 - rank, tag, mine)
        ok = torch.equal(ranks[rank].receive(1 - rank, tag, LONG_S), theirs)
        return ok and ranks[rank].flush(1 - rank, ticket, LONG_S)

    with ThreadPoolExecutor(12) as pool:
        done = [pool.submit(swap, rank, tag) for tag in range(6) for rank in (0, 1)]
        assert all(each.result() for each in done)


def test_a_rank_hears_each_of_the_others():
    ends = {rank: socket.socketpair() for rank in (1, 2, 3)}
    zero = Connections([(rank, mine.detach()) for rank, (mine, _) in ends.items()])
    others = {rank: Connections([(0, theirs.detach())]) for rank, (_, theirs) in ends.items()}
    for rank, other in others.items():
        send(other, 0, 5, noise(1000, rank))
        send(zero, rank, 5, noise(1000, 10 + rank))
    for rank, other in others.items():
        assert torch.equal(zero.receive(rank, 5, LONG_S), noise(1000, rank))
        assert torch.equal(other.receive(0, 5, LONG_S), noise(1000, 10 + rank))
    others[2].close()
    with pytest.raises(RuntimeError, match="it closed the connection"):
        zero.receive(2, 5, LONG_S)
    send(others[3], 0, 6, noise(10))
    assert torch.equal(zero.receive(3, 6, LONG_S), noise(10))


messages = st.lists(
    st.tuples(st.sampled_from([0, 1, 2, 2**63]), st.sampled_from([0, 1, 16, 300_000]) | st.integers(0, 5000)),
    max_size=12,
)


@settings(max_examples=50)
@given(messages, messages, st.randoms(use_true_random=False))
def test_messages_both_ways_arrive_byte_for_byte(there, back, chance: random.Random):
    ranks, plans, source = pair(), (there, back), noise(400_000)
    content = [
        [(tag, source[at : at + size]) for at, (tag, size) in enumerate(plan, 1000 * rank)]
        for rank, plan in enumerate(plans)
    ]
    turns = [rank for rank in (0, 1) for _ in plans[rank]]
    chance.shuffle(turns)
    left, tickets = [list(content[0]), list(content[1])], [0, 0]
    for rank in turns:
        tickets[rank] = send(ranks[rank], 1 - rank, *left[rank].pop(0))
    for sender in (0, 1):
        order = [tag for tag, _ in content[sender]]
        chance.shuffle(order)
        waiting = list(content[sender])
        for tag in order:
            expected = next(each for each in waiting if each[0] == tag)  # the first of its tag
            waiting = [each for each in waiting if each is not expected]
            assert torch.equal(ranks[1 - sender].receive(sender, tag, LONG_S), expected[1])
        assert tickets[sender] == len(content[sender])
        assert ranks[sender].flush(1 - sender, tickets[sender], LONG_S)


def test_what_is_sent_lives_until_it_has_left():
    one, two = socket.socketpair()
    zero = Connections([(1, one.detach())])
    data = noise(30 * MB)
    send(zero, 1, 0, data)
    del data
    gc.collect()
    reused = [torch.zeros(30 * MB, dtype=torch.uint8) for _ in range(2)]  # would be where the message was
    other = Connections([(0, two.detach())])
    assert torch.equal(other.receive(0, 0, LONG_S), noise(30 * MB))
    assert not any(bool(each.any()) for each in reused)


def test_what_has_left_is_let_go():
    zero, plain = with_socket()
    data, owners = noise(4 * MB), [Owner() for _ in range(3)]
    seen = [weakref.ref(owner) for owner in owners]
    ticket = zero.send(1, 0, data.data_ptr(), data.numel(), owners.pop(0))
    assert seen[0]() is not None
    expected = len(frame(0, data))
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read, plain, expected)
        assert zero.flush(1, ticket, LONG_S)
        assert reading.result() == frame(0, data)
    zero.send(1, 1, data.data_ptr(), 1, owners.pop(0))  # fits the socket: nothing to keep
    assert [each() for each in seen[:2]] == [None, None]
    zero.send(1, 2, data.data_ptr(), data.numel(), owners.pop(0))
    assert seen[2]() is not None
    zero.close()
    assert seen[2]() is None
    plain.close()


def test_a_silent_rank_is_waited_for_as_long_as_told():
    zero, plain = with_socket()
    with takes(0.4):
        assert zero.receive(1, 0, 0.4) is None
    plain.sendall(frame(0, noise(10)))  # late, and not lost
    assert torch.equal(zero.receive(1, 0, LONG_S), noise(10))
    plain.close()


def test_a_message_that_trickles_in_is_not_silence():
    zero, plain = with_socket()
    data = frame(0, noise(80))

    def trickle():
        for at in range(0, len(data), 12):
            plain.sendall(data[at : at + 12])
            time.sleep(0.15)

    with after(0, trickle), takes(0.9):
        assert torch.equal(zero.receive(1, 0, 0.7), noise(80))
    plain.sendall(data[:50])
    with takes(0.3):
        assert zero.receive(1, 0, 0.3) is None  # the rest never comes
    plain.sendall(data[50:])
    assert torch.equal(zero.receive(1, 0, LONG_S), noise(80))
    plain.close()


def test_a_rank_that_does_not_read_is_noticed():
    zero, plain = with_socket()
    data = noise(8 * MB)
    ticket = send(zero, 1, 0, data)
    with takes(0.4):
        assert zero.flush(1, ticket, 0.4) is False
    expected = frame(0, data)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read, plain, len(expected))
        assert zero.flush(1, ticket, LONG_S) is True
        assert reading.result() == expected
    plain.close()


def test_a_rank_that_reads_slowly_is_not_silent():
    zero, plain = with_socket()
    data = noise(2 * MB)
    expected = frame(0, data)
    ticket = send(zero, 1, 0, data)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read, plain, len(expected), 0.15)
        with takes(0.7):
            assert zero.flush(1, ticket, 0.6) is True
        assert reading.result() == expected
    plain.close()


def test_what_came_before_the_end_is_received_first():
    zero, one = pair()
    for tag in (1, 2):
        send(one, 0, tag, noise(1000, tag))
    one.close()
    for tag in (2, 1):
        assert torch.equal(zero.receive(1, tag, LONG_S), noise(1000, tag))
    for tag in (1, 3):
        with takes(0), pytest.raises(RuntimeError, match="it closed the connection"):
            zero.receive(1, tag, LONG_S)


def test_what_came_before_a_reset_is_received_first():
    with socket.create_server(("127.0.0.1", 0)) as server:
        plain = socket.create_connection(server.getsockname())
        mine, _ = server.accept()
    zero = Connections([(1, mine.detach())])
    send(zero, 1, 0, noise(1000))
    plain.sendall(frame(1, noise(1000)))
    assert plain.recv(1)
    plain.close()  # with bytes unread, which resets the connection
    assert torch.equal(zero.receive(1, 1, LONG_S), noise(1000))
    with takes(0), pytest.raises(RuntimeError):
        zero.receive(1, 2, LONG_S)


def test_whoever_waits_learns_at_once_that_the_rank_is_gone():
    zero, plain = with_socket()
    ticket = send(zero, 1, 0, noise(8 * MB))
    with ThreadPoolExecutor(2) as pool:
        receiving = pool.submit(zero.receive, 1, 0, LONG_S)
        flushing = pool.submit(zero.flush, 1, ticket, LONG_S)
        time.sleep(0.1)
        with takes(0):
            plain.close()
            for each in (receiving, flushing):
                assert isinstance(each.exception(), RuntimeError)


@pytest.mark.parametrize("how", ["receive", "flush"])
def test_closing_wakes_whoever_waits(how):
    zero, plain = with_socket()
    ticket = send(zero, 1, 0, noise(8 * MB))
    with after(0.2, zero.close), takes(0), pytest.raises(RuntimeError, match="this rank has closed its connections"):
        zero.receive(1, 0, LONG_S) if how == "receive" else zero.flush(1, ticket, LONG_S)
    zero.close()  # twice is once
    assert len(read(plain)) < 8 * MB
    plain.close()


def test_after_closing_nothing_comes_or_goes():
    zero, plain = with_socket()
    zero.close()
    send(zero, 1, 0, noise(10))
    with takes(0), pytest.raises(RuntimeError, match="this rank has closed its connections"):
        zero.receive(1, 0, LONG_S)
    assert read(plain) == FAREWELL
    plain.close()


def test_a_message_to_a_rank_that_is_gone_has_not_left():
    zero, one = pair()
    one.close()
    with pytest.raises(RuntimeError):
        zero.receive(1, 0, LONG_S)
    with pytest.raises(RuntimeError, match="it closed the connection"):
        zero.flush(1, send(zero, 1, 0, noise(10)), 0.1)


@pytest.mark.parametrize("nbytes", [2**60, 2**64 - 1, 2**40 + 1])
def test_bytes_that_are_no_message_end_the_connection(nbytes):
    zero, plain = with_socket()
    plain.sendall(frame(1, noise(10)) + HEADER.pack(0, nbytes) + b"garbage")
    with takes(0), pytest.raises(RuntimeError, match="it sent something else than a message"):
        zero.receive(1, 0, LONG_S)
    assert torch.equal(zero.receive(1, 1, LONG_S), noise(10))
    assert read(plain) == b""  # the connection was ended from this side
    plain.close()


@pytest.mark.parametrize("kept", [1, 15, 16, 17, 1000])
def test_a_part_of_a_message_is_none(kept):
    zero, plain = with_socket()
    plain.sendall(frame(0, noise(1000))[:kept])
    plain.close()
    with takes(0), pytest.raises(RuntimeError, match="it closed the connection"):
        zero.receive(1, 0, LONG_S)


def test_connections_end_while_messages_wait_to_leave():
    zero, plain = with_socket()
    data, owner = noise(30 * MB), Owner()
    seen = weakref.ref(owner)
    zero.send(1, 0, data.data_ptr(), data.numel(), owner)
    plain.sendall(frame(0, noise(10)))  # and one that nobody has asked for
    del owner
    with takes(0):
        del zero
        gc.collect()
    assert seen() is None
    assert len(read(plain)) < 30 * MB
    plain.close()


def test_what_was_received_outlives_the_connections():
    zero, one = pair()
    send(zero, 1, 0, noise(MB))
    got = one.receive(0, 0, LONG_S)
    del zero, one
    gc.collect()
    assert torch.equal(got, noise(MB))


@pytest.mark.parametrize("rank", [0, 2, -1])
def test_a_rank_without_connection_is_named(rank):
    zero, _one = pair()
    data = noise(1)
    for use in (lambda: send(zero, rank, 0, data), lambda: zero.receive(rank, 0, 1), lambda: zero.flush(rank, 1, 1)):
        with pytest.raises(ValueError, match=f"there is no connection to rank {rank}"):
            use()


def test_no_connections_are_none():
    with pytest.raises(ValueError, match="no connection to rank 0"):
        Connections([]).receive(0, 0, 1)


@pytest.fixture
def ctrl_c():
    """Sends SIGINT to the main thread, as it is outside of test runners."""
    assert threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("how", ["receive", "flush"])
def test_waiting_can_be_interrupted(how, ctrl_c):
    zero, plain = with_socket()
    ticket = send(zero, 1, 0, noise(8 * MB))
    with takes(0.2), after(0.2, ctrl_c), pytest.raises(KeyboardInterrupt):
        zero.receive(1, 0, LONG_S) if how == "receive" else zero.flush(1, ticket, LONG_S)
    plain.sendall(frame(0, noise(10)))
    assert torch.equal(zero.receive(1, 0, LONG_S), noise(10))
    plain.close()


def test_waiting_can_be_interrupted_while_other_messages_come(ctrl_c):
    zero, plain = with_socket()
    done = threading.Event()

    def chatter():
        for _ in range(1000):
            plain.sendall(frame(7, noise(10)))
            if done.wait(0.02):
                break

    with after(0, chatter), after(0.2, ctrl_c), takes(0.1):
        with pytest.raises(KeyboardInterrupt):
            zero.receive(1, 0, LONG_S)
        done.set()
    plain.close()


def test_endless_patience_is_patient():
    zero, one = pair()
    with after(0.2, send, one, 0, 0, noise(10)):
        got = zero.receive(1, 0, math.inf)
    assert got is not None
    assert torch.equal(got, noise(10))


def test_several_threads_may_close():
    for _ in range(20):
        zero, _one = pair()
        barrier = threading.Barrier(4)

        def close(zero=zero, barrier=barrier):
            barrier.wait()
            zero.close()

        with ThreadPoolExecutor(4) as pool:
            for each in [pool.submit(close) for _ in range(4)]:
                each.result()


def test_whatever_is_let_go_may_send():
    zero, one = pair()
    data = noise(MB)

    class Sends:
        def __del__(self):
            for _ in range(4):
                zero.send(1, 9, data.data_ptr(), data.numel(), Owner())

    for _ in range(12):
        ticket = zero.send(1, 1, data.data_ptr(), data.numel(), Sends())
    for _ in range(12):
        one.receive(0, 1, LONG_S)
    assert zero.flush(1, ticket, LONG_S)
    send(zero, 1, 2, noise(10))
    assert torch.equal(one.receive(0, 2, LONG_S), noise(10))


def test_a_rank_with_nothing_to_send_beats():
    zero, plain = with_socket()
    assert read(plain, 2 * len(BEAT)) == 2 * BEAT
    assert zero.receive(1, 0, 0.01) is None  # a beat is no message, and comes from this side
    plain.close()


def test_beats_are_heard_and_are_no_messages():
    zero, plain = with_socket()
    plain.sendall(BEAT + frame(0, noise(1000)) + BEAT)
    assert torch.equal(zero.receive(1, 0, LONG_S), noise(1000))
    with takes(0.4):
        begin = time.monotonic()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(zero.receive, 1, 1, 0.4)
            while not waiting.done():
                plain.sendall(BEAT)
                assert time.monotonic() - begin < LONG_S  # a rank that only beats is silent
                time.sleep(0.05)
            assert waiting.result() is None
    plain.sendall(BEAT[:5])
    time.sleep(0.7)
    plain.sendall(BEAT[5:] + frame(1, noise(10)))
    assert torch.equal(zero.receive(1, 1, LONG_S), noise(10))
    assert zero.silence(1) < 0.7
    plain.close()


def test_a_report_ends_all_waiting_and_overtakes_what_waits_to_leave():
    ends = {rank: socket.socketpair() for rank in (1, 2)}
    zero = Connections([(rank, mine.detach()) for rank, (mine, _) in ends.items()])
    one, two = (Connections([(0, theirs.detach())]) for _, theirs in ends.values())
    send(one, 0, 5, noise(10))
    send(zero, 1, 0, noise(8 * MB))
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(zero.receive, 1, 0, LONG_S), pool.submit(two.receive, 0, 0, LONG_S)]
        time.sleep(0.1)
        assert not zero.reported()
        two.report("rank 1 is silent")
        for each in waiting:
            with pytest.raises(RuntimeError, match="it was reported"):
                each.result(LONG_S)
    assert zero.reported()
    assert zero.report_of(2) == b"rank 1 is silent"
    assert zero.report_of(1) is None
    assert torch.equal(zero.receive(1, 5, LONG_S), noise(10))  # what came is received all the same
    zero.report("so it is")
    zero.report("only the first counts")
    for other in (one, two):
        end = time.monotonic() + LONG_S
        while other.report_of(0) is None and time.monotonic() < end:
            time.sleep(0.01)
        assert other.report_of(0) == b"so it is"
    assert not zero.gone(1)
    assert not zero.gone(2)


def test_a_rank_that_reported_and_ended_is_known_by_its_report():
    zero, one = pair()
    one.report("rank 7 is gone")
    one.close()
    with pytest.raises(RuntimeError, match="it was reported"):
        zero.receive(1, 0, LONG_S)
    assert zero.report_of(1) == b"rank 7 is gone"


@pytest.mark.parametrize("way", ["close", "end"])
def test_only_an_end_without_a_farewell_disturbs(way):
    zero, plain = with_socket()
    if way == "close":
        plain.sendall(FAREWELL)
    plain.close()
    with pytest.raises(RuntimeError, match="it closed the connection"):
        zero.receive(1, 0, LONG_S)
    assert zero.disturbed() is (way == "end")
    assert not zero.reported()


def test_a_report_that_is_too_long_ends_the_connection():
    zero, plain = with_socket()
    plain.sendall(HEADER.pack(2**20 + 1, 0xBEA7000067726164 + 2))
    with pytest.raises(RuntimeError, match="it sent something else than a message"):
        zero.receive(1, 0, LONG_S)
    plain.close()


def test_closed_connections_keep_no_descriptor_and_their_count():
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    zero, one = (Connections([(1 - rank, end.detach())]) for rank, end in enumerate(tcp_ends()))
    send(zero, 1, 0, noise(1000))
    one.receive(0, 0, LONG_S)
    counted = zero.wire_bytes()
    assert counted is None or counted > 1000
    for each in (zero, one):
        each.close()
    assert counted is None or zero.wire_bytes() >= counted
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def tcp_ends():
    with socket.create_server(("127.0.0.1", 0)) as server:
        calling = socket.create_connection(server.getsockname())
        return calling, server.accept()[0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # the child touches nothing but its copy
def test_a_forked_child_has_no_connection():
    one, plain = socket.socketpair()
    descriptor = one.detach()
    zero = Connections([(1, descriptor)])
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(5)
        try:
            os.fstat(descriptor)
        except OSError:
            try:
                zero.receive(1, 0, LONG_S)
            except RuntimeError as error:
                zero.close()
                os._exit(0 if "that this one was forked from" in str(error) else 2)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status == 0
    send(zero, 1, 0, noise(10))
    plain.settimeout(5)
    assert read(plain, len(frame(0, noise(10)))) == frame(0, noise(10))
    plain.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # the child touches nothing but its copy
def test_a_forked_child_does_not_end_the_connections():
    held = list(pair())
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(5)
        held.clear()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0
    send(held[0], 1, 0, noise(10))
    assert torch.equal(held[1].receive(0, 0, LONG_S), noise(10))


# Ranks that find each other by a store.


@pytest.fixture
def store(monkeypatch):
    """The store of ranks that are threads."""
    shared = dist.HashStore()
    monkeypatch.setattr(sockets, "default_store", lambda: shared)
    # Blame asks it, to keep the store of rank 0 a while: here nobody keeps one.
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 1)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    return shared


def reach(rank, size, timeout_s=LONG_S, name="here"):
    return SocketPeers.of(rank, size, group=None, name=name, timeout_s=timeout_s)


def join(size, timeout_s=LONG_S, name="here"):
    """All ranks of a group, connected."""
    return results(on_every_rank(lambda rank: reach(rank, size, timeout_s, name), size, range(size)))


def place(store, rank):
    """Where a rank listens, and what callers must know."""
    store.wait([f"here/address/{rank}"], timedelta(seconds=5))
    port, secret, address = store.get(f"here/address/{rank}").decode().split(" ")
    return (address, int(port)), bytes.fromhex(secret)


def call(address, hello=b""):
    calling = socket.create_connection(address, LONG_S)
    calling.sendall(hello)
    return calling


def hangs_up(called, within_s=5.0):
    """Whether the other side ends the connection."""
    called.settimeout(within_s)
    try:
        return called.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


@contextlib.contextmanager
def rank_of(rank, size, timeout_s=LONG_S):
    """A rank that connects on a thread."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(reach, rank, size, timeout_s)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_ranks_find_each_other_and_agree(store, size):
    ranks = join(size)
    assert [(each.rank, each.size) for each in ranks] == [(rank, size) for rank in range(size)]
    for tag in (0, 9):
        results(on_every_rank(lambda peers: agree(peers, "all is well", tag), size, ranks))  # noqa: B023
    if size > 1:
        disagreement = on_every_rank(lambda peers: agree(peers, f"rank {peers.rank}", 10), size, ranks)
        assert all(isinstance(each, PeerError) for each in disagreement)


def test_ranks_may_come_late_and_in_any_order(store):
    def late(rank):
        time.sleep(0.1 * (3 - rank))
        return reach(rank, 4)

    ranks = results(on_every_rank(late, 4, range(4)))
    results(on_every_rank(lambda peers: agree(peers, "all is well"), 4, ranks))


def test_two_groups_of_one_store_do_not_meet(store):
    first, second = join(2), join(2, name="there")
    first[0].swap({}, 0, "a test").send(1, noise(4, 1))
    second[0].swap({}, 0, "a test").send(1, noise(4, 2))
    assert torch.equal(second[1].swap({0: 4}, 0, "a test").receive(0), noise(4, 2))
    assert torch.equal(first[1].swap({0: 4}, 0, "a test").receive(0), noise(4, 1))


def test_the_interface_that_is_named_is_listened_at(store, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    ranks = join(2)
    assert place(store, 0)[0][0] == "127.0.0.1"
    results(on_every_rank(lambda peers: agree(peers, "all is well"), 2, ranks))


def test_an_interface_that_is_missing_is_named(store, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere7")
    with pytest.raises(PeerError, match=r"GLOO_SOCKET_IFNAME names 'nowhere7', which has no IPv4 address: .*device"):
        reach(0, 2, 1)


def hello(rank, secret, name=b"gradwire"):
    return struct.pack("<8sI16s", name, rank, secret)


STRANGERS = {
    "nothing": lambda secret: b"",
    "little": lambda secret: b"GET",
    "garbage": lambda secret: b"GET / HTTP/1.1\r\nHost: somewhere.else\r\n\r\n" * 10,
    "wrong secret": lambda secret: hello(1, bytes(16)),
    "almost the secret": lambda secret: hello(1, secret[:-1] + bytes([secret[-1] ^ 1])),
    "wrong name": lambda secret: hello(1, secret, b"gradwirf"),
    "rank of the called": lambda secret: hello(0, secret),
    "rank beyond the last": lambda secret: hello(2, secret),
    "enormous rank": lambda secret: hello(2**32 - 1, secret),
}


@pytest.mark.parametrize("says", STRANGERS)
def test_strangers_do_not_get_in(store, says):
    with rank_of(0, 2) as zero:
        address, secret = place(store, 0)
        stranger = call(address, STRANGERS[says](secret))
        with contextlib.suppress(OSError):  # it has been shown the door already
            stranger.shutdown(socket.SHUT_WR)
        assert hangs_up(stranger)
        assert not zero.done()
        ranks = [None, reach(1, 2)]
        ranks[0] = zero.result()
    results(on_every_rank(lambda peers: agree(peers, "all is well"), 2, ranks))
    stranger.close()


def test_strangers_that_reset_or_say_nothing_do_not_disturb(store, monkeypatch):
    monkeypatch.setattr(sockets, "_HELLO_S", 0.2)
    with rank_of(0, 2) as zero:
        address, _ = place(store, 0)
        for _ in range(3):
            rude = call(address, b"hi")
            rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            rude.close()
        silent = call(address)
        ranks = [None, reach(1, 2)]
        ranks[0] = zero.result()
    assert hangs_up(silent)
    results(on_every_rank(lambda peers: agree(peers, "all is well"), 2, ranks))
    silent.close()


@pytest.mark.parametrize("count", tiered([4, 50, 200], first=[4]))
def test_silent_strangers_delay_no_rank(store, count):
    """More than are held as well: the oldest must go."""
    with rank_of(0, 3) as zero, contextlib.ExitStack() as stack:
        address, _ = place(store, 0)
        strangers = [stack.enter_context(call(address, b"hi"[: each % 3])) for each in range(count)]
        with takes(0, sockets._HELLO_S):
            ranks = results(on_every_rank(lambda rank: reach(rank, 3), 3, range(1, 3)))
            ranks = [zero.result(), *ranks]
        assert all(hangs_up(each) for each in strangers)
    results(on_every_rank(lambda peers: agree(peers, "all is well"), 3, ranks))


@pytest.mark.full
def test_strangers_cost_few_descriptors(store, monkeypatch):
    monkeypatch.setattr(sockets, "_MOST_STRANGERS", 8)
    with rank_of(0, 2) as zero, contextlib.ExitStack() as stack:
        address, _ = place(store, 0)
        before = len(os.listdir("/proc/self/fd"))
        count = 100
        for _ in range(count):
            stack.enter_context(call(address))
        ranks = [None, reach(1, 2)]
        ranks[0] = zero.result()
        # The strangers' own ends are ours too. Of the callers' at most ten were held, and none is left.
        assert len(os.listdir("/proc/self/fd")) - before - count <= 10
    results(on_every_rank(lambda peers: agree(peers, "all is well"), 2, ranks))


def test_a_rank_gets_in_once(store):
    with rank_of(0, 3) as zero:
        address, secret = place(store, 0)
        first, second = call(address, hello(1, secret)), call(address, hello(1, secret))
        assert hangs_up(second)
        third = call(address, hello(2, secret))
        peers = zero.result()
    first.sendall(frame(0, noise(4, 1)))
    third.sendall(frame(0, noise(4, 2)))
    swap = peers.swap({1: 4, 2: 4}, 0, "a test")
    assert torch.equal(swap.receive(1), noise(4, 1))
    assert torch.equal(swap.receive(2), noise(4, 2))
    for each in (first, second, third):
        each.close()


def test_a_rank_that_never_calls_is_named(store):
    with rank_of(0, 3, 0.5) as zero, takes(0.4):
        address, secret = place(store, 0)
        one = call(address, hello(1, secret))
        error = zero.exception()
    assert isinstance(error, PeerError)
    assert str(error) == "ranks [2] have not connected to rank 0 in 0.5 s."
    one.close()


def test_a_rank_that_never_listens_is_named(store):
    with takes(0.4), pytest.raises(PeerError, match="rank 1 cannot connect to rank 0"):
        reach(1, 2, 0.5)


def test_a_rank_that_listens_no_more_is_named(store):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    store.set("here/address/0", f"{port} {bytes(16).hex()} 127.0.0.1")
    with takes(0), pytest.raises(PeerError, match=r"rank 1 cannot connect to rank 0: .*refused"):
        reach(1, 2)


def test_whoever_cannot_connect_to_all_ends_the_connections_it_has(store):
    with rank_of(0, 3, 0.5) as zero:
        address, secret = place(store, 0)
        one = call(address, hello(1, secret))
        error = zero.exception()
    assert isinstance(error, PeerError)  # held here, as by whoever reports it
    try:
        assert hangs_up(one, 0.5)
    finally:
        one.close()


def test_strangers_do_not_make_a_rank_wait_longer(store):
    with rank_of(0, 2, 0.4) as zero:
        address, _ = place(store, 0)
        begin = time.monotonic()
        while not zero.done() and time.monotonic() - begin < 8:
            with contextlib.suppress(ConnectionError):
                call(address, b"hi").close()
            time.sleep(0.1)
        waited = time.monotonic() - begin
        assert isinstance(zero.exception(), PeerError)
    assert waited < 5


def test_peers_close_their_sockets(store):
    gc.collect()  # of earlier tests
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        ranks = join(3)
        del ranks
        gc.collect()
    assert [str(each.message) for each in seen] == []


def test_a_message_of_the_wrong_size_shows_both(store):
    ranks = join(2)
    ranks[1].swap({}, 4, "a test").send(0, noise(3))
    with pytest.raises(PeerError, match=r"^a test failed: rank 1 sent 3 bytes; expected 5\.$"):
        ranks[0].swap({1: 5}, 4, "a test").receive(1)


def test_a_swap_waits_for_what_it_expects_and_what_it_sends(store):
    ranks = join(2)

    def swap(peers):
        other, mine = 1 - peers.rank, noise(3 * MB, peers.rank)
        messages = peers.swap({other: 3 * MB}, 2, "a test")
        messages.send(other, mine)
        messages.wait()

    results(on_every_rank(swap, 2, ranks))


def test_a_rank_that_is_gone_is_named(store):
    ranks = join(2)
    ranks[1].connections.close()
    with takes(0), pytest.raises(PeerError, match=r"^a test failed: rank 1 is gone\. It closed the connection\.$"):
        ranks[0].swap({1: 5}, 0, "a test").receive(1)


def test_a_rank_that_sends_nothing_is_named(store):
    ranks = join(2, 0.5)
    told = r"^a test failed: rank 1 did not answer in time\. It has sent nothing for 0\.5 s\.$"
    with takes(0.5), pytest.raises(PeerError, match=told):
        ranks[0].swap({1: 5}, 0, "a test").receive(1)


def test_a_rank_that_takes_nothing_is_named(store):
    with rank_of(0, 2, 0.5) as zero:
        address, secret = place(store, 0)
        one = call(address, hello(1, secret))
        peers = zero.result()
    messages = peers.swap({}, 0, "a test")
    messages.send(1, noise(40 * MB))
    told = r"^a test failed: rank 1 did not answer in time\. It has taken nothing for 0\.5 s\.$"
    with takes(0.4), pytest.raises(PeerError, match=told):
        messages.wait()
    one.close()


def test_the_rank_that_is_gone_is_named_by_those_who_wait_for_another(store):
    ranks = join(3)
    ranks[2].connections.close()

    def chain(peers):  # rank 1 waits for rank 2, and rank 0 only for rank 1
        peers.swap({peers.rank + 1: 5}, 0, "a test").receive(peers.rank + 1)

    with takes(0):
        errors = on_every_rank(chain, 2, ranks[:2])
    assert "rank 2 is gone (noticed by way of rank 1)" in str(errors[0])
    assert str(errors[1]).startswith("a test failed: rank 2 is gone.")


# Process groups.


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.delenv("GRADWIRE_TRANSPORT", raising=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_connecting_needs_a_process_group():
    with pytest.raises(ConfigError, match=r"call torch\.distributed\.init_process_group first"):
        connect()


@pytest.mark.parametrize("timeout_s", [0, -1, math.nan, math.inf])
def test_a_timeout_must_be_above_zero(alone, timeout_s):
    with pytest.raises(ConfigError, match=rf"`timeout_s` must be above 0 and at most 1e\+06; got {timeout_s}"):
        connect(timeout_s=timeout_s)


def test_a_transport_nobody_knows_is_named(alone, monkeypatch):
    monkeypatch.setenv("GRADWIRE_TRANSPORT", "nonsense")
    with pytest.raises(ConfigError, match="GRADWIRE_TRANSPORT must be 'sockets' or 'gloo'; got 'nonsense'"):
        connect()


@pytest.mark.parametrize(("named", "kind"), [(None, SocketPeers), ("sockets", SocketPeers), ("gloo", GlooPeers)])
def test_a_transport_can_be_chosen(alone, monkeypatch, named, kind):
    if named:
        monkeypatch.setenv("GRADWIRE_TRANSPORT", named)
    peers = connect(timeout_s=7)
    assert type(peers) is kind
    assert (peers.rank, peers.size, peers.timeout_s) == (0, 1, 7)
    agree(peers, "all is well")
    assert connect().name != peers.name  # or a second set of ranks would find the addresses of the first


STRANGERS_CALL = """
import os, socket, sys, time, torch.distributed as dist
from gradwire.collectives import agree, connect
from gradwire.torch_internals import default_store
rank = int(sys.argv[2])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=rank, world_size=2)
if rank == 1:
    key = f"gradwire/{dist.group.WORLD.group_name}/1/address/0"
    default_store().wait([key])
    port, _, address = default_store().get(key).decode().split(" ")
    strangers = [socket.create_connection((address, int(port))) for _ in range(int(sys.argv[3]))]
begin = time.monotonic()
peers = connect(timeout_s=30)
agree(peers, "all is well")
print(time.monotonic() - begin)
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.parametrize("count", tiered([4, 50], first=[4]))
def test_processes_connect_while_strangers_hold_the_port(tmp_path, count):
    command = [sys.executable, "-c", STRANGERS_CALL, str(tmp_path / "store")]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen([*command, str(rank), str(count)], env=environment, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=50)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert float(said[1]) < sockets._HELLO_S


TRAINED = """
import sys, torch, torch.distributed as dist
from gradwire.collectives import connect
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=int(sys.argv[2]), world_size=2)
group = dist.group.WORLD
connect().close()
own = torch.ones(1000)
for work in [dist.all_gather([torch.empty_like(own) for _ in range(2)], own, async_op=True) for _ in range(50)]:
    work.wait()
dist.destroy_process_group()
"""


@pytest.mark.full
@pytest.mark.timeout(300)  # twelve processes that import torch, on a machine that may be busy
def test_a_process_that_ends_right_after_a_collective_of_torch_has_not_failed(tmp_path):
    """Without gradwire one of three aborts, which torchrun counts as a failed training."""
    for attempt in range(6):
        command = [sys.executable, "-c", TRAINED, str(tmp_path / f"store-{attempt}")]
        ranks = [
            subprocess.Popen([*command, str(rank)], env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"}) for rank in range(2)
        ]
        assert [rank.wait(120) for rank in ranks] == [0, 0]
