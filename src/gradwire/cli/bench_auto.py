"""``gradwire bench auto``: the planner against every fixed method."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradwire.benchmarks import plot
from gradwire.benchmarks.auto import Settings, draw, measure
from gradwire.cli.output import JsonOption, errors, print_json, show, table

__all__ = ["auto"]


def auto(
    task: Annotated[str, typer.Option(help="digits or charlm.")] = Settings.task,
    workers: Annotated[list[int] | None, typer.Option(help="Ranks, one a host; several times; 2 and 4.")] = None,
    rates: Annotated[
        list[str] | None, typer.Option("--rate", help="Links; several times; 100mbit, 1gbit and none. They need root.")
    ] = None,
    methods: Annotated[
        list[str] | None, typer.Option("--method", help="Fixed methods, beside plain DDP; several times.")
    ] = None,
    target_steps: Annotated[int, typer.Option(help="Plain DDP's steps to the loss to reach.")] = Settings.target_steps,
    timed_steps: Annotated[int, typer.Option(help="Steps of each fixed method that are timed.")] = Settings.timed_steps,
    repeats: Annotated[int, typer.Option(help="Trainings of each, with another seed each.")] = Settings.repeats,
    picture: Annotated[Path | None, typer.Option("--plot", help="Draw the ratios: .png, .svg or .pdf.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Train with auto over shaped links to the loss that plain DDP reaches, and compare with every fixed method."""
    settings = Settings(
        task,
        tuple(workers or Settings.workers),
        tuple(rates or Settings.rates),
        tuple(methods or Settings.methods),
        target_steps,
        timed_steps,
        repeats,
    )
    if picture is not None:
        plot.check(picture)
    with errors.status("starting") as status:
        report = measure(settings, status.update)
    if picture is not None:
        draw(report, picture)
    if as_json:
        print_json(report.as_json())
        return
    names = ["ddp", *settings.methods]
    columns = {"workers, rate": "left"} | dict.fromkeys(names, "right")
    columns |= {"auto": "right", "/ best": "right", "first / best": "right", "to loss / best": "right"}
    columns |= {"loss": "right", "plan": "left"}
    rows = [
        [
            f"{cell.workers}, {cell.rate}",
            *(f"{cell.seconds(name):.1f}" for name in names),
            f"{cell.later * cell.seconds(cell.best):.1f}",
            f"{cell.later:.2f}",
            f"{cell.first:.2f}",
            f"{cell.to_loss:.2f}" if cell.to_loss is not None else "not reached",
            f"{cell.loss:+.1%}",
            cell.plans[-1],
        ]
        for cell in report.cells
    ]
    caption = (
        f"Seconds of {target_steps} steps. auto was trained over the link from its first step, {repeats} times: first "
        f"is the training that had to find its plan. The others were timed over {timed_steps} steps. to loss: seconds "
        "of auto to the validation loss that plain DDP has after these steps, over the best. loss: of auto after them, "
        "over plain DDP's; the mean of three validations, and of all trainings."
    )
    show(table(settings.task, columns, rows, caption))
