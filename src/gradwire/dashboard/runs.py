"""A run's folder, read while the run goes on: docs/telemetry.md says what is in it.

The files may come from anybody. A line that is no record is counted and left out; strings are kept as they are, cut to
a length, for whoever shows them to escape; numbers are finite or NaN.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import nsmallest
from pathlib import Path
from sys import intern
from typing import Any, Final

from gradwire.dashboard.columns import CoordinatorTable, StepTable, number, whole
from gradwire.dashboard.lines import Lines
from gradwire.dashboard.room import FILES, Room, Share, cost_of, pruned
from gradwire.errors import ConfigError

__all__ = ["Coordinator", "Layer", "Rank", "Run"]

_RANK: Final = re.compile(r"rank-(\d{1,6})\.jsonl", re.ASCII)
_COORDINATOR: Final = "coordinator.jsonl"
_KEPT: Final = 500  # notes, plans, validations
_LOOK_S: Final = 1.0  # for files that are new or have grown, while there is more to read
_LAYERS: Final = 5000
_HISTORY: Final = 200  # of a layer; then every second entry is given up
_TEXT: Final = 2000  # characters of a string that is kept
_NAME: Final = 300  # of a layer or a codec
_RANKS: Final = 256  # of a note
_NOTE: Final = 8 * _RANKS  # bytes of its ranks
_LAYER: Final = 1000  # bytes, and its names
_ENTRY: Final = 160  # bytes, of a layer's history
_VALUES: Final = 400_000  # of a record: each takes about a hundred bytes once it is read
_ANYWHERE: Final = 1 << 20  # a rank no file has
_VALIDATION: Final = ("time", "step", "loss", "accuracy")

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
    >>> len(rank.columns["loss"]), rank.done
    (0, None)
    """

    def __init__(self, share: Share | None = None) -> None:
        self.start: dict[str, Any] = {}
        self.starts = 0
        self.done: dict[str, Any] | None = None
        self.time = 0.0  # of its latest record
        self.table = StepTable(share)

    @property
    def columns(self) -> dict[str, array[float]]:
        """Step, time, loss and so on: the fields of a ``step`` record, and totals."""
        return self.table.columns


