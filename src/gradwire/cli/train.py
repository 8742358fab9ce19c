"""``gradwire train``: a built-in training with compressed gradients."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from gradwire.cli.completion import complete_codec, complete_task
from gradwire.cli.live import LiveView
from gradwire.cli.output import JsonOption, errors, print_json, show, size, table
from gradwire.cli.plan import plan_table
from gradwire.clusters import run_workers
from gradwire.collectives import method
from gradwire.dashboard.runs import Run
from gradwire.errors import ConfigError
from gradwire.lab import Lab, parse_rate
from gradwire.planner import Plan
from gradwire.tasks import TASKS

__all__ = ["train"]

_DETAILS: Final = "The training in detail"
_SHARDED: Final = "A sharded optimizer"


def train(
    task: Annotated[
        str, typer.Option(help=f"What to train: {', '.join(TASKS)}.", autocompletion=complete_task)
    ] = "digits",
    codec: Annotated[
        str | None,
        typer.Option(
            help="How gradients travel: int4, int8, topk:0.01+int8, powersgd:16+int8, none, or auto, which chooses.",
            autocompletion=complete_codec,
            show_default="int4",
        ),
    ] = None,
    workers: Annotated[int, typer.Option(help="Worker processes.")] = 2,
    epochs: Annotated[int, typer.Option(help="Passes over the training data; charlm: hundreds of steps.")] = 4,
    steps: Annotated[int | None, typer.Option(help="Steps, instead of epochs.", rich_help_panel=_DETAILS)] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(help="Examples in a worker's batch.", rich_help_panel=_DETAILS, show_default="the task's own"),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Equal seeds give equal runs on one machine.", rich_help_panel=_DETAILS)
    ] = 0,
    feedback: Annotated[
        bool,
        typer.Option(
            "--feedback/--no-feedback",
            help="Error feedback for biased codecs of fewer than 4 bits.",
            rich_help_panel=_DETAILS,
        ),
    ] = True,
    rate: Annotated[
        str | None, typer.Option(help="Join the workers by links of this rate, e.g. 100mbit (a lab; needs root).")
    ] = None,
    ratio: Annotated[
        float | None,
        typer.Option(
            help="Instead of DDP and a codec: a sharded optimizer that sends this part of float32's bytes.",
            rich_help_panel=_SHARDED,
        ),
    ] = None,
    stage: Annotated[
        int | None,
        typer.Option(
            help="1 shards the optimizer's state, 2 gradients too, 0 neither.",
            rich_help_panel=_SHARDED,
            show_default="1",
        ),
    ] = None,
    checkpoints: Annotated[
        Path | None,
        typer.Option(help="Save in this folder, and go on from the last complete one.", rich_help_panel=_SHARDED),
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(help="Steps between checkpoints.", rich_help_panel=_SHARDED, show_default="50")
    ] = None,
    retry_times: Annotated[
        int, typer.Option(help="Start workers again after so many failures in a row.", rich_help_panel=_DETAILS)
    ] = 0,
    run_dir: Annotated[
        Path | None, typer.Option(help="Record every step in this folder, for gradwire dash and gradwire report.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train with compressed gradients between worker processes; say what it cost and reached.

    A built-in task on real data. Each worker is a process of its own; gradients travel over loopback, or with --rate
    over links of that speed, each worker on a host of its own. It ends with losses, bytes, seconds, and whether all
    workers hold the same bits.

    Examples:

      $ gradwire train
      $ gradwire train --codec topk:0.01+int8 --epochs 2
      $ gradwire train --codec auto --rate 100mbit --workers 4
      $ gradwire train --run-dir runs/first
      $ gradwire train --ratio 0.1 --checkpoints run --steps 200
    """
    settings = {**_settings(task, codec or "int4", workers, epochs, steps, batch_size, seed), "feedback": feedback}
    settings |= _sharding(ratio, codec, stage, checkpoints, checkpoint_every)
    run = _Run()
    with (
        _links(workers, rate) as lab,
        _recorded(run_dir) as folder,
        LiveView(Run(folder), _title(task, settings, workers, rate), errors),
    ):
        settings |= {"run_folder": str(folder.absolute()), "about": {"workers": workers, "rate": rate}}
        for event in run_workers("gradwire.tasks.worker", settings, workers, lab, retry_times=retry_times):
            run.take(event)
            if event["event"] == "retry":
                errors.print(f"{event['error']} Starting again.", style="yellow")
            if event["event"] == "planned":
                errors.print(f"step {event['step']}: {event['what']}", highlight=False)
    told = {name: value for name, value in settings.items() if name not in ("run_folder", "about")}
    if as_json:
        print_json({"settings": {**told, "workers": workers, "rate": rate}, **run.result()})
    else:
        show(run.table(task, workers, rate))
        if run_dir is not None:
            errors.print(f"recorded in {run_dir}: look at it with gradwire dash {run_dir}", highlight=False)
        if run.plan:
            show(plan_table(Plan.from_json(run.plan["plan"]), "the last plan"))


