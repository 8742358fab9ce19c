"""Merging whole models: federated and local-SGD rounds."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor

from gradwire.coordinator.loop import Loop
from gradwire.coordinator.rules import merged
from gradwire.coordinator.structure import (
    Parameters,
    Structure,
    check_entries,
    entries_of,
    label,
    nonfinite_entry,
    restored,
)
from gradwire.errors import ConfigError, NonFiniteError

__all__ = ["DistributedModelParametersCoordinator"]


class DistributedModelParametersCoordinator(Loop):
    """Replaces the model by the average of copies that workers have trained, each time enough have come.

    ``copies`` of them make a round. With ``every_s`` a round also ends after so many seconds, if at least ``least``
    copies have come. ``merge="weighted"`` counts each copy as much as its worker says, for example by its examples.

    >>> import torch
    >>> coordinator = DistributedModelParametersCoordinator(copies=2)
    >>> coordinator.set_model_parameters(torch.zeros(2))
    >>> coordinator.start()
    >>> coordinator.add_model_parameters(torch.tensor([1.0, 2.0]))
    >>> coordinator.add_model_parameters(torch.tensor([3.0, 6.0]))
    >>> coordinator.stop()
    >>> coordinator.get_model_parameters()
    tensor([2., 4.])
    """

    _name = "gradwire-merger"

    def __init__(
        self,
        copies: int,
        *,
        merge: Literal["average", "weighted"] = "average",
        every_s: float | None = None,
        least: int = 1,
        on_update: Callable[[int], Any] | None = None,
    ) -> None:
        if not isinstance(copies, int) or copies < 1:
            raise ConfigError(f"`copies` must be a whole number of at least 1; got {copies!r}.")
        if merge not in ("average", "weighted"):
            raise ConfigError(f"`merge` must be 'average' or 'weighted'; got {merge!r}.")
        if every_s is not None and not every_s > 0:
            raise ConfigError(f"`every_s` must be above 0, or None; got {every_s!r}.")
        if not isinstance(least, int) or not 1 <= least <= copies:
            raise ConfigError(f"`least` must be from 1 to {copies}, the copies of a round; got {least!r}.")
        self._copies, self._merge, self._every_s, self._least = copies, merge, every_s, least
        super().__init__(on_update)
        self._began = 0.0
        self._parameters: dict[str, Tensor] = {}
        self._structure: Structure = "tensor"
        self._given: list[tuple[dict[str, Tensor], float]] = []
        self._version, self._counts = 0, Counter[str]()

    def set_model_parameters(self, parameters: Parameters) -> None:
        """The model to begin with."""
        entries, structure = entries_of("parameters", parameters)
        with self._changed:
            self._parameters = {name: tensor.detach().clone() for name, tensor in entries.items()}
            self._structure = structure
            self._given.clear()
            self._version += 1 if self._version else 0

    def get_model_parameters(self) -> Parameters:
        """A copy of the present model."""
        with self._changed:
            self._there()
            return restored({name: tensor.clone() for name, tensor in self._parameters.items()}, self._structure)

    @property
    def version(self) -> int:
        """Rounds so far."""
        with self._changed:
            return self._version

    def add_model_parameters(self, parameters: Parameters, weight: float = 1.0) -> None:
        """Hand over a copy, which must not change any more."""
        entries, structure = entries_of("parameters", parameters)
        bad = nonfinite_entry(entries)
        if not isinstance(weight, int | float) or not 0 < weight < float("inf"):
            raise ConfigError(f"`weight` must be above 0 and finite; got {weight!r}.")
        with self._changed:
            self._there()
            if structure != self._structure:
                raise ConfigError(f"`parameters` must be a {self._structure}, as the model; got a {structure}.")
            check_entries("parameters", entries, self._parameters)
            missing = sorted(set(self._parameters) - set(entries))
            if missing:
                raise ConfigError(f"`parameters` must be a whole model; {missing[:5]} are missing.")
            if bad is not None:
                self._counts["refused"] += 1
                raise NonFiniteError(f"{label('parameters', bad)} holds NaN or Inf.")
            detached = {name: entries[name].detach() for name in self._parameters}
            self._given.append((detached, float(weight) if self._merge == "weighted" else 1.0))
            self._counts["added"] += 1
            self._changed.notify_all()

    def clear_model_parameters(self) -> int:
        """Drop the copies of the round that is under way; returns how many."""
        with self._changed:
            dropped = len(self._given)
            self._given.clear()
            return dropped

    def metrics(self) -> dict[str, int]:
        """Copies added, refused, merged and waiting; rounds."""
        with self._changed:
            counts = {name: self._counts[name] for name in ("added", "refused", "merged")}
            return {**counts, "waiting": len(self._given), "version": self._version}

    def _there(self) -> None:
        if not self._parameters:
            raise ConfigError("there are no parameters: call set_model_parameters first.")

    # The loop.

    def _check_ready(self) -> None:
        self._there()
        self._began = time.monotonic()

    def _patience_s(self) -> float | None:
        return None if self._every_s is None else max(0.0, self._began + self._every_s - time.monotonic())

    def _idle(self) -> bool:
        if len(self._given) >= self._copies:
            return False
        late = self._every_s is not None and time.monotonic() >= self._began + self._every_s
        if late and len(self._given) < self._least:
            self._began = time.monotonic()  # too few: another round of waiting
        return not late or len(self._given) < self._least

    def _work(self) -> int | None:
        round_of = self._given[: self._copies]
        del self._given[: len(round_of)]
        self._parameters = merged([model for model, _ in round_of], [weight for _, weight in round_of])
        self._version += 1
        self._counts["merged"] += len(round_of)
        self._began = time.monotonic()
        return self._version
