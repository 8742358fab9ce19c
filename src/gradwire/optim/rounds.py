"""An optimizer that talks to the other ranks in rounds, between which members may go and come."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.collectives import Peers, agree, connect
from gradwire.collectives.base import ring_bytes
from gradwire.collectives.peers import tell
from gradwire.collectives.processes import ProcessPeers
from gradwire.errors import ConfigError, NonFiniteError, PeerError
from gradwire.optim.exchange import NamedExchange
from gradwire.optim.sharded_optimizer import ShardedOptimizerBase
from gradwire.optim.wrapping import (
    check_parameters,
    check_wrapped,
    load_optimizer,
    parameters_of,
    require_whole,
    saved_optimizer,
)
from gradwire.tree import from_bytes, to_bytes
from gradwire.wire import FLOAT_DTYPES, Key

__all__ = ["Group", "RoundOptimizer", "RoundTraffic", "RoundWrapper"]

Group: TypeAlias = dist.ProcessGroup | Peers | None
"""Whose ranks train together: a process group, all ranks if it is None, or any other peers."""

_ROLL_CALL, _SIZE, _STATE, _LOADING, _LOADED = 1, 2, 3, 4, 5  # tags
_OWN: Final = "its own state"
_NOBODY: Final = -1  # the round of a rank that has only just come


@dataclass(frozen=True)
class RoundTraffic:
    """Bytes this rank sent: in the last exchange, in all, and what plain DDP in float32 would have in as many steps.

    >>> RoundTraffic(last_bytes=10, sent_bytes=40, dense_bytes=4000).ratio
    0.01
    """

    last_bytes: int
    sent_bytes: int
    dense_bytes: int

    @property
    def ratio(self) -> float:
        """Bytes sent over DDP's; 0 if that would have sent none."""
        return self.sent_bytes / self.dense_bytes if self.dense_bytes else 0.0


