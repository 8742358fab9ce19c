"""Whether an optimizer treats every element by itself, so that it may be given slices of parameters."""

from __future__ import annotations

import inspect
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

__all__ = ["is_elementwise_optimizer", "settings_of"]

_STEPS: Final = 3


def settings_of(optimizer: Optimizer) -> dict[str, Any]:
    """The arguments that make another one like it.

    >>> settings_of(torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9))["momentum"]
    0.9
    """
    allowed = inspect.signature(type(optimizer).__init__).parameters
    return {name: value for name, value in optimizer.defaults.items() if name in allowed}


def is_elementwise_optimizer(optimizer: Optimizer) -> bool:
    """Try it: a matrix stepped as a whole, and the same one stepped in two pieces, must end with the same bits.

    >>> weight = nn.Parameter(torch.zeros(3))
    >>> is_elementwise_optimizer(torch.optim.AdamW([weight], lr=0.1))
    True
    >>> is_elementwise_optimizer(torch.optim.Adafactor([weight], lr=0.1))
    False
    """
    kind, settings = type(optimizer), settings_of(optimizer)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(6, 5, generator=generator)
    gradients = [torch.randn(6, 5, generator=generator) for _ in range(_STEPS)]
    whole = [nn.Parameter(start.clone())]
    pieces = [nn.Parameter(start.view(-1)[:13].clone()), nn.Parameter(start.view(-1)[13:].clone())]
    try:
        for parameters in (whole, pieces):
            trial = kind(parameters, **settings)
            for gradient in gradients:
                at = 0
                for parameter in parameters:
                    piece = gradient.view(-1)[at : at + parameter.numel()]
                    parameter.grad = piece.view(parameter.shape).clone()
                    at += parameter.numel()
                trial.step()
    except Exception:  # whatever it needs that a trial has not: then its tensors stay whole, which is always right
        return False
    return torch.equal(whole[0].detach().view(-1), torch.cat([piece.detach() for piece in pieces]))
