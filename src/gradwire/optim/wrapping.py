"""What optimizers around another one share: which ones they take, and its settings as they are saved."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from gradwire.errors import ConfigError

__all__ = [
    "check_parameters",
    "check_wrapped",
    "has_other_groups",
    "load_groups",
    "load_optimizer",
    "loadable_groups",
    "packed",
    "parameters_of",
    "require_number",
    "require_whole",
    "saved_optimizer",
    "unpacked",
]

_INTEGER: Final = re.compile(r"int:(-?[0-9]{1,18})")
_SET: Final = "set:"
_OWN: Final = object()  # a setting that an optimizer is made with, and that is not saved


def check_wrapped(name: str, optimizer: object) -> None:
    """Raise unless it is an optimizer that steps once a gradient; ``name`` is the argument's."""
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"`{name}` must be a gradient-based optimizer, a torch.optim.Optimizer; got {type(optimizer).__name__}."
        )
    if isinstance(optimizer, LBFGS):
        raise ConfigError(f"`{name}` must step once a gradient; got {type(optimizer).__name__}.")


def has_other_groups(optimizer: Optimizer) -> bool:
    """Whether an optimizer keeps optimizers inside that have parameter groups of their own.

    >>> import torch
    >>> outer, inner = (torch.optim.SGD([torch.zeros(1)], lr=0.5) for _ in range(2))
    >>> outer.inner = inner
    >>> has_other_groups(inner), has_other_groups(outer)
    (False, True)
    """
    held = list(vars(optimizer).values())
    inside = [*held, *(each for value in held if isinstance(value, list | tuple) for each in value)]
    known = {id(group) for group in optimizer.param_groups}
    return any(id(group) not in known for each in inside if isinstance(each, Optimizer) for group in each.param_groups)


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
    """Give parameter groups the settings that were saved; if some cannot be taken nothing changes."""
    for group, settings in zip(mine, loadable_groups(mine, saved), strict=True):
        group.update(settings)


def loadable_groups(mine: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the settings that parameter groups get from those that were saved.

    >>> loadable_groups([{"params": [], "betas": (0.9, 0.99)}], [{"params": [0], "betas": [0.8, 0.9]}])
    [{'betas': (0.8, 0.9)}]
    """
    if len(saved) != len(mine):
        raise ConfigError(f"the state has {len(saved)} parameter groups; this optimizer has {len(mine)}.")
    return [
        {name: _setting(name, value, group.get(name)) for name, value in each.items() if name != "params"}
        for group, each in zip(mine, saved, strict=True)
    ]


def _setting(name: str, value: Any, before: Any) -> Any:
    if not isinstance(before, tuple):
        return unpacked(value)
    if not isinstance(value, list | tuple):  # JSON has no tuples
        raise ConfigError(f"the state has {name!r} of a parameter group as {value!r:.80}; it must be a list.")
    return tuple(value)


def saved_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's own state, with names instead of numbers: what :mod:`gradwire.tree` can write.

    >>> import torch
    >>> saved_optimizer(torch.optim.SGD([torch.zeros(1)], lr=0.5))["param_groups"][0]["lr"]
    0.5
    """
    state, kind = optimizer.state_dict(), type(optimizer).__name__
    return {
        "state": {
            str(place): packed(unpacked(each), f"{kind}.state[parameter {place}]")  # with tensors of its own
            for place, each in state["state"].items()
        },
        "param_groups": state["param_groups"],
    }


def load_optimizer(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Undo :func:`saved_optimizer`."""
    load_groups(optimizer.param_groups, saved["param_groups"])
    state = {int(place): unpacked(each) for place, each in saved["state"].items()}
    # The groups as they are now, for the numbers of their parameters.
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def packed(value: Any, where: str, made_with: Any = None) -> Any:
    """What :mod:`gradwire.tree` can write of an optimizer's state: whole numbers as keys, and sets, are spelled out.

    ``where`` is its place, for the error. ``made_with`` is the value when the optimizer was new: a function or another
    object that is still the same is left out, for the optimizer that loads the state was made with its own.

    >>> packed({0: {"seen": {3, 2}}}, "state")
    {'int:0': {'seen': {'set:': [2, 3]}}}
    >>> packed({"when": print, "k": 1}, "group", made_with={"when": print})
    {'k': 1}
    >>> packed({"when": print}, "group")
    Traceback (most recent call last):
    gradwire.errors.ConfigError: group['when'] is a builtin_function_or_method, which cannot be saved...
    """
    try:
        if isinstance(value, Mapping):
            before = made_with if isinstance(made_with, Mapping) else {}
            found = {
                _written(key, where): packed(each, f"{where}[{key!r}]", before.get(key)) for key, each in value.items()
            }
            return {key: each for key, each in found.items() if each is not _OWN}
        if isinstance(value, list | tuple):
            known = made_with if isinstance(made_with, list | tuple) and len(made_with) == len(value) else ()
            members = [
                packed(each, f"{where}[{place}]", beside if isinstance(each, Mapping) else None)
                for place, (each, beside) in enumerate(zip_longest(value, known))
            ]
            return tuple(members) if isinstance(value, tuple) else members
        if isinstance(value, set | frozenset):
            return {_SET: sorted((packed(each, where) for each in value), key=repr)}
        plain = value is None or isinstance(value, Tensor | bool | int | float)
        if not plain and (not isinstance(value, str) or value.startswith("tensor:")):
            raise ConfigError(
                f"{where} is a {type(value).__name__}, which cannot be saved: a state can hold tensors, numbers, "
                "strings, and dicts, lists and sets of them."
            )
    except ConfigError:
        if made_with is not None and repr(made_with) == repr(value):
            return _OWN
        raise
    return value


def _written(key: object, where: str) -> str:
    if isinstance(key, int) and not isinstance(key, bool):
        return f"int:{key}"
    if isinstance(key, str) and key != _SET and not _INTEGER.fullmatch(key):
        return key
    raise ConfigError(f"{where} has the key {key!r}, which cannot be saved: keys are strings and whole numbers.")


def unpacked(value: Any, device: torch.device | None = None) -> Any:
    """Undo :func:`packed`, with tensors of its own; those that are no single numbers go to the device.

    >>> unpacked(packed({0: {"seen": {3, 2}}}, "state"))
    {0: {'seen': {2, 3}}}
    """
    if isinstance(value, Tensor):
        copy = value.detach().clone()
        return copy.to(device) if device is not None and copy.dim() else copy
    if isinstance(value, list | tuple):
        members = [unpacked(each, device) for each in value]
        return tuple(members) if isinstance(value, tuple) else members
    if not isinstance(value, Mapping):
        return value
    found = value.get(_SET)
    if len(value) == 1 and isinstance(found, list) and all(isinstance(each, str | int | float) for each in found):
        return set(found)
    return {_read(key): unpacked(each, device) for key, each in value.items()}


def _read(key: Any) -> Any:
    found = _INTEGER.fullmatch(key) if isinstance(key, str) else None
    return int(found[1]) if found else key


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
