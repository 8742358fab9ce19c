"""Pictures of plans: step times against the number of hosts, predictions against the clock."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradwire.benchmarks.plans import PlansReport
from gradwire.extras import require
from gradwire.planner import Plan

__all__ = ["draw_predictions", "draw_scaling"]

_COLOURS = ("#222222", "#45b3e0", "#0b5394", "#0b8043", "#e69138", "#674ea7")


def draw_scaling(hosts: Sequence[int], plans: Sequence[Plan], title: str, file: Path) -> None:
    """A line a method, and the plan's own."""
    axis, figure = _axis()
    for colour, name in zip(_COLOURS, plans[0].alternatives, strict=False):
        axis.plot(hosts, [1000 * plan.alternatives[name] for plan in plans], label=name, color=colour, linewidth=1.4)
    axis.plot(hosts, [1000 * plan.predicted_s for plan in plans], "o", label="plan", color="#cc4125", markersize=4)
    axis.plot(hosts, [1000 * plan.computing_s for plan in plans], ":", label="computing", color="#8f8f8f")
    axis.set(xscale="log", yscale="log", xlabel="hosts", ylabel="ms a step, expected", title=title)
    _finish(axis, figure, file)


def draw_predictions(report: PlansReport, file: Path) -> None:
    """Measured against predicted: a point a cell."""
    axis, figure = _axis()
    names = list(dict.fromkeys(cell.method for cell in report.cells))
    for colour, name in zip(_COLOURS, names, strict=False):
        cells = [cell for cell in report.cells if cell.method == name]
        x, y = [1000 * cell.measured_s for cell in cells], [1000 * cell.predicted_s for cell in cells]
        axis.plot(x, y, "o", label=name, color=colour, markersize=4, alpha=0.8)
    ends = [1000 * f(cell.measured_s for cell in report.cells) for f in (min, max)]
    axis.plot(ends, ends, color="#8f8f8f", linewidth=1)
    axis.fill_between(ends, [0.85 * e for e in ends], [1.15 * e for e in ends], color="#8f8f8f", alpha=0.2)
    share = f"{report.within(0.15):.0%} of {len(report.cells)} cells within 15%"
    axis.set(xscale="log", yscale="log", xlabel="ms a step, measured", ylabel="ms a step, expected", title=share)
    _finish(axis, figure, file)


def _axis() -> tuple[Any, Any]:
    figure_module: Any = require("matplotlib.figure", purpose="`--plot`")
    figure = figure_module.Figure(figsize=(6, 4.5), layout="constrained")
    return figure.subplots(), figure


def _finish(axis: Any, figure: Any, file: Path) -> None:
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, fontsize=8)
    figure.savefig(file, dpi=150)
