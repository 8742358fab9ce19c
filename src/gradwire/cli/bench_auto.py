"""``gradwire bench auto``: the planner against every fixed method."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Annotated

import typer

from gradwire.benchmarks import plot
from gradwire.benchmarks.auto import Settings, draw, measure
from gradwire.cli.completion import complete_method, complete_task
from gradwire.cli.output import JsonOption, errors, listed, print_json, say, show, table

__all__ = ["auto"]


def auto(
    task: Annotated[str, typer.Option(help="digits or charlm.", autocompletion=complete_task)] = Settings.task,
    workers: Annotated[
        list[int] | None, typer.Option(help="Ranks, one a host; several times.", show_default=listed(Settings.workers))
    ] = None,
    rates: Annotated[
        list[str] | None,
        typer.Option("--rate", help="A link; several times. It needs root.", show_default=listed(Settings.rates)),
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            help='A fixed method, beside plain DDP; several times. "ddp again" shows what two of the same differ by.',
            autocompletion=complete_method,
            show_default=listed(Settings.methods),
        ),
    ] = None,
    target_steps: Annotated[int, typer.Option(help="Plain DDP's steps to the loss to reach.")] = Settings.target_steps,
    timed_steps: Annotated[int, typer.Option(help="Steps of each fixed method that are timed.")] = Settings.timed_steps,
    repeats: Annotated[int, typer.Option(help="Trainings of each, with another seed each.")] = Settings.repeats,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            help="The task's own unless given. The digits' losses can be compared at 0.002; at 0.02 they vary."
        ),
    ] = None,
    picture: Annotated[Path | None, typer.Option("--plot", help="Draw the ratios: .png, .svg or .pdf.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare auto with every fixed method, over shaped links.

    auto is trained to the loss that plain DDP reaches, from its first step over the link; the fixed methods are timed.
    Needs root, for the links.

    Example:

      $ sudo gradwire bench auto --workers 2 --rate 100mbit --repeats 1
    """
    settings = Settings(
        task,
        tuple(workers or Settings.workers),
        tuple(rates or Settings.rates),
        tuple(methods or Settings.methods),
        target_steps,
        timed_steps,
        repeats,
        learning_rate,
    )
    if picture is not None:
        plot.check(picture)
    with errors.status("starting") as status:
        report = measure(settings, status.update, say)
    if picture is not None:
        draw(report, picture)
    if as_json:
        print_json(report.as_json())
        return
    names = ["ddp", *settings.methods]
    columns = {"workers, rate": "left"} | dict.fromkeys(names, "right")
    columns |= {
        "auto": "right",
        "/ best": "right",
        "first / best": "right",
        "/ ddp": "right",
        "to loss / best": "right",
    }
    columns |= {"loss": "right", "stolen": "right", "plan": "left"}
    rows = [
        [
            f"{cell.workers}, {cell.rate}",
            *(f"{cell.seconds(name):.1f}" for name in names),
            f"{statistics.median(cell.auto[1:] or cell.auto):.1f}",
            f"{cell.later:.2f}",
            f"{cell.first:.2f}",
            f"{cell.against_ddp:.2f}",
            f"{cell.to_loss:.2f}" if cell.to_loss is not None else "not reached",
            f"{cell.loss:+.1%}",
            f"{cell.stolen:.0%}",
            cell.plans[-1],
        ]
        for cell in report.cells
    ]
    caption = (
        f"Seconds of {target_steps} steps. auto was trained over the link from its first step, {repeats} times: first "
        f"is the training that had to find its plan. The others took turns with it, {timed_steps} steps each. "
        "to loss: seconds of auto to the validation loss that plain DDP has after these steps, over the best. loss: of "
        "auto after them, over plain DDP's; the mean of three validations, and of all trainings. stolen: the share of "
        "processor time that a hypervisor gave to other machines; above some percent the rest tells little."
    )
    show(table(settings.task, columns, rows, caption))
