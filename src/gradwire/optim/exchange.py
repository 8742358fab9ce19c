"""Means of named tensors over all ranks, and what was left unsent when the ranks changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.codecs import Codec, State
from gradwire.collectives import Method, Peers, PowerSGD, method
from gradwire.errors import ConfigError
from gradwire.kernels.memory import empty
from gradwire.reducer import GradientReducer
from gradwire.transforms import is_stateful

__all__ = ["Flight", "NamedExchange", "room_for", "unsent"]

Unsent = dict[str, dict[str, Tensor]]  # by parameter: "own", of this rank, and "mean", of the mean of all ranks


def room_for(parameters: Mapping[str, Tensor], names: Sequence[str]) -> tuple[Tensor, dict[str, Tensor]]:
    """A flat float32 tensor, and the views of it that have the shapes of those parameters.

    >>> flat, views = room_for({"a": torch.zeros(2, 3), "b": torch.zeros(4)}, ["a", "b"])
    >>> flat.numel(), views["a"].shape
    (10, torch.Size([2, 3]))
    """
    sizes = [parameters[name].numel() for name in names]
    flat = empty(sum(sizes), torch.float32, parameters[names[0]].device)
    pieces = zip(names, torch.split(flat, sizes), strict=True)
    return flat, {name: piece.view(parameters[name].shape) for name, piece in pieces}


def unsent(states: Mapping[str, State]) -> Unsent:
    """What error feedback has kept back, of the states of a reducer.

    >>> unsent({"w": {"residual": torch.ones(2), "owned": torch.ones(1), "owned_from": 1}})
    {'w': {'own': tensor([1., 1.]), 'mean': tensor([0., 1.])}}
    """
    found: Unsent = {}
    for name, state in states.items():
        own = state.get("residual", state.get("unsent"))
        if not isinstance(own, Tensor):
            continue
        own = own.reshape(-1).clone()
        mean, owned, at = torch.zeros_like(own), state.get("owned"), int(state.get("owned_from", 0))
        if isinstance(owned, Tensor):
            mean[at : at + owned.numel()] = owned
        found[name] = {"own": own, "mean": mean}
    return found


@dataclass(frozen=True)
class Flight:
    """An exchange under way: ``tensors`` become means."""

    tensors: dict[str, Tensor]
    done: Future[None]


class NamedExchange:
    """A :class:`~gradwire.reducer.GradientReducer` for tensors in the shapes of parameters, that outlives its ranks.

    What error feedback kept back from ranks that are no longer the same is added to what is sent next.

    >>> from gradwire.collectives.loopback import Alone
    >>> weights = {"w": nn.Parameter(torch.zeros(3))}
    >>> exchange = NamedExchange(weights, "none")
    >>> exchange.connect(Alone(), seed=0)
    >>> flight = exchange.start(["w"], {"w": torch.ones(3)})
    >>> exchange.land(flight)
    >>> flight.tensors["w"]
    tensor([1., 1., 1.])
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], what: str | Method) -> None:
        self.parameters, self.method = dict(parameters), method(what)
        self.kept: Unsent = {}
        self._reducer: GradientReducer | None = None

    @property
    def keeps(self) -> bool:
        """Whether anything is ever kept back."""
        return isinstance(self.method, PowerSGD) or (isinstance(self.method, Codec) and is_stateful(self.method))

    @property
    def reducer(self) -> GradientReducer:
        """Of the ranks it is connected to."""
        if self._reducer is None:
            raise ConfigError("the last regroup() failed: call it again before anything else.")
        return self._reducer

    def connect(self, peers: Peers, seed: int) -> None:
        """Begin with other ranks, which all must."""
        self.leave()
        self._reducer = GradientReducer(self.parameters, self.method, peers, seed=seed)

    def leave(self) -> None:
        """Part from the ranks; what was not sent stays here."""
        if self._reducer is not None:
            self._keep(unsent(self._reducer.state_dict()["states"]))
            self._reducer.close()
        self._reducer = None

    def hold_back(self) -> Unsent:
        """Take what was not sent out of the reducer: it is added to what is sent next, whoever sends it."""
        state = self.reducer.state_dict()
        self._keep(unsent(state["states"]))
        self.reducer.load_state_dict({**state, "states": {}})
        return self.kept

    def _keep(self, more: Unsent) -> None:
        for name, parts in more.items():
            before = self.kept.get(name)
            self.kept[name] = parts if before is None else {key: before[key] + parts[key] for key in parts}

    def start(self, names: Sequence[str], tensors: Mapping[str, Tensor], flat: Tensor | None = None) -> Flight:
        """Start to replace tensors by their means over all ranks, which all must."""
        for name in names:
            if name in self.kept:
                self._add_kept(tensors[name], self.kept[name])
        given = {name: tensors[name] for name in names}
        return Flight(given, self.reducer.start(list(names), list(given.values()), last=True, flat=flat))

    def _add_kept(self, tensor: Tensor, kept: Mapping[str, Tensor]) -> None:
        tensor.view(-1).add_(kept["own"].to(tensor.device))
        # A mean's loss counts once for all ranks; sent by this one alone it is divided by their number.
        tensor.view(-1).add_(kept["mean"].to(tensor.device), alpha=self.reducer.peers.size)

    def land(self, flight: Flight) -> None:
        """Wait for the means. What was kept counts as sent from then on, and not if any of it failed."""
        flight.done.result()
        for name in flight.tensors:
            self.kept.pop(name, None)

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Of this rank."""
        return {"reducer": self.reducer.state_dict(), "kept": {name: dict(each) for name, each in self.kept.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from this rank's state."""
        self.reducer.load_state_dict(state["reducer"])
        self.kept = {name: {key: part.clone() for key, part in each.items()} for name, each in state["kept"].items()}

    def share(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Keep this rank's share of what the ranks of these states have not sent; every rank calls it."""
        self.hold_back()
        self.kept = {}
        for state in states:
            for found in (unsent(state["reducer"]["states"]), state["kept"]):
                for name, each in found.items():
                    share = each["own"] / len(states) + each["mean"]
                    self._keep({name: {"own": share, "mean": torch.zeros_like(share)}})
