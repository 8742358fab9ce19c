"""Losses of trainings as a picture: against the seconds under each link, and against the bytes a rank sends."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from gradwire.benchmarks.hooks import PEERS
from gradwire.benchmarks.training import TrainingReport
from gradwire.errors import ConfigError
from gradwire.extras import require

__all__ = ["draw"]

_OURS: Final = ("#0b5394", "#45b3e0", "#0b8043", "#93c47d", "#674ea7", "#e066c8")
_PEERS: Final = ("#222222", "#8f8f8f", "#c0c0c0", "#f6b26b", "#e69138", "#b45f06", "#cc4125", "#a64d79")

_WIDE: Final = 10  # from here on losses are drawn on a logarithmic scale


def draw(report: TrainingReport, file: Path) -> None:
    """Draw validation losses: one panel a link, and one for bytes."""
    if not report.validations:
        raise ConfigError("`--plot` needs losses: give `--curve-steps` or `--curves` too.")
    figure_module: Any = require("matplotlib.figure", purpose="`--plot`")
    ticker: Any = require("matplotlib.ticker", purpose="`--plot`")
    counted = all(steps.wire_bytes for name, steps in next(iter(report.links.values())).items() if name in PEERS)
    panels = [*report.links, *(["bytes"] if counted else [])]
    figure = figure_module.Figure(figsize=(4.2 * len(panels), 4.2), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    colours = _colours(list(report.validations))
    for panel, axis in zip(panels, axes, strict=True):
        for name in report.validations:
            steps, losses = [list(each) for each in zip(*report.curve(name), strict=True)]
            axis.plot(_places(report, panel, name, steps), losses, label=name, color=colours[name], linewidth=1.4,
                      linestyle="--" if name in PEERS else "-")  # fmt: skip
        axis.set_xscale("log")
        axis.xaxis.set_minor_formatter(ticker.NullFormatter())
        axis.set_xlabel("MB sent by a rank" if panel == "bytes" else f"seconds, {panel}")
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("validation loss")
    losses = [loss for name in report.validations for _, loss in report.curve(name)]
    if max(losses) > _WIDE * min(losses):
        axes[0].set_yscale("log")
    handles, labels = axes[0].get_legend_handles_labels()
    title = f"{report.settings.task}, {report.settings.workers} workers"
    figure.legend(handles, labels, loc="outside upper center", ncols=6, fontsize=8, frameon=False, title=title)
    figure.savefig(file, dpi=150)


def _places(report: TrainingReport, panel: str, name: str, steps: list[Any]) -> list[float]:
    if panel != "bytes":
        return [report.seconds_of(name, panel, step) for step in steps]
    return [report.bytes_of(name, step) / 1e6 for step in steps]


def _colours(names: list[str]) -> dict[str, str]:
    ours, peers = [n for n in names if n not in PEERS], [n for n in names if n in PEERS]
    mine = {name: _OURS[i % len(_OURS)] for i, name in enumerate(ours)}
    return mine | {name: _PEERS[i % len(_PEERS)] for i, name in enumerate(peers)}
