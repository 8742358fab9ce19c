"""The results as a picture: bars of time over a copy, on a logarithmic scale."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from gradwire.benchmarks.codecs import GROUPS, Report, Result
from gradwire.errors import ConfigError
from gradwire.extras import require

__all__ = ["check", "draw"]

_OURS: Final = "#0b5394"
_PEERS: Final = {
    "eager": "#d0d0d0",
    "eager, tuned": "#b7b7b7",
    "eager, transposed": "#8f8f8f",
    "torch.topk only": "#a99bbd",
    "compiled": "#666666",
    "torchao": "#f6b26b",
    "torchao compiled": "#c8690a",
    "torchao kernel": "#7f3f00",
    "bitsandbytes": "#7cb37c",
}
_BAR_INCHES: Final = 0.145
_GAP_BARS: Final = 0.7  # between two operations
_TITLE_BARS: Final = 2.6  # between two groups
_LABEL: Final = 6.5  # points


def check(file: Path) -> None:
    """Raise now what drawing would raise after the measurement."""
    require("matplotlib", purpose="`--plot`")
    if file.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"`--plot` must be a .png, .svg or .pdf file; got {str(file)!r}.")
    if not os.access(file if file.exists() else file.parent, os.W_OK) or not file.parent.is_dir():
        raise ConfigError(f"`--plot` must be a file that can be written, in an existing folder; got {str(file)!r}.")


def draw(report: Report, file: Path) -> None:
    """Draw the results at the first number of threads."""
    check(file)
    figure_module: Any = require("matplotlib.figure", purpose="`--plot`")
    results = [result for result in report.results if result.threads == report.settings.threads[0]]
    groups = [[r for r in results if r.group == group] for group in GROUPS]
    columns = _balanced([group for group in groups if group])
    heading = 0.62 if len(columns) > 1 else 0.86  # inches; the legend of a narrow picture takes more lines
    height = max(sum(map(_bars, column)) for column in columns) * _BAR_INCHES + heading + 0.35
    figure = figure_module.Figure(figsize=(6.2 * len(columns), height), dpi=150)
    span = _span(results)
    top, bottom = 1 - heading / height, 0.35 / height
    for position, column in enumerate(columns):
        y = top
        for group in column:
            share = _bars(group) * _BAR_INCHES / height
            bars = (_bars(group) - _TITLE_BARS) * _BAR_INCHES / height
            left = (position + 0.2) / len(columns)
            axes = figure.add_axes((left, max(y - share, bottom), 0.77 / len(columns), bars))
            _panel(axes, group, span, last=group is column[-1])
            y -= share
    _heading(figure, report, results)
    try:
        figure.savefig(file)
    except OSError as error:
        raise ConfigError(f"`--plot` cannot be written: {error}") from error


def _balanced(groups: list[list[Result]]) -> list[list[list[Result]]]:
    """One column, or two of about the same height."""
    total = sum(map(_bars, groups))
    if total < 30:
        return [groups]
    sums = [sum(map(_bars, groups[:i])) for i in range(1, len(groups))]
    if not sums:
        return [groups]
    cut = min(range(len(sums)), key=lambda i: max(sums[i], total - sums[i])) + 1
    return [groups[:cut], groups[cut:]]


def _bars(group: list[Result]) -> float:
    return sum(1 + len(result.peers) + _GAP_BARS for result in group) + _TITLE_BARS


def _span(results: list[Result]) -> tuple[float, float]:
    values = [value for r in results for name in (None, *r.peers) if (value := r.over_limit(name)) is not None]
    return min(0.4, min(values) * 0.7), max(values) * 2.2


def _panel(axes: Any, group: list[Result], span: tuple[float, float], *, last: bool) -> None:
    y, ticks, names = 0.0, [], []
    for result in group:
        start = y
        for name in (None, *sorted(result.peers, key=list(_PEERS).index)):
            value = result.over_limit(name)
            assert value is not None
            axes.barh(y, value - span[0], left=span[0], height=0.86, color=_PEERS[name] if name else _OURS, zorder=2)
            text = axes.text(value * 1.04, y, _figure(value), va="center", fontsize=_LABEL, zorder=4)
            text.set_fontweight("normal" if name else "bold")
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.4})  # the limit's line goes behind it
            y += 1
        ticks.append((start + y - 1) / 2)
        names.append(result.name + (" *" if result.limit == "read" else ""))
        y += _GAP_BARS
    axes.set_xscale("log")
    axes.set_xlim(*span)
    axes.set_ylim(y - 0.4, -0.8)
    axes.set_yticks(ticks, names, fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", which="both", labelsize=7, labelbottom=last)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.axvline(1, color="#cc0000", linewidth=1, zorder=3)
    axes.grid(axis="x", color="#e5e5e5", linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.set_title(GROUPS[group[0].group], fontsize=9, fontweight="bold", loc="left", pad=3)


def _figure(value: float) -> str:
    return f"{value:.2f}" if value < 1 else f"{value:.1f}" if value < 10 else f"{value:.0f}"


def _heading(figure: Any, report: Report, results: list[Result]) -> None:
    lines: Any = require("matplotlib.lines", purpose="`--plot`")
    patches: Any = require("matplotlib.patches", purpose="`--plot`")
    taking_part = [name for name in _PEERS if any(name in result.peers for result in results)]
    handles = [patches.Patch(color=_OURS, label="gradwire")]
    handles += [patches.Patch(color=_PEERS[name], label=name) for name in taking_part]
    handles.append(lines.Line2D([], [], color="#cc0000", linewidth=1, label="limit: one copy (* one read)"))
    settings, height = report.settings, figure.get_figheight()
    threads = settings.threads[0]
    where = report.machine["device"] + ("" if settings.device == "cuda" else f", {threads} thread{'s'[: threads > 1]}")
    title = "Time over that of a copy (log scale; shorter is better)"
    figure.text(0.015, 1 - 0.1 / height, title, fontsize=10, fontweight="bold", va="top")
    figure.text(0.015, 1 - 0.3 / height, f"{settings.numel:,} float32 on {where}", fontsize=8.5, va="top")
    figure.legend(
        handles=handles,
        ncols=len(handles) if figure.get_figwidth() > 8 else 4,
        fontsize=7.5,
        frameon=False,
        handlelength=1.2,
        loc="upper left",
        bbox_to_anchor=(0.006, 1 - 0.42 / height),
    )