def _sharding(
    ratio: float | None, codec: str | None, stage: int | None, checkpoints: Path | None, checkpoint_every: int | None
) -> dict[str, Any]:
    if ratio is not None and not 0 < ratio <= 1:
        raise ConfigError(f"`--ratio` must be in (0, 1]; got {ratio}.")
    if ratio is not None and codec is not None:
        raise ConfigError(f"give either `--ratio`, which chooses codecs, or `--codec`; got {ratio} and {codec!r}.")
    for name, value in (("stage", stage), ("checkpoints", checkpoints), ("checkpoint-every", checkpoint_every)):
        if value is not None and ratio is None:
            raise ConfigError(f"`--{name}` needs `--ratio`: it is of a sharded optimizer.")
    stage, checkpoint_every = 1 if stage is None else stage, checkpoint_every or 50
    if stage not in (0, 1, 2):
        raise ConfigError(f"`--stage` must be 0, 1 or 2; got {stage}.")
    if checkpoint_every < 1:
        raise ConfigError(f"`--checkpoint-every` must be at least 1; got {checkpoint_every}.")
    where = None if checkpoints is None else str(checkpoints.absolute())
    return {"ratio": ratio, "stage": stage, "checkpoints": where, "checkpoint_every": checkpoint_every}


@contextmanager
def _recorded(run_dir: Path | None) -> Iterator[Path]:
    """The folder of the run; of one that is not to be kept, until it ends."""
    if run_dir is None:
        with tempfile.TemporaryDirectory(prefix="gradwire-run-") as folder:
            yield Path(folder)
        return
    if run_dir.is_dir() and any(run_dir.glob("*.jsonl")):
        raise ConfigError(f"`--run-dir` must be a new folder; {str(run_dir)!r} has a run already.")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"`--run-dir` {str(run_dir)!r} cannot be made: {error.strerror}.") from error
    yield run_dir


def _title(task: str, settings: Mapping[str, Any], workers: int, rate: str | None) -> str:
    how = settings["codec"] if settings["ratio"] is None else f"sharded, ratio {settings['ratio']}"
    return f"{task}, {how}, {_count(workers, 'worker')}" + (f", {rate}" if rate else "")


def _links(workers: int, rate: str | None) -> AbstractContextManager[Lab | None]:
    """A lab of its own for this run, or loopback."""
    parse_rate(rate, argument="--rate")
    return Lab.up(workers, rate, name=f"train-{os.getpid()}") if rate is not None else nullcontext()


