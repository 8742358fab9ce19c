"""``gradwire bench train``: training over real links, ours beside what people use today."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.table import Table

from gradwire.benchmarks import plot, training_plot
from gradwire.benchmarks.hooks import PEERS
from gradwire.benchmarks.training import LOOPBACK, OURS, Settings, TrainingReport, earlier_report, measure
from gradwire.cli.completion import complete_method, complete_task
from gradwire.cli.output import JsonOption, errors, listed, print_json, show, size, table
from gradwire.errors import ConfigError, LabError
from gradwire.lab import unavailable

__all__ = ["train"]

_LOSSES: Final = "Losses"


def train(
    task: Annotated[str, typer.Option(help="digits or charlm.", autocompletion=complete_task)] = "digits",
    workers: Annotated[int, typer.Option(help="Ranks, one a host.")] = 4,
    rates: Annotated[
        list[str] | None,
        typer.Option(
            "--rate",
            help="A link, e.g. 100mbit or none, several times: needs root. loopback: no link, needs no root.",
            show_default=f"{listed(Settings.rates)}; loopback where no lab can be made",
        ),
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            help=f"A peer ({', '.join(PEERS)}) or a codec; several times.",
            autocompletion=complete_method,
            show_default="all peers and ours",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Rounds over all methods.")] = 3,
    steps: Annotated[int, typer.Option(help="Timed steps of a method in a round.")] = 6,
    curve_steps: Annotated[
        int,
        typer.Option(help="Also train each method for so many steps, for its losses.", rich_help_panel=_LOSSES),
    ] = 0,
    seeds: Annotated[int, typer.Option(help="Seeds of those trainings.", rich_help_panel=_LOSSES)] = 1,
    target_steps: Annotated[
        int,
        typer.Option(
            help="The loss to reach is that of plain DDP after so many steps; 0: after all.", rich_help_panel=_LOSSES
        ),
    ] = 0,
    curves: Annotated[
        Path | None,
        typer.Option(
            help="Take the losses from the --json of an earlier run of the same task.", rich_help_panel=_LOSSES
        ),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Examples in a worker's batch.", show_default="the task's own")
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            "--plot", help="Draw losses against seconds and bytes: .png, .svg or .pdf.", rich_help_panel=_LOSSES
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Time training steps over shaped links, ours beside what people use today.

    With --curve-steps also the time to the loss that plain DDP reaches. Needs root, but for --rate loopback.

    Examples:

      $ gradwire bench train --rate loopback --method ddp --method int4
      $ sudo gradwire bench train --rate 100mbit --curve-steps 60 --json
    """
    settings = Settings(
        task=task,
        workers=workers,
        rates=tuple(rates or _default_rates()),
        methods=tuple(methods or (*PEERS, *OURS)),
        rounds=rounds,
        steps=steps,
        curve_steps=curve_steps,
        seeds=seeds,
        target_steps=target_steps,
        batch_size=batch_size,
    )
    if (reason := unavailable()) and settings.rates != (LOOPBACK,):
        raise LabError(f"{reason} Without links: `gradwire bench train --rate {LOOPBACK}`.")
    if picture is not None:
        plot.check(picture)
    earlier = None
    if curves is not None:
        earlier = earlier_report(curves, settings)
        seeds = len(next(iter(earlier["losses"].values())))
        settings = replace(settings, curve_steps=earlier["curve_steps"], seeds=seeds)
    if settings.target_steps > settings.curve_steps:
        raise ConfigError(
            f"`--target-steps` must be at most {settings.curve_steps}, the steps of the losses; "
            f"got {settings.target_steps}."
        )
    with errors.status("starting") as status:
        report = measure(settings, status.update, earlier)
    if picture is not None:
        training_plot.draw(report, picture)
    if as_json:
        print_json(report.as_json())
        return
    for rate in report.links:
        show(_table(report, rate))


def _default_rates() -> tuple[str, ...]:
    """The links of ``Settings``; loopback where no links can be made."""
    if reason := unavailable():
        errors.print(f"{reason} Measuring over {LOOPBACK} instead.", highlight=False)
        return (LOOPBACK,)
    return Settings.rates


def _table(report: TrainingReport, rate: str) -> Table:
    there, settings = report.links[rate], report.settings
    columns = {"": "left", "ms a step": "right", "x compute": "right", "bytes a step": "right"}
    if report.validations:
        columns |= {"loss": "right", "steps": "right", "seconds": "right", "x sooner than ddp": "right"}
    rows = []
    for name, steps in there.items():
        moved = steps.wire_bytes or steps.sent_bytes or 0
        row = [name, f"{1000 * steps.step.median_s:.0f}", f"{steps.over_compute:.2f}", size(moved) if moved else ""]
        if report.validations:
            row += _to_loss(report, name, rate)
        rows.append(row)
    title = f"{settings.task}, {settings.workers} workers, {rate}, on {report.machine['device']}"
    caption = f"Median of {settings.rounds} interleaved rounds of {settings.steps} steps; bytes "
    caption += "with all headers." if any(steps.wire_bytes for steps in there.values()) else "of messages."
    if report.validations:
        caption += (
            f" loss: of validation after {settings.target_steps or settings.curve_steps} steps, mean of "
            f"{settings.seeds} seeds. steps, seconds: to the loss that ddp has then; empty: not reached in "
            f"{settings.curve_steps} steps."
        )
    return table(title, columns, rows, caption)


def _to_loss(report: TrainingReport, name: str, rate: str) -> list[str]:
    if name not in report.validations:
        return ["", "", "", ""]
    loss = report.loss_at(name)
    steps, seconds, ddp = report.steps_to(name), report.seconds_to(name, rate), report.seconds_to("ddp", rate)
    reached = ["", "", ""] if steps is None or seconds is None else [f"{steps:.0f}", f"{seconds:.1f}", ""]
    if seconds and ddp:
        reached[2] = f"{ddp / seconds:.2f}"
    return ["" if loss is None else f"{loss:.4f}", *reached]