class Exchange(Protocol):
    """What an optimizer keeps for talking to the others, which outlives them."""

    def connect(self, peers: Peers, seed: int) -> None:
        """Begin with other ranks, which all must."""
        ...

    def leave(self) -> None:
        """Part from the ranks; what was not sent stays here."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Of this rank."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from this rank's state."""
        ...

    def share(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Keep this rank's share of what the ranks of these states have not sent; every rank calls it."""
        ...


class RoundOptimizer(Optimizer):
    """What optimizers that talk in rounds share: their ranks, agreement on what all hold, traffic, saved states.

    A subclass says in ``_shared`` what all ranks hold alike and takes another rank's in ``_adopt``; ``_line`` is what
    they must agree on. It calls ``_meet`` when it is set up.
    """

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        seed: int,
        timeout_s: float,
        join: bool,
    ) -> None:
        require_whole("seed", seed, 0, 2**64 - 1)
        if not isinstance(join, bool):
            raise ConfigError(f"`join` must be True or False; got {join!r}.")
        self._ready = False
        super().__init__(params, defaults)
        parameters = parameters_of(self.param_groups)
        check_parameters("params", parameters)
        _check_dtypes(parameters)
        self._parameters = {str(place): p for place, p in enumerate(parameters)}
        self._numel = sum(p.numel() for p in parameters)
        self._exchanges: Mapping[str, Exchange] = {}
        self._seed, self._timeout_s, self._joining = seed, timeout_s, join
        self.steps = 0  # that this rank has taken
        self.round = 0  # exchanges whose result all have taken
        self._generation = 0  # the round in which these ranks met
        self._last_bytes = self._sent_bytes = self._dense_bytes = 0
        self._closed = False

    # What a subclass says.

    @abstractmethod
    def _line(self) -> str:
        """Settings that all ranks must have."""

    @abstractmethod
    def _shared(self) -> dict[str, Any]:
        """What all ranks hold alike, to the bit."""

    @abstractmethod
    def _adopt(self, shared: Mapping[str, Any], own: Mapping[str, Any] | None, *, counted: bool) -> None:
        """Hold what another rank does, and for one that has only just come, what that one has for itself.

        ``counted``: what this rank had done is part of it already.
        """

    @abstractmethod
    def _own(self) -> dict[str, Any]:
        """What this rank has for itself, and another one could begin with."""

    @abstractmethod
    def _advance(self) -> None:
        """Take a step with the gradients that are there."""

    def _settle(self) -> None:
        """Take the result of what is under way, if it can be had."""

    # A step.

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step. Every rank must call it as often, for some of the steps talk to the others.

        Raises :class:`~gradwire.errors.NonFiniteError` on every rank if what one rank would send is not finite, and
        :class:`~gradwire.errors.PeerError` if a rank is gone: see :meth:`regroup`.
        """
        self._check_open()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._advance()
        return loss

    def _took_step(self) -> None:
        self.steps += 1
        self._dense_bytes += ring_bytes(self._numel, self.peers.size)

    def _talked(self, sent_bytes: int) -> None:
        self.round += 1
        self._last_bytes = sent_bytes
        self._sent_bytes += sent_bytes

    # Who takes part.

    def _meet(self, group: Group) -> None:
        """Find the other ranks, agree on the settings, and hold what the one that is furthest does."""
        self.peers, self._group = _peers_of(group, self._timeout_s), group
        shapes = [(*p.shape, p.dtype) for p in self._parameters.values()]
        checksum = crc32(repr(shapes).encode())
        agree(
            self.peers,
            f"{type(self).__name__}, {self._line()}, seed {self._seed}, {len(shapes)} parameters with checksum "
            f"{checksum:08x}",
        )
        self._catch_up()
        self._generation = self.round
        self._connect()
        self._joining, self._ready = False, True

    def _connect(self) -> None:
        seed = Key(self._seed).fold(self._generation).seed  # other random bits than the ranks before drew
        for exchange in self._exchanges.values():
            exchange.connect(self.peers, seed)

    @torch.no_grad()
    def _catch_up(self) -> None:
        """Take what all hold from the rank of the highest round, and of these the lowest rank."""
        me, size = self.peers.rank, self.peers.size
        mine = _NOBODY if self._joining else self.round
        line = json.dumps({"round": mine, "checksum": crc32(to_bytes(self._shared()))})
        told = [json.loads(each) for each in tell(self.peers, line, _ROLL_CALL, "the roll call")]
        source = max(range(size), key=lambda rank: (told[rank]["round"], -rank))
        lacking = [r for r in range(size) if r != source and (told[r] != told[source] or told[r]["round"] == _NOBODY)]
        if not lacking:
            return
        data = to_bytes({"shared": self._shared(), "own": self._own()}) if me == source else b""
        nbytes = int(tell(self.peers, str(len(data)), _SIZE, "the size of the state")[source])
        swap = self.peers.swap({source: nbytes} if me in lacking else {}, _STATE, "the exchange of the state")
        if me == source:
            block = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            for rank in lacking:
                swap.send(rank, block)
        if me in lacking:
            state = from_bytes(swap.receive(source).numpy().tobytes())
            new = mine == _NOBODY
            self._adopt(state["shared"], state["own"] if new else None, counted=told[source]["round"] > mine)
        swap.wait()

    @torch.no_grad()
    def regroup(self, group: Group = None) -> None:
        """Go on with other ranks: those that are left, and those that come. Every one of ``group`` must take part.

        Members call this, newcomers construct the optimizer with ``join=True``. All end with what the member of the
        highest round holds (of several, that of the lowest rank). A round that failed is repeated at the end of the
        next step; the work of this rank since the last exchange takes part in it.
        """
        self._check_open()
        with suppress(PeerError, NonFiniteError):  # whoever has the result takes it, and the others follow
            self._settle()
        self._leave()
        self._meet(group)

    def _leave(self) -> None:
        for exchange in self._exchanges.values():
            exchange.leave()
        if isinstance(self.peers, ProcessPeers):
            self.peers.close()

    def close(self) -> None:
        """End the threads and connections."""
        if not self._closed:
            self._closed = True
            self._leave()

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("close() was called: this optimizer can no longer be used.")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once the ranks have met."""
        if getattr(self, "_ready", False):
            raise ConfigError("parameters cannot be added once ranks have met: construct the optimizer with all.")
        super().add_param_group(param_group)

    def __deepcopy__(self, memo: object) -> RoundOptimizer:
        raise ConfigError(f"{type(self).__name__} cannot be copied: it is one of several ranks. Save its state_dict().")

    def __reduce__(self) -> Any:
        raise ConfigError(f"{type(self).__name__} cannot be pickled: save its state_dict() by gradwire.tree.to_bytes.")

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Everything this rank keeps: dicts, lists, tensors, numbers and strings. Save it on every rank."""
        self._check_open()
        return {
            "format": 1,
            "kind": type(self).__name__,
            "shapes": [list(p.shape) for p in self._parameters.values()],
            "rank": self.peers.rank,
            "ranks": self.peers.size,
            "generation": self._generation,
            "dense_bytes": self._dense_bytes,
            "sent_bytes": self._sent_bytes,
            "last_bytes": self._last_bytes,
            "shared": self._shared(),
            "own": self._own(),
            "unshared": self._unshared(),
            "exchanges": {name: exchange.state_dict() for name, exchange in self._exchanges.items()},
        }

    @abstractmethod
    def _unshared(self) -> dict[str, Any]:
        """What this rank has done since the last round; nothing right after one."""

    @abstractmethod
    def _resume(self, unshared: Mapping[str, Any]) -> None:
        """Undo :meth:`_unshared`."""

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on from this rank's state; every rank must call it. Parameters are restored too.

        With another number of ranks, give the states of all ranks that were saved, in a list, between two rounds: what
        compression has not sent yet is shared among all. From one rank's state alone the others' part of that is lost;
        call ``flush()`` before saving where there is one. A state that one rank cannot take is an error on all.
        """
        self._check_open()
        states: list[Any] = list(state_dict) if isinstance(state_dict, list | tuple) else [state_dict]
        me, size = self.peers.rank, self.peers.size
        same = self._find_own(states)
        mine = same[0] if same else states[me % len(states)]
        if not same and any(state["unshared"] for state in states):
            raise ConfigError(
                f"the state was saved within a round by rank {mine['rank']} of {mine['ranks']}; this is rank {me} of "
                f"{size}. Save between rounds, or after synchronize(), to go on with other ranks."
            )
        self._adopt(mine["shared"], mine["own"], counted=True)
        self._generation = int(mine["generation"])
        self._leave()
        self.peers = _peers_of(self._group, self._timeout_s)
        self._connect()
        everyones = [] if len(states) < mine["ranks"] else states
        for name, exchange in self._exchanges.items():
            if same and name in mine["exchanges"]:
                exchange.load_state_dict(mine["exchanges"][name])
            else:
                exchange.share([state["exchanges"][name] for state in everyones if name in state["exchanges"]])
        if same:
            self._resume(mine["unshared"])
        for name in ("dense_bytes", "sent_bytes", "last_bytes"):
            setattr(self, f"_{name}", int(mine[name]))
        agree(self.peers, f"the state of round {self.round} and step {self.steps}", _LOADED)

    def _find_own(self, states: Sequence[Any]) -> list[Any]:
        """This rank's own state, if every rank was given its own. A state that one rank cannot take is told to all."""
        me, refused, own = (self.peers.rank, self.peers.size), None, list[Any]()
        try:
            self._check_states(states)
            own = [state for state in states if (state["rank"], state["ranks"]) == me]
        except ConfigError as error:
            refused = error
        told = tell(self.peers, str(refused or (_OWN if own else "another's")), _LOADING, "the loading of states")
        if refused is not None:
            raise refused
        for rank, words in enumerate(told):
            if words not in (_OWN, "another's"):
                raise PeerError(f"rank {rank} cannot take the state it was given: {words}")
        return own if set(told) == {_OWN} else []  # one rank cannot go on in the middle where the others begin

    def _check_states(self, states: Sequence[Any]) -> None:
        expected = {"format", "kind", "shapes", "rank", "ranks", "shared", "own", "unshared", "exchanges", "generation"}
        for state in states or [None]:
            if not isinstance(state, Mapping) or not expected <= set(state):
                got = sorted(state) if isinstance(state, Mapping) else type(state).__name__
                raise ConfigError(f"`state_dict` must come from state_dict(), with {sorted(expected)}; got {got}.")
            mine = {"format": 1, "kind": type(self).__name__}
            mine["shapes"] = [list(p.shape) for p in self._parameters.values()]
            for name, value in mine.items():
                if state[name] != value:
                    raise ConfigError(f"`state_dict` has {name} {state[name]!r}; this optimizer has {value!r}.")
        ranks, rounds = [state["rank"] for state in states], sorted({state["shared"]["round"] for state in states})
        if len(set(ranks)) < len(ranks):
            raise ConfigError(f"`state_dict` must have the state of every rank that was saved once; got ranks {ranks}.")
        if len(sizes := sorted({state["ranks"] for state in states})) > 1:
            raise ConfigError(f"`state_dict` must have states of as many ranks; got some of {sizes} ranks.")
        if len(states) not in (1, sizes[0]):
            words = f"the states of all {sizes[0]} ranks that were saved, or of one"
            raise ConfigError(f"`state_dict` must have {words}; got ranks {ranks}.")
        if len(rounds) > 1:
            raise ConfigError(f"`state_dict` must have states of one round; got those of rounds {rounds}.")

    # What it is, for people.

    @property
    def traffic(self) -> RoundTraffic:
        """Bytes this rank has sent."""
        return RoundTraffic(self._last_bytes, self._sent_bytes, self._dense_bytes)