def _settings(
    task: str, codec: str, workers: int, epochs: int, steps: int | None, batch_size: int | None, seed: int
) -> dict[str, Any]:
    """The checked settings; a mistake is said before any worker starts."""
    if task not in TASKS:
        raise ConfigError(f"`--task` must be one of {', '.join(TASKS)}; got {task!r}.")
    examples = TASKS[task].train_examples
    if not 1 <= workers <= 64:
        raise ConfigError(f"`--workers` must be from 1 to 64; got {workers}.")
    if epochs < 1:
        raise ConfigError(f"`--epochs` must be at least 1; got {epochs}.")
    if steps is not None and steps < 1:
        raise ConfigError(f"`--steps` must be at least 1; got {steps}.")
    if batch_size is not None and not 1 <= batch_size <= examples // workers:
        raise ConfigError(
            f"`--batch-size` must be from 1 to {examples // workers} with {workers} workers; got {batch_size}."
        )
    if not 0 <= seed < 1 << 31:
        raise ConfigError(f"`--seed` must be from 0 to {(1 << 31) - 1}; got {seed}.")
    TASKS[task]().load()
    how = codec if codec == "auto" else str(method(codec, feedback=False))
    return {"task": task, "codec": how, "epochs": epochs, "steps": steps, "batch_size": batch_size, "seed": seed}


class _Run:
    """What the workers said, added up."""

    def __init__(self) -> None:
        self.start: dict[str, Any] = {}
        self.plan: dict[str, Any] = {}  # of ``auto``
        self.planned: list[dict[str, Any]] = []
        self.done: dict[str, Any] = {}
        self.losses: dict[int, float] = {}  # by step: those after a checkpoint may be taken again
        self.sent_bytes = self.dense_sent_bytes = 0

    def take(self, event: dict[str, Any]) -> None:
        if event["event"] == "step":
            self.losses[event["step"]] = event["loss"]
            self.sent_bytes += event["sent_bytes"]
            self.dense_sent_bytes += event["dense_sent_bytes"]
        elif event["event"] == "planned":
            self.planned.append({"step": event["step"], "what": event["what"]})
        else:
            setattr(self, event["event"], event)

    def result(self) -> dict[str, Any]:
        losses = list(self.losses.values())
        if not losses:
            raise ConfigError(
                f"`--checkpoints` has this training already, of {self.start['steps']} steps or more: "
                "give more `--steps`."
            )
        return {
            "codec": self.start["codec"],
            "parameters": self.start["parameters"],
            "steps": len(losses),
            "first_loss": losses[0],
            "train_loss": losses[-1],
            "test_loss": self.done["test_loss"],
            "test_accuracy": self.done["test_accuracy"],
            "sent_bytes": self.sent_bytes,
            "fp32_bytes": self.dense_sent_bytes,
            "ratio": self.sent_bytes / self.dense_sent_bytes if self.dense_sent_bytes else None,
            "seconds": self.done["seconds"],
            "replicas_identical": True,  # a worker that finds otherwise fails
            **({"planned": self.planned, "plan": json.loads(self.plan["plan"])} if self.plan else {}),
        }

    def table(self, task: str, workers: int, rate: str | None) -> Any:
        r = self.result()
        ratio = f" = {r['ratio']:.3f} of a float32 all-reduce" if r["ratio"] is not None else ""
        rows = [
            ("model", f"{r['parameters']:,} parameters"),
            ("gradients travel as", r["codec"]),
            ("training loss", f"{r['first_loss']:.4f} -> {r['train_loss']:.4f}"),
            ("test loss", f"{r['test_loss']:.4f}"),
            ("test accuracy", f"{r['test_accuracy']:.2%}"),
            ("bytes sent a worker", f"{size(r['sent_bytes'])}{ratio}"),
            ("time", f"{r['seconds']:.1f} s, {1000 * r['seconds'] / r['steps']:.0f} ms a step"),
            ("replicas", "bit-identical on all workers" if workers > 1 else "one worker"),
        ]
        return table(
            f"{task}: {_count(workers, 'worker')}, {_count(r['steps'], 'step')}" + (f", {rate}" if rate else ""),
            {"": "left", "result": "left"},
            rows,
        )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
