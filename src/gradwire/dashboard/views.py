"""What the page and the report show of a run, as JSON: bounded in size, and with null where there is no number."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gradwire.dashboard.columns import number
from gradwire.dashboard.runs import Rank, Run
from gradwire.errors import ConfigError

__all__ = ["AXES", "GROUPS", "PARTS", "layer", "series", "summary", "timeline"]

Floats = npt.NDArray[np.float64]

POINTS: Final = 1500  # of a chart
RECENT: Final = 100  # steps that a worker's medians are of
_ITEMS: Final = 1000  # of a list or an object that is passed on
_DEPTH: Final = 8
_RANKS: Final = 256  # shown
_BARS: Final = 20_000  # of a timeline
_NAME: Final = 300  # characters

GROUPS: Final = {
    "loss": ("loss",),
    "time": ("compute_s", "exposed_s", "seconds"),
    "phases": ("encode_s", "wire_s", "decode_s"),
    "bytes": ("sent", "received", "ratio"),
}
"""Chart -> what it shows."""
AXES: Final = {"step": "step", "seconds": "seconds_total", "bytes": "sent_total"}
"""What losses are shown against -> the column of it."""


def summary(run: Run) -> dict[str, Any]:
    """A line about a run.

    >>> import tempfile, pathlib
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found = summary(Run(pathlib.Path(folder)))
    >>> found["state"], found["step"], found["loss"]
    ('empty', None, None)
    """
    rank = run.first or Rank()
    columns, start = rank.columns, rank.start
    sent, dense = _count(_last(columns["sent_total"])), _count(_last(columns["dense_total"]))
    ends = [each.done for each in run.ranks.values() if each.done is not None]
    bad = next((end for end in ends if end.get("status") != "done"), None)
    steps = number(start.get("steps"))
    return _cleaned(
        {
            "name": run.name,
            "state": run.state,
            "what": (bad or {}).get("what"),
            "codec": start.get("codec"),
            "ranks": start.get("ranks") if type(start.get("ranks")) is int else len(run.ranks),
            "parameters": _count(number(start.get("parameters"))),
            "planned": int(steps) if steps >= 1 else None,
            "step": _count(_last(columns["step"])),
            "loss": _latest(columns["loss"]),
            "seconds": _last(columns["seconds_total"]),
            "step_s": _middle(columns["seconds"]),
            "step_bytes": _count(_middle(columns["sent"])),
            "sent": sent,
            "dense": dense,
            "ratio": sent / dense if sent is not None and dense else None,
            "validation": run.validations[-1] if run.validations else None,
            "restarts": max(rank.starts - 1, 0),
            "dropped": run.dropped,
            "started": run.started or None,
            "time": run.time or None,
            "skipped": run.skipped,
            "reading": run.reading,
            "progress": run.progress,
        }
    )


def series(
    run: Run,
    groups: Iterable[str],
    axis: str = "step",
    low: float = -math.inf,
    high: float = math.inf,
    *,
    points: int = POINTS,
) -> dict[str, Any]:
    """The points of charts, at most about ``points`` each; a dent or a spike that lasts one step stays visible.

    ``low`` and ``high`` are in the unit of ``axis``: a part of the run in as many points as all of it.
    """
    rank = run.first or Rank()
    rows = slice(None)
    if axis not in AXES:
        raise ConfigError(f"`axis` must be one of {', '.join(AXES)}; got {axis!r}.")
    if low > -math.inf or high < math.inf:
        along = np.array(rank.columns[AXES[axis]])
        first, last = np.searchsorted(along, low, "left"), np.searchsorted(along, high, "right")
        rows = slice(max(int(first) - 1, 0), int(last) + 1)
    return {group: _group(rank, group, rows, points) for group in groups}


def _group(rank: Rank, group: str, rows: slice, points: int) -> dict[str, Any]:
    if group not in GROUPS:
        raise ConfigError(f"`groups` must be of {', '.join(GROUPS)}; got {group!r}.")
    values = {name: _column(rank, name, rows) for name in GROUPS[group]}
    shown = _sample(list(values.values()), points)
    along = {axis: np.array(rank.columns[column][rows])[shown] for axis, column in AXES.items()}
    return {name: _listed(column) for name, column in along.items()} | {
        "values": {name: _listed(column[shown]) for name, column in values.items()}
    }


def _column(rank: Rank, name: str, rows: slice) -> Floats:
    if name == "ratio":
        dense = np.array(rank.columns["dense"][rows])
        with np.errstate(all="ignore"):
            return np.where(dense > 0, np.array(rank.columns["sent"][rows]) / dense, np.nan)
    return np.array(rank.columns[name][rows])


def _sample(columns: list[Floats], points: int) -> npt.NDArray[np.int64]:
    """Rows to show: the least and the greatest of each column in each of equal stretches, and both ends."""
    rows = len(columns[0])
    if rows <= points:
        return np.arange(rows)
    width = math.ceil(rows / (points // (2 * len(columns))))
    stretches = math.ceil(rows / width)
    chosen = [np.array([0, rows - 1])]
    begin = np.arange(stretches) * width
    for column in columns:
        padded = np.full(stretches * width, np.nan)
        padded[:rows] = column
        table, missing = padded.reshape(stretches, width), np.isnan(padded).reshape(stretches, width)
        chosen.append(begin + np.where(missing, np.inf, table).argmin(axis=1))
        chosen.append(begin + np.where(missing, -np.inf, table).argmax(axis=1))
    return np.unique(np.concatenate(chosen))


def _listed(column: Floats) -> list[float | int | None]:
    """To seven digits: what a chart can show, in half the bytes."""
    with np.errstate(all="ignore"):
        scale = 10.0 ** (6 - np.floor(np.log10(np.abs(column))))
        short = np.where((scale > 0) & np.isfinite(scale) & (scale > 1), np.round(column * scale) / scale, column)
    return [None if not math.isfinite(each) else int(each) if each.is_integer() else each for each in short.tolist()]


def workers(run: Run) -> list[dict[str, Any]]:
    """A line about each rank; ``slow`` if it computes a quarter longer than the rank in the middle.

    A rank that has not said that it ended is ``running``: ``time`` is that of its last word, for whoever shows it.
    """
    found = [_worker(number, run.ranks[number]) for number in sorted(run.ranks)[:_RANKS]]
    computing = [each["compute_s"] for each in found if each["compute_s"] is not None]
    middle = median(computing) if computing else 0.0
    for each in found:
        each["slow"] = len(computing) > 1 and (each["compute_s"] or 0.0) > 1.25 * middle
    return found


def _worker(number: int, rank: Rank) -> dict[str, Any]:
    columns = rank.columns
    return _cleaned(
        {
            "rank": number,
            "host": rank.start.get("host"),
            "step": _count(_last(columns["step"])),
            "step_s": _middle(columns["seconds"]),
            "compute_s": _middle(columns["compute_s"]),
            "exposed_s": _middle(columns["exposed_s"]),
            "sent": _count(_last(columns["sent_total"])),
            "state": "running" if rank.done is None else rank.done.get("status"),
            "time": rank.time or None,
        }
    )


def timeline(run: Run, step: int | None = None) -> dict[str, Any]:
    """What each rank did in a step: the last one that all have, unless another is asked for."""
    ranks = sorted(run.ranks)[:_RANKS]
    last = [int(run.ranks[rank].columns["step"][-1]) for rank in ranks if len(run.ranks[rank].table)]
    if not last:
        return {"step": None, "last": None, "rows": []}
    # A rank that died long ago must not keep the others' last step from being shown.
    wanted = min(each for each in last if each >= max(last) - 10) if step is None else step
    rows, bars = [], 0
    for rank in ranks:
        record = run.step(rank, wanted)
        if record is not None:
            rows.append(_bars(rank, record, _BARS - bars))
            bars += len(rows[-1]["buckets"])
    return {"step": wanted, "last": max(last), "rows": rows}


def _bars(rank: int, record: dict[str, Any], most: int) -> dict[str, Any]:
    buckets = record.get("buckets")
    told = [each for each in buckets if isinstance(each, dict)] if isinstance(buckets, list) else []
    fields = ("codec", "sent", "dense", "encode_s", "wire_s", "decode_s", "ready_s", "done_s")
    row = {name: number(record.get(name)) for name in ("step", "seconds", "compute_s", "exposed_s", "sent")}
    return _cleaned(
        row | {"rank": rank, "buckets": [{name: _plain(each.get(name)) for name in fields} for each in told[:most]]}
    )


def _plain(value: Any) -> Any:
    """A number or a short text: a row of the timeline is of nothing else, and there are many."""
    return value[:_NAME] if isinstance(value, str) else value if isinstance(value, int | float) else None


def layers(run: Run) -> list[dict[str, Any]]:
    """How well each parameter's gradients travel."""
    return [
        {"name": name, "codec": each.codec, "step": each.history[-1][0]}
        | {"error": _value(each.error), "residual": _value(each.residual)}
        for name, each in run.layers.items()
    ]