class RoundWrapper(RoundOptimizer):
    """Around another optimizer, whose ``param_groups`` are this one's: schedulers work on either."""

    _exchanges: dict[str, NamedExchange]

    def __init__(self, optimizer: Optimizer, **membership: Any) -> None:
        check_wrapped("optimizer", optimizer)
        if isinstance(optimizer, RoundOptimizer | ShardedOptimizerBase):
            raise ConfigError(f"`optimizer` talks to other ranks itself; got {type(optimizer).__name__}. Wrap it once.")
        self.wrapped = optimizer
        groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
        super().__init__(groups, dict(optimizer.defaults), **membership)
        self._share_groups()

    def _share_groups(self) -> None:
        self.param_groups, self.state = self.wrapped.param_groups, self.wrapped.state

    def _line(self) -> str:
        methods = ", ".join(f"{name} as {exchange.method}" for name, exchange in self._exchanges.items())
        defaults = ", ".join(f"{name}={value!r}" for name, value in sorted(self.wrapped.defaults.items()))
        return f"{methods}, {type(self.wrapped).__name__} with {defaults}"

    @property
    def _in_step(self) -> bool:
        """Whether all ranks step alike, so that the wrapped optimizer's state is the same on all."""
        raise NotImplementedError

    def _shared(self) -> dict[str, Any]:
        counters = {"round": self.round, "steps": self.steps}
        return counters | ({"wrapped": saved_optimizer(self.wrapped)} if self._in_step else {})

    def _own(self) -> dict[str, Any]:
        return {} if self._in_step else {"wrapped": saved_optimizer(self.wrapped)}

    def _adopt(self, shared: Mapping[str, Any], own: Mapping[str, Any] | None, *, counted: bool) -> None:
        self.round, self.steps = int(shared["round"]), int(shared["steps"])
        wrapped = shared.get("wrapped", (own or {}).get("wrapped"))
        if wrapped is not None:
            load_optimizer(self.wrapped, wrapped)
            self._share_groups()

    def _step_with_mean(self, exchange: NamedExchange, tensors: Mapping[str, Tensor], flat: Tensor) -> None:
        """Let the wrapped optimizer step with the mean of all ranks' tensors. They change, gradients do only then."""
        flight = exchange.start(list(self._parameters), tensors, flat)
        exchange.land(flight)
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(flight.tensors[name])
        self.wrapped.step()
        self._talked(exchange.reducer.traffic.sent_bytes)


def _check_dtypes(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        if parameter.dtype not in FLOAT_DTYPES:
            raise ConfigError(f"parameters must be float32, float16 or bfloat16; got {parameter.dtype}.")
    if len(devices := {p.device for p in parameters}) > 1:
        raise ConfigError(f"all parameters must be on one device; got {sorted(map(str, devices))}.")


def _peers_of(group: Group, timeout_s: float) -> Peers:
    if group is None or isinstance(group, dist.ProcessGroup):
        return connect(group, timeout_s=timeout_s)
    if not hasattr(group, "swap"):
        raise ConfigError(f"`group` must be a process group, None for all ranks, or Peers; got {group!r}.")
    return group