class Coordinator:
    """What a coordinator's server wrote, once a second; ``staleness`` is its latest histogram: age -> gradients.

    >>> Coordinator().staleness
    {}
    """

    def __init__(self, share: Share | None = None) -> None:
        self.table = CoordinatorTable(share)
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
    share: Share = field(default_factory=lambda: Room().share(), repr=False, compare=False)

    def _remember(self, step: int) -> None:
        while self.history and self.history[-1][0] >= step:
            self.history.pop()
            self.share.take_rows(-_ENTRY)
        if self.share.take_rows(_ENTRY):
            self.history.append((step, self.error, self.residual))
        elif self.history:  # the latest counts
            self.history[-1] = (step, self.error, self.residual)
        if len(self.history) > _HISTORY:
            self.thin()

    def nbytes(self) -> int:
        """What its history takes."""
        return _ENTRY * len(self.history)

    def thin(self) -> int:
        """Give up every second entry; how many bytes that were."""
        before = len(self.history)
        del self.history[-2::-2]
        freed = _ENTRY * (before - len(self.history))
        self.share.take_rows(-freed)
        return freed


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

    def __init__(self, folder: Path, room: Room | None = None) -> None:
        self.folder = Path(folder)
        self._share = (room or Room()).share()
        if not self.folder.is_dir():
            raise ConfigError(f"`RUN_DIR` must be the folder of a run; {str(folder)!r} is none.")
        self.name = self.folder.name or self.folder.resolve().name or str(self.folder)
        self.version = 0  # another number whenever something was read
        self.versions = dict.fromkeys(_PARTS.values(), 0)  # and a part of the page that shows it
        self._clear()

    def _clear(self) -> None:
        self._share.clear()
        self.ranks: dict[int, Rank] = {}
        self.notes: list[dict[str, Any]] = []
        self.drops: list[dict[str, Any]] = []
        self.validations: list[dict[str, Any]] = []
        self.plans: list[dict[str, Any]] = []
        self.layout: dict[str, Any] | None = None
        self.layers: dict[str, Layer] = {}
        self.coordinator = Coordinator(self._share)
        self.skipped = 0
        self.time = 0.0  # of the latest record
        self.dropped = 0  # of `drops`, with those that are no longer kept
        self._files: dict[int | None, Lines] = {}
        self._teller: dict[str, int] = {}  # whose layout, layers, ... are shown: those of the lowest rank
        self._noted: dict[tuple[Any, Any], dict[str, Any]] = {}
        self._looked = -math.inf  # when the sizes of files were looked at

    def poll(self, seconds: float = 0.2) -> bool:
        """Read what is new, for about so long at most; True if there is more to read."""
        begun = time.monotonic()
        end = begun + seconds
        if not self._more or begun > self._looked + _LOOK_S:
            self._look()
            self._looked = time.monotonic()
        while True:
            waiting = [(rank, lines) for rank, lines in self._files.items() if lines.more]
            for rank, lines in waiting:
                self._read(rank, lines)
                if time.monotonic() > end:
                    return self._more
            if not waiting:
                return False

    def _look(self) -> None:
        """Find files that are new, have grown or were written anew."""
        self._find()
        if not all(lines.refresh() for lines in self._files.values()):
            self._clear()
            self.versions = {part: version + 1 for part, version in self.versions.items()}
            self._find()
            for lines in self._files.values():
                lines.refresh()

    @property
    def _more(self) -> bool:
        return any(lines.more for lines in self._files.values())

    @property
    def progress(self) -> float:
        """How much of the files has been read, from 0 to 1."""
        if self._looked == -math.inf:
            return 0.0
        size = sum(lines.size for lines in self._files.values())
        return min(sum(lines.position for lines in self._files.values()) / size, 1.0) if size else 1.0

    @property
    def reading(self) -> bool:
        """Whether there is more to read, as far as known."""
        return self._looked == -math.inf or self._more

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
            with os.scandir(self.folder) as entries:
                found = nsmallest(FILES, self._new(entry.name for entry in entries))
        except OSError:
            return
        for rank, name in found:
            if self._share.take_file():
                self._files[rank if rank >= 0 else None] = Lines(self.folder / name)
                self.version += 1

    def _new(self, names: Iterable[str]) -> Iterator[tuple[int, str]]:
        """Files that are not read yet: their ranks, or -1, and names."""
        for name in names:
            match = _RANK.fullmatch(name)
            rank = int(match[1]) if match else None
            if (match or name == _COORDINATOR) and rank not in self._files:
                yield -1 if rank is None else rank, name

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
            known = self.ranks[rank] = Rank(self._share)
        if at > known.time:
            known.time = at
        if event == "step":
            step = whole(record.get("step"))
            if step is None:
                return False
            return known.table.add(step, record, offset)
        take = _TAKERS.get(event)
        return take is None or take(self, rank, known, record)

    def _take_coordinator(self, record: dict[str, Any], offset: int) -> bool:
        added = self.coordinator.table.add(record, offset)
        ages = record.get("staleness")
        if isinstance(ages, dict):
            counts = (
                (age, number(count)) for age, count in list(ages.items())[:_LAYERS] if re.fullmatch(r"\d{1,9}", age)
            )
            self.coordinator.staleness = {int(age): count for age, count in counts if count >= 0}
        return added

    def _kept(self, record: dict[str, Any], before: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """What can be kept of a record, in the place of another; None if there is no room."""
        record = pruned(record)
        more = cost_of(record) - (cost_of(before) if before else 0)
        return record if self._share.take_record(more) else None

    def _take_start(self, number: int, rank: Rank, record: dict[str, Any]) -> bool:
        rank.starts += 1
        self._drop(rank.done)
        rank.done = None
        kept = self._kept(record, rank.start)
        if kept is not None:
            rank.start = kept
        return kept is not None

    def _take_done(self, number: int, rank: Rank, record: dict[str, Any]) -> bool:
        kept = self._kept(record, rank.done)
        # How it ended must be known.
        rank.done = kept if kept is not None else {"status": _text(record.get("status"))[:_NAME]}
        return kept is not None

    def _drop(self, *records: dict[str, Any] | None) -> None:
        """Give back the room of records that are no longer kept."""
        self._share.take_record(-sum(cost_of(record) for record in records if record))

    def _keep(self, records: list[dict[str, Any]], record: dict[str, Any], most: int = _KEPT) -> bool:
        """Put a record behind others, of which the first go."""
        record = pruned(record)
        cost = cost_of(record)
        while len(records) >= most or not self._share.take_record(cost):
            if not records:
                return False
            self._drop(records.pop(0))
        records.append(record)
        return True

    def _take_layout(self, number: int, rank: Rank, record: dict[str, Any]) -> bool:
        if not isinstance(record.get("buckets"), list):
            return False
        if not self._tells("layout", number):
            return True
        kept = self._kept(record, self.layout)
        if kept is not None:
            self.layout = kept
        return kept is not None

    def _take_quality(self, rank: int, _: Rank, record: dict[str, Any]) -> bool:
        step, layers = whole(record.get("step")), record.get("layers")
        if step is None or not isinstance(layers, dict):
            return False
        if not self._tells("quality", rank):
            return True
        for name, told in layers.items():
            if not isinstance(told, dict):
                return False
            name = _text(name)[:_NAME]
            layer = self.layers.get(name)
            if layer is None:
                if len(self.layers) >= _LAYERS or not self._share.take_record(_LAYER + 2 * cost_of(name)):
                    continue
                layer = self.layers[name] = Layer("", 0.0, 0.0, share=self._share)
                self._share.add(layer)
            layer.codec = intern(_text(told.get("codec"))[:_NAME])
            layer.error, layer.residual = number(told.get("error")), number(told.get("residual"))
            layer._remember(step)
        return True

    def _take_plan(self, number: int, rank: Rank, record: dict[str, Any]) -> bool:
        if not isinstance(record.get("buckets", []), list):
            return False
        return not self._tells("plan", number) or self._keep(self.plans, record, _KEPT // 5)

    def _take_validation(self, rank: int, _: Rank, record: dict[str, Any]) -> bool:
        step = whole(record.get("step"))
        if step is None:
            return False
        if not self._tells("validation", rank):
            return True
        while self.validations and self.validations[-1]["step"] >= step:
            self._drop(self.validations.pop())
        return self._keep(self.validations, {name: record.get(name) for name in _VALIDATION}, 4 * _KEPT)

    def _take_note(self, rank: int, _: Rank, record: dict[str, Any]) -> bool:
        what = record.get("what")
        if not isinstance(what, str):
            return False
        key = (whole(record.get("step")), _text(what))
        note = self._noted.get(key)
        if note is None:
            note = {"time": number(record.get("time")), "step": key[0], "what": key[1]}
            cost = 2 * cost_of(note) + _NOTE
            while len(self.notes) >= _KEPT or not self._share.take_record(cost):
                if not self.notes:
                    return False
                self._forget_note()
            note["ranks"] = []
            self.notes.append(note)
            self._noted[key] = note
        if rank not in note["ranks"] and len(note["ranks"]) < _RANKS:
            note["ranks"].append(rank)
        return True

    def _forget_note(self) -> None:
        note = self.notes.pop(0)
        self._noted.pop((note["step"], note["what"]), None)
        del note["ranks"]
        self._share.take_record(-(2 * cost_of(note) + _NOTE))

    def _take_drop(self, number: int, rank: Rank, record: dict[str, Any]) -> bool:
        if not isinstance(record.get("what"), str):
            return False
        if not self._tells("drop", number):
            return True
        self.dropped += 1
        return self._keep(self.drops, record)

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
            for name, layer in self.layers.items():
                self._share.forget(layer)
                self._share.take_rows(-layer.nbytes())
                self._share.take_record(-(_LAYER + 2 * cost_of(name)))
            self.layers.clear()
        elif event in (told := {"drop": self.drops, "plan": self.plans, "validation": self.validations}):
            self._drop(*told[event])
            told[event].clear()
            self.dropped = 0 if event == "drop" else self.dropped


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
    if len(line) > _VALUES and line.count(b",") + line.count(b"[") + line.count(b"{") > _VALUES:
        return None
    try:
        record = _decode(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _text(value: Any) -> str:
    return value[:_TEXT] if isinstance(value, str) else ""
