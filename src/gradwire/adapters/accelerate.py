"""Hugging Face Accelerate: one call, and gradients travel in a codec."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any, Final

from gradwire.adapters.ddp import Compression, compression_of
from gradwire.adapters.ddp import compress as compress_ddp
from gradwire.adapters.resume import load_residuals
from gradwire.checkpoint import save_checkpoint
from gradwire.errors import ConfigError
from gradwire.extras import require

_accelerate: Any = require("accelerate", purpose="gradwire.accelerate")

__all__ = ["CompressionHandler", "compress"]

_FOLDER: Final = "gradwire"


def compress(accelerator: Any, codec: Any = "auto", **options: Any) -> CompressionHandler:
    """Let the models that an ``Accelerator`` prepares exchange gradients in a codec: one line, before ``prepare``.

    ``codec`` and ``options`` are those of :func:`gradwire.compress`; an ``Accelerator``'s scaler is given to it, and
    its ``DistributedDataParallelKwargs`` stay. Residuals are saved by ``save_state``, a file a rank, and ``load_state``
    takes them back.

    >>> compress(None)
    Traceback (most recent call last):
    gradwire.errors.ConfigError: `accelerator` must be an accelerate.Accelerator; got NoneType.
    """
    if not isinstance(accelerator, _accelerate.Accelerator):
        raise ConfigError(f"`accelerator` must be an accelerate.Accelerator; got {type(accelerator).__name__}.")
    if isinstance(accelerator.ddp_handler, CompressionHandler):
        raise ConfigError("`accelerator` compresses already.")
    if getattr(accelerator, "_models", None):
        raise ConfigError("`accelerator` has prepared a model already: call compress before prepare.")
    handler = CompressionHandler(accelerator, accelerator.ddp_handler, codec, options)
    accelerator.ddp_handler = handler
    accelerator.register_save_state_pre_hook(handler.save)
    accelerator.register_load_state_pre_hook(handler.load)
    return handler


class CompressionHandler:
    """What :func:`compress` gives an accelerator, as its handler of DDP.

    >>> CompressionHandler(None, None, "int4", {}).to_kwargs()
    {}
    """

    def __init__(self, accelerator: Any, ddp: Any, codec: Any, options: dict[str, Any]) -> None:
        self._accelerator, self._ddp, self._codec, self._options = accelerator, ddp, codec, options
        self._models: list[weakref.ref[Any]] = []

    @property
    def compressions(self) -> list[Compression]:
        """Those of the models that are there, in the order they were prepared in."""
        models = [model for known in self._models if (model := known()) is not None]
        return [found for model in models if (found := compression_of(model)) is not None]

    def to_kwargs(self) -> dict[str, Any]:
        """What DDP itself is to take; asked by Accelerate."""
        kwargs: dict[str, Any] = self._ddp.to_kwargs() if self._ddp is not None else {}
        return kwargs

    def register_comm_hook(self, model: Any) -> None:
        """Called by Accelerate with every model that it has wrapped."""
        scaler = getattr(self._accelerator, "scaler", None)
        compress_ddp(model, self._codec, scaler=scaler, **self._options)
        self._models.append(weakref.ref(model))

    def save(self, models: Any, weights: Any, folder: str) -> None:
        """Called by ``save_state``."""
        for number, each in enumerate(self.compressions):
            save_checkpoint(self._folder(folder, number), each, keep=1)

    def load(self, models: Any, folder: str) -> None:
        """Called by ``load_state``; warns of what was saved without gradwire, which has no residuals."""
        for number, each in enumerate(self.compressions):
            load_residuals(self._folder(folder, number), each)

    def _folder(self, folder: str, number: int) -> Path:
        return Path(folder) / _FOLDER / f"model-{number}"