def layer(run: Run, name: str) -> dict[str, Any]:
    """What there was of one parameter: steps, errors and residuals; empty lists if it is not known."""
    known = run.layers.get(name)
    history = known.history if known is not None else []
    return {
        "step": [step for step, _, _ in history],
        "error": [_value(error) for _, error, _ in history],
        "residual": [_value(residual) for _, _, residual in history],
    }


def _notes(run: Run) -> dict[str, Any]:
    notes = sorted(run.notes, key=lambda note: -math.inf if math.isnan(note["time"]) else note["time"])
    return _cleaned({"notes": notes, "drops": run.drops[-100:], "dropped": run.dropped})


def _about(run: Run) -> dict[str, Any]:
    rank = run.first or Rank()
    known = ("codec", "ranks", "parameters", "steps", "gradwire", "torch", "host", "pid", "time", "settings")
    layout = run.layout or {}
    return _cleaned(
        {
            "start": {name: rank.start[name] for name in known if name in rank.start},
            "starts": rank.starts,
            "ends": [
                {"rank": number, "status": each.done.get("status"), "what": each.done.get("what")}
                for number, each in sorted(run.ranks.items())[:_RANKS]
                if each.done is not None
            ],
            "layout": [
                {"names": each.get("names"), "numel": each.get("numel")}
                for each in layout.get("buckets", [])
                if isinstance(each, dict)
            ],
        }
    )


