"""``gradwire bench plan`` and ``gradwire bench drift``: what the planner expects, and what the clock says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradwire.benchmarks import drift as drifting
from gradwire.benchmarks import plans
from gradwire.benchmarks.plan_plot import draw_predictions
from gradwire.benchmarks.plot import check as check_picture
from gradwire.cli.completion import complete_task
from gradwire.cli.output import JsonOption, console, errors, listed, print_json, say, show, table

__all__ = ["drift", "plan"]

PlotOption = Annotated[Path | None, typer.Option(help="Draw it: .png, .svg or .pdf.")]


def plan(
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--task",
            help="What to train; several times.",
            autocompletion=complete_task,
            show_default=listed(plans.Settings.tasks),
        ),
    ] = None,
    workers: Annotated[
        list[int] | None,
        typer.Option(help="Ranks, one a host; several times.", show_default=listed(plans.Settings.workers)),
    ] = None,
    rates: Annotated[
        list[str] | None,
        typer.Option(
            "--rate", help="A link, or none; several times. It needs root.", show_default=listed(plans.Settings.rates)
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Rounds over all methods.")] = plans.Settings.rounds,
    steps: Annotated[int, typer.Option(help="Timed steps of a method in a round.")] = plans.Settings.steps,
    plot: PlotOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare the step times that auto expects of each method with those that are measured.

    Needs root, for the links.

    Example:

      $ sudo gradwire bench plan --task digits --workers 2 --rate 100mbit
    """
    default = plans.Settings
    settings = plans.Settings(
        tuple(tasks or default.tasks), tuple(workers or default.workers), tuple(rates or default.rates), rounds, steps
    )
    if plot is not None:
        check_picture(plot)
    with errors.status("starting") as status:
        report = plans.measure(settings, status.update, say)
    if plot is not None:
        draw_predictions(report, plot)
    if as_json:
        print_json(report.as_json())
        return
    rows = [
        [
            cell.task,
            str(cell.workers),
            cell.rate,
            cell.method,
            f"{1000 * cell.predicted_s:.0f}",
            f"{1000 * cell.measured_s:.0f}",
            f"{cell.above:+.0%}",
            "chosen" if cell.chosen else "",
        ]
        for cell in report.cells
    ]
    columns = {"task": "left", "workers": "right", "link": "left", "method": "left", "expected, ms": "right"}
    columns |= {"measured, ms": "right", "off": "right", "auto": "left"}
    caption = f"{report.within(0.15):.0%} of the cells within 15%, {report.within(0.3):.0%} within 30%."
    show(table("step times", columns, rows, caption))


def drift(
    task: Annotated[str, typer.Option(help="digits or charlm.", autocompletion=complete_task)] = drifting.Settings.task,
    workers: Annotated[int, typer.Option(help="Ranks, one a host.")] = drifting.Settings.workers,
    rates: Annotated[
        list[str] | None,
        typer.Option(
            "--rate",
            help="A link; several times: one after the other. They need root.",
            show_default=listed(drifting.Settings.rates),
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps at each rate.")] = drifting.Settings.steps,
    plot: PlotOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change the rate of all links under a training, and see how soon auto follows.

    Needs root, for the links.

    Example:

      $ sudo gradwire bench drift --rate 1gbit --rate 50mbit --steps 100
    """
    settings = drifting.Settings(task, workers, tuple(rates or drifting.Settings.rates), steps)
    if plot is not None:
        check_picture(plot)
    with errors.status("starting") as status:
        report = drifting.measure(settings, status.update)
    if plot is not None:
        drifting.draw(report, plot)
    if as_json:
        print_json(report.as_json())
        return
    for step, what in report.planned:
        console.print(f"step {step}: {what}", highlight=False)
    followed, medians = report.followed(), report.medians()
    rows = [
        [rate, str(change), str(followed[rate] or "never"), *(f"{1000 * each:.0f}" for each in medians[rate])]
        for change, rate in report.changes.items()
    ]
    columns = {"then": "left", "from step": "right", "new plan after steps": "right"}
    columns |= {"first steps, ms": "right", "last steps, ms": "right"}
    show(table(f"{task}, {workers} workers, {settings.rates[0]} at first", columns, rows))
