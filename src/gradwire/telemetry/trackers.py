"""TensorBoard, MLflow and Weights & Biases: the numbers of rank 0, as each of them takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gradwire.errors import ConfigError
from gradwire.extras import require
from gradwire.telemetry.base import Record
from gradwire.telemetry.scalars import scalars

__all__ = ["MLflow", "TensorBoard", "WandB"]


class _Tracker:
    """Numbers by step, and notes as text; only those of rank 0."""

    every_rank = False

    def __init__(self) -> None:
        self._step = 0

    def open(self, start: Record) -> None:
        """Connect."""
        raise NotImplementedError

    def write(self, record: Record) -> None:
        """Hand the numbers of a record over."""
        self._step = int(record.get("step") or self._step)
        numbers = scalars(record)
        if numbers:
            self._numbers(numbers, self._step)
        elif record["event"] in ("note", "drop"):
            self._note(str(record.get("what", record["event"])), self._step)

    def _numbers(self, numbers: dict[str, float], step: int) -> None:
        raise NotImplementedError

    def _note(self, text: str, step: int) -> None:
        """Not all of them take text by step."""

    def flush(self) -> None:
        """They do so by themselves."""

    def close(self) -> None:
        """What the user opened, the user closes."""


class TensorBoard(_Tracker):
    """Event files in a folder: ``tensorboard --logdir FOLDER``.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sink = TensorBoard(folder)
    ...     sink.open({"event": "start", "rank": 0})
    ...     sink.write({"event": "step", "step": 1, "loss": 0.5})
    ...     sink.close()
    ...     len(list(Path(folder).glob("events.*")))
    1
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        if not isinstance(folder, str | Path) or not str(folder):
            raise ConfigError(f"`folder` must be a path; got {folder!r}.")
        self.folder = str(folder)
        self._writer: Any = None

    def open(self, start: Record) -> None:
        """Open the event file."""
        require("tensorboard", purpose="the TensorBoard sink")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(self.folder)

    def _numbers(self, numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def _note(self, text: str, step: int) -> None:
        self._writer.add_text("notes", text.replace("<", "&lt;"), step)  # its page reads markup

    def flush(self) -> None:
        """To the file."""
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class MLflow(_Tracker):
    """Metrics of the MLflow run that is active when the training starts, or of one it starts itself.

    ``every`` thins them out: a tracking server takes a while for each step.

    >>> MLflow(every=10).every
    10
    """

    def __init__(self, every: int = 1) -> None:
        super().__init__()
        self.every = every
        self._client: Any = None
        self._run: str = ""
        self._own = False

    def open(self, start: Record) -> None:
        """Find the run, or start one, and note what the training is."""
        mlflow = require("mlflow", purpose="the MLflow sink")
        active = mlflow.active_run()
        self._own = active is None
        self._run = (active or mlflow.start_run()).info.run_id
        self._client = mlflow.MlflowClient()
        for name in ("codec", "ranks", "parameters"):
            if name in start:
                self._client.log_param(self._run, f"gradwire.{name}", start[name])

    def _numbers(self, numbers: dict[str, float], step: int) -> None:
        if step % self.every == 0:
            for name, value in numbers.items():
                self._client.log_metric(self._run, _plain(name), value, step=step)

    def _note(self, text: str, step: int) -> None:
        self._client.set_tag(self._run, f"gradwire.note.{step}", text[:500])

    def close(self) -> None:
        """End the run if it is this sink's own."""
        if self._own:
            require("mlflow", purpose="the MLflow sink").end_run()


class WandB(_Tracker):
    """Metrics of the Weights & Biases run that is active when the training starts, or of one it starts itself.

    The training's own ``wandb.log`` goes on beside it: these carry their step as ``gradwire/step``.

    >>> WandB().every_rank
    False
    """

    def __init__(self) -> None:
        super().__init__()
        self._run: Any = None
        self._own = False

    def open(self, start: Record) -> None:
        """Find the run, or start one."""
        wandb = require("wandb", purpose="the W&B sink")
        self._own = wandb.run is None
        self._run = wandb.run or wandb.init()
        self._run.define_metric("gradwire/step")
        self._run.define_metric("gradwire/*", step_metric="gradwire/step")
        self._run.config.update(
            {f"gradwire.{name}": start[name] for name in ("codec", "ranks", "parameters") if name in start}
        )

    def _numbers(self, numbers: dict[str, float], step: int) -> None:
        self._run.log({"gradwire/step": step, **{f"gradwire/{name}": value for name, value in numbers.items()}})

    def close(self) -> None:
        """End the run if it is this sink's own."""
        if self._own:
            self._run.finish()


def _plain(name: str) -> str:
    """A name as MLflow allows it: letters, digits, _ - . / and blanks."""
    return "".join(each if each.isalnum() or each in "_-./ " else "_" for each in name)
