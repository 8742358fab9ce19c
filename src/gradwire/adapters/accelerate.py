"""Hugging Face Accelerate: a kwargs handler whose gradients travel in a codec."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gradwire.adapters.ddp import Compression, compress
from gradwire.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from gradwire.errors import ConfigError
from gradwire.extras import require

_accelerate: Any = require("accelerate", purpose="gradwire.accelerate")

__all__ = ["CompressionKwargs"]

_FOLDER: Final = "gradwire"


@dataclass
class CompressionKwargs(_accelerate.DistributedDataParallelKwargs):  # type: ignore[misc]
    """``Accelerator(kwargs_handlers=[gradwire.accelerate.CompressionKwargs(codec="int4")])``, and that is all.

    ``codec`` and ``options`` are those of :func:`gradwire.compress`; other arguments are those of Accelerate's
    ``DistributedDataParallelKwargs``. Accelerate asks it to register a hook when the model is prepared. For residuals
    in ``save_state`` and ``load_state``, call :meth:`keep_with`.

    >>> CompressionKwargs(codec="int4").codec
    'int4'
    """

    codec: Any = "auto"
    options: dict[str, Any] = field(default_factory=dict)
    compression: Compression | None = field(default=None, init=False)

    def to_kwargs(self) -> dict[str, Any]:
        """What DDP itself takes."""
        own = ("codec", "options", "compression")
        return {name: value for name, value in super().to_kwargs().items() if name not in own}

    def register_comm_hook(self, model: Any) -> None:
        """Called by Accelerate with the wrapped model."""
        self.compression = compress(model, self.codec, **self.options)

    def keep_with(self, accelerator: Any) -> None:
        """Save residuals in a folder of ``save_state``'s, a file a rank, and take them back in ``load_state``."""

        def save(models: Any, weights: Any, folder: str) -> None:
            save_checkpoint(Path(folder) / _FOLDER, self._there(), keep=1)

        def load(models: Any, folder: str) -> None:
            last = latest_checkpoint(Path(folder) / _FOLDER)
            if last is not None:
                load_checkpoint(last, self._there())

        accelerator.register_save_state_pre_hook(save)
        accelerator.register_load_state_pre_hook(load)

    def _there(self) -> Compression:
        if self.compression is None:
            raise ConfigError(
                "no model has been prepared with these CompressionKwargs: call accelerator.prepare first."
            )
        return self.compression
