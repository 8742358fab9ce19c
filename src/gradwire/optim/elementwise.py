"""What an optimizer looks at when it steps an element, so that it may be given a part of a model."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["fractions_of", "is_elementwise_optimizer", "scope_of", "settings_of"]

_STEPS: Final = 6
_ROUNDING: Final = 0.05  # of an update: matrices stepped together may be stacked, and in bfloat16
_SCALES: Final = (100.0, 1.0, 30.0)  # of the second gradient: a statistic of both is another than that of the first


def settings_of(optimizer: Optimizer) -> dict[str, Any]:
    """The arguments that make another one like it.

    >>> settings_of(torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9))["momentum"]
    0.9
    """
    allowed = inspect.signature(type(optimizer).__init__).parameters
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


def scope_of(optimizer: Optimizer) -> Literal["elements", "tensors", "model"]:
    """Try what a step of an element depends on: itself, its whole tensor, or all tensors of the model.

    An optimizer of ``"elements"`` steps two slices of a matrix, each by an optimizer of its own, to the bits of the
    whole matrix. One of ``"tensors"`` steps two matrices so, to the last digits.

    >>> scope_of(torch.optim.Adafactor([nn.Parameter(torch.zeros(3))], lr=0.1))
    'tensors'
    """
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(6, 5, generator=generator) for _ in range(2)]
    direction = torch.randn(6, 5, generator=generator)
    noise = torch.randn(_STEPS, 6, 5, generator=generator)
    # One gradient always points the same way. The other, most of the time larger, does not.
    steady = [direction + 0.1 * each for each in noise]
    unsteady = [each * _SCALES[step % len(_SCALES)] for step, each in enumerate(noise)]
    flat = start[0].view(-1)
    slices = [(flat[where], [each.view(-1)[where] for each in steady]) for where in (slice(0, 13), slice(13, 30))]
    matrices = [(start[0], steady), (start[1], unsteady)]
    with torch.random.fork_rng(devices=[]), _eager():
        try:
            whole, (one, other) = _trained(optimizer, matrices[:1]), (_trained(optimizer, [each]) for each in slices)
            equal = torch.equal(whole.tensors[0].view(-1), torch.cat([one.tensors[0], other.tensors[0]]))
            if equal and _same_settings(whole, one) and _same_settings(whole, other):
                return "elements"
        except Exception:  # whatever it needs that a slice has not
            pass
        try:
            together = _trained(optimizer, matrices)
            apart = [_trained(optimizer, [each]) for each in matrices]
            same = _alike(together.tensors, [each.tensors[0] for each in apart], start)
            same = same and all(_same_settings(together, each) for each in apart)
            if not same:  # random numbers?
                same = not _alike(together.tensors, _trained(optimizer, matrices).tensors, start)
        except Exception:  # whatever it needs that a trial has not: then tensors stay whole
            same = True
    return "tensors" if same else "model"


class _Trained(NamedTuple):
    """What a trial ends with."""

    tensors: list[Tensor]
    settings: dict[str, float]  # of the group: among them what an optimizer has measured


def _trained(like: Optimizer, tensors: Sequence[tuple[Tensor, Sequence[Tensor]]]) -> _Trained:
    """Step tensors with their gradients, by one new optimizer."""
    parameters = [nn.Parameter(start.clone()) for start, _ in tensors]
    trial = type(like)(parameters, **settings_of(like))
    if callable(train := getattr(trial, "train", None)):
        train()
    for step in range(_STEPS):
        for parameter, (_, gradients) in zip(parameters, tensors, strict=True):
            parameter.grad = gradients[step].clone()
        trial.step()
    return _Trained([parameter.detach() for parameter in parameters], fractions_of(trial.param_groups[0]))


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


def _eager() -> AbstractContextManager[Any]:
    """Optimizers that compile themselves would do so for every shape of a trial, for seconds each."""
    return torch.compiler.set_stance("force_eager") if hasattr(torch.compiler, "set_stance") else nullcontext()
