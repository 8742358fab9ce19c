"""What an optimizer looks at when it steps an element, so that it may be given a part of a model."""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["Scope", "fractions_of", "is_elementwise_optimizer", "scope_of", "settings_of", "why_untried"]

Scope = Literal["elements", "tensors", "model"]

_STEPS: Final = 6
_ROUNDING: Final = 0.05  # of an update: matrices stepped together may be stacked, and in bfloat16
_SCALES: Final = (100.0, 1.0, 30.0)  # of the second gradient: a statistic of both is another than that of the first
_LEARNING_RATE: Final = 0.01  # where a schedule begins at 0, and nothing would move


def settings_of(optimizer: Optimizer) -> dict[str, Any]:
    """The arguments that make another one like it.

    >>> settings_of(torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9))["momentum"]
    0.9
    """
    allowed = _arguments_of(optimizer)
    return {name: value for name, value in optimizer.defaults.items() if name in allowed}


def is_elementwise_optimizer(optimizer: Optimizer) -> bool:
    """Whether it treats every element by itself.

    >>> weight = nn.Parameter(torch.zeros(3))
    >>> is_elementwise_optimizer(torch.optim.AdamW([weight], lr=0.1))
    True
    >>> is_elementwise_optimizer(torch.optim.Adafactor([weight], lr=0.1))
    False
    """
    return scope_of(optimizer) == "elements"


def scope_of(optimizer: Optimizer) -> Scope | None:
    """Try what a step of an element depends on: itself, its whole tensor, or all tensors of the model.

    An optimizer of ``"elements"`` steps two slices of a matrix, each by an optimizer of its own, to the bits of the
    whole matrix. One of ``"tensors"`` steps two matrices so, to the last digits. Groups of other settings are tried
    too, and the widest scope counts. None if one of them cannot be tried: see :func:`why_untried`.

    >>> scope_of(torch.optim.Adafactor([nn.Parameter(torch.zeros(3))], lr=0.1))
    'tensors'
    """
    scopes = {_scope_with(optimizer, settings) for settings in _settings_to_try(optimizer)}
    if "model" in scopes:
        return "model"
    if None in scopes:
        return None
    return "tensors" if "tensors" in scopes else "elements"


def why_untried(optimizer: Optimizer) -> str:
    """The error that keeps an optimizer from being tried; empty if there is none.

    >>> class Scheduled(torch.optim.SGD):
    ...     def __init__(self, params, total_steps):
    ...         super().__init__(params)
    >>> optimizer = Scheduled([nn.Parameter(torch.zeros(3))], 100)
    >>> scope_of(optimizer), why_untried(optimizer)[:9]
    (None, 'TypeError')
    """
    with _apart():
        for settings in _settings_to_try(optimizer):
            try:
                for matrices in ([_steady()], [_unsteady()], [_steady(), _unsteady()]):
                    _trained(optimizer, settings, matrices)
            except Exception as error:
                return f"{type(error).__name__}: {error}"
    return ""


def _scope_with(like: Optimizer, settings: Mapping[str, Any]) -> Scope | None:
    with _apart():
        if _steps_slices_alike(like, settings):  # a slice may lack what a matrix has: None tells nothing
            return "elements"
        alike = _steps_tensors_alike(like, settings)
    return None if alike is None else "tensors" if alike else "model"


def _steps_slices_alike(like: Optimizer, settings: Mapping[str, Any]) -> bool | None:
    """Whether two slices end as the whole matrix does, to the bit; None if they cannot be stepped."""
    start, gradients = _steady()
    parts = [
        (start.view(-1)[part], [each.view(-1)[part] for each in gradients]) for part in (slice(0, 13), slice(13, 30))
    ]
    try:  # whatever it needs that a slice has not
        whole, one, other = (_trained(like, settings, [each]) for each in ((start, gradients), *parts))
    except Exception:
        return None
    equal = torch.equal(whole.tensors[0].view(-1), torch.cat([one.tensors[0], other.tensors[0]]))
    return equal and _same_settings(whole, one) and _same_settings(whole, other)


def _steps_tensors_alike(like: Optimizer, settings: Mapping[str, Any]) -> bool | None:
    """Whether two matrices end as each would alone, but for rounding; None if they cannot be stepped."""
    matrices = [_steady(), _unsteady()]
    start = [each for each, _ in matrices]
    try:  # whatever it needs that a trial has not
        together = _trained(like, settings, matrices)
        apart = [_trained(like, settings, [each]) for each in matrices]
        same = _alike(together.tensors, [each.tensors[0] for each in apart], start)
        if same and all(_same_settings(together, each) for each in apart):
            return True
        # Random numbers? Then the same matrices end differently, too.
        return not _alike(together.tensors, _trained(like, settings, matrices).tensors, start)
    except Exception:
        return None


