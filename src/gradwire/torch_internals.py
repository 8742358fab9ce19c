"""What gradwire uses of torch that torch does not promise to keep, in this module and nowhere else.

A release of torch may rename or drop any of these. Every function says what gradwire needs the name for, and what it
does without: it takes a plainer way, or it raises a :class:`~gradwire.ConfigError` that says what is missing. Where a
docstring names no release, all from :data:`TESTED`'s first to its last have the name.
``tests/test_torch_internals.py`` tests each with the installed torch, and with a torch that lacks it;
``make test-versions`` runs these tests with the oldest torch, the newest and the pinned one.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

# Public and documented; only torch's type hints do not export them.
from torch.distributed import GradBucket, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from gradwire.errors import ConfigError

__all__ = [
    "TESTED",
    "GradBucket",
    "PrefixStore",
    "Store",
    "TCPStore",
    "backward_queue",
    "can_replace_group",
    "default_store",
    "delays_parameters",
    "divides_by_all_ranks",
    "forget_hook",
    "fsdp_communication",
    "fsdp_group",
    "fsdp_reduce_scatter",
    "gloo_backend",
    "has_hook",
    "ignored_parameters",
    "is_unscaled",
    "replace_group",
    "set_found_inf",
    "uncompiled",
    "uses_python_reducer",
]

TESTED: Final = ("2.9", "2.15")
"""The oldest and the newest torch that have all of these names."""


def _missing(name: str, purpose: str) -> ConfigError:
    return ConfigError(
        f"{purpose} needs {name}, which torch {torch.__version__} does not have; torch {TESTED[0]} to {TESTED[1]} "
        f"have it: install one of these, or a newer gradwire."
    )


# Process groups and their stores.


def default_store() -> Store:
    """Return the store of the default process group, in which ranks leave words for each other.

    Without ``_get_default_store`` this is the group's own store, which is a part of the same one.
    """
    find = getattr(dist.distributed_c10d, "_get_default_store", None)
    if find is None:
        group: Any = dist.group.WORLD
        if group is None:
            raise ValueError("torch.distributed.init_process_group was not called.")
        find = getattr(group, "get_group_store", None)
    if find is None:
        raise _missing("torch.distributed.distributed_c10d._get_default_store", "a process group")
    store: Store = find()
    return store


def gloo_backend(store: Store, rank: int, size: int, timeout_s: float) -> Any:
    """Return gloo's connections to all ranks, which are no process group of torch's list.

    Raises ConfigError where torch was built without gloo.
    """
    kind = getattr(dist, "ProcessGroupGloo", None)
    if kind is None:
        raise _missing("torch.distributed.ProcessGroupGloo", "gradwire without its native core")
    return kind(store, rank, size, timedelta(seconds=timeout_s))


# DistributedDataParallel.

_REPLACE: Final = "_update_process_group"  # of DDP's reducer


def can_replace_group(model: DistributedDataParallel) -> bool:
    """Return whether :func:`replace_group` works. Where it does not, gradients travel by a hook.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = DistributedDataParallel(torch.nn.Linear(3, 2))
    >>> can_replace_group(model)
    True
    >>> dist.destroy_process_group()
    """
    return hasattr(getattr(model, "reducer", None), _REPLACE)


def replace_group(model: DistributedDataParallel, group: dist.ProcessGroup) -> None:
    """Let DDP's reducer call ``group`` for its all-reduces."""
    getattr(model.reducer, _REPLACE)(group)


def has_hook(model: DistributedDataParallel) -> bool:
    """Return whether a model has a communication hook, as far as its list of hooks says.

    Without the list this is False, and DDP itself refuses a second hook.
    """
    return bool(getattr(model, "_comm_hooks", ()))


def forget_hook(model: DistributedDataParallel) -> None:
    """Take the last hook off the list from which copies of a model get theirs; DDP's reducer keeps it.

    Without the list there is nothing to take.
    """
    if has_hook(model):
        model._comm_hooks.pop()


def divides_by_all_ranks(model: DistributedDataParallel) -> bool:
    """Return whether means are sums divided by the number of all ranks.

    After ``model.join(divide_by_initial_world_size=False)`` they are divided by the number of ranks that still have
    inputs. ``_join_config`` says whether that ``join`` was enabled, and whether this model counts the ranks. Without it
    this is False for any such ``join``: ranks count inputs where they need not, and means stay right.
    """
    config: Any = getattr(model, "_join_config", None)
    joins = config is None or (config.enable and config.is_first_joinable)
    return not joins or bool(getattr(model, "_divide_by_initial_world_size", True))


