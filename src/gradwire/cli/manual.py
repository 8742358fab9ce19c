"""Help that reads as a manual: what is wrapped in a docstring is wrapped anew for the terminal, examples are not."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

__all__ = ["EXIT_STATUS", "Group", "command", "manual"]

F = TypeVar("F", bound=Callable[..., Any])

EXIT_STATUS: Final = (
    "Exit status: 0 all went well, 1 the work failed, 2 it was asked for wrongly, 130 it was interrupted by Ctrl-C."
)


class Group(TyperGroup):
    """Commands under one name, with help as :func:`command` gives it.

    >>> app = typer.Typer(cls=Group)
    """

    def get_params(self, ctx: Any) -> Any:
        """As typer has them."""
        return _flags_without_type(super().get_params(ctx))


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> Any:
        return _flags_without_type(super().get_params(ctx))


def _flags_without_type(parameters: Any) -> Any:
    """Typer writes ``<bool>`` beside a flag, which takes no value."""
    for each in parameters:
        if getattr(each, "is_flag", False):
            each.metavar = ""
    return parameters


def manual(text: str | None) -> str:
    r"""Help of a docstring: paragraphs in one line each, for the terminal to wrap; indented ones as they are.

    >>> manual("Train.\n\nWith gradients\ncompressed.\n\n  $ gradwire train\n  $ gradwire train --help")
    'Train.\n\nWith gradients compressed.\n\n  $ gradwire train\n  $ gradwire train --help'
    """
    paragraphs = inspect.cleandoc(text or "").split("\n\n")
    return "\n\n".join(each if each.startswith(" ") else " ".join(each.split("\n")) for each in paragraphs)


def command(app: typer.Typer, name: str | None = None, **settings: Any) -> Callable[[F], F]:
    """A decorator: the function is a command, and its docstring the manual.

    >>> app = typer.Typer()
    >>> @command(app)
    ... def greet() -> None:
    ...     "Say hello."
    >>> app.registered_commands[0].help
    'Say hello.'
    """

    def add(function: F) -> F:
        app.command(name, cls=_Command, help=manual(function.__doc__), epilog=EXIT_STATUS, **settings)(function)
        return function

    return add
