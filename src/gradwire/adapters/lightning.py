"""Lightning: a strategy whose gradients travel in a codec, and whose checkpoints have the residuals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
import torch.distributed as dist

from gradwire.adapters.ddp import Compression, compress
from gradwire.errors import ConfigError
from gradwire.extras import require
from gradwire.tree import from_bytes, to_bytes

_strategies: Any = require("lightning.pytorch.strategies", purpose="gradwire.lightning")
_states: Any = require("lightning.pytorch.trainer.states", purpose="gradwire.lightning")
_callbacks: Any = require("lightning.pytorch.callbacks", purpose="gradwire.lightning")

__all__ = ["Monitor", "Strategy"]

_KEY: Final = "gradwire"  # in Lightning's checkpoint


class Strategy(_strategies.DDPStrategy):  # type: ignore[misc]
    """Lightning's DDP strategy with compressed gradients: ``Trainer(strategy=gradwire.lightning.Strategy("int4"))``.

    ``codec`` and ``options`` are those of :func:`gradwire.compress`; a precision plugin's scaler is given to it. All
    else is Lightning's: accumulation, precision, clipping. Residuals of all ranks are in its checkpoints, and a
    training may go on with more ranks or fewer. ``ddp`` are further arguments of ``DDPStrategy``.

    >>> Strategy("int4", options={"seed": 1}).codec
    'int4'
    """

    strategy_name = "gradwire"

    def __init__(self, codec: Any = "auto", *, options: Mapping[str, Any] | None = None, **ddp: Any) -> None:
        if not isinstance(options, Mapping | None):
            raise ConfigError(f"`options` must be those of gradwire.compress, by name; got {type(options).__name__}.")
        if "ddp_comm_hook" in ddp:
            raise ConfigError("`ddp_comm_hook` cannot be given: the codec is one.")
        super().__init__(**ddp)
        self.codec, self.options = codec, dict(options or {})
        self.compression: Compression | None = None
        self._kept: list[Any] | None = None  # of a checkpoint, until there is something to give it to

    def setup(self, trainer: Any) -> None:
        """Wrap the model, then compress."""
        super().setup(trainer)
        if trainer.state.fn != _states.TrainerFn.FITTING:
            return
        scaler = getattr(self.precision_plugin, "scaler", None)
        self.compression = compress(self.model, self.codec, scaler=scaler, **self.options)
        if self._kept is not None:
            self.compression.load_state_dict(self._kept)
            self._kept = None

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """With the residuals of all ranks."""
        if self.compression is not None:
            checkpoint[_KEY] = _gathered(self.compression)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *more: Any, **options: Any) -> dict[str, Any]:
        """As Lightning does, and take the residuals out of it."""
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *more, **options)
        found = checkpoint.get(_KEY)
        if found is not None:
            self._kept = [from_bytes(each.numpy().tobytes()) for each in found]
        return checkpoint

    def teardown(self) -> None:
        """End the connections."""
        if self.compression is not None:
            self.compression.close()
            self.compression = None
        super().teardown()


class Monitor(_callbacks.Callback):  # type: ignore[misc]
    """A callback that logs what gradients cost: ``gradwire/sent_mb``, and ``gradwire/saved``, the part of float32's.

    It also tells ``codec="auto"`` the loss, which then travels more exactly if the loss rises.

    >>> Monitor().state_key
    'Monitor'
    """

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After each batch."""
        compression = getattr(trainer.strategy, "compression", None)
        if compression is None:
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor):
            compression.observe_loss(float(loss.detach()))
        traffic = compression.traffic
        module.log("gradwire/sent_mb", traffic.sent_bytes / 1e6)
        if traffic.dense_sent_bytes:
            module.log("gradwire/saved", 1.0 - traffic.sent_bytes / traffic.dense_sent_bytes)


def _gathered(compression: Compression) -> list[torch.Tensor]:
    """The states of all ranks, as bytes, on the first one; every rank calls it."""
    own = torch.frombuffer(bytearray(to_bytes(compression.state_dict())), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    backend = dist.get_backend()
    device = torch.device("cuda") if backend == "nccl" else torch.device("cpu")
    sizes = [size.to(device) for size in sizes]
    dist.all_gather(sizes, torch.tensor([own.numel()], device=device))
    most = max(int(size) for size in sizes)
    padded = torch.zeros(most, dtype=torch.uint8, device=device)
    padded[: own.numel()] = own.to(device)
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded)
    return [each[: int(size)].cpu().clone() for each, size in zip(gathered, sizes, strict=True)]
