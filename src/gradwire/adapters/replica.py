"""A DDP training as one thing that is saved, and taken up by as many ranks or by others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradwire.adapters.ddp import Compression
from gradwire.collectives import Peers
from gradwire.errors import CheckpointError, ConfigError

__all__ = ["Replica"]


class Replica:
    """A rank's model, its optimizer, what its compression keeps, and the number of steps taken.

    :func:`gradwire.save_checkpoint` and :func:`gradwire.load_checkpoint` take it. All ranks hold the same model and
    optimizer, so the first rank saves them for all; residuals are saved by each. ``also`` are further objects with
    ``state_dict`` and ``load_state_dict``, such as a scheduler or a scaler, the same on all ranks.

    >>> import gradwire, tempfile, torch, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(128, 64))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> replica = Replica(model, optimizer, gradwire.compress(model, "int4"))
    >>> replica.learn(model(torch.ones(1, 128)).square().sum()) > 0
    True
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = gradwire.save_checkpoint(folder, replica)
    ...     replica.steps = 0
    ...     extra = gradwire.load_checkpoint(path, replica)
    >>> replica.steps
    1
    >>> replica.close(); dist.destroy_process_group()
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        compression: Compression,
        also: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(also, Mapping | None):
            raise ConfigError(f"`also` must be objects by name, or None; got {type(also).__name__}.")
        for name, each in (also or {}).items():
            if not all(callable(getattr(each, method, None)) for method in ("state_dict", "load_state_dict")):
                raise ConfigError(f"`also` must hold objects with a state_dict; got {type(each).__name__} as {name!r}.")
        self.model, self.optimizer, self.compression, self.also = model, optimizer, compression, dict(also or {})
        self.steps = 0
        """Steps taken so far: also those before a restart."""

    def learn(self, loss: Tensor) -> float:
        """Take a step down a loss, computed with :attr:`model`: backward, the optimizer, gradients set to none.

        Returns the loss. Loops that clip, scale or accumulate do this themselves, and count :attr:`steps`.
        """
        if not isinstance(loss, Tensor):
            raise ConfigError(f"`loss` must be a tensor; got {type(loss).__name__}.")
        before = self.compression.rounds
        loss.backward()  # type: ignore[no-untyped-call]
        if self.compression.rounds == before:
            raise ConfigError("`loss` must be computed with replica.model: its gradients were not exchanged.")
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        value = loss.item()
        self.compression.observe_loss(value)
        return value

    def close(self) -> None:
        """End the compression's threads and connections."""
        self.compression.close()

    # As gradwire.save_checkpoint takes it.

    @property
    def peers(self) -> Peers:
        """The ranks of the model's group."""
        return self.compression.peers

    @property
    def rounds(self) -> int:
        """Steps so far."""
        return self.steps

    def state_dict(self) -> dict[str, Any]:
        """What this rank keeps; of the first rank with model and optimizer."""
        state: dict[str, Any] = {"steps": self.steps, "compression": self.compression.state_dict()}
        if self.peers.rank == 0:
            state["model"] = self.model.module.state_dict()
            state["optimizer"] = _with_names(self.optimizer.state_dict())
            state["kind"] = type(self.optimizer).__name__
            state["also"] = {name: each.state_dict() for name, each in self.also.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on from what this rank and the first one kept; or, by another number of ranks, from what all did."""
        states = [state] if isinstance(state, Mapping) else list(state)
        if not states or not isinstance(states[0], Mapping) or "model" not in states[0]:
            raise ConfigError("`state` must begin with what the first rank of a Replica kept: it has the model.")
        first, own = states[0], [each for each in states if self._is_own(each)]
        if set(first["also"]) != set(self.also):
            raise ConfigError(f"`also` holds {sorted(self.also)}; what was saved has {sorted(first['also'])}.")
        if first["kind"] != type(self.optimizer).__name__:
            raise CheckpointError(f"what was saved is of {first['kind']}; this is {type(self.optimizer).__name__}.")
        try:
            self.model.module.load_state_dict(first["model"])
            self.optimizer.load_state_dict(_with_places(first["optimizer"]))
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(f"what was saved is of another model: {error}") from error
        self.compression.load_state_dict(own[0]["compression"] if own else [each["compression"] for each in states])
        for name, each in self.also.items():
            each.load_state_dict(first["also"][name])
        self.steps = int(first["steps"])

    def fits(self, *states: Mapping[str, Any]) -> bool:
        """Whether this is enough: what this rank kept, and the model, which the first one has."""
        return self._is_own(states[0]) and any("model" in each for each in states)

    def _is_own(self, state: Mapping[str, Any]) -> bool:
        kept = state["compression"]
        return bool(kept["rank"] == self.peers.rank and kept["ranks"] == self.peers.size)


def _with_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state with strings for the places of parameters, as JSON has them."""
    return {**state, "state": {str(place): each for place, each in state["state"].items()}}


def _with_places(state: Mapping[str, Any]) -> dict[str, Any]:
    return {**state, "state": {int(place): each for place, each in state["state"].items()}}
