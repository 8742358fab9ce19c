"""The files of the page, out of the package: served one by one, or all in one for a report."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Final

__all__ = ["SCRIPTS", "STYLES", "assets", "page", "text"]

STYLES: Final = ("style.css",)
SCRIPTS: Final = ("format.js", "charts.js", "timeline.js", "tables.js", "source.js", "app.js")
"""In the order in which they are run; each adds to one object, ``gradwire``."""


@cache
def text(name: str) -> str:
    """A file of the page."""
    return (files("gradwire.dashboard") / "page" / name).read_text("utf-8")


@cache
def page() -> bytes:
    """The page as it is served, with its styles and scripts as files beside it.

    >>> page()[:15]
    b'<!doctype html>'
    """
    head = '<link rel="icon" href="/icon.svg">\n'
    head += "".join(f'<link rel="stylesheet" href="/{name}">\n' for name in STYLES)
    scripts = "".join(f'<script src="/{name}" defer></script>\n' for name in SCRIPTS)
    return text("index.html").replace("<!-- head -->", head + scripts).replace("<!-- data -->", "").encode()


def assets() -> dict[str, tuple[str, bytes]]:
    """What is served beside the page: path -> type and bytes."""
    kinds = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}
    names = (*STYLES, *SCRIPTS, "icon.svg")
    return {f"/{name}": (kinds[name.rsplit(".", 1)[1]], text(name).encode()) for name in names}
