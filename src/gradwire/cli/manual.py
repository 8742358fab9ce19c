"""Help that reads as a manual: what is wrapped in a docstring is wrapped anew for the terminal, examples are not."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final, TypeVar

import typer

__all__ = ["EXIT_STATUS", "command", "manual"]

F = TypeVar("F", bound=Callable[..., Any])

EXIT_STATUS: Final = (
    "Exit status: 0 all went well, 1 the work failed, 2 it was asked for wrongly, 130 it was interrupted by Ctrl-C."
)


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
        app.command(name, help=manual(function.__doc__), epilog=EXIT_STATUS, **settings)(function)
        return function

    return add
