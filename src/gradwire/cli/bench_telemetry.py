"""``gradwire bench telemetry``: what recording every step costs."""

from __future__ import annotations

import statistics
from typing import Annotated

import typer

from gradwire.benchmarks.telemetry import Settings, measure
from gradwire.cli.output import JsonOption, errors, print_json, show, table

__all__ = ["telemetry"]


def telemetry(
    task: Annotated[str, typer.Option(help="digits or charlm.")] = Settings.task,
    batch_size: Annotated[int, typer.Option(help="Examples in a worker's batch.")] = Settings.batch_size,
    codec: Annotated[str, typer.Option(help="How gradients travel.")] = Settings.codec,
    workers: Annotated[int, typer.Option(help="Worker processes.")] = Settings.workers,
    turns: Annotated[int, typer.Option(help="Of each training.")] = Settings.turns,
    steps: Annotated[int, typer.Option(help="Steps of a turn.")] = Settings.steps,
    as_json: JsonOption = False,
) -> None:
    """Time a training with and without telemetry, turn by turn in the same processes.

    Everything is recorded: every step and bucket to a file of each rank, and what is lost of each layer.

    Examples:

      $ gradwire bench telemetry
      $ gradwire bench telemetry --codec topk:0.01+int8
    """
    settings = Settings(task, batch_size, codec, workers, turns, steps)
    with errors.status("starting") as status:
        report = measure(settings, status.update)
    if as_json:
        print_json(report.as_json())
        return
    rows = [
        [
            name,
            f"{1000 * statistics.median(report.seconds[name]):.2f}",
            f"{1000 * statistics.median(report.processor_s[name]):.2f}",
        ]
        for name in ("without", "with")
    ]
    step = statistics.median(report.seconds["without"])
    caption = (
        f"Medians of {turns} turns of {steps} steps. Of turns next to each other: the clock {report.clock_ratio:.4f} "
        f"times, the processor {1e6 * report.added_s:.0f} microseconds more a step ({report.added_s / step:.2%} of a "
        f"step, {report.added_s / 0.05:.2%} of one of 50 ms)."
    )
    show(
        table(
            f"{task}, {codec}, {workers} workers",
            {"telemetry": "left", "ms a step": "right", "ms of the processor": "right"},
            rows,
            caption,
        )
    )
