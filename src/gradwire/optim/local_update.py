"""Training that talks less often: Local SGD, DiLoCo and its streaming form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradwire.collectives import Method
from gradwire.errors import ConfigError, NonFiniteError
from gradwire.optim.exchange import Flight, NamedExchange, room_for
from gradwire.optim.rounds import Group, RoundWrapper
from gradwire.optim.wrapping import require_number, require_whole

__all__ = ["DiLoCo", "LocalSGD"]


@dataclass(frozen=True)
class _Schedule:
    """Which fragment is due after a step, and when its result is taken."""

    every: int
    synchronous_steps: int = 0
    fragments: int = 1
    overlap: int = 0

    def __post_init__(self) -> None:
        require_whole("every", self.every, 1)
        require_whole("synchronous_steps", self.synchronous_steps, 0)
        require_whole("fragments", self.fragments, 1)
        require_whole("overlap", self.overlap, 0)
        if self.fragments > self.every:
            raise ConfigError(f"`fragments` must be at most `every`, {self.every}; got {self.fragments}.")
        if self.overlap > (most := self.every // self.fragments):
            raise ConfigError(
                f"`overlap` must be at most every / fragments, {most}: an exchange ends before the next begins; "
                f"got {self.overlap}."
            )

    def due(self, steps: int) -> list[int]:
        """Fragments that are due after so many steps."""
        at = (steps - self.synchronous_steps) % self.every
        return [f for f in range(self.fragments) if (f + 1) * self.every // self.fragments % self.every == at]


@dataclass(frozen=True)
class _Outer:
    """What the mean difference does to the agreed parameters, and these to the local ones."""

    learning_rate: float = 1.0
    momentum: float = 0.0
    mixing: float = 0.0

    def __post_init__(self) -> None:
        require_number(
            "outer_learning_rate", self.learning_rate, "above 0 and finite", low=0, high=math.inf, above=True
        )
        require_number("outer_momentum", self.momentum, "in [0, 1)", low=0, high=1)
        require_number("mixing", self.mixing, "in [0, 1)", low=0, high=1)

    def step(self, agreed: Tensor, mean: Tensor, velocity: Tensor | None) -> None:
        """Nesterov's SGD; the outer gradient is the mean difference, the other way round."""
        if velocity is not None:
            velocity.mul_(self.momentum).add_(mean)
            mean = mean.add(velocity, alpha=self.momentum)
        agreed.add_(mean, alpha=self.learning_rate)


@dataclass(frozen=True)
class _UnderWay:
    """The exchange of a fragment, whose result is taken after so many steps."""

    fragment: int
    lands: int
    exchange: str
    flight: Flight
    sent_bytes: int | None = None  # if it has arrived already


