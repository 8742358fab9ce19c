"""The Trainer of Hugging Face's Transformers: one call, and its gradients travel in a codec."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from torch.nn.parallel import DistributedDataParallel

from gradwire.adapters.ddp import Compression
from gradwire.adapters.ddp import compress as compress_ddp
from gradwire.adapters.resume import load_residuals
from gradwire.checkpoint import save_checkpoint
from gradwire.errors import ConfigError
from gradwire.extras import require
from gradwire.torch_internals import uncompiled

_transformers: Any = require("transformers", purpose="gradwire.transformers")

__all__ = ["CompressionCallback", "compress"]

_FOLDER: Final = "gradwire"


def compress(trainer: Any, codec: Any = "auto", **options: Any) -> CompressionCallback:
    """Let a ``transformers.Trainer`` exchange its gradients in a codec: one line, before ``trainer.train()``.

    ``codec`` and ``options`` are those of :func:`gradwire.compress`. Residuals are in the Trainer's checkpoints, and
    are loaded from the one that ``trainer.train(resume_from_checkpoint=...)`` resumes from, wherever it is.

    >>> compress(None)
    Traceback (most recent call last):
    gradwire.errors.ConfigError: `trainer` must be a transformers.Trainer; got NoneType.
    """
    if not isinstance(trainer, _transformers.Trainer):
        raise ConfigError(f"`trainer` must be a transformers.Trainer; got {type(trainer).__name__}.")
    if any(isinstance(each, CompressionCallback) for each in trainer.callback_handler.callbacks):
        raise ConfigError("`trainer` compresses already.")
    callback = CompressionCallback(trainer, codec, options)
    callback.note_resumed()
    trainer.add_callback(callback)
    return callback


class CompressionCallback(_transformers.TrainerCallback):  # type: ignore[misc]
    """What :func:`compress` adds to a trainer; ``compression`` is there from the begin of the training on.

    >>> CompressionCallback(None, "int4", {}).compression is None
    True
    """

    def __init__(self, trainer: Any, codec: Any, options: dict[str, Any]) -> None:
        self._trainer, self._codec, self._options = trainer, codec, options
        self._resumed: Path | None = None  # the folder that this training goes on from
        self.compression: Compression | None = None

    def note_resumed(self) -> None:
        """Learn of the folder that a training goes on from: callbacks are not told, but what loads the optimizer is."""
        load = self._trainer._load_optimizer_and_scheduler

        def noting(checkpoint: Any, *arguments: Any, **more: Any) -> Any:
            self._resumed = None if checkpoint is None else Path(checkpoint)
            return load(checkpoint, *arguments, **more)

        self._trainer._load_optimizer_and_scheduler = noting

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """The model is wrapped now; go on from the checkpoint the trainer has gone on from."""
        model, resumed = uncompiled(self._trainer.model_wrapped), self._resumed
        self._resumed = None
        if not isinstance(model, DistributedDataParallel):
            if args.world_size > 1:
                raise ConfigError(f"the trainer must train with DDP to be compressed; it has {type(model).__name__}.")
            return  # alone: there is nothing to send
        scaler = getattr(self._trainer.accelerator, "scaler", None)
        self.compression = compress_ddp(model, self._codec, scaler=scaler, **self._options)
        if resumed is not None:
            load_residuals(resumed / _FOLDER, self.compression)

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """After the trainer's own files."""
        if self.compression is not None:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}" / _FOLDER
            save_checkpoint(folder, self.compression, keep=1)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        """Tell ``auto`` the loss."""
        if self.compression is not None and logs is not None and "loss" in logs:
            self.compression.observe_loss(float(logs["loss"]))
