"""``gradwire bench stragglers``: what a rank that stands still costs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from gradwire.benchmarks.stragglers import Settings, measure
from gradwire.cli.output import JsonOption, errors, print_json, show, table

__all__ = ["stragglers"]


def stragglers(
    workers: Annotated[int, typer.Option(help="Ranks.")] = 4,
    steps: Annotated[int, typer.Option(help="Steps of each training, of the digits CNN.")] = 300,
    pause: Annotated[float, typer.Option(help="Seconds that one rank is stopped for.")] = 5.0,
    rounds: Annotated[int, typer.Option(help="Rounds over all ways.")] = 3,
    as_json: JsonOption = False,
) -> None:
    """See what a rank that stands still costs: left out by the policy, or waited for.

    The digits CNN with the sharded optimizer; one rank is stopped for a while, at a random moment.

    Example:

      $ gradwire bench stragglers --workers 2 --steps 100 --pause 2 --rounds 1
    """
    settings = Settings(workers, steps, pause, rounds)
    with errors.status("starting") as status:
        found = measure(settings, status.update)
    if as_json:
        print_json({name: asdict(each) for name, each in found.items()})
        return
    rows = [
        [name, f"{each.seconds:.1f}", f"{each.over_undisturbed:.3f}", f"{each.dropped:.0f}", f"{each.loss:.4f}"]
        for name, each in found.items()
    ]
    columns = {"": "left", "s": "right", "x undisturbed": "right", "gradients left out": "right", "loss": "right"}
    caption = f"Median of {rounds} interleaved rounds of {steps} steps; one rank stopped for {pause:g} s."
    show(table(f"a late rank, {workers} workers", columns, rows, caption))
