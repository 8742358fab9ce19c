"""Dense inside a host, compressed between hosts: links inside are fast, and every byte between them counts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gradwire.codecs import EMPTY, Codec, State
from gradwire.collectives.base import (
    Collective,
    Reduced,
    Reduction,
    delivered,
    finite_mean,
    result_tensor,
    ring_bytes,
    tensor_of,
    where,
)
from gradwire.collectives.gather import Gather
from gradwire.collectives.peers import Peers, Team, others, tell
from gradwire.collectives.two_stage import TwoStage, slices
from gradwire.errors import ConfigError, NonFiniteError
from gradwire.wire import Key, TensorSpec

__all__ = ["Hierarchical", "find_hosts"]

_NAMESPACE = Path("/proc/self/ns/net")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def find_hosts(peers: Peers, tag: int = 0) -> tuple[int, ...]:
    """The host of each rank: ranks that share a kernel and its network are on one.

    >>> from gradwire.collectives.loopback import Alone
    >>> find_hosts(Alone())
    (0,)
    """
    names = tell(peers, _host(), tag, "the names of all hosts")
    return tuple(names.index(name) for name in names)


def _host() -> str:
    if _NAMESPACE.exists() and _BOOT.exists():
        return f"{_BOOT.read_text().strip()} {_NAMESPACE.readlink()}"
    import platform

    return platform.node()


@dataclass(frozen=True)
class Hierarchical:
    """Ranks of a host sum a slice each, in float32; the slice's owners on all hosts reduce it in a codec.

    ``hosts`` has the host of each rank, and as many ranks on each. A residual is that of a host's sum, kept by the rank
    that owns the slice.

    >>> from gradwire import codec
    >>> from gradwire.collectives.base import run
    >>> from gradwire.collectives.loopback import Alone
    >>> alone = Hierarchical(Alone(), codec("none"), (0,))
    >>> run(alone.reduce(torch.arange(3.0), {}, Key(), tag=0)).mean
    tensor([0., 1., 2.])
    """

    peers: Peers
    codec: Codec
    hosts: tuple[int, ...]

    def __post_init__(self) -> None:
        counts = {self.hosts.count(host) for host in self.hosts}
        if len(self.hosts) != self.peers.size or len(counts) != 1:
            raise ConfigError(
                f"`hosts` must name a host for each rank, with equally many ranks each; got {self.hosts}."
            )

    @functools.cached_property
    def _local(self) -> Team:
        mine = self.hosts[self.peers.rank]
        return Team.of(self.peers, [rank for rank, host in enumerate(self.hosts) if host == mine])

    @functools.cached_property
    def _between(self) -> Collective:
        """The owners of this rank's slice on all hosts."""
        place = self._local.rank
        teams = [[r for r, host in enumerate(self.hosts) if host == each] for each in sorted(set(self.hosts))]
        owners = Team.of(self.peers, [team[place] for team in teams])
        return Gather(owners, self.codec) if owners.size <= 2 else TwoStage(owners, self.codec)

    def _own(self, numel: int) -> slice:
        return slices(numel, self._local.size)[self._local.rank]

    @property
    def _one_host(self) -> bool:
        return len(set(self.hosts)) == 1

    def init(self, spec: TensorSpec, device: torch.device | str | None = None) -> State:
        """That of the slice; none if nothing is encoded."""
        if self._one_host:
            return EMPTY
        own = self._own(spec.numel)
        return self._between.init(TensorSpec((own.stop - own.start,)), device)

    def by_tensor(self, state: State, sizes: Sequence[int]) -> list[State]:
        """Residuals of each tensor: zeros where this rank owns nothing."""
        if not state:
            return [state] * len(sizes)
        full, own = torch.zeros(sum(sizes)), self._own(sum(sizes))
        if "carry" in state:
            full += tensor_of(state, "carry")
        full[own] += tensor_of(state, "residual").view(-1)
        if "owned" in state:
            # A mean's loss counts once for all hosts; sent by this one alone it is divided by their number.
            between = self._between.peers
            part = slices(own.stop - own.start, between.size)[between.rank]
            full[own][part] += tensor_of(state, "owned") * between.size
        return [{"residual": piece} for piece in torch.split(full, list(sizes))]

    def from_tensors(self, states: Sequence[State], sizes: Sequence[int]) -> State:
        """A fresh state, and what is left of before, which travels with the next gradient."""
        if not any(states):
            return {}
        carry = torch.cat([tensor_of(state, "residual").reshape(-1) for state in states])
        return {**self.init(TensorSpec((sum(sizes),)), carry.device), "carry": carry}

    def reduce(self, x: Tensor, state: State, key: Key, tag: int, out: Tensor | None = None) -> Reduction:
        """Reduce a tensor as a flat one."""
        local, what = self._local, f"the exchange of {where(key)}"
        flat = x.reshape(-1).to("cpu")
        if "carry" in state:
            flat = flat + tensor_of(state, "carry")
            state = {name: value for name, value in state.items() if name != "carry"}
        parts, me, ranks = slices(flat.numel(), local.size), local.rank, others(local)
        own = parts[me]

        # The host's sum of this rank's slice, in the order of ranks.
        swap = local.swap(dict.fromkeys(ranks, 4 * (own.stop - own.start)), tag, what)
        for rank in ranks:
            swap.send(rank, flat[parts[rank]].contiguous().view(torch.uint8))
        sent = sum(4 * (parts[rank].stop - parts[rank].start) for rank in ranks)
        yield
        told = {rank: swap.receive(rank).view(torch.float32) for rank in ranks} | {me: flat[own]}
        total = torch.zeros(own.stop - own.start)
        for rank in range(local.size):
            total += told[rank]
        swap.wait()

        # The mean of all hosts' sums; NaN and Inf are known to the owners of this slice only, who tell their hosts.
        failure: NonFiniteError | None = None
        inner = Reduced(total, state, 0, 0, 0)
        try:
            if self._one_host:
                finite_mean(total, 1, key)
            else:
                inner = yield from self._between.reduce(total, state, key, tag + 1)
        except NonFiniteError as error:
            failure = error
        mine = torch.empty(4 * total.numel() + 1, dtype=torch.uint8)
        mine[:-1] = inner.mean.div_(local.size).view(-1).view(torch.uint8)
        mine[-1] = failure is not None
        sizes = {rank: 4 * (parts[rank].stop - parts[rank].start) + 1 for rank in ranks}
        swap = local.swap(sizes, tag + 3, what)
        for rank in ranks:
            swap.send(rank, mine)
        yield
        result, bad = result_tensor(out, flat.numel()), failure is not None
        for rank in [*reversed(ranks), me]:
            letter = mine if rank == me else swap.receive(rank)
            bad |= bool(letter[-1])
            result[parts[rank]] = letter[:-1].view(torch.float32)
        swap.wait()
        if bad:
            raise failure or NonFiniteError(f"{where(key)}: NaN or Inf on some rank, or in the sum of all ranks.")
        within = sent + len(ranks) * mine.numel()
        received = len(ranks) * 4 * (own.stop - own.start) + sum(sizes.values())
        moved = (within + inner.sent_bytes, received + inner.received_bytes)
        return Reduced(delivered(result, out, x), inner.state, *moved, ring_bytes(flat.numel(), self.peers.size))
