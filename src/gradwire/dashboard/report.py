"""Runs as one HTML file: the dashboard's page with its styles, scripts and data inside, and nothing outside."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import gradwire
from gradwire.dashboard import pages, views
from gradwire.dashboard.runs import Run
from gradwire.dashboard.store import Store

__all__ = ["report"]

_HISTORY: Final = 60  # points of a layer's
_LAYER_POINTS: Final = 300_000  # of all layers: with more than 5,000 each has fewer
_POINTS: Final = 60_000  # of a chart of all runs: with more than 40 each has fewer
_FEWEST: Final = 300


def report(store: Store) -> tuple[bytes, list[dict[str, Any]]]:
    """All runs of ``store`` as a page that opens without a server, and a line about each.

    The size does not grow with the number of steps: charts hold what the dashboard would show.

    >>> import tempfile, pathlib
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page, runs = report(Store([pathlib.Path(folder)]))
    >>> page[:15], runs
    (b'<!doctype html>', [])
    """
    store.read_all()
    runs = store.overview(-1)["runs"]
    title = ", ".join(run["name"] for run in runs[:3]) or "no runs"
    before, after = _page(title)
    return b"".join([before, *_data(store, runs), after]), runs


def _data(store: Store, runs: list[dict[str, Any]]) -> Iterator[bytes]:
    """The data as JSON, run after run: not all of it is in memory as objects."""
    known = {"made": time.time(), "gradwire": gradwire.__version__, "runs": runs}
    yield _embedded(known)[:-1]
    points = max(_FEWEST, min(views.POINTS, _POINTS // max(len(runs), 1)))
    layers = 0
    for each in runs:
        with store.run(each["id"]) as run:
            layers += len(run.layers)
    history = max(2, min(_HISTORY, _LAYER_POINTS // max(layers, 1)))
    sections: dict[str, Callable[[Run], Any]] = {
        "series": lambda run: views.series(run, views.GROUPS, points=points),
        "parts": lambda run: {name: make(run) for name, make in views.PARTS.items()},
        "layers": lambda run: [{"name": name} | _thinned(views.layer(run, name), history) for name in run.layers],
        "timeline": views.timeline,
    }
    for section, make in sections.items():
        yield f',"{section}":{{'.encode()
        for place, each in enumerate(runs):
            with store.run(each["id"]) as run:
                yield (b"," if place else b"") + _embedded(each["id"]) + b":" + _embedded(make(run))
        yield b"}"
    yield b"}"


def _thinned(history: dict[str, list[Any]], points: int) -> dict[str, list[Any]]:
    every = -(-len(history["step"]) // points) or 1
    return {name: column[::-every][::-1] for name, column in history.items()}  # with the latest


def _page(title: str) -> tuple[bytes, bytes]:
    """What is before the data, and after it."""
    style = "\n".join(pages.text(name) for name in pages.STYLES)
    script = "\n".join(pages.text(name) for name in pages.SCRIPTS)
    # Only what is in this file runs, whatever a run's strings say; nothing is loaded from anywhere.
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "img-src blob: data:; base-uri 'none'; form-action 'none'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    head += f'<meta name="referrer" content="no-referrer">\n<style>{style}</style>'
    end = f'<script type="application/json" id="data"><!-- here --></script>\n<script>{script}</script>'
    page = pages.text("index.html").replace("<title>gradwire</title>", f"<title>{html.escape(title)}</title>")
    page = page.replace("<!-- head -->", head).replace("<!-- data -->", end)
    before, _, after = page.rpartition("<!-- here -->")  # a title has none: it is escaped
    return before.encode("utf-8", "replace"), after.encode("utf-8", "replace")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _embedded(data: Any) -> bytes:
    """JSON that no HTML parser takes for the end of its element, or for a comment."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.encode().replace(b"&", b"\\u0026").replace(b"<", b"\\u003c").replace(b">", b"\\u003e")
