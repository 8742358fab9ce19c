"""A run's folder, read while the run goes on: docs/telemetry.md says what is in it.

The files may come from anybody. A line that is no record is counted and left out; strings are kept as they are, cut to
a length, for whoever shows them to escape; numbers are finite or NaN.
"""

from __future__ import annotations

import json
import os
import re
import time
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gradwire.dashboard.columns import CoordinatorTable, StepTable, number, whole
from gradwire.dashboard.lines import Lines
from gradwire.errors import ConfigError

__all__ = ["Coordinator", "Layer", "Rank", "Run"]

_RANK: Final = re.compile(r"rank-(\d{1,6})\.jsonl", re.ASCII)
_COORDINATOR: Final = "coordinator.jsonl"
_KEPT: Final = 500  # notes, plans, validations
_LAYERS: Final = 5000
_HISTORY: Final = 200  # of a layer; then every second entry is given up
_TEXT: Final = 2000  # characters of a string that is kept
_ANYWHERE: Final = 1 << 20  # a rank no file has

_PARTS: Final = {
    "start": "about",
    "done": "about",
    "layout": "about",
    "step": "steps",
    "quality": "layers",
    "plan": "plans",
    "note": "notes",
    "drop": "notes",
    "validation": "validations",
    "coordinator": "coordinator",
}
_decode: Final = json.JSONDecoder(parse_constant=lambda _: None).decode


class Rank:
    """What one rank wrote: ``columns`` has a number a step, NaN where the record has none.

    >>> rank = Rank()
    >>> len(rank.columns["loss"]), rank.last
    (0, None)
    """

    def __init__(self) -> None:
        self.start: dict[str, Any] = {}
        self.starts = 0
        self.done: dict[str, Any] | None = None
        self.last: dict[str, Any] | None = None
        self.time = 0.0  # of its latest record
        self.table = StepTable()

    @property
    def columns(self) -> dict[str, array[float]]:
        """Step, time, loss and so on: the fields of a ``step`` record, and totals."""
        return self.table.columns


class Coordinator:
    """What a coordinator's server wrote, once a second; ``staleness`` is its latest histogram: age -> gradients.

    >>> Coordinator().staleness
    {}
    """

    def __init__(self) -> None:
        self.table = CoordinatorTable()
        self.staleness: dict[int, float] = {}

    @property
    def columns(self) -> dict[str, array[float]]:
        """Time, version, applied, refused, queued, workers, received and sent; nothing if there is no coordinator."""
        return self.table.columns


@dataclass
class Layer:
    """How well a parameter's gradients travel: the latest, and ``history`` with (step, error, residual).

    >>> Layer("int4", 0.01, 0.1).history
    []
    """

    codec: str
    error: float
    residual: float
    history: list[tuple[int, float, float]] = field(default_factory=list)

    def _remember(self, step: int) -> None:
        while self.history and self.history[-1][0] >= step:
            self.history.pop()
        self.history.append((step, self.error, self.residual))
        if len(self.history) > _HISTORY:
            del self.history[-2::-2]