class _LocalUpdates(RoundWrapper):
    """Steps of its own on every rank, and now and then an exchange of what they have come to."""

    def __init__(
        self,
        optimizer: Optimizer,
        schedule: _Schedule,
        outer: _Outer,
        codec: str | Method,
        synchronous_codec: str | Method,
        *,
        group: Group,
        **membership: Any,
    ) -> None:
        super().__init__(optimizer, **membership)
        self._schedule, self._outer = schedule, outer
        self._due: list[int] = []  # fragments, in order
        self._under_way: _UnderWay | None = None
        self._exchanges = {
            "differences": NamedExchange(self._parameters, codec),
            "rest": NamedExchange(self._parameters, "none"),
        }
        if schedule.synchronous_steps:
            self._exchanges["gradients"] = NamedExchange(self._parameters, synchronous_codec)
        self._agreed = {n: p.detach().to(torch.float32, copy=True) for n, p in self._parameters.items()}
        self._velocity = {n: torch.zeros_like(each) for n, each in self._agreed.items()} if outer.momentum else {}
        self._meet(group)

    def _line(self) -> str:
        settings = vars(self._schedule) | {f"outer {name}": value for name, value in vars(self._outer).items()}
        return ", ".join([*(f"{name}={value!r}" for name, value in settings.items()), super()._line()])

    @property
    def agreed(self) -> list[Tensor]:
        """The parameters all ranks hold alike, in float32: of the last exchange, in the order of the optimizer's."""
        return [each.clone() for each in self._agreed.values()]

    @property
    def _in_step(self) -> bool:
        return self.steps < self._schedule.synchronous_steps

    # A step.

    def _advance(self) -> None:
        if self._in_step:
            self._synchronous_step()
            return
        self.wrapped.step()
        self._took_step()
        self._due += [fragment for fragment in self._schedule.due(self.steps) if fragment not in self._due]
        self._talk()

    def _synchronous_step(self) -> None:
        flat, means = room_for(self._parameters, list(self._parameters))
        for name, parameter in self._parameters.items():
            means[name].zero_() if parameter.grad is None else means[name].copy_(parameter.grad)
        self._step_with_mean(self._exchanges["gradients"], means, flat)
        self._took_step()
        for name, parameter in self._parameters.items():
            self._agreed[name].copy_(parameter)
        if not self._in_step:  # no gradient is sent any more, so nothing of any will be
            self._exchanges["gradients"].share([])

    def _talk(self) -> None:
        """Take the result that is due, and start the exchange that is: one at a time, in the order all ranks share."""
        if self._under_way is not None and self.steps >= self._under_way.lands:
            self._land()
        while self._due and self._under_way is None:
            self._start(self._due[0], "differences", self._schedule.overlap)
            if not self._schedule.overlap:
                self._land()

    def _names(self, fragment: int) -> list[str]:
        return list(self._parameters)[fragment :: self._schedule.fragments]

    def _start(self, fragment: int, exchange: str, steps: int) -> None:
        names = self._names(fragment)
        if not names:  # more fragments than parameters
            self._due = [each for each in self._due if each != fragment]
            return
        flat, differences = room_for(self._parameters, names)
        for name in names:
            torch.sub(self._parameters[name].to(torch.float32), self._begun(name), out=differences[name])
        flight = self._exchanges[exchange].start(names, differences, flat)
        self._due = [each for each in self._due if each != fragment]
        self._under_way = _UnderWay(fragment, self.steps + steps, exchange, flight)

    def _begun(self, name: str) -> Tensor:
        """The agreed parameters as a rank begins with them: what rounding to 16 bits takes off is nobody's work."""
        return self._agreed[name].to(self._parameters[name].dtype).to(torch.float32)

    def _land(self, *, mixing: float | None = None) -> None:
        """Wait for the mean difference of what is under way, and take it."""
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return
        exchange, fragment = self._exchanges[under_way.exchange], under_way.fragment
        try:
            exchange.land(under_way.flight)
        except NonFiniteError:  # on every rank: it is tried again when it is due again
            raise
        except BaseException:
            self._due.insert(0, fragment)
            raise
        for name, mean in under_way.flight.tensors.items():
            self._outer.step(self._agreed[name], mean, self._velocity.get(name))
            self._take_agreed(name, self._outer.mixing if mixing is None else mixing)
        sent = under_way.sent_bytes
        self._talked(exchange.reducer.traffic.sent_bytes if sent is None else sent)

    def _take_agreed(self, name: str, mixing: float = 0.0) -> None:
        parameter, agreed = self._parameters[name], self._agreed[name].to(self._parameters[name].dtype)
        if mixing:
            parameter.lerp_(agreed, 1 - mixing)
        else:
            parameter.copy_(agreed)

    def _settle(self) -> None:
        self._land()

    # Whenever you say.

    @torch.no_grad()
    def synchronize(self) -> None:
        """Exchange everything now, in the codec; all ranks hold the agreed parameters then. Every rank must call it."""
        self._exchange_all("differences")

    @torch.no_grad()
    def flush(self) -> None:
        """As :meth:`synchronize`, in float32, with what compression has kept back: nothing is left to send then."""
        self._settle()
        self._exchanges["rest"].kept = self._exchanges["differences"].hold_back()
        self._exchange_all("rest")

    def _exchange_all(self, exchange: str) -> None:
        self._check_open()
        self._land()
        if self._in_step:  # parameters are agreed after every step
            return
        for fragment in range(self._schedule.fragments):
            self._start(fragment, exchange, 0)
            self._land(mixing=0.0)

    @torch.no_grad()
    def rollback(self) -> None:
        """Go back to the agreed parameters, and forget this rank's work since: after NaN or Inf, for example.

        Where the wrapped optimizer's state holds NaN or Inf by now, it begins anew.
        """
        for name, parameter in self._parameters.items():
            self._take_agreed(name)
            state = self.wrapped.state.get(parameter, {})
            if not all(bool(each.isfinite().all()) for each in state.values() if isinstance(each, Tensor)):
                del self.wrapped.state[parameter]

    # State.

    def _shared(self) -> dict[str, Any]:
        return {**super()._shared(), "due": list(self._due), "agreed": self._agreed, "velocity": self._velocity}

    def _adopt(self, shared: Mapping[str, Any], own: Mapping[str, Any] | None, *, counted: bool) -> None:
        super()._adopt(shared, own, counted=counted)
        self._due, self._under_way = [int(each) for each in shared["due"]], None
        for name, there in shared["agreed"].items():
            here = self._agreed[name]
            if own is None and torch.equal(here, there.to(here.device)):
                continue  # this rank's work on it since then counts
            here.copy_(there)
            self._take_agreed(name)
            self._exchanges["differences"].kept.pop(name, None)
        for name, velocity in self._velocity.items():
            velocity.copy_(shared["velocity"][name])

    def _unshared(self) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        started = {name: agreed.to(self._parameters[name].dtype) for name, agreed in self._agreed.items()}
        local = {n: p.detach().clone() for n, p in self._parameters.items() if not torch.equal(p, started[n])}
        if local:
            kept["local"] = local
        if (now := self._under_way) is not None:
            exchange = self._exchanges[now.exchange]
            exchange.land(now.flight)
            sent = exchange.reducer.traffic.sent_bytes if now.sent_bytes is None else now.sent_bytes
            kept["under_way"] = {
                "fragment": now.fragment, "lands": now.lands, "exchange": now.exchange, "sent_bytes": sent,
                "means": {name: mean.clone() for name, mean in now.flight.tensors.items()},
            }  # fmt: skip
        return kept

    def _resume(self, unshared: Mapping[str, Any]) -> None:
        for name, there in unshared.get("local", {}).items():
            self._parameters[name].copy_(there)
        if (there := unshared.get("under_way")) is not None:
            arrived: Future[None] = Future()
            arrived.set_result(None)
            device = next(iter(self._parameters.values())).device
            flight = Flight({name: mean.clone().to(device) for name, mean in there["means"].items()}, arrived)
            self._under_way = _UnderWay(
                int(there["fragment"]), int(there["lands"]), str(there["exchange"]), flight, int(there["sent_bytes"])
            )


