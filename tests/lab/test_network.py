"""Labs that are really brought up: what their links carry, what they count, and what is left of them."""

import re
import subprocess
import sys

import pytest

from gradwire import ConfigError, LabError
from gradwire.lab import Lab, state

PAYLOAD = 3_000_000
# Segments of 1448 bytes in frames of 1514: Ethernet 14, IPv4 20, TCP 32 with timestamps.
WIRE = PAYLOAD / 1448 * 1514

RECEIVE = """
import selectors, socket, sys, time
server = socket.create_server(("", 7000))
print("ready", flush=True)
started, got, peers = None, 0, selectors.DefaultSelector()
for _ in range(int(sys.argv[1])):
    peers.register(server.accept()[0], selectors.EVENT_READ)
    started = started or time.monotonic()
while peers.get_map():
    for key, _ in peers.select():
        data = key.fileobj.recv(1 << 20)
        got += len(data)
        if not data:
            peers.unregister(key.fileobj)
print(got, time.monotonic() - started)
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 7000)) as peer:
    peer.sendall(bytes(int(sys.argv[2])))
"""


def receive(lab, receiver, senders):
    """Seconds until a host has the payload of every sender, counted from the first connection."""
    program = [sys.executable, "-c", RECEIVE, str(len(senders))]
    server = lab.popen(receiver, program, stdout=subprocess.PIPE, text=True)
    with server.stdout as lines:
        assert lines.readline() == "ready\n"
        send = [sys.executable, "-c", SEND, lab.hosts[receiver].address, str(PAYLOAD)]
        clients = [lab.popen(sender, send) for sender in senders]
        got, seconds = lines.readline().split()
    assert int(got) == PAYLOAD * len(senders)
    assert [process.wait(60) for process in (server, *clients)] == [0] * (1 + len(senders))
    return float(seconds)


def transfer(lab, sender=0, receiver=1):
    """Seconds that the payload takes from one host to another, and the bytes it is on the wire.

    The best of three, because other tests keep the machine busy; no link is ever faster than its rate.
    """

    def once():
        before = lab.wire_bytes(sender)
        seconds = receive(lab, receiver, [sender])
        return seconds, lab.wire_bytes(sender) - before

    return min(once() for _ in range(3))


def namespaces():
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines()}


@pytest.mark.parametrize(("sender", "receiver"), [(0, 1), (1, 0)])
def test_a_link_has_its_rate_and_counts_every_header(lab, sender, receiver):
    seconds, sent = transfer(lab, sender, receiver)
    assert sent == pytest.approx(WIRE, rel=0.03)
    assert 0.75 < seconds / (8 * WIRE / 100e6) < 10  # `gradwire lab` is exact; who measures may be busy


def test_what_a_host_receives_is_shaped_too(name):
    with Lab.up(3, "100mbit", name=name) as lab:
        seconds = min(receive(lab, 0, senders=[1, 2]) for _ in range(3))
    assert 0.75 < seconds / (2 * 8 * WIRE / 100e6) < 10


def test_reshape_acts_at_once_and_is_remembered(lab):
    lab.reshape("20mbit")
    assert lab.rate == Lab.find(lab.name).rate == "20mbit"
    seconds, sent = transfer(lab)
    assert 0.75 < seconds / (8 * WIRE / 20e6) < 10
    assert sent == pytest.approx(WIRE, rel=0.03)
    lab.reshape("none")
    assert lab.rate is None
    unshaped, sent = transfer(lab)
    assert unshaped < seconds / 3
    assert sent == pytest.approx(WIRE, rel=0.03)
    with pytest.raises(ConfigError, match="got 'slow'"):
        lab.reshape("slow")


