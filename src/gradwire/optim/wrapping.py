"""What optimizers around another one share: which ones they take, and its settings as they are saved."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from gradwire.errors import ConfigError

__all__ = [
    "check_parameters",
    "check_wrapped",
    "load_groups",
    "load_optimizer",
    "parameters_of",
    "require_number",
    "require_whole",
    "saved_optimizer",
]


def check_wrapped(name: str, optimizer: object) -> None:
    """Raise unless it is an optimizer that steps once a gradient; ``name`` is the argument's."""
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"`{name}` must be a gradient-based optimizer, a torch.optim.Optimizer; got {type(optimizer).__name__}."
        )
    if isinstance(optimizer, LBFGS):
        raise ConfigError(f"`{name}` must step once a gradient; got {type(optimizer).__name__}.")


def parameters_of(groups: Iterable[Mapping[str, Any]]) -> list[nn.Parameter]:
    """The parameters of groups that are not frozen: frozen ones never change, and never travel."""
    return [p for group in groups for p in group["params"] if p.requires_grad]


def check_parameters(name: str, parameters: Sequence[nn.Parameter]) -> None:
    """Raise unless there are parameters, and all are plain tensors of floats."""
    if not parameters:
        raise ConfigError(f"`{name}` must have parameters; it has none.")
    for parameter in parameters:
        if not parameter.is_floating_point() or parameter.is_sparse or not parameter.is_contiguous():
            raise ConfigError(
                f"parameters must be contiguous tensors of floats; got {parameter.dtype} of shape "
                f"{tuple(parameter.shape)}."
            )


def load_groups(mine: Sequence[dict[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Give parameter groups the settings that were saved."""
    if len(saved) != len(mine):
        raise ConfigError(f"the state has {len(saved)} parameter groups; this optimizer has {len(mine)}.")
    for group, each in zip(mine, saved, strict=True):
        for name, value in each.items():
            if name != "params":  # JSON has no tuples
                group[name] = tuple(value) if isinstance(group.get(name), tuple) else value


def saved_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's own state, with names instead of numbers: what :mod:`gradwire.tree` can write.

    >>> import torch
    >>> saved_optimizer(torch.optim.SGD([torch.zeros(1)], lr=0.5))["param_groups"][0]["lr"]
    0.5
    """
    state = optimizer.state_dict()
    return {
        "state": {str(place): _copied(each) for place, each in state["state"].items()},
        "param_groups": state["param_groups"],
    }


def load_optimizer(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Undo :func:`saved_optimizer`."""
    load_groups(optimizer.param_groups, saved["param_groups"])
    state = {int(place): _copied(each) for place, each in saved["state"].items()}
    # The groups as they are now, for the numbers of their parameters.
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}


def require_whole(name: str, value: object, least: int, most: float = math.inf) -> None:
    """Raise unless an argument is a whole number of a range.

    >>> require_whole("every", 0, 1)
    Traceback (most recent call last):
    gradwire.errors.ConfigError: `every` must be a whole number of 1 or more; got 0.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        allowed = f"of {least} or more" if most == math.inf else f"from {least} to {most}"
        raise ConfigError(f"`{name}` must be a whole number {allowed}; got {value!r}.")


def require_number(name: str, value: object, allowed: str, *, low: float, high: float, above: bool = False) -> None:
    """Raise unless an argument is in [low, high), or with ``above`` in (low, high); ``allowed`` says so to people.

    >>> require_number("outer_momentum", 1.5, "in [0, 1)", low=0, high=1)
    Traceback (most recent call last):
    gradwire.errors.ConfigError: `outer_momentum` must be in [0, 1); got 1.5.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low <= value < high or (above and value == low):  # type: ignore[operator]
        raise ConfigError(f"`{name}` must be {allowed}; got {value!r}.")
