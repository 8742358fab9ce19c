"""Parameters as people have them (a tensor, a list of tensors, a dict of them) and as the coordinator keeps them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from gradwire.errors import ConfigError, NonFiniteError
from gradwire.wire import FLOAT_DTYPES

__all__ = ["Parameters", "Structure", "entries_of", "restored"]

Parameters: TypeAlias = Tensor | Sequence[Tensor] | Mapping[str, Tensor]
"""A tensor, a list of tensors, or a dict of them by name, such as a ``state_dict``."""

Structure: TypeAlias = Literal["tensor", "list", "dict"]


def entries_of(what: str, given: Parameters) -> tuple[dict[str, Tensor], Structure]:
    """Tensors by their names, in the order given; those of a list are numbered, a single one has no name.

    >>> entries, structure = entries_of("parameters", [torch.zeros(2), torch.ones(1)])
    >>> list(entries), structure
    (['0', '1'], 'list')
    """
    entries: dict[str, Tensor]
    structure: Structure
    if isinstance(given, Tensor):
        entries, structure = {"": given}, "tensor"
    elif isinstance(given, Mapping):
        entries, structure = dict(given), "dict"
    elif isinstance(given, Sequence) and not isinstance(given, str | bytes):
        entries, structure = {str(number): each for number, each in enumerate(given)}, "list"
    else:
        raise ConfigError(
            f"`{what}` must be a tensor, a list of tensors or a dict of tensors; got {type(given).__name__}."
        )
    if not entries:
        raise ConfigError(f"`{what}` must hold at least one tensor; got none.")
    for name, tensor in entries.items():
        if not isinstance(name, str):
            raise ConfigError(f"`{what}` must have names that are strings; got {name!r}.")
        if not isinstance(tensor, Tensor):
            raise ConfigError(f"{label(what, name)} must be a tensor; got {type(tensor).__name__}.")
        if tensor.is_sparse or tensor.is_complex():
            raise ConfigError(f"{label(what, name)} must be a dense tensor of real numbers; got {tensor.dtype}.")
    return entries, structure


def restored(entries: Mapping[str, Tensor], structure: Structure) -> Parameters:
    """Undo :func:`entries_of`.

    >>> restored(*entries_of("parameters", torch.ones(2)))
    tensor([1., 1.])
    """
    if structure == "tensor":
        return entries[""]
    return dict(entries) if structure == "dict" else list(entries.values())


def label(what: str, name: str) -> str:
    """An entry, for people.

    >>> label("gradients", "layer.weight")
    "`gradients['layer.weight']`"
    """
    return f"`{what}[{name!r}]`" if name else f"`{what}`"


def known_entry(what: str, name: str, like: Mapping[str, Tensor]) -> Tensor:
    """The parameter of a name, or an error."""
    wanted = like.get(name)
    if wanted is None:
        known = ", ".join(map(repr, list(like)[:5])) + (", ..." if len(like) > 5 else "")
        raise ConfigError(f"{label(what, name)} is not one of the parameters: {known}.")
    return wanted


def check_entries(what: str, given: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> None:
    """Raise unless every entry is one of those it should be like, of the same shape and kind of number."""
    for name, tensor in given.items():
        wanted = known_entry(what, name, like)
        if tensor.shape != wanted.shape:
            raise ConfigError(
                f"{label(what, name)} must have shape {tuple(wanted.shape)}, as the parameter; "
                f"got {tuple(tensor.shape)}."
            )
        if tensor.dtype != wanted.dtype:
            raise ConfigError(f"{label(what, name)} must be {wanted.dtype}, as the parameter; got {tensor.dtype}.")


def check_parameters(given: Mapping[str, Tensor]) -> None:
    """Raise unless all of them are finite, and of a kind that can travel."""
    check_kinds("parameters", given)
    bad = nonfinite_entry(given)
    if bad is not None:
        raise NonFiniteError(f"{label('parameters', bad)} holds NaN or Inf.")


def check_kinds(what: str, given: Mapping[str, Tensor]) -> None:
    """Raise unless all of them are of a kind that can travel."""
    for name, tensor in given.items():
        if tensor.dtype not in FLOAT_DTYPES:
            raise ConfigError(f"{label(what, name)} must be float32, float16 or bfloat16; got {tensor.dtype}.")


def nonfinite_entry(given: Mapping[str, Tensor]) -> str | None:
    """The name of the first entry with NaN or Inf."""
    for name, tensor in given.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return name
    return None
