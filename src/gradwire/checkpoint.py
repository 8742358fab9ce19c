"""Checkpoints of a sharded training: a folder a checkpoint, a safetensors file a rank, and a marker that all are there.

A checkpoint is written into a folder of its own. Each rank writes its file, to the disk, under another name first; when
all have, the first rank writes ``COMPLETE`` with the number and checksums of the files. Without it a folder is not a
checkpoint, whenever the ranks were killed. A step that is saved again gets files of other names, its other edition, and
the first ones are removed once ``COMPLETE`` names the others: one of the two can always be loaded.
"""

from __future__ import annotations

import importlib
import json
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol
from zlib import crc32

import torch
from torch import Tensor

from gradwire.collectives.peers import Peers, tell, together
from gradwire.errors import CheckpointError, GradwireError, PeerError, WireError
from gradwire.files import read_json, read_whole, write_whole
from gradwire.tree import from_bytes, from_tensors, to_bytes, to_tensors

__all__ = [
    "Checkpointed",
    "latest_checkpoint",
    "load_checkpoint",
    "load_distributed_checkpoint",
    "save_checkpoint",
    "save_distributed_checkpoint",
]

_MARKER: Final = "COMPLETE"
_TAG: Final = 3
_LATE_S: Final = 5.0
_DCP: Final = "torch.distributed.checkpoint"
_TEXT: Final = "#tree"  # after the name of a rank: everything but its tensors
_SAVING: Final = "the saving of a checkpoint"
_LOADING: Final = "the loading of a checkpoint"
_MARKER_BYTES: Final = 4 << 20  # of 100,000 ranks it has 2.5 MB
_WORDS: Final = 400  # of an error, which may quote what a file holds


