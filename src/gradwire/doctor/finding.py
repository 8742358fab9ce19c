"""One thing that was looked at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["Finding", "Level", "worst"]

Level = Literal["ok", "warning", "problem"]
_ORDER: Final[tuple[Level, ...]] = ("ok", "warning", "problem")


@dataclass(frozen=True)
class Finding:
    """What was found, in a line; and what to do about it, as a command where there is one.

    ``problem``: gradwire does not work like this. ``warning``: it works, worse than it could, or not with others.

    >>> Finding("gloo", "problem", "not in this torch", fix="pip install torch").level
    'problem'
    """

    name: str
    level: Level
    fact: str
    fix: str | None = None


def worst(findings: Iterable[Finding]) -> Level:
    """The worst level of several.

    >>> worst([Finding("a", "ok", ""), Finding("b", "warning", "")])
    'warning'
    """
    return max((each.level for each in findings), key=_ORDER.index, default="ok")
