"""The commands, put together.

Exit status: 0, all went well; 1, the work failed (a worker died, a file is no payload); 2, it was asked for wrongly;
130, it was interrupted; 143 and 129, it was ended by SIGTERM or SIGHUP.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Final

import typer

import gradwire
from gradwire.cli.bench import bench
from gradwire.cli.completion import bash_protocol
from gradwire.cli.config import load_config
from gradwire.cli.dash import dash
from gradwire.cli.doctor import doctor
from gradwire.cli.inspect import inspect
from gradwire.cli.lab import lab
from gradwire.cli.manual import EXIT_STATUS, Group, command, manual
from gradwire.cli.output import errors
from gradwire.cli.plan import plan
from gradwire.cli.report import report
from gradwire.cli.serve import serve
from gradwire.cli.train import train
from gradwire.errors import ConfigError, GradwireError

__all__ = ["app", "main"]

_ABOUT: Final = """Distributed PyTorch training that is fast on the networks people really have.

Workers compute gradients; gradwire makes them small, sums them, and brings the result back.

Start here:

  $ gradwire doctor              what this machine has, and what it lacks
  $ gradwire train               two workers, gradients at 4 bits
  $ gradwire plan --rate 1gbit   what compression would gain over a link

Each command explains itself: gradwire COMMAND --help. All of them: docs/commands.md.
"""
_INTERRUPTED: Final = 130


class _Program(Group):
    """All commands; Ctrl-C ends any of them with one line and a status of its own."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with _ending_on_signals():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            errors.print("interrupted", highlight=False)
            raise typer.Exit(_INTERRUPTED) from None


@contextmanager
def _ending_on_signals() -> Iterator[None]:
    """A signal that would end this process at once becomes an exit: ranks are ended and labs taken down."""

    def leave(number: int, _: FrameType | None) -> None:
        for each in fatal:  # from now on: `timeout` sends it twice, and cleaning up must not be cut short
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    here = threading.current_thread() is threading.main_thread()  # only there signals can be taken
    fatal = [each for each in (signal.SIGTERM, signal.SIGHUP) if here and signal.getsignal(each) is signal.SIG_DFL]
    for number in fatal:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in fatal:
            if signal.getsignal(number) is leave:
                signal.signal(number, signal.SIG_DFL)


app = typer.Typer(
    name="gradwire",
    cls=_Program,
    help=manual(_ABOUT),
    epilog=EXIT_STATUS,
    no_args_is_help=True,
    rich_markup_mode="rich",
)
command(app)(doctor)
command(app)(train)
command(app)(plan)
command(app)(inspect)
command(app)(dash)
command(app)(report)
app.add_typer(bench, name="bench")
app.add_typer(lab, name="lab")
app.add_typer(serve, name="serve")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gradwire {gradwire.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(
            envvar="GRADWIRE_CONFIG",
            help="Options of commands, in TOML: a table a command, such as \\[train]. The command line wins over it.",
            show_default=False,
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    if config is not None:
        context.default_map = load_config(config, context.command)


def main() -> None:
    """Run the command line; errors of ours become one line and an exit status."""
    try:
        with bash_protocol():
            app()
    except GradwireError as error:
        errors.print(f"[bold red]error:[/] {_escaped(str(error))}", highlight=False, soft_wrap=True, emoji=False)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")