class Checkpointed(Protocol):
    """What can be saved: a :class:`~gradwire.ShardedOptimizerBase`."""

    @property
    def peers(self) -> Peers:
        """The ranks it is divided among."""
        ...

    @property
    def rounds(self) -> int:
        """Steps so far."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What this rank keeps."""
        ...

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Take back what this rank kept, or all ranks."""
        ...

    def fits(self, *states: Mapping[str, Any]) -> bool:
        """Whether what this rank kept is enough for it; asked again with what the first rank kept after its own."""
        ...


def save_checkpoint(
    folder: str | Path,
    optimizer: Checkpointed,
    extra: Mapping[str, Any] | None = None,
    *,
    keep: int = 2,
    shared: bool = True,
) -> Path:
    """Save an optimizer, the weights it moves and ``extra``, of tensors and plain values, as this rank has them.

    Every rank must call it, between steps, with the same folder, which all can reach. Of earlier checkpoints in it the
    last ``keep`` complete ones stay, this one among them. ``shared=False`` is for folders of each rank's own, whose
    files the caller brings together. Returns the path of the checkpoint.

    If it cannot be saved, every rank raises :class:`~gradwire.errors.CheckpointError` and removes what it wrote. An
    earlier checkpoint of the same step stays until the new one is complete.

    >>> import tempfile, torch, torch.distributed as dist
    >>> from gradwire import ShardedOptimizerBase
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> optimizer = ShardedOptimizerBase(torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save_checkpoint(folder, optimizer, {"epoch": 3})
    ...     latest_checkpoint(folder) == path, load_checkpoint(path, optimizer)
    (True, {'epoch': 3})
    >>> dist.destroy_process_group()
    """
    peers = optimizer.peers
    here = Path(folder) / f"step-{optimizer.rounds:010d}"
    data = together(peers, lambda: _packed(here, optimizer, extra), _TAG, _SAVING, CheckpointError)
    edition = int(tell(peers, f"{_next_edition(here)}", _TAG, _SAVING)[0])  # the first rank has the marker
    own, other = (here / _name(peers.rank, peers.size, each) for each in (edition, 1 - edition))

    def write() -> None:
        with _not_saved(here):
            here.mkdir(parents=True, exist_ok=True)
        _put(own, data)

    def complete(files: list[list[int]]) -> None:
        if peers.rank > 0:
            return
        with _not_saved(here):
            missing = _missing(here, [nbytes for _, nbytes in files], edition) if shared else []
        if missing:
            raise CheckpointError(
                f"the checkpoint {here} was not saved: the first rank does not see the files of ranks {missing}. "
                f"{folder} must be a folder that all ranks share."
            )
        marker = {"format": 1, "ranks": peers.size, "steps": optimizer.rounds, "edition": edition, "files": files}
        _put(here / _MARKER, json.dumps(marker).encode())
        for old in _complete(Path(folder))[:-keep] if keep else []:
            shutil.rmtree(old, ignore_errors=True)

    try:
        together(peers, write, _TAG, _SAVING, CheckpointError)
        lines = tell(peers, f"{crc32(data)} {len(data)}", _TAG, _SAVING)
        files = [[int(number) for number in line.split(" ")] for line in lines]
        together(peers, lambda: complete(files), _TAG, _SAVING, CheckpointError)  # no rank goes on before it counts
    except PeerError:  # the ranks that are left cannot know whether it counts: a marker may be there
        raise
    except Exception:
        _discard(own, edition, peers)
        raise
    with suppress(OSError):
        other.unlink(missing_ok=True)
    return here


def _packed(here: Path, optimizer: Checkpointed, extra: Mapping[str, Any] | None) -> bytes:
    with _not_saved(here):
        return to_bytes({"optimizer": optimizer.state_dict(), "extra": dict(extra or {})})


def _put(path: Path, data: bytes) -> None:
    with _not_saved(path.parent, f"{path.name} cannot be written: "):
        write_whole(path, data)


@contextmanager
def _not_saved(here: Path, what: str = "") -> Iterator[None]:
    try:
        yield
    except (PeerError, CheckpointError):
        raise
    except Exception as error:  # a state may hold anything
        raise CheckpointError(f"the checkpoint {here} was not saved: {what}{_sentence(error)}") from error


def _sentence(error: BaseException) -> str:
    """Return what an error says as a sentence, with its type if it is not one of ours."""
    kind = "" if isinstance(error, GradwireError | OSError) else f"{type(error).__name__}: "
    return f"{kind}{error}".removesuffix(".") + "."


def _discard(own: Path, edition: int, peers: Peers) -> None:
    """Remove what was written of a checkpoint that failed on some rank; every rank calls it.

    It stays if the marker names it: then only the folder could not be brought to the disk.
    """
    here = own.parent
    counts = tell(peers, "yes" if _edition(here) == edition else "", _TAG, _SAVING)[0]
    if counts:
        return
    with suppress(OSError):
        own.unlink(missing_ok=True)
    tell(peers, "", _TAG, _SAVING)  # the folder is empty once all ranks have done so
    with suppress(OSError):
        here.rmdir()


def _missing(here: Path, sizes: Sequence[int], edition: int) -> list[int]:
    """Ranks whose files are not there; those of a network file system may come a little later."""
    end = time.monotonic() + _LATE_S
    while True:
        missing = [rank for rank, size in enumerate(sizes) if not _has(here / _name(rank, len(sizes), edition), size)]
        if not missing or time.monotonic() > end:
            return missing
        time.sleep(0.05)


def _has(path: Path, size: int) -> bool:
    return path.exists() and path.stat().st_size == size


def latest_checkpoint(folder: str | Path) -> Path | None:
    """The last complete checkpoint in a folder, or None.

    >>> latest_checkpoint("/nowhere") is None
    True
    """
    found = _complete(Path(folder))
    return found[-1] if found else None


def load_checkpoint(path: str | Path | None, optimizer: Checkpointed) -> dict[str, Any]:
    """Go on from a checkpoint, saved by as many ranks as there are now or by others. Returns ``extra``.

    Every rank must call it. By another number of ranks ``extra`` is the first rank's. If one rank cannot read or take
    its part, all raise :class:`~gradwire.errors.CheckpointError`; a sharded optimizer stays as it was then.

    >>> import torch.distributed as dist
    >>> from gradwire import ShardedOptimizerBase
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> optimizer = ShardedOptimizerBase(torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1))
    >>> load_checkpoint("/nowhere", optimizer)
    Traceback (most recent call last):
    gradwire.errors.CheckpointError: /nowhere is not a complete checkpoint: it has no COMPLETE.
    >>> dist.destroy_process_group()
    """
    if path is None:
        raise CheckpointError("`path` is None: `latest_checkpoint` has found no complete checkpoint in its folder.")
    here, peers = Path(path), optimizer.peers
    return _go_on(lambda: _states(here, peers.rank, peers.size, optimizer), optimizer)


@dataclass(frozen=True)
class _Found:
    """What a rank is to load, and which file or folder it is of, for errors."""

    where: Path
    states: list[dict[str, Any]]
    extra: dict[str, Any]


def _go_on(find: Callable[[], _Found], optimizer: Checkpointed) -> dict[str, Any]:
    """Find the states, and load them into the optimizer; a failure on one rank is raised on all."""
    found = together(optimizer.peers, find, _TAG, _LOADING, CheckpointError)

    failure: CheckpointError | None = None
    try:
        with _named(found.where):
            optimizer.load_state_dict(found.states[0] if len(found.states) == 1 else found.states)
    except CheckpointError as error:
        failure = error

    def outcome() -> None:
        if failure is not None:
            raise failure

    together(optimizer.peers, outcome, _TAG, _LOADING, CheckpointError)  # local optimizers connect anew as they load
    return found.extra


@contextmanager
def _named(where: Path) -> Iterator[None]:
    """Raise an error that names the file for anything that goes wrong with its content, which may be anything."""
    try:
        yield
    except Exception as error:
        said = f"{where} holds no state that can be loaded here: {_sentence(error)}"
        raise CheckpointError(said[:_WORDS]) from error


def _states(here: Path, rank: int, ranks: int, optimizer: Checkpointed) -> _Found:
    """What this rank saved, if that is enough for it, or with what the first one did; or else what all did."""
    marker = _marker(here)
    saved = len(marker.files)

    def read(each: int) -> _Found:
        path = here / _name(each, saved, marker.edition)
        tree = _read(path, *marker.files[each])
        return _Found(path, [tree["optimizer"]], tree["extra"])

    if saved == ranks:
        own = read(rank)
        with _named(own.where):
            if optimizer.fits(*own.states):
                return own
        first = read(0) if rank else own
        with _named(own.where):
            if rank and optimizer.fits(*own.states, *first.states):
                return _Found(here, [*first.states, *own.states], own.extra)
    everyone = [read(each) for each in range(saved)]
    states = [state for each in everyone for state in each.states]
    return _Found(here, states, everyone[rank if saved == ranks else 0].extra)


def _name(rank: int, ranks: int, edition: int) -> str:
    return f"rank-{rank:05d}-of-{ranks:05d}{'-again' if edition else ''}.safetensors"


def _complete(folder: Path) -> list[Path]:
    return sorted(each.parent for each in folder.glob(f"step-*/{_MARKER}"))


@dataclass(frozen=True)
class _Marker:
    files: list[list[int]]  # by rank, the checksum and the size
    edition: int  # 0 or 1: which names the files have


def _edition(here: Path) -> int | None:
    """Return the edition that counts; None if there is no checkpoint."""
    try:
        return _marker(here).edition
    except CheckpointError:
        return None


def _next_edition(here: Path) -> int:
    """Return the edition that no checkpoint has."""
    return 1 if _edition(here) == 0 else 0


def _marker(here: Path) -> _Marker:
    """Return what ``COMPLETE`` says."""
    path = here / _MARKER
    try:
        marker = read_json(path, _MARKER_BYTES)
    except FileNotFoundError:
        inside = latest_checkpoint(here)
        hint = f" Do you mean {inside}?" if inside is not None else ""
        raise CheckpointError(f"{here} is not a complete checkpoint: it has no {_MARKER}.{hint}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{here} is not a checkpoint: its {_MARKER} cannot be read: {error}.") from error
    files = marker.get("files") if isinstance(marker, dict) and marker.get("format") == 1 else None
    if not isinstance(files, list) or not files or len(files) != marker.get("ranks") or not all(map(_is_file, files)):
        raise CheckpointError(f"{path} is not the marker of a checkpoint of format 1.")
    edition = marker.get("edition", 0)
    if type(edition) is not int or edition not in (0, 1):
        raise CheckpointError(f"{path} is malformed: `edition` is {edition!r:.40}; it must be 0 or 1.")
    return _Marker(files, edition)


def _is_file(told: Any) -> bool:
    """Whether this is a checksum of 32 bits and a size."""
    if not isinstance(told, list) or len(told) != 2:
        return False
    return all(type(each) is int and 0 <= each < most for each, most in zip(told, (1 << 32, 1 << 62), strict=True))


def _read(path: Path, checksum: int, nbytes: int) -> dict[str, Any]:
    try:
        data = read_whole(path, nbytes)
    except OSError as error:
        raise CheckpointError(f"a file of the checkpoint cannot be read: {error}.") from error
    if len(data) != nbytes or crc32(data) != checksum:
        raise CheckpointError(
            f"{path} is damaged: it has {len(data)} bytes with checksum {crc32(data)}; {_MARKER} says {nbytes} bytes "
            f"with {checksum}."
        )
    try:
        tree = from_bytes(data)
    except WireError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    return _checked(tree, path)


def _checked(tree: Any, path: Path) -> dict[str, Any]:
    if not isinstance(tree, dict) or not all(isinstance(tree.get(name), dict) for name in ("optimizer", "extra")):
        raise CheckpointError(f"{path} is not of a checkpoint.")
    return tree


# By torch.distributed.checkpoint.


def save_distributed_checkpoint(
    path: str | Path, optimizer: Checkpointed, extra: Mapping[str, Any] | None = None, *, storage_writer: Any = None
) -> None:
    """Save by ``torch.distributed.checkpoint``, into safetensors files unless there is another ``storage_writer``.

    Every rank must call it. torch's ranks pickle what they tell each other while they do so, and other writers pickle
    what they write: :func:`save_checkpoint` does neither.

    If it cannot be saved, every rank raises :class:`~gradwire.errors.CheckpointError`. What torch has written by then
    stays in the folder, also over the files of an earlier checkpoint: save into a new folder, and remove it when this
    raises.

    >>> import tempfile, torch.distributed as dist
    >>> from gradwire import ShardedOptimizerBase
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> optimizer = ShardedOptimizerBase(torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_distributed_checkpoint(folder, optimizer, {"epoch": 3})
    ...     load_distributed_checkpoint(folder, optimizer)
    {'epoch': 3}
    >>> dist.destroy_process_group()
    """
    dcp: Any = importlib.import_module(_DCP)  # which takes a while to import

    peers, here = optimizer.peers, Path(path)

    def prepare() -> tuple[dict[str, Tensor], Any]:
        with _not_saved(here):
            tensors, text = to_tensors({"optimizer": optimizer.state_dict(), "extra": dict(extra or {})})
            prefix = _prefix(peers.rank, peers.size)
            named = {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}
            named[f"{prefix}{_TEXT}"] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
            return named, storage_writer or dcp.HuggingFaceStorageWriter(str(path), save_distributed=True)

    def save() -> None:
        with _not_saved(here), _failures_of_torch():
            dcp.save(named, storage_writer=writer)

    named, writer = together(peers, prepare, _TAG, _SAVING, CheckpointError)
    together(peers, save, _TAG, _SAVING, CheckpointError)


@contextmanager
def _failures_of_torch() -> Iterator[None]:
    """Raise what went wrong on which rank, without the traces, for torch's error, which is no Exception."""
    dcp: Any = importlib.import_module(_DCP)
    try:
        yield
    except dcp.CheckpointException as error:
        failed = [f"rank {rank}: {type(each).__name__}: {each}" for rank, (each, _) in sorted(error.failures.items())]
        raise GradwireError("; ".join(failed)[:_WORDS]) from error


def load_distributed_checkpoint(
    path: str | Path, optimizer: Checkpointed, *, storage_reader: Any = None
) -> dict[str, Any]:
    """Go on from what :func:`save_distributed_checkpoint` saved, by as many ranks or by others. Returns ``extra``.

    Every rank must call it.

    >>> import torch.distributed as dist
    >>> from gradwire import ShardedOptimizerBase
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> optimizer = ShardedOptimizerBase(torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1))
    >>> load_distributed_checkpoint("/nowhere", optimizer)
    Traceback (most recent call last):
    gradwire.errors.CheckpointError: /nowhere cannot be read: ...
    >>> dist.destroy_process_group()
    """
    return _go_on(lambda: _distributed_states(Path(path), optimizer, storage_reader), optimizer)


def _distributed_states(here: Path, optimizer: Checkpointed, storage_reader: Any) -> _Found:
    dcp: Any = importlib.import_module(_DCP)  # which takes a while to import

    try:
        reader = storage_reader or dcp.HuggingFaceStorageReader(str(here))
        there = reader.read_metadata().state_dict_metadata
    except Exception as error:  # a reader may raise anything
        raise CheckpointError(f"{here} cannot be read: {type(error).__name__}: {error}."[:_WORDS]) from error
    found = sorted(name[: -len(_TEXT)] for name in there if name.endswith(_TEXT))
    ranks = len(found)
    if found != sorted(_prefix(rank, ranks) for rank in range(ranks)) or not ranks:
        raise CheckpointError(f"{here} is not a checkpoint of all its ranks: it has {found}.")

    def read(rank: int) -> _Found:
        prefix = _prefix(rank, ranks)
        with _named(here), _failures_of_torch(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it is meant to be
            into = {
                name: torch.empty(about.size, dtype=about.properties.dtype)
                for name, about in there.items()
                if name.startswith((f"{prefix}/", f"{prefix}{_TEXT}"))
            }
            dcp.load(into, storage_reader=reader, no_dist=True)
            text = into.pop(f"{prefix}{_TEXT}").numpy().tobytes().decode()
            tree = from_tensors({name[len(prefix) + 1 :]: tensor for name, tensor in into.items()}, text)
        tree = _checked(tree, here)
        return _Found(here, [tree["optimizer"]], tree["extra"])

    own = read(optimizer.peers.rank) if ranks == optimizer.peers.size else None
    with _named(here):
        if own is not None and optimizer.fits(*own.states):
            return own
    everyone = [read(rank) for rank in range(ranks)]
    return _Found(here, [state for each in everyone for state in each.states], (own or everyone[0]).extra)


def _prefix(rank: int, ranks: int) -> str:
    return f"gradwire-{rank:05d}-of-{ranks:05d}"
