"""Ranks as threads, joined by loopback."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from gradwire import Key
from gradwire.collectives import run
from gradwire.collectives.loopback import Loopback

TIMEOUT_S = 20


def on_every_rank(body, ranks, peers=None):
    """What ``body(peers)`` returned on every rank, or the error it raised."""
    peers = peers or Loopback.ranks(ranks, TIMEOUT_S)

    def guarded(rank):
        try:
            return body(rank)
        except Exception as error:
            return error

    if ranks == 1:
        return [guarded(peers[0])]
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(guarded, peers))


def results(outcomes):
    """The outcomes of all ranks, none of them an error."""
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes


def tensors(ranks, numel, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(numel, generator=generator) for _ in range(ranks)]


def reduce_all(collectives, xs, states, step=0, tag=0):
    """One reduction on every rank: what each got, or its error."""

    def body(peers):
        r = peers.rank
        return run(collectives[r].reduce(xs[r], states[r], Key(7, step, 3), tag))

    return on_every_rank(body, len(xs), [c.peers for c in collectives])


@dataclass(frozen=True)
class Counting:
    """Peers that count the bytes that pass, and may be told to change or to hold back messages.

    ``change(data, to, tag)`` returns what is sent instead of a message; ``gate(tag)`` is called before one is received.
    """

    inner: Loopback
    sent: list = field(default_factory=list)
    received: list = field(default_factory=list)
    change: object = None
    gate: object = None

    @property
    def rank(self):
        return self.inner.rank

    @property
    def size(self):
        return self.inner.size

    def swap(self, nbytes, tag, what):
        return _Counted(self, self.inner.swap(nbytes, tag, what), dict(nbytes), tag)


@dataclass
class _Counted:
    peers: Counting
    inner: object
    into: dict
    tag: int

    def send(self, rank, data):
        self.peers.sent.append(data.numel())
        self.inner.send(rank, self.peers.change(data, rank, self.tag) if self.peers.change else data)

    def receive(self, rank):
        if self.peers.gate:
            self.peers.gate(self.tag)
        data = self.inner.receive(rank)
        self.peers.received.append(self.into.pop(rank))
        return data

    def wait(self):
        for rank in list(self.into):
            self.receive(rank)
        self.inner.wait()


class Gate:
    """Holds back the messages of some tags, on the side of the receiver, until it is opened."""

    def __init__(self, tags):
        self.tags, self.open = tags, threading.Event()

    def __call__(self, tag):
        if tag in self.tags:
            assert self.open.wait(TIMEOUT_S)