def test_a_lab_is_found_by_its_name_with_all_it_knows(lab):
    found = Lab.find(lab.name)
    assert (found.name, found.hosts, found.rate) == (lab.name, lab.hosts, "100mbit")
    assert lab.name in [each.name for each in Lab.find_all()]
    assert lab.is_up()
    assert [host.namespace for host in lab.hosts] == [f"gradwire-{lab.name}-{rank}" for rank in range(2)]
    assert {host.interface for host in lab.hosts} == {"eth0"}
    assert all(re.fullmatch(r"10\.77\.\d+\.\d", host.address) for host in lab.hosts)
    assert repr(lab) == f"<Lab {lab.name!r}: 2 hosts, 100mbit>"
    for rank in (-1, 2):
        with pytest.raises(ConfigError, match=f"`rank` must be from 0 to 1 in lab '{lab.name}'; got {rank}"):
            lab.wire_bytes(rank)


def test_labs_side_by_side_have_different_subnets(lab, name):
    with Lab.up(1, None, name=f"{name}-b") as other:
        assert other.rate is None
        assert other.hosts[0].address.rsplit(".", 1)[0] != lab.hosts[0].address.rsplit(".", 1)[0]


def test_a_name_is_taken_once(lab):
    with pytest.raises(LabError, match=rf"lab '{lab.name}' is already up; .*`gradwire lab down --name {lab.name}`"):
        Lab.up(3, "1gbit", name=lab.name)
    assert len(Lab.find(lab.name).hosts) == 2


def test_down_leaves_nothing(name):
    lab = Lab.up(2, "100mbit", name=name)
    assert {*(host.namespace for host in lab.hosts), f"gradwire-{name}-bridge"} <= namespaces()
    sleeper = lab.popen(0, ["sleep", "100"])
    lab.down()
    assert not [n for n in namespaces() if n.startswith(f"gradwire-{name}-")]
    assert not (state.FOLDER / f"{name}.json").exists()
    assert sleeper.poll() == -9
    assert not lab.is_up()
    with pytest.raises(LabError, match=f"no lab '{name}' is up"):
        Lab.find(name)
    lab.down()  # a second time is nothing


def test_an_old_object_does_not_touch_a_later_lab(name):
    old = Lab.up(1, None, name=name)
    Lab.find(name).down()
    with Lab.up(1, None, name=name):
        with pytest.raises(LabError, match=f"lab '{name}' is not up any more"):
            old.reshape("1mbit")
        old.down()
        assert Lab.find(name).rate is None


@pytest.fixture
def foreign(name):
    """A namespace that somebody else made, named as this test's lab would name its second host."""
    mine = f"gradwire-{name}-1"
    subprocess.run(["ip", "netns", "add", mine], check=True)
    yield mine
    subprocess.run(["ip", "netns", "del", mine], check=True)


def test_a_namespace_of_somebody_else_is_never_touched(name, foreign):
    with pytest.raises(LabError, match=rf"namespace '{foreign}' exists that no lab made; .*`ip netns del {foreign}`"):
        Lab.up(2, "100mbit", name=name)
    assert foreign in namespaces()
    assert f"gradwire-{name}-0" not in namespaces()
    with Lab.up(1, "100mbit", name=name):  # needs only the first
        assert foreign in namespaces()
    assert foreign in namespaces()
    links = subprocess.run(["ip", "-n", foreign, "-br", "link"], capture_output=True, text=True, check=True).stdout
    assert [line.split()[0] for line in links.splitlines()] == ["lo"]


def test_a_lab_whose_making_was_killed_can_be_removed(name):
    with Lab.up(2, "100mbit", name=name) as lab:
        subprocess.run(["ip", "netns", "del", lab.hosts[1].namespace], check=True)
        with pytest.raises(LabError):
            lab.wire_bytes(1)
        Lab.find(name).down()
    assert not [n for n in namespaces() if n.startswith(f"gradwire-{name}-")]


def test_a_lab_that_cannot_be_finished_leaves_nothing(name, monkeypatch):
    def broken(self, rate):
        raise LabError("as if tc had failed")

    monkeypatch.setattr(Lab, "_shape", broken)
    with pytest.raises(LabError, match="as if tc had failed"):
        Lab.up(2, "100mbit", name=name)
    assert not [n for n in namespaces() if n.startswith(f"gradwire-{name}-")]
    assert name not in [lab.name for lab in Lab.find_all()]