def delays_parameters(model: DistributedDataParallel) -> bool:
    """Return whether a model was wrapped with ``delay_all_reduce_named_params``; False if torch does not say."""
    return bool(getattr(model, "_delay_all_reduce_params", ()))


def uses_python_reducer(model: DistributedDataParallel) -> bool:
    """Return whether a model reduces gradients in Python, and has no buckets; False if torch does not say."""
    return bool(getattr(model, "_use_python_reducer", False))


def ignored_parameters(model: DistributedDataParallel) -> frozenset[str]:
    """Return the names of parameters that DDP leaves alone; none if torch does not say."""
    return frozenset(getattr(model, "parameters_to_ignore", ()))


def uncompiled(model: Any) -> Any:
    """Return the module that ``torch.compile`` was given, and any other as it is.

    Without ``_orig_mod`` a compiled model is returned as it is, and :func:`~gradwire.compress` refuses it.

    >>> uncompiled(torch.compile(torch.nn.Linear(2, 2), backend="eager"))
    Linear(in_features=2, out_features=2, bias=True)
    """
    return getattr(model, "_orig_mod", model)


# Autograd.


def backward_queue() -> Callable[[Callable[[], None]], None]:
    """Return a function that has another one called when the backward under way ends.

    That function raises ``RuntimeError`` where no backward is under way. Torch has no public name for it; its own FSDP
    calls it by this one.
    """
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    queue: Callable[[Callable[[], None]], None] | None = getattr(engine, "queue_callback", None)
    if queue is None:
        raise _missing("torch.autograd.Variable._execution_engine.queue_callback", "gradwire.compress")
    return queue


# GradScaler. Any other object with ``get_scale`` is taken for one that never unscales by itself.


def is_unscaled(scaler: object, optimizer: object) -> bool:
    """Return whether ``scaler.unscale_(optimizer)`` was called in this step."""
    state = _scaler_states(scaler).get(id(optimizer), {})
    return getattr(state.get("stage"), "name", "") == "UNSCALED"


def set_found_inf(scaler: object, optimizer: object, found: torch.Tensor) -> None:
    """Tell a scaler whether the gradients of an optimizer that it knows hold NaN or Inf, instead of what it found."""
    states = _scaler_states(scaler)
    if id(optimizer) in states:
        states[id(optimizer)]["found_inf_per_device"] = {found.device: found}


def _scaler_states(scaler: object) -> dict[int, dict[str, Any]]:
    """Return what a GradScaler knows of each optimizer, by the optimizer's id."""
    found: dict[int, dict[str, Any]] | None = getattr(scaler, "_per_optimizer_states", None)
    if found is None and isinstance(scaler, torch.amp.GradScaler):
        raise _missing("torch.amp.GradScaler._per_optimizer_states", "a sharded optimizer with a scaler")
    return {} if found is None else found


# FSDP2.

_FSDP2: Final = "gradwire.fsdp2"


def fsdp_communication() -> tuple[type[Any], type[Any], type[Any]]:
    """Return ``FSDPModule``, and the base classes of all-gathers and reduce-scatters it takes."""
    where = "torch.distributed.fsdp._fully_shard._fsdp_api"
    try:
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
    except ImportError as error:
        raise _missing(f"AllGather and ReduceScatter of {where}", _FSDP2) from error
    for name in ("set_custom_all_gather", "set_custom_reduce_scatter"):
        if not hasattr(FSDPModule, name):
            raise _missing(f"FSDPModule.{name}", _FSDP2)
    return FSDPModule, AllGather, ReduceScatter


def fsdp_group(module: Any) -> dist.ProcessGroup | None:
    """Return the group whose ranks share a module's own parameters; none if it has no parameters."""
    found = _fsdp_parameters(module)
    group: dist.ProcessGroup | None = None if found is None else _fsdp_attribute(found, "_reduce_scatter_process_group")
    return group


def fsdp_reduce_scatter(module: Any) -> object:
    """Return what scatters a module's gradients."""
    return _fsdp_attribute(_fsdp_parameters(module), "_reduce_scatter_comm")


def _fsdp_parameters(module: Any) -> Any:
    """Return what torch keeps of a module's own parameters; none if it has none."""
    state = _fsdp_attribute(module, "_get_fsdp_state")()
    if hasattr(state, "_fsdp_param_groups"):  # since torch 2.12
        return state._fsdp_param_groups[0] if state._fsdp_param_groups else None
    return _fsdp_attribute(state, "_fsdp_param_group")


def _fsdp_attribute(of: Any, name: str) -> Any:
    try:
        return getattr(of, name)
    except AttributeError as error:
        raise _missing(f"{type(of).__name__}.{name}", _FSDP2) from error
