"""Which DDP models can be compressed, and which of their parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.errors import ConfigError
from gradwire.torch_internals import delays_parameters, ignored_parameters, uses_python_reducer

__all__ = ["parameters_to_reduce"]


def parameters_to_reduce(model: DistributedDataParallel, codec: str) -> dict[str, Tensor]:
    """Return the parameters whose gradients DDP hands over, by name, as it hands these over.

    Raises :class:`~gradwire.errors.ConfigError` if any of them could not be reduced rightly in the codec.
    """
    ignored = ignored_parameters(model)
    found = {n: p for n, p in model.module.named_parameters() if p.requires_grad and n not in ignored}
    _check_reduction(model)
    _check_parameters(model, found, codec)
    return {name: _real(parameter) for name, parameter in found.items()}


def _check_reduction(model: DistributedDataParallel) -> None:
    """Refuse models whose gradients do not go through the hook of DDP's own reducer."""
    if uses_python_reducer(model):
        raise ConfigError(
            "`model` was wrapped while `torch._dynamo.config.optimize_ddp` was 'python_reducer', which has no buckets "
            "to compress. Set `torch._dynamo.config.optimize_ddp = True` before you wrap the module in "
            "DistributedDataParallel."
        )
    if getattr(model, "mixed_precision", None) is not None:
        raise ConfigError(
            "`model` has DistributedDataParallel(mixed_precision=...), which reduces gradients by a hook of its own. "
            "Wrap the module without it, and use `torch.autocast` or a module in bfloat16."
        )
    if getattr(model, "skip_all_reduce_unused_params", False):
        raise ConfigError(
            "`model` has DistributedDataParallel(skip_all_reduce_unused_params=True), which hands over no bucket of "
            "unused parameters: the end of a step could not be told. Wrap the module without it; "
            "`find_unused_parameters=True` alone works."
        )


def _check_parameters(model: DistributedDataParallel, parameters: Mapping[str, nn.Parameter], codec: str) -> None:
    """Refuse parameters whose gradients would not arrive as they should, by name."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    for module in model.module.modules():
        # As DDP finds out which gradients are sparse.
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and id(module.weight) in names:
            raise ConfigError(
                f"`model` has a parameter with sparse gradients, {names[id(module.weight)]!r}, and these cannot be "
                f"compressed. Make the nn.{type(module).__name__} with `sparse=False`, or have DDP leave the "
                "parameter out, by DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names) "
                "before you wrap the module, and reduce its gradient yourself."
            )
    # DDP's own all-reduce keeps 64 bits, and is not to be had with delayed parameters.
    delayed = delays_parameters(model)
    for name, parameter in parameters.items():
        dense = codec == "dense" and parameter.device.type == "cpu"
        if parameter.dtype in (torch.float64, torch.complex128) and (delayed or not dense):
            without = "wrap it without `delay_all_reduce_named_params`"
            other = without if dense else "take `codec` 'dense' (on CPUs)"
            other += f" and {without}" if delayed and not dense else ""
            raise ConfigError(
                f"`model` has parameters of double precision: {name!r} is {parameter.dtype}, and its gradient would "
                f"travel in 32 bits. Convert the module with `model.float()` before you wrap it, or {other}."
            )


def _real(tensor: Tensor) -> Tensor:
    """Return a tensor of complex numbers as one of twice as many real ones, as DDP hands them over; any other as is."""
    return torch.view_as_real(tensor.detach()).view(*tensor.shape[:-1], -1) if tensor.is_complex() else tensor
