"""Blocks by way of Ray's object store."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from secrets import token_hex
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.errors import ConfigError, PeerError
from gradwire.extras import require
from gradwire.sharding.exchange import sized
from gradwire.torch_internals import default_store

__all__ = ["RayExchange"]

_THREADS: Final = 8
_LINGER_S: Final = 30.0


class _Mailbox:
    """An actor: who has left which block for whom. It holds references; the blocks stay in the object store."""

    def __init__(self) -> None:
        self.left: dict[int, list[tuple[int, int, list[Any]]]] = {}
        self.closed: set[int] = set()
        self.unread = Counter[int]()  # blocks that have not been fetched, by who left them

    def put(self, source: int, to: int, tag: int, reference: list[Any]) -> None:
        self.unread[source] += 1
        self.left.setdefault(to, []).append((source, tag, reference))

    def fetched(self, source: int) -> None:
        self.unread[source] -= 1

    def unread_of(self, source: int) -> int:
        return self.unread[source]

    def take(self, to: int) -> tuple[list[tuple[int, int, list[Any]]], list[int]]:
        return self.left.pop(to, []), sorted(self.closed)

    def close(self, rank: int) -> None:
        self.closed.add(rank)


class RayExchange:
    """Partitions are Ray tasks or actors. The program that starts them makes a :meth:`mailbox` and hands it to each.

    A thread asks for new blocks and fetches them, several at a time, so that they are there when they are taken. Blocks
    end with the process that left them: close an exchange when its partition is done.

    >>> RayExchange.__name__
    'RayExchange'
    """

    def __init__(self, ray: Any, mailbox: Any, rank: int, size: int, timeout_s: float, poll_s: float) -> None:
        self._ray, self._mailbox, self.rank, self.size = ray, mailbox, rank, size
        self.timeout_s, self._poll_s = timeout_s, poll_s
        self._blocks: dict[tuple[int, int], Tensor] = {}
        self._gone: set[int] = set()
        self._fetching = Counter[int]()  # blocks on their way, by source
        self._failure: str = ""
        self._arrived = threading.Condition()
        self._closed = threading.Event()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="gradwire-ray")
        self._thread = threading.Thread(target=self._watch, daemon=True, name="gradwire-ray")
        self._thread.start()

    @staticmethod
    def mailbox() -> Any:
        """An actor through which partitions tell each other of blocks; it lives as long as somebody has it."""
        return require("ray", purpose="RayExchange").remote(num_cpus=0)(_Mailbox).remote()

    @classmethod
    def of(cls, mailbox: Any, rank: int, size: int, *, timeout_s: float = 300.0, poll_s: float = 0.002) -> RayExchange:
        """Join the partitions that use this mailbox, as number ``rank`` of ``size``."""
        return cls(require("ray", purpose="RayExchange"), mailbox, rank, size, timeout_s, poll_s)

    @classmethod
    def of_workers(cls, *, timeout_s: float = 300.0, poll_s: float = 0.002) -> RayExchange:
        """Join the workers of a Ray Train, or any other ranks that are Ray's: all of them call it, in the same order.

        The first one makes the mailbox; the others find its name in the store of torch's process group.

        >>> RayExchange.of_workers()
        Traceback (most recent call last):
        gradwire.errors.ConfigError: torch.distributed is not initialized: exchange='ray' is for workers of Ray Train.
        """
        if not dist.is_initialized():
            raise ConfigError("torch.distributed is not initialized: exchange='ray' is for workers of Ray Train.")
        ray = require("ray", purpose="RayExchange")
        rank, size, words = dist.get_rank(), dist.get_world_size(), default_store()
        key = f"gradwire/ray/{words.add(f'gradwire/ray/calls/{rank}', 1)}"
        if rank:
            mailbox = ray.get_actor(words.get(key).decode())
        else:
            name = f"gradwire-{token_hex(8)}"
            mailbox = ray.remote(num_cpus=0)(_Mailbox).options(name=name).remote()
            ray.get(mailbox.unread_of.remote(0))  # it is there
            words.set(key, name)
        return cls(ray, mailbox, rank, size, timeout_s, poll_s)

    def put(self, to: int, tag: int, block: Tensor) -> None:
        """Into the object store; the receiver is told where."""
        reference = self._ray.put(block.numpy())
        self._mailbox.put.remote(self.rank, to, tag, [reference])

    def take(self, source: int, tag: int, nbytes: int, timeout_s: float | None = None) -> Tensor | None:
        """Wait for a block to be fetched."""
        key, end = (source, tag), time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        with self._arrived:
            self._arrived.wait_for(
                lambda: key in self._blocks or self._is_gone(source) or self._failure, max(0.0, end - time.monotonic())
            )
            block, gone = self._blocks.pop(key, None), self._is_gone(source)
        if block is not None:
            return sized(block, source, nbytes)
        if self._failure:
            raise PeerError(f"Ray's object store failed: {self._failure}")
        if gone:
            raise PeerError(f"partition {source} is gone: its exchange was closed.")
        if timeout_s is None:
            raise PeerError(f"partition {source} has left no block for {self.timeout_s:g} s.")
        return None

    def look(self, source: int, tag: int, nbytes: int) -> Tensor | None:
        """Take a block that was fetched already."""
        with self._arrived:
            block = self._blocks.pop((source, tag), None)
        return None if block is None else sized(block, source, nbytes)

    def close(self) -> None:
        """Tell the others, and wait until they have what was left for them, for a while."""
        if self._closed.is_set():
            return
        end = time.monotonic() + min(self.timeout_s, _LINGER_S)
        self._ray.get(self._mailbox.close.remote(self.rank))
        while time.monotonic() < end and self._ray.get(self._mailbox.unread_of.remote(self.rank)) > 0:
            time.sleep(self._poll_s)
        self._closed.set()
        self._thread.join()
        self._pool.shutdown()

    def _watch(self) -> None:
        try:
            while not self._closed.is_set():
                found, closed = self._ray.get(self._mailbox.take.remote(self.rank))
                with self._arrived:
                    self._fetching.update(source for source, _, _ in found)
                    self._gone |= set(closed)
                    self._arrived.notify_all()
                for source, tag, reference in found:
                    self._pool.submit(self._fetch, source, tag, reference[0])
                if not found:
                    time.sleep(self._poll_s)
        except Exception as error:  # Ray is gone, or the mailbox: whoever waits must know
            self._fail(error)

    def _fetch(self, source: int, tag: int, reference: Any) -> None:
        try:
            block = torch.from_numpy(self._ray.get(reference).copy())  # what the store has is read-only
        except Exception as error:
            self._fail(error)
            return
        self._mailbox.fetched.remote(source)
        with self._arrived:
            self._blocks[source, tag] = block
            self._fetching[source] -= 1
            self._arrived.notify_all()

    def _is_gone(self, source: int) -> bool:
        return source in self._gone and not self._fetching[source]

    def _fail(self, error: Exception) -> None:
        with self._arrived:
            self._failure = f"{type(error).__name__}: {error}".splitlines()[0]
            self._arrived.notify_all()
