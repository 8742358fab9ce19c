"""The commands, put together.

Exit status: 0, all went well; 1, the work failed (a worker died, a file is no payload); 2, it was asked for wrongly;
130, it was interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Final

import typer
import typer.main
from typer.core import TyperCommand

import gradwire
from gradwire.cli.completion import bash_protocol
from gradwire.cli.config import load_config
from gradwire.cli.manual import EXIT_STATUS, Group, command, manual
from gradwire.cli.output import errors
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


_COMMANDS: Final = {
    "doctor": "Look at this machine: what is missing, and the command that mends it.",
    "train": "Train with compressed gradients between worker processes; say what it cost and reached.",
    "plan": "Show how gradients would travel over a link, and how long a step would take, without training.",
    "inspect": "Print the header, codec and sizes of a payload.",
    "dash": "Show runs in a browser, while they go on and afterwards.",
    "report": "Write runs into one HTML file that opens anywhere.",
    "bench": "Measure what codecs weigh, how fast they are here, and what training gains.",
    "lab": "Hosts with slow links, on this machine. Needs Linux and root.",
    "serve": "Serve a model to workers that push gradients whenever they have them.",
}  # each a module of its name here; and what it does, as its own help begins


class _Commands(Mapping[str, Any]):
    """Commands by name. What one imports, torch most of all, is imported when it is asked for."""

    def __getitem__(self, name: str) -> Any:
        return _load(name)

    def __contains__(self, name: object) -> bool:
        return name in _COMMANDS

    def __iter__(self) -> Iterator[str]:
        return iter(_COMMANDS)

    def __len__(self) -> int:
        return len(_COMMANDS)


@cache
def _load(name: str) -> Any:
    if name not in _COMMANDS:
        raise KeyError(name)
    found = getattr(import_module(f"gradwire.cli.{name}"), name)
    if not isinstance(found, typer.Typer):
        function, found = found, typer.Typer(add_completion=False, rich_markup_mode="rich")
        command(found, name)(function)
    loaded = typer.main.get_command(found)
    loaded.name = name
    return loaded


class _Program(Group):
    """All commands; Ctrl-C ends any of them with one line and a status of its own."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings | {"commands": {}})
        self.commands: Any = _Commands()

    def list_commands(self, ctx: Any) -> list[str]:
        """Their names, in order."""
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """For lists of commands: name and first sentence, without the command itself."""
        return TyperCommand(cmd_name, help=_COMMANDS[cmd_name]) if cmd_name in _COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that is called, or whose options are completed."""
        name, found, rest = super().resolve_command(ctx, args)
        return name, found if found is None else self.commands[name], rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            errors.print("interrupted", highlight=False)
            raise typer.Exit(_INTERRUPTED) from None


app = typer.Typer(
    name="gradwire",
    cls=_Program,
    help=manual(_ABOUT),
    epilog=EXIT_STATUS,
    no_args_is_help=True,
    rich_markup_mode="rich",
)


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
        errors.print(f"[bold red]error:[/] {_escaped(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")
