"""Runs as one HTML file: the dashboard's page with its styles, scripts and data inside, and nothing outside."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import time
from typing import Any, Final

import gradwire
from gradwire.dashboard import pages, views
from gradwire.dashboard.store import Store

__all__ = ["report"]

_HISTORY: Final = 60  # points of a layer's


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
    data = _data(store)
    title = ", ".join(run["name"] for run in data["runs"][:3]) or "no runs"
    return _page(title, data).encode("utf-8", "replace"), data["runs"]


def _data(store: Store) -> dict[str, Any]:
    runs = store.overview(-1)["runs"]
    data: dict[str, Any] = {"made": time.time(), "gradwire": gradwire.__version__, "runs": runs}
    data |= {"series": {}, "parts": {}, "layers": {}, "timeline": {}}
    for told in runs:
        with store.run(told["id"]) as run:
            data["series"][told["id"]] = views.series(run, views.GROUPS)
            data["parts"][told["id"]] = {name: make(run) for name, make in views.PARTS.items()}
            data["layers"][told["id"]] = [{"name": name} | _thinned(views.layer(run, name)) for name in run.layers]
            data["timeline"][told["id"]] = views.timeline(run)
    return data


def _thinned(history: dict[str, list[Any]]) -> dict[str, list[Any]]:
    every = -(-len(history["step"]) // _HISTORY) or 1
    return {name: column[::-every][::-1] for name, column in history.items()}  # with the latest


def _page(title: str, data: dict[str, Any]) -> str:
    style = "\n".join(pages.text(name) for name in pages.STYLES)
    script = "\n".join(pages.text(name) for name in pages.SCRIPTS)
    # Only what is in this file runs, whatever a run's strings say; nothing is loaded from anywhere.
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "img-src blob: data:; base-uri 'none'; form-action 'none'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    head += f'<meta name="referrer" content="no-referrer">\n<style>{style}</style>'
    end = f'<script type="application/json" id="data">{_embedded(data)}</script>\n<script>{script}</script>'
    page = pages.text("index.html").replace("<title>gradwire</title>", f"<title>{html.escape(title)}</title>")
    return page.replace("<!-- head -->", head).replace("<!-- data -->", end)


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _embedded(data: Any) -> str:
    """JSON that no HTML parser takes for the end of its element, or for a comment."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
