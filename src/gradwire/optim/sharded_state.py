"""The state of a sharded optimizer: what one rank keeps, and how the ranks' states become those of other ranks.

A rank's state has every parameter by its place, as torch counts them, with the pieces of it that the rank owns: where
they begin, the wrapped optimizer's tensors for them, the weights, and the float32 master copy if there is one. Joined,
the pieces of all ranks are whole parameters, from which any other division can be cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from gradwire.errors import ConfigError

__all__ = ["Piece", "check_state", "cut", "in_shape", "joined"]

Piece = dict[str, Any]  # first, last, weights, master (or None), state


def joined(states: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Whole parameters of the states of all ranks: weights, master and the wrapped optimizer's state, flat.

    That of an optimizer which had whole parameters, ``"undivided"``, is as the optimizer left it.
    """
    whole: dict[str, dict[str, Any]] = {}
    undivided = bool(states[0].get("undivided", states[0]["stage"] == 0))
    for key, shape in states[0]["shapes"].items():
        numel = prod(shape)
        pieces = [piece for state in states for piece in state["pieces"].get(key, [])]
        if states[0]["stage"] == 0:
            pieces = pieces[:1]  # all ranks have the same: the first one's counts
        pieces.sort(key=lambda piece: piece["first"])
        reached = 0
        for piece in pieces:
            if piece["first"] != reached:
                break
            reached = piece["last"]
        if reached != numel:
            raise ConfigError(
                f"the states of {len(states)} ranks have {reached} of the {numel} elements of parameter {key}: "
                "give the states of all ranks that were saved."
            )
        pieces = [piece for piece in pieces if piece["last"] > piece["first"]] or pieces[:1]
        state = _whole_state([piece["state"] for piece in pieces], [piece["last"] - piece["first"] for piece in pieces])
        whole[key] = {"shape": shape, "weights": _whole(pieces, "weights"), "state": state, "undivided": undivided}
        whole[key]["master"] = None if any(piece["master"] is None for piece in pieces) else _whole(pieces, "master")
    return whole


def _whole(pieces: Sequence[Piece], name: str) -> Tensor:
    return torch.cat([piece[name].reshape(-1) for piece in pieces])


def _whole_state(values: Sequence[Any], lengths: Sequence[int]) -> Any:
    """One value of those of pieces of such lengths: tensors of a piece's length end to end, the first of all others."""
    first = values[0]
    if len(values) == 1:
        return first
    if isinstance(first, Mapping) and all(isinstance(value, Mapping) for value in values):
        names = dict.fromkeys(name for value in values for name in value)
        having = {name: [place for place, value in enumerate(values) if name in value] for name in names}
        return {
            name: _whole_state([values[place][name] for place in places], [lengths[place] for place in places])
            for name, places in having.items()
        }
    divided = isinstance(first, Tensor) and first.dim() and first.numel() == lengths[0]
    return torch.cat([value.reshape(-1) for value in values]) if divided else first


