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
    step = statistics.median(report.seconds["without"])
    rows = [
        ["a step without it, ms", f"{1000 * step:.2f}"],
        ["the same with it, over that", f"{report.clock_ratio:.4f}"],
        ["on the thread that trains, microseconds a step", f"{1e6 * report.training_s:.0f}"],
        ["on its own thread", f"{1e6 * report.beside_s:.0f}"],
        ["both, of a step of 50 ms", f"{report.added_s / 0.05:.2%}"],
    ]
    caption = (
        f"{turns} turns of {steps} steps each. Over: the median of turns next to each other. Microseconds are of the "
        "processor."
    )
    show(table(f"{task}, {codec}, {workers} workers", {"telemetry": "left", "": "right"}, rows, caption))
