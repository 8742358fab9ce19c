"""``gradwire bench rounds``: training that talks less often, over a slow link."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradwire.benchmarks.rounds import Settings, draw, measure
from gradwire.cli.completion import complete_task
from gradwire.cli.output import JsonOption, errors, listed, print_json, show, size, table

__all__ = ["rounds"]


def rounds(
    task: Annotated[str, typer.Option(help="digits or charlm.", autocompletion=complete_task)] = Settings.task,
    workers: Annotated[int, typer.Option(help="Ranks, one a host.")] = Settings.workers,
    rate: Annotated[str, typer.Option(help="Of every link. It needs root.")] = Settings.rate,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            help="accumulate, localsgd, diloco or demo, with options; several times.",
            show_default=listed(Settings.methods),
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of each.")] = Settings.steps,
    target_steps: Annotated[int, typer.Option(help="Plain DDP's steps to the loss to reach.")] = Settings.target_steps,
    ddp_steps: Annotated[int, typer.Option(help="Steps of plain DDP over the link.")] = Settings.ddp_steps,
    seed: Annotated[int, typer.Option(help="Of model and batches.")] = Settings.seed,
    plot: Annotated[Path | None, typer.Option(help="Draw losses: .png, .svg or .pdf.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare methods that talk less often with plain DDP: time and bytes to its loss.

    Each is trained over the link from first to last; plain DDP for a few steps, for its step time. Needs root.

    Example:

      $ sudo gradwire bench rounds --task digits --steps 60 --target-steps 30
    """
    chosen = tuple(methods or Settings.methods)
    settings = Settings(task, workers, rate, chosen, steps, target_steps, ddp_steps, seed)
    with errors.status("starting") as status:
        report = measure(settings, status.update)
    if plot is not None:
        draw(report, plot)
    if as_json:
        print_json(report.as_json())
        return
    rows = [["ddp", str(target_steps), f"{report.ddp_seconds:.0f}", size(report.ddp_bytes), "1", "1"]]
    for name, course in report.courses.items():
        found = report.against_ddp(name)
        best = min((loss for _, loss, _ in course.validations), default=float("nan"))
        rows.append(
            [name, f"not in {steps}: {best:.3f}", "", size(course.validations[-1][2]), "", ""]
            if found is None
            else [
                name,
                f"{found['steps']:.0f}",
                f"{found['seconds']:.0f}",
                size(found["bytes"]),
                f"{found['times_sooner']:.1f}",
                f"{found['times_fewer_bytes']:.0f}",
            ]
        )
    columns = {"": "left", "steps": "right", "seconds": "right", "sent by a rank": "right"}
    columns |= {"times sooner": "right", "times fewer bytes": "right"}
    caption = (
        f"To plain DDP's validation loss after {target_steps} steps, {report.target:.4f}. Its seconds are "
        f"{target_steps} steps of {report.ddp_step_s:.1f} s; the others' were trained over the link from first to last."
    )
    show(table(f"{task}, {workers} workers, {rate}", columns, rows, caption))
