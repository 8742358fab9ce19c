"""Where the commands print: tables for people, JSON for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["JsonOption", "console", "errors", "listed", "print_json", "say", "show", "size", "table"]

console = Console()
errors = Console(stderr=True)

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def listed(values: Iterable[object]) -> str:
    """Several values in a line, for a default.

    >>> listed((2, 4))
    '2, 4'
    """
    return ", ".join(map(str, values))


def print_json(value: Any) -> None:
    """One JSON document on standard output. JSON has no NaN and no infinity: they are null.

    >>> print_json({"loss": float("nan")})
    {
      "loss": null
    }
    """
    typer.echo(json.dumps(_finite(value), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def say(what: object) -> None:
    """A line beside the results: of long work, as it goes on."""
    errors.print(str(what), highlight=False, soft_wrap=True, markup=False)


def table(title: str, columns: Mapping[str, str], rows: Iterable[Iterable[str]], caption: str | None = None) -> Table:
    """A table; ``columns`` maps each heading to ``left`` or ``right``.

    >>> table("t", {"codec": "left", "bits": "right"}, [["int8", "8.06"]]).row_count
    1
    """
    # As Text, because a cell may come from a file and must not be read as markup.
    title_text, caption_text = Text(title), Text(caption) if caption else None
    result = Table(title=title_text, caption=caption_text, title_justify="left", caption_justify="left")
    for heading, justify in columns.items():
        result.add_column(heading, justify="right" if justify == "right" else "left", no_wrap=True)
    for row in rows:
        result.add_row(*(Text(cell) for cell in row))
    return result


def show(what: Table) -> None:
    """Print a table in full: in a pipe or a narrow terminal its cells are not cut."""
    needed = console.measure(what, options=console.options.update(max_width=400)).maximum
    Console(width=max(needed, console.width)).print(what)


def size(nbytes: float) -> str:
    """Bytes for people.

    >>> size(999), size(1_234_567)
    ('999 B', '1.2 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000 or unit == "GB":
            break
        nbytes /= 1000
    return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
