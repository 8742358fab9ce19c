"""``gradwire report``: runs as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gradwire.cli.dash import FoldersArgument
from gradwire.cli.output import JsonOption, console, print_json, show, size, table
from gradwire.dashboard.report import report as make
from gradwire.dashboard.store import Store
from gradwire.errors import ConfigError
from gradwire.files import write_whole

__all__ = ["report"]


def report(
    folders: FoldersArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("report.html"),
    as_json: JsonOption = False,
) -> None:
    """Write runs into one HTML file that opens anywhere.

    It holds the dashboard's charts and tables, and needs no server and no network. Its size does not grow with the
    number of steps.

    Examples:

      $ gradwire report runs/first -o first.html
      $ gradwire report runs --json
    """
    page, runs = make(Store(folders))
    if not runs:
        raise ConfigError(f"`RUN_DIR` {', '.join(map(str, folders))}: there is no run, nor a folder of one.")
    try:
        write_whole(output, page)
    except OSError as error:
        raise ConfigError(f"`--output` {str(output)!r} cannot be written: {error.strerror}.") from error
    if as_json:
        print_json({"file": str(output), "bytes": len(page), "runs": [_line(run) for run in runs]})
        return
    columns = dict.fromkeys(("run", "state", "travels as"), "left")
    columns |= dict.fromkeys(("steps", "loss", "time", "sent", "against float32"), "right")
    show(table("runs", columns, [_cells(run) for run in runs]))
    console.print(f"{output}, {size(len(page))}", highlight=False, soft_wrap=True, markup=False)


def _line(run: dict[str, Any]) -> dict[str, Any]:
    left_out = ("id", "versions", "reading", "progress")
    return {name: value for name, value in run.items() if name not in left_out}


def _cells(run: dict[str, Any]) -> list[str]:
    def shown(name: str, form: str) -> str:
        return format(run[name], form) if isinstance(run[name], int | float) else "-"

    codec = run["codec"] if isinstance(run["codec"], str) else "-"
    sent = size(run["sent"]) if run["sent"] is not None else "-"
    seconds = f"{run['seconds']:,.1f} s" if run["seconds"] is not None else "-"
    return [
        run["name"],
        run["state"],
        codec,
        shown("step", ",.0f"),
        shown("loss", ".4g"),
        seconds,
        sent,
        shown("ratio", ".3g"),
    ]