def _settings_to_try(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The settings of all groups, each but once: what a step depends on is the same at any learning rate."""
    arguments = _arguments_of(optimizer)
    found: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        # Steps keep in their groups what they have measured: a trial is to measure anew.
        set_here = {name for name in group if name in arguments or not optimizer.state} - {"params", "lr", "initial_lr"}
        settings = {**optimizer.defaults, **{name: value for name, value in group.items() if name in set_here}}
        rate = settings.setdefault("lr", group.get("lr", _LEARNING_RATE))
        if isinstance(rate, int | float | Tensor) and not float(rate):
            settings["lr"] = _LEARNING_RATE
        found.setdefault(repr(sorted(settings.items())), settings)
    return list(found.values())


def _arguments_of(optimizer: Optimizer) -> Collection[str]:
    """Beside the parameters."""
    return list(inspect.signature(type(optimizer).__init__).parameters)[2:]


class _Trained(NamedTuple):
    """What a trial ends with."""

    tensors: list[Tensor]
    settings: dict[str, float]  # of the group: among them what an optimizer has measured


_Matrix = tuple[Tensor, Sequence[Tensor]]  # and its gradients


def _steady() -> _Matrix:
    """A matrix whose gradient always points the same way."""
    start, _, direction, noise = _drawn()
    return start, [direction + 0.1 * each for each in noise]


def _unsteady() -> _Matrix:
    """One whose gradient does not, and is larger most of the time."""
    _, start, _, noise = _drawn()
    return start, [each * _SCALES[step % len(_SCALES)] for step, each in enumerate(noise)]


def _drawn() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(*shape, generator=generator) for shape in ((6, 5), (6, 5), (6, 5), (_STEPS, 6, 5)))


def _trained(like: Optimizer, settings: Mapping[str, Any], tensors: Sequence[_Matrix]) -> _Trained:
    """Step tensors with their gradients, by one new optimizer."""
    parameters, allowed = [nn.Parameter(start.clone()) for start, _ in tensors], _arguments_of(like)
    own = {name: _own(value) for name, value in settings.items()}
    trial = type(like)(parameters, **{name: value for name, value in own.items() if name in allowed})
    if len(trial.param_groups) == 1:  # those that are no arguments; an object of the original's would be stepped too
        more = {name: value for name, value in own.items() if name not in allowed and _is_plain(value)}
        trial.param_groups[0].update(more)
    if callable(train := getattr(trial, "train", None)):
        train()
    for step in range(_STEPS):
        for parameter, (_, gradients) in zip(parameters, tensors, strict=True):
            parameter.grad = gradients[step].clone()
        trial.step()
    return _Trained([parameter.detach() for parameter in parameters], fractions_of(trial.param_groups[0]))


def _own(value: Any) -> Any:
    """A setting that a trial may change in place."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return (
        value is None or isinstance(value, bool | int | float | str) or (isinstance(value, Tensor) and not value.dim())
    )


def fractions_of(group: Mapping[str, Any]) -> dict[str, float]:
    """The settings of a group that are no whole numbers: counters may differ where tensors are divided.

    >>> fractions_of({"params": [], "lr": torch.tensor(0.5), "k": 3, "betas": (0.9, 0.99)})
    {'lr': 0.5}
    """
    return {
        name: float(value)
        for name, value in group.items()
        if isinstance(value, float)
        or (isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point() and not value.requires_grad)
    }


def _alike(some: Sequence[Tensor], others: Sequence[Tensor], start: Sequence[Tensor]) -> bool:
    """Whether tensors have moved from where they began by the same, but for rounding."""
    return all(
        float((one - other).norm()) <= _ROUNDING * max(float((one - begin).norm()), float((other - begin).norm()))
        for one, other, begin in zip(some, others, start, strict=True)
    )


def _same_settings(one: _Trained, other: _Trained) -> bool:
    """Whether both have measured the same, but for rounding."""
    return all(
        math.isclose(one.settings[name], other.settings[name], rel_tol=_ROUNDING)
        for name in one.settings.keys() & other.settings.keys()
    )


@contextmanager
def _apart() -> Iterator[None]:
    """Leave the program's random numbers alone."""
    with torch.random.fork_rng(devices=[]), _eager():
        yield


def _eager() -> AbstractContextManager[Any]:
    """Optimizers that compile themselves would do so for every shape of a trial, for seconds each."""
    return torch.compiler.set_stance("force_eager") if hasattr(torch.compiler, "set_stance") else nullcontext()
