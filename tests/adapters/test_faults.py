"""Ranks that are killed or stopped in training: every survivor names them."""

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.case import tiered
from tests.workers import mortal
from tests.workers.group import Group

CODECS = ("int4", "ef(topk:0.1)", "powersgd:2,start=0+int8", "none", "ef21(int4)", "dense")
TIMEOUT_S = 20
pytestmark = pytest.mark.timeout(900)


def names(words, victim, how):
    """Whether the words of a survivor name exactly that rank."""
    return re.match(rf"PeerError after [\d.]+ s in step \d+: .* failed: rank {victim} {how}", words) is not None


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kills", tiered([3, 20], first=[3]))
def test_a_killed_rank_is_named_by_every_survivor(tmp_path, kills):
    moments = random.Random(4)
    wrong = []
    for number in range(kills):
        # The store is a file, or kept by rank 0; the dead may be any rank, and every fourth time it is rank 0.
        victim = 0 if number % 4 == 0 else moments.randrange(4)
        store = {"port": free_port()} if number % 8 >= 4 else {}
        codec = CODECS[number % len(CODECS)]
        with Group(mortal.live, tmp_path / str(number), codec=codec, **store) as group:
            time.sleep(moments.uniform(0, 0.3))
            os.kill(group.ranks[victim].pid, signal.SIGKILL)
            said = group.survivors_of(victim, TIMEOUT_S)
        if not all(names(words, victim, "is gone") for words in said):
            wrong.append((number, victim, codec, store, said))
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize(
    ("victim", "store", "codec"),
    tiered([(2, "file", "int4"), (0, "tcp", "int4"), (1, "file", "dense")], first=[(0, "tcp", "int4")]),
)
def test_a_stopped_rank_is_named_by_every_survivor(tmp_path, victim, store, codec):
    at = {"port": free_port()} if store == "tcp" else {}
    with Group(mortal.live, tmp_path / "group", timeout_s=4, codec=codec, **at) as group:
        os.kill(group.ranks[victim].pid, signal.SIGSTOP)
        said = group.survivors_of(victim, 4 + TIMEOUT_S)
        os.kill(group.ranks[victim].pid, signal.SIGKILL)
    assert all(names(words, victim, "did not answer in time") for words in said), said


@pytest.mark.parametrize("store", tiered(["file", "tcp"], first=["file"]))
def test_a_survivor_that_hears_of_it_only_from_the_rank_with_the_store_names_the_dead(tmp_path, store):
    at = {"port": free_port()} if store == "tcp" else {}
    with Group(mortal.live, tmp_path / "group", ranks=3, way="overtaken", **at) as group:
        os.kill(group.ranks[2].pid, signal.SIGKILL)
        said = group.survivors_of(2, TIMEOUT_S)
    assert all(names(words, 2, "is gone") for words in said), said


@pytest.mark.full
def test_two_ranks_that_are_killed_at_once_are_named(tmp_path):
    with Group(mortal.live, tmp_path / "group") as group:
        for victim in (1, 2):
            os.kill(group.ranks[victim].pid, signal.SIGKILL)
        group.wait_for("said", (0, 3), TIMEOUT_S)
        said = [group.said(rank) for rank in (0, 3)]
    assert all(names(words, "[12]", "is gone") for words in said), said


def test_the_other_of_two_ranks_is_named(tmp_path):
    with Group(mortal.live, tmp_path / "group", ranks=2) as group:
        os.kill(group.ranks[0].pid, signal.SIGKILL)
        said = group.survivors_of(0, TIMEOUT_S)
    assert all(names(words, 0, "is gone") for words in said), said


@contextlib.contextmanager
def ending_children(folder):
    """Kill the children of ranks in the end."""
    try:
        yield
    finally:
        for file in folder.glob("child-*"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(file.read_text()), signal.SIGKILL)


@pytest.mark.parametrize(
    ("child", "victim", "store", "codec"),
    tiered(
        [("fork", 1, "file", "int4"), ("loader", 0, "tcp", "int4"), ("fork", 0, "tcp", "dense")],
        first=[("fork", 1, "file", "int4")],
    ),
)
def test_a_killed_rank_is_named_at_once_while_its_child_lives(tmp_path, child, victim, store, codec):
    at = {"port": free_port()} if store == "tcp" else {}
    settings = {"timeout_s": 100, "child": child, "codec": codec, **at}
    with ending_children(tmp_path), Group(mortal.live, tmp_path, ranks=3, **settings) as group:
        os.kill(group.ranks[victim].pid, signal.SIGKILL)
        said = group.survivors_of(victim, 40)
        os.kill(int((tmp_path / f"child-{victim}").read_text()), 0)  # it does live
    assert all(names(words, victim, "is gone") for words in said), said


LATE_S = 10  # after `timeout_s` the error has come, on a busy machine too; two seconds on an idle one


@contextlib.contextmanager
def leaving(folder, *arguments, transport="sockets"):
    """Three ranks that train, or are ready to; the first one keeps the store."""
    command = [sys.executable, "-m", "tests.workers.leaving", str(folder), *map(str, arguments)]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": "3"}
    place |= {"OMP_NUM_THREADS": "1", "GRADWIRE_TRANSPORT": transport}
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(3):
            ranks.append(
                subprocess.Popen(command, env=os.environ | place | {"RANK": str(rank)}, cwd=Path(__file__).parents[2])
            )
            stack.callback(ranks[-1].wait)
            stack.callback(ranks[-1].kill)
        end = time.monotonic() + 120
        while len(list(folder.glob("training-*"))) < 3:
            assert time.monotonic() < end
            time.sleep(0.05)
        yield ranks


def endings(folder, ranks):
    """When the survivors of the first rank had an error, on the machine's clock, and which."""
    assert [rank.wait(90) for rank in ranks[1:]] == [1, 1]  # by the error, not by a signal
    said = [(folder / f"stopped-{rank}").read_text().partition(" ") for rank in (1, 2)]
    return [(float(seconds), words) for seconds, _, words in said]


@pytest.mark.full
@pytest.mark.parametrize("transport", ["sockets", "gloo"])
@pytest.mark.parametrize("codec", ["int4", "dense"])
def test_a_stopped_rank_that_keeps_the_store_is_named_in_time_and_no_survivor_aborts(tmp_path, codec, transport):
    timeout_s = 4
    with leaving(tmp_path, codec, timeout_s, transport=transport) as ranks:
        ranks[0].send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        for seconds, words in endings(tmp_path, ranks):
            assert re.match(r"PeerError: .* failed: rank 0 did not answer in time", words), words
            print(f"{seconds - stopped:.2f} s after the stop")
            assert seconds - stopped < timeout_s + LATE_S


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "transport", "says"),
    [
        (signal.SIGSTOP, "sockets", ": the process that keeps torch's store has not answered for 4 s"),
        (signal.SIGSTOP, "gloo", ": the process that keeps torch's store has not answered for 4 s"),
        (signal.SIGKILL, "sockets", ": "),  # and what torch says of the connection
    ],
    ids=["stopped", "stopped, gloo", "killed"],
)
def test_compress_ends_in_time_when_the_rank_that_keeps_the_store_is_no_more(tmp_path, how, transport, says):
    timeout_s = 4
    with leaving(tmp_path, "int4", timeout_s, "late", transport=transport) as ranks:
        ranks[0].send_signal(how)
        began = time.monotonic()
        (tmp_path / "go").touch()
        for seconds, words in endings(tmp_path, ranks):
            assert re.match(rf"PeerError: rank [12] cannot connect{says}", words), words
            print(f"{seconds - began:.2f} s after the call")
            assert seconds - began < timeout_s + LATE_S