class Run:
    """A run's folder. :meth:`poll` reads what is new; everything else is what has been read so far.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / "rank-0.jsonl").write_text('{"event":"step","time":1.5,"step":1,"loss":2.5}\\n')
    ...     run = Run(Path(folder))
    ...     run.poll()
    ...     run.ranks[0].columns["loss"][-1]
    False
    2.5
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise ConfigError(f"`RUN_DIR` must be the folder of a run; {str(folder)!r} is none.")
        self.name = self.folder.name or self.folder.resolve().name or str(self.folder)
        self.version = 0  # another number whenever something was read
        self.versions = dict.fromkeys(_PARTS.values(), 0)  # and a part of the page that shows it
        self._clear()

    def _clear(self) -> None:
        self.ranks: dict[int, Rank] = {}
        self.notes: list[dict[str, Any]] = []
        self.drops: list[dict[str, Any]] = []
        self.validations: list[dict[str, Any]] = []
        self.plans: list[dict[str, Any]] = []
        self.layout: dict[str, Any] | None = None
        self.layers: dict[str, Layer] = {}
        self.coordinator = Coordinator()
        self.skipped = 0
        self.time = 0.0  # of the latest record
        self.dropped = 0  # of `drops`, with those that are no longer kept
        self._files: dict[int | None, Lines] = {}
        self._teller: dict[str, int] = {}  # whose layout, layers, ... are shown: those of the lowest rank
        self._noted: dict[tuple[Any, Any], dict[str, Any]] = {}
        self._looked = False  # whether the sizes of files are known

    def poll(self, seconds: float = 0.2) -> bool:
        """Read what is new, for about so long at most; True if there is more to read."""
        end = time.monotonic() + seconds
        self._find()
        if not all(lines.refresh() for lines in self._files.values()):
            self._clear()
            self.versions = {part: version + 1 for part, version in self.versions.items()}
            self._find()
            for lines in self._files.values():
                lines.refresh()
        self._looked = True
        while True:
            waiting = [(rank, lines) for rank, lines in self._files.items() if lines.more]
            for rank, lines in waiting:
                self._read(rank, lines)
                if time.monotonic() > end:
                    return any(each.more for each in self._files.values())
            if not waiting:
                return False

    @property
    def progress(self) -> float:
        """How much of the files has been read, from 0 to 1."""
        if not self._looked:
            return 0.0
        size = sum(lines.size for lines in self._files.values())
        return min(sum(lines.position for lines in self._files.values()) / size, 1.0) if size else 1.0

    @property
    def reading(self) -> bool:
        """Whether there is more to read, as far as known."""
        return not self._looked or any(lines.more for lines in self._files.values())

    @property
    def started(self) -> float:
        """When it was started, for the last time if it was started again; 0 if that is not known."""
        told = [number(rank.start.get("time")) for rank in self.ranks.values()]
        return max((each for each in (*told, *self.coordinator.columns["time"][:1]) if each > 0), default=0.0)

    @property
    def state(self) -> str:
        """``running``, ``done`` or ``failed``; ``empty`` if there is nothing yet."""
        ends = [rank.done for rank in self.ranks.values()]
        if any(end is not None and end.get("status") != "done" for end in ends):
            return "failed"
        if ends and all(end is not None for end in ends):
            return "done"
        return "running" if ends or len(self.coordinator.table) else "empty"

    @property
    def first(self) -> Rank | None:
        """The rank whose loss and step are shown for all: the lowest that has steps, or the lowest."""
        ordered = [self.ranks[number] for number in sorted(self.ranks)]
        return next((rank for rank in ordered if len(rank.table)), ordered[0] if ordered else None)

    def step(self, rank: int, step: int) -> dict[str, Any] | None:
        """The whole record of a step (or of the one before it, where it has none), read again from the file."""
        if rank not in self.ranks or rank not in self._files:
            return None
        table = self.ranks[rank].table
        row = table.row_of(step)
        if row is None:
            return None
        record = _record(self._files[rank].line_at(table.offsets[row]))
        return record if record is not None and record.get("step") == table.columns["step"][row] else None

    def _find(self) -> None:
        try:
            names = os.listdir(self.folder)
        except OSError:
            return
        for name in names:
            match = _RANK.fullmatch(name)
            rank = int(match[1]) if match else None
            if (match or name == _COORDINATOR) and rank not in self._files:
                self._files[rank] = Lines(self.folder / name)
                self.version += 1

    def _read(self, rank: int | None, lines: Lines) -> None:
        skipped = lines.too_long
        found = lines.block()
        for offset, line in found:
            record = _record(line)
            if record is None or not self._take(rank, record, offset):
                self.skipped += bool(line)
        self.skipped += lines.too_long - skipped
        self.version += 1

    def _take(self, rank: int | None, record: dict[str, Any], offset: int) -> bool:
        """Whether the record was understood; one of an event that is not known is none of ours, and is."""
        at = number(record.get("time"))
        event = record.get("event")
        if not isinstance(event, str):
            return False
        if at > self.time:
            self.time = at
        part = _PARTS.get(event)
        if part is None:
            return True
        self.versions[part] += 1
        if rank is None:
            return self._take_coordinator(record, offset) if event == "coordinator" else True
        known = self.ranks.get(rank)
        if known is None:
            known = self.ranks[rank] = Rank()
        if at > known.time:
            known.time = at
        if event == "step":
            step = whole(record.get("step"))
            if step is None:
                return False
            known.table.add(step, record, offset)
            known.last = record
            return True
        take = _TAKERS.get(event)
        return take is None or take(self, rank, known, record)

    def _take_coordinator(self, record: dict[str, Any], offset: int) -> bool:
        self.coordinator.table.add(record, offset)
        ages = record.get("staleness")
        if isinstance(ages, dict):
            counts = (
                (age, number(count)) for age, count in list(ages.items())[:_LAYERS] if re.fullmatch(r"\d{1,9}", age)
            )
            self.coordinator.staleness = {int(age): count for age, count in counts if count >= 0}
        return True

    def _take_start(self, number: int, rank: Rank, record: dict[str, Any]) -> bool:
        rank.start, rank.done = record, None
        rank.starts += 1
        return True

    def _take_done(self, number: int, rank: Rank, record: dict[str, Any]) -> bool:
        rank.done = record
        return True

    def _take_layout(self, number: int, rank: Rank, record: dict[str, Any]) -> bool:
        if not isinstance(record.get("buckets"), list):
            return False
        if self._tells("layout", number):
            self.layout = record
        return True

    def _take_quality(self, rank: int, _: Rank, record: dict[str, Any]) -> bool:
        step, layers = whole(record.get("step")), record.get("layers")
        if step is None or not isinstance(layers, dict):
            return False
        if not self._tells("quality", rank):
            return True
        for name, told in layers.items():
            if not isinstance(told, dict):
                return False
            name = _text(name)
            layer = self.layers.get(name)
            if layer is None:
                if len(self.layers) >= _LAYERS:
                    continue
                layer = self.layers[name] = Layer("", 0.0, 0.0)
            layer.codec = _text(told.get("codec"))
            layer.error, layer.residual = number(told.get("error")), number(told.get("residual"))
            layer._remember(step)
        return True

    def _take_plan(self, number: int, rank: Rank, record: dict[str, Any]) -> bool:
        if not isinstance(record.get("buckets", []), list):
            return False
        if self._tells("plan", number):
            _keep(self.plans, record, _KEPT // 5)
        return True

    def _take_validation(self, rank: int, _: Rank, record: dict[str, Any]) -> bool:
        step = whole(record.get("step"))
        if step is None:
            return False
        if self._tells("validation", rank):
            while self.validations and self.validations[-1]["step"] >= step:
                self.validations.pop()
            _keep(self.validations, record, 4 * _KEPT)
        return True

    def _take_note(self, rank: int, _: Rank, record: dict[str, Any]) -> bool:
        what = record.get("what")
        if not isinstance(what, str):
            return False
        key = (whole(record.get("step")), _text(what))
        note = self._noted.get(key)
        if note is None:
            note = {"time": number(record.get("time")), "step": key[0], "what": key[1], "ranks": []}
            if len(self.notes) == _KEPT:
                self._noted.pop((self.notes[0]["step"], self.notes[0]["what"]), None)
            _keep(self.notes, note)
            self._noted[key] = note
        if rank not in note["ranks"]:
            note["ranks"].append(rank)
        return True

    def _take_drop(self, number: int, rank: Rank, record: dict[str, Any]) -> bool:
        if not isinstance(record.get("what"), str):
            return False
        if self._tells("drop", number):
            _keep(self.drops, record)
            self.dropped += 1
        return True

    def _tells(self, event: str, rank: int) -> bool:
        """All ranks may tell the same: it is taken from the lowest that does."""
        teller = self._teller.get(event, _ANYWHERE)
        if rank > teller:
            return False
        if rank < teller < _ANYWHERE:
            self._forget(event)
        self._teller[event] = rank
        return True

    def _forget(self, event: str) -> None:
        if event == "quality":
            self.layers.clear()
        elif event == "drop":
            self.drops.clear()
            self.dropped = 0
        elif event == "plan":
            self.plans.clear()
        elif event == "validation":
            self.validations.clear()


_TAKERS: Final = {
    "start": Run._take_start,
    "done": Run._take_done,
    "layout": Run._take_layout,
    "quality": Run._take_quality,
    "plan": Run._take_plan,
    "validation": Run._take_validation,
    "note": Run._take_note,
    "drop": Run._take_drop,
}


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = _decode(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _keep(records: list[dict[str, Any]], record: dict[str, Any], most: int = _KEPT) -> None:
    records.append(record)
    del records[:-most]


def _text(value: Any) -> str:
    return value[:_TEXT] if isinstance(value, str) else ""
