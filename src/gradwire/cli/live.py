"""The terminal view of a training: what its workers write into the run's folder, as it comes."""

from __future__ import annotations

import math
import statistics
import time
from array import array
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gradwire.cli.output import size
from gradwire.dashboard.runs import Rank, Run

__all__ = ["LiveView"]

_RECENT = 20  # steps whose median is shown
_BLOCKS = "▁▂▃▄▅▆▇█"
_BAR = 30  # characters
_COMPUTE, _EXPOSED, _ENCODE, _LOSS = "green", "yellow", "cyan", "magenta"


class LiveView:
    """Loss, where a step's time goes, bytes, a row a worker and the time that is left; nothing if it is no terminal.

    >>> import tempfile, io
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with LiveView(Run(Path(folder)), "digits, int4", Console(file=io.StringIO())) as view:
    ...         view.title
    'digits, int4'
    """

    def __init__(self, run: Run, title: str, console: Console) -> None:
        self.run, self.title = run, title
        self._started = time.monotonic()
        self._live = Live(console=console, transient=True, refresh_per_second=5, get_renderable=self.render)
        self._shown = console.is_terminal

    def __enter__(self) -> LiveView:
        if self._shown:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown:
            self._live.stop()

    def render(self) -> RenderableType:
        """Read what is new, and draw it."""
        self.run.poll(0.05)
        first = self.run.first
        if first is None or not len(first.columns["step"]):
            seconds = time.monotonic() - self._started
            return Text.assemble((self.title, "bold"), f"   starting workers, {seconds:.0f} s")
        return Group(self._head(first), self._numbers(first), Text(""), self._workers())

    def _head(self, first: Rank) -> RenderableType:
        columns, total = first.columns, first.start.get("steps")
        step = int(columns["step"][-1])
        line = Table.grid(padding=(0, 2))
        parts: list[RenderableType] = [Text(self.title, style="bold")]
        if isinstance(total, int) and total > 0:
            left = max(0, total - step) * _median(columns["seconds"])
            parts += [ProgressBar(total=total, completed=step, width=30), Text(f"step {step} of {total}")]
            parts.append(Text(f"{_clock(left)} left" if not math.isnan(left) else ""))
        else:
            parts.append(Text(f"step {step}"))
        line.add_row(*parts)
        return line

    def _numbers(self, first: Rank) -> RenderableType:
        columns = first.columns
        grid = Table.grid(padding=(0, 2))
        losses = [each for each in columns["loss"] if not math.isnan(each)]
        if losses:
            grid.add_row("loss", Text(f"{losses[-1]:.4f}"), Text(sparkline(losses, _BAR), style=_LOSS))
        seconds, compute, exposed, encode = (
            _median(columns[name]) for name in ("seconds", "compute_s", "exposed_s", "encode_s")
        )
        if not math.isnan(seconds):
            split = Text("")
            if not math.isnan(compute + exposed) and seconds > 0:
                split.append(_ms(compute, "computing"), style=_COMPUTE)
                split.append(_ms(exposed, "waiting"), style=_EXPOSED)
                split.append(f"{1000 * encode:.0f} ms encoding", style=_ENCODE)
                bar = Text("█" * round(_BAR * compute / seconds), style=_COMPUTE)
                bar.append("█" * max(0, _BAR - round(_BAR * compute / seconds)), style=_EXPOSED)
                split = Text.assemble(bar, "  ", split)
            grid.add_row("a step", Text(f"{1000 * seconds:.0f} ms"), split)
        sent, dense = sum(columns["sent"]), sum(columns["dense"])
        ratio = f"{sent / dense:.3f} of float32's {size(dense)}" if dense > 0 else ""
        grid.add_row("sent", Text(size(sent)), Text(ratio))
        return grid

    def _workers(self) -> Table:
        table = Table(box=None, padding=(0, 2), header_style="dim")
        for name in ("worker", "step", "a step", "computing", "encoding", "waiting", "decoding", "sent"):
            table.add_column(name, justify="right")
        for number, rank in sorted(self.run.ranks.items()):
            columns = rank.columns
            if not len(columns["step"]):
                continue
            times = (_median(columns[name]) for name in ("seconds", "compute_s", "encode_s", "exposed_s", "decode_s"))
            cells = [str(number), str(int(columns["step"][-1])), *map(_cell, times), size(columns["sent"][-1])]
            table.add_row(*(Text(cell) for cell in cells))
        return table


def sparkline(values: Sequence[float], width: int) -> str:
    """A line of blocks, the highest value the highest block.

    >>> sparkline([4.0, 2.0, 1.0], 3)
    '█▃▁'
    """
    parts = min(width, len(values))
    means = [statistics.fmean(values[len(values) * i // parts : len(values) * (i + 1) // parts]) for i in range(parts)]
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((each - low) * scale)] for each in means)


def _median(values: array[float]) -> float:
    known = [each for each in values[-_RECENT:] if not math.isnan(each)]
    return statistics.median(known) if known else math.nan


def _ms(seconds: float, what: str) -> str:
    return f"{1000 * seconds:.0f} ms {what}   "


def _cell(seconds: float) -> str:
    return "" if math.isnan(seconds) else f"{1000 * seconds:.0f} ms"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