def _plans(run: Run) -> list[dict[str, Any]]:
    return [clean(plan) for plan in run.plans[-20:]]


def _validations(run: Run) -> list[dict[str, Any]]:
    """With the seconds and bytes of their steps, so that they fit on every axis."""
    rank, shown = run.first or Rank(), []
    for each in run.validations:
        row = rank.table.row_of(each["step"])
        at = {axis: rank.columns[name][row] if row is not None else None for axis, name in AXES.items()}
        shown.append(clean(at | {"step": each["step"], "loss": each.get("loss"), "accuracy": each.get("accuracy")}))
    return shown


def _coordinator(run: Run) -> dict[str, Any]:
    columns = {name: np.array(column) for name, column in run.coordinator.columns.items()}
    rows = len(columns["time"])
    if not rows:
        return {"rows": 0}
    with np.errstate(all="ignore"):
        rate = np.diff(columns["applied"], prepend=np.nan) / np.diff(columns["time"], prepend=np.nan)
    rate[~np.isfinite(rate) | (rate < 0)] = np.nan
    values = {"queued": columns["queued"], "rate": rate, "workers": columns["workers"]}
    shown = _sample(list(values.values()), POINTS)
    return {
        "rows": rows,
        "seconds": _listed((columns["time"] - columns["time"][0])[shown]),
        "values": {name: _listed(column[shown]) for name, column in values.items()},
        "now": {name: _value(_last(column)) for name, column in columns.items()},
        "staleness": sorted(run.coordinator.staleness.items())[:_ITEMS],
    }


PARTS: Final[dict[str, Callable[[Run], Any]]] = {
    "workers": workers,
    "layers": layers,
    "notes": _notes,
    "about": _about,
    "plans": _plans,
    "validations": _validations,
    "coordinator": _coordinator,
}
"""What there is beside charts and timelines, by name."""


def clean(value: Any, depth: int = 0) -> Any:
    """The same without what JSON or a browser has not, and not too much of it.

    >>> clean({"loss": float("nan"), "sent": 10**400, "what": "<b>"})
    {'loss': None, 'sent': None, 'what': '<b>'}
    """
    if isinstance(value, str):
        return value[:2000]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return value if type(value) is int and abs(value) < 1 << 53 else _value(number(value))
    if depth == _DEPTH:
        return "..."
    if isinstance(value, dict):
        return {str(key)[:300]: clean(each, depth + 1) for key, each in list(value.items())[:_ITEMS]}
    return [clean(each, depth + 1) for each in list(value)[:_ITEMS]] if isinstance(value, list | tuple) else None


def _cleaned(value: dict[str, Any]) -> dict[str, Any]:
    return {key: clean(each, 1) for key, each in value.items()}


def _value(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _last(column: Any) -> float | None:
    return float(column[-1]) if len(column) else None


def _count(value: float | None) -> int | None:
    """Of what is counted, such as steps or bytes: columns hold floats, and a median may lie between two."""
    return None if value is None or not math.isfinite(value) else round(value)


def _latest(column: Any) -> float | None:
    """The last that is a number, of the last hundred."""
    return next((each for each in reversed(column[-RECENT:]) if each == each), None)


def _middle(column: Any) -> float | None:
    known = [each for each in column[-RECENT:] if each == each]
    return median(known) if known else None