def cut(whole: Mapping[str, Any], first: int, last: int, shape: Sequence[int]) -> Piece:
    """A piece of a whole parameter."""
    numel = whole["weights"].numel()

    def part(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: part(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [part(each) for each in value]
        if not isinstance(value, Tensor):
            return value
        as_it_is = whole["undivided"] and list(shape) == list(whole["shape"])
        if value.dim() and value.numel() == numel and not as_it_is:
            if last - first == numel and value.dim() > 1 and len(shape) > 1:
                return value.clone()
            return value.reshape(-1)[first:last].clone().view(tuple(shape))
        if value.dim() and last - first < numel:
            raise ConfigError(
                f"a parameter of shape {whole['shape']} has state of shape {tuple(value.shape)}, which cannot be "
                "divided: set partition='tensors'."
            )
        return value.clone()

    master = whole["master"]
    return {
        "first": first,
        "last": last,
        "weights": whole["weights"][first:last].clone(),
        "master": None if master is None else master[first:last].clone(),
        "state": part(whole["state"]),
    }


def in_shape(state: Any, shape: Sequence[int]) -> Any:
    """The state of a parameter with its flat tensors in the parameter's shape."""
    if isinstance(state, Mapping):
        return {name: in_shape(each, shape) for name, each in state.items()}
    flat = isinstance(state, Tensor) and state.dim() == 1 and state.numel() == prod(shape)
    return state.reshape(tuple(shape)) if flat else state


_EXPECTED = {
    "format": int, "rank": int, "ranks": int, "stage": int, "wrapped": str, "plan": str, "step": int, "steps": int,
    "skipped": int, "param_groups": list, "shapes": Mapping, "pieces": Mapping, "residuals": Mapping,
    "owned": Mapping, "codec_states": list,
}  # fmt: skip


def check_state(state: Any) -> None:
    """Raise unless it is the state of a sharded optimizer."""
    if not isinstance(state, Mapping):
        raise ConfigError(f"a state must come from state_dict() or serialize(); got {type(state).__name__}.")
    for name, kind in _EXPECTED.items():
        if not isinstance(state.get(name), kind):
            raise ConfigError(
                f"a state must come from state_dict() or serialize(), with {name!r} of type {kind.__name__}; "
                f"got {type(state.get(name)).__name__}."
            )
    if not isinstance(state.get("more", {}), Mapping):
        raise ConfigError(f"a state must have 'more' of type Mapping; got {type(state['more']).__name__}.")
    if state["format"] != 1:
        raise ConfigError(f"a state must be of format 1; got {state['format']}: it was saved by another version.")
    for name in ("rank", "ranks", "stage", "step", "steps", "skipped"):
        if not _is_count(state[name]):
            raise ConfigError(f"a state must have a whole number of 0 or more as {name!r}; got {state[name]!r:.80}.")
    sizes = {key: _numel(shape) for key, shape in state["shapes"].items()}
    for name, is_valid in {
        "param_groups": all(isinstance(each, Mapping) for each in state["param_groups"]),
        "shapes": None not in sizes.values(),
        "pieces": all(_are_pieces(each, sizes.get(key)) for key, each in state["pieces"].items()),
        "residuals": all(_is_flat(each, sizes.get(key)) for key, each in state["residuals"].items()),
        "owned": all(_is_owned(each, sizes.get(key)) for key, each in state["owned"].items()),
        "codec_states": all(
            isinstance(each, list) and all(isinstance(kept, Mapping) for kept in each) for each in state["codec_states"]
        ),
    }.items():
        if not is_valid:
            raise ConfigError(f"a state must come from state_dict() or serialize(); its {name!r} does not.")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _numel(shape: Any) -> int | None:
    """Elements of a tensor of that shape; None if it is no shape."""
    if not isinstance(shape, list) or not all(map(_is_count, shape)):
        return None
    return prod(shape)


def _is_flat(value: Any, numel: int | None) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and list(value.shape) == [numel]


def _are_pieces(pieces: Any, numel: int | None) -> bool:
    return isinstance(pieces, list) and numel is not None and all(_is_piece(each, numel) for each in pieces)


def _is_piece(piece: Any, numel: int) -> bool:
    if not isinstance(piece, Mapping) or not {"first", "last", "weights", "master", "state"} <= set(piece):
        return False
    first, last, master = piece["first"], piece["last"], piece["master"]
    if not (_is_count(first) and _is_count(last) and first <= last <= numel and isinstance(piece["state"], Mapping)):
        return False
    return _is_flat(piece["weights"], last - first) and (master is None or _is_flat(master, last - first))


def _is_owned(piece: Any, numel: int | None) -> bool:
    if not isinstance(piece, Mapping) or numel is None or not _is_count(piece.get("first")):
        return False
    residual = piece.get("residual")
    return (
        isinstance(residual, Tensor)
        and _is_flat(residual, residual.numel())
        and (piece["first"] + residual.numel() <= numel)
    )
