"""What a gradient does to parameters. Nothing here waits, locks or talks: the same gradients give the same bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.coordinator.structure import check_entries
from gradwire.errors import ConfigError, StaleGradientError

__all__ = ["GradientChangeMode", "Model", "OptimizerFactory", "Staleness", "merged"]

GradientChangeMode: TypeAlias = Literal["descent", "ascent"]
OptimizerFactory: TypeAlias = Callable[[list[nn.Parameter]], Optimizer]

_RULES: Final = ("none", "weight", "compensate")


def check_mode(mode: str, name: str = "gradient_change_mode") -> GradientChangeMode:
    """Return the mode in lower case, as it is kept; raise if it is none. Any case is accepted.

    >>> check_mode("Descent"), check_mode("ASCENT")
    ('descent', 'ascent')
    """
    lower = mode.lower() if isinstance(mode, str) else mode
    if lower not in ("descent", "ascent"):
        raise ConfigError(f"`{name}` must be 'descent' or 'ascent', in any case; got {mode!r}.")
    return lower  # type: ignore[return-value]


@dataclass(frozen=True)
class Staleness:
    """What happens to a gradient that was computed with parameters of an older version.

    More than ``bound`` versions old: it is refused. Otherwise, by ``rule``: ``"none"``, it counts as any other;
    ``"weight"``, one that is s versions old counts 1 / (1 + s); ``"compensate"``, it is corrected for what the
    parameters have moved since its worker read them, g + strength * g * g * (now - then), as in DC-ASGD.

    >>> Staleness(bound=2).weight(1), Staleness(rule="weight").weight(3)
    (1.0, 0.25)
    """

    bound: int | None = None
    rule: Literal["none", "weight", "compensate"] = "none"
    strength: float = 0.04

    def __post_init__(self) -> None:
        if self.bound is not None and (not isinstance(self.bound, int) or self.bound < 0):
            raise ConfigError(
                f"`bound` of staleness must be a whole number of at least 0, or None; got {self.bound!r}."
            )
        if self.rule not in _RULES:
            raise ConfigError(f"`rule` of staleness must be one of {', '.join(_RULES)}; got {self.rule!r}.")
        if not 0 <= self.strength < math.inf:
            raise ConfigError(f"`strength` of staleness must not be negative; got {self.strength!r}.")

    def check(self, version: int | None, now: int) -> None:
        """Raise if a gradient of a version is too old, or of one that does not exist yet."""
        if version is None:
            return
        if not isinstance(version, int) or not 0 <= version <= now:
            raise ConfigError(f"`version` must be from 0 to the present one, {now}; got {version!r}.")
        if self.bound is not None and now - version > self.bound:
            raise StaleGradientError(version, now, self.bound)

    def weight(self, age: int) -> float:
        """How much a gradient counts."""
        return 1.0 / (1 + age) if self.rule == "weight" else 1.0


@dataclass
class Model:
    """Parameters, their optimizer if there is one, and a version that counts how often they have changed.

    >>> model = Model({"w": torch.tensor([1.0, 2.0])})
    >>> model.take({"w": torch.tensor([0.5, 0.5])}, "descent")
    True
    >>> model.parameters["w"], model.version
    (tensor([0.5000, 1.5000]), 1)
    """

    parameters: dict[str, Tensor]
    optimizer: OptimizerFactory | None = None
    learning_rate: float = 1.0
    average_over: int = 1
    staleness: Staleness = field(default_factory=Staleness)
    version: int = 0

    def __post_init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self.waiting = 0  # gradients of an average that is not complete
        self._leaves: dict[str, nn.Parameter] = {}
        self._optimizer: Optimizer | None = None
        if self.optimizer is not None:
            for name, tensor in self.parameters.items():
                if not tensor.is_floating_point():
                    raise ConfigError(f"an optimizer needs parameters of floats; {name!r} is {tensor.dtype}.")
            self._leaves = {name: nn.Parameter(tensor) for name, tensor in self.parameters.items()}
            self._optimizer = self.optimizer(list(self._leaves.values()))
            if not isinstance(self._optimizer, Optimizer):
                raise ConfigError(
                    f"`optimizer` must be a function from parameters to a torch.optim.Optimizer; it returned "
                    f"{type(self._optimizer).__name__}."
                )

    @torch.no_grad()
    def take(
        self,
        gradients: Mapping[str, Tensor],
        mode: GradientChangeMode,
        *,
        version: int | None = None,
        then: Mapping[str, Tensor] | None = None,
    ) -> bool:
        """Apply gradients, or keep them until there are enough to average; whether parameters have changed.

        The gradients are like the parameters, which the caller has checked. ``version`` is that of the parameters they
        were computed with, and ``then`` those parameters, if they are known.
        """
        age = 0 if version is None else self.version - version
        weight = self.staleness.weight(age)
        for name, gradient in gradients.items():
            given = gradient if weight == 1.0 else gradient * weight
            if self.staleness.rule == "compensate" and then is not None and name in then and age:
                moved = self.parameters[name] - then[name]
                given = given + self.staleness.strength * given * given * moved
            if self.average_over == 1 and self._optimizer is None:
                self._step({name: given}, mode)  # gradients may be decoded one at a time
            elif name in self._sums:
                self._sums[name] += given
                self._counts[name] += 1
            else:
                self._sums[name], self._counts[name] = given if self.average_over == 1 else given.clone(), 1
        self.waiting += 1
        if self.waiting < self.average_over:
            return False
        self._step({name: _mean(total, self._counts[name]) for name, total in self._sums.items()}, mode)
        self.clear()
        self.version += 1
        return True

    def clear(self) -> int:
        """Forget gradients that wait for others; how many there were."""
        self._sums, self._counts, waiting = {}, {}, self.waiting
        self.waiting = 0
        return waiting

    def _step(self, gradients: Mapping[str, Tensor], mode: GradientChangeMode) -> None:
        if self._optimizer is not None:
            for name, leaf in self._leaves.items():
                given = gradients.get(name)
                leaf.grad = None if given is None else (given if mode == "descent" else -given)
            self._optimizer.step()
            return
        for name, gradient in gradients.items():
            target = self.parameters[name]
            if self.learning_rate == 1.0:
                target.sub_(gradient) if mode == "descent" else target.add_(gradient)
            else:
                target.add_(gradient, alpha=-self.learning_rate if mode == "descent" else self.learning_rate)

    @cached_property
    def nbytes(self) -> int:
        """Memory of the parameters."""
        return sum(tensor.nbytes for tensor in self.parameters.values())

    @cached_property
    def largest(self) -> int:
        """Elements of the largest parameter."""
        return max(tensor.numel() for tensor in self.parameters.values())

    # Its state.

    def state(self) -> dict[str, Any]:
        """Everything that the next gradient depends on: copies, by string keys."""
        optimizer = {} if self._optimizer is None else self._optimizer.state_dict()["state"]
        return {
            "parameters": {name: tensor.clone() for name, tensor in self.parameters.items()},
            "version": self.version,
            "waiting": self.waiting,
            "sums": {name: tensor.clone() for name, tensor in self._sums.items()},
            "counts": dict(self._counts),
            "optimizer": {str(place): _cloned(each) for place, each in optimizer.items()},
        }

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take it back, into parameters of the same names and shapes; its tensors are the model's from now on."""
        check_entries("parameters", state["parameters"], self.parameters)
        for name, tensor in state["parameters"].items():
            self.parameters[name].copy_(tensor)
        self.version, self.waiting = int(state["version"]), int(state["waiting"])
        self._sums, self._counts = dict(state["sums"]), dict(state["counts"])
        if self._optimizer is not None:
            groups = self._optimizer.state_dict()["param_groups"]
            told = {int(place): dict(each) for place, each in state["optimizer"].items()}
            self._optimizer.load_state_dict({"state": told, "param_groups": groups})


def _cloned(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in values.items()}


def _mean(total: Tensor, count: int) -> Tensor:
    return total if count == 1 else total / count


def merged(models: Sequence[Mapping[str, Tensor]], weights: Iterable[float]) -> dict[str, Tensor]:
    """The weighted average of models of the same entries, in float64 and rounded once.

    >>> merged([{"w": torch.tensor([1.0])}, {"w": torch.tensor([4.0])}], [2.0, 1.0])
    {'w': tensor([2.])}
    """
    shares = list(weights)
    total = math.fsum(shares)
    result = {}
    for name, like in models[0].items():
        sums = torch.zeros(like.shape, dtype=torch.float64)
        for model, share in zip(models, shares, strict=True):
            sums += model[name].to("cpu", torch.float64) * share
        mean = sums / total
        result[name] = (mean if like.is_floating_point() else mean.round()).to(like.device, like.dtype)
    return result
