"""The commands, put together.

Exit status: 0, all went well; 1, the work failed (a worker died, a file is no payload); 2, it was asked for wrongly.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import gradwire
from gradwire.cli.bench import bench
from gradwire.cli.inspect import inspect
from gradwire.cli.lab import lab
from gradwire.cli.output import errors
from gradwire.cli.plan import plan
from gradwire.cli.serve import serve
from gradwire.cli.train import train
from gradwire.errors import ConfigError, GradwireError

__all__ = ["app", "main"]

app = typer.Typer(
    name="gradwire",
    help="Distributed PyTorch training that is fast on the networks people really have.",
    epilog="Exit status: 0 all went well, 1 the work failed, 2 it was asked for wrongly.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.command()(train)
app.command()(plan)
app.command()(inspect)
app.add_typer(bench, name="bench")
app.add_typer(lab, name="lab")
app.add_typer(serve, name="serve")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gradwire {gradwire.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; errors of ours become one line and an exit status."""
    try:
        app()
    except GradwireError as error:
        errors.print(f"[bold red]error:[/] {_escaped(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")