class LocalSGD(_LocalUpdates):
    """Every rank steps for itself; after ``every`` steps all take the mean of their parameters.

    What travels, in ``codec``, is the difference to the parameters all agreed on last, with error feedback where the
    codec wants it. The first ``synchronous_steps`` steps average gradients instead, in ``synchronous_codec``: training
    that starts so and talks less often later loses less (post-local SGD). The other arguments are those of
    :class:`LocalAccumulation`.

    >>> from gradwire.collectives.loopback import Alone
    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer = LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), every=4, group=Alone())
    >>> for _ in range(8):
    ...     optimizer.zero_grad()
    ...     model(torch.ones(1, 3)).square().sum().backward()
    ...     optimizer.step()
    >>> optimizer.steps, optimizer.round
    (8, 2)
    """

    def __init__(
        self,
        optimizer: Optimizer,
        every: int,
        codec: str | Method = "int8",
        *,
        synchronous_steps: int = 0,
        synchronous_codec: str | Method = "int8",
        group: Group = None,
        seed: int = 0,
        timeout_s: float = 300.0,
        join: bool = False,
    ) -> None:
        schedule = _Schedule(every, synchronous_steps)
        membership: dict[str, Any] = {"group": group, "seed": seed, "timeout_s": timeout_s, "join": join}
        super().__init__(optimizer, schedule, _Outer(), codec, synchronous_codec, **membership)


class DiLoCo(_LocalUpdates):
    """Local steps, whose mean difference is the gradient of an outer Nesterov SGD on the agreed parameters.

    As Local SGD, which it is with an outer learning rate of 1 and no momentum (Douillard et al., 2023). Streaming
    (2025): the parameters are dealt out to ``fragments``, which take turns, each once in ``every`` steps; the result of
    an exchange is taken ``overlap`` steps after its start, and ``mixing`` is the share of the local parameters that
    stays in them then: 0 without overlap and 0.5 with it, unless you say. With a sparse codec, ``"topk:0.03+int2"``,
    it is SparseLoCo.

    >>> from gradwire.collectives.loopback import Alone
    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer = DiLoCo(torch.optim.AdamW(model.parameters()), every=4, fragments=2, overlap=1, group=Alone())
    >>> for _ in range(9):
    ...     optimizer.zero_grad()
    ...     model(torch.ones(1, 3)).square().sum().backward()
    ...     optimizer.step()
    >>> optimizer.steps, optimizer.round
    (9, 4)
    """

    def __init__(
        self,
        optimizer: Optimizer,
        every: int,
        codec: str | Method = "int4",
        *,
        outer_learning_rate: float = 0.7,
        outer_momentum: float = 0.9,
        fragments: int = 1,
        overlap: int = 0,
        mixing: float | None = None,
        synchronous_steps: int = 0,
        synchronous_codec: str | Method = "int8",
        group: Group = None,
        seed: int = 0,
        timeout_s: float = 300.0,
        join: bool = False,
    ) -> None:
        schedule = _Schedule(every, synchronous_steps, fragments, overlap)
        mixing = (0.5 if overlap else 0.0) if mixing is None else mixing
        membership: dict[str, Any] = {"group": group, "seed": seed, "timeout_s": timeout_s, "join": join}
        outer = _Outer(outer_learning_rate, outer_momentum, mixing)
        super().__init__(optimizer, schedule, outer, codec, synchronous_codec, **membership)
