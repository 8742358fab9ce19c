"""Checkpoints of a sharded training: a folder a checkpoint, a safetensors file a rank, and a marker that all are there.

A checkpoint is written into a folder of its own. Each rank writes its file, to the disk, under another name first; when
all have, the first rank writes ``COMPLETE`` with the number and checksums of the files. Without it a folder is not a
checkpoint, whenever the ranks were killed.
"""

from __future__ import annotations

import importlib
import json
import shutil
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol
from zlib import crc32

import torch

from gradwire.collectives.peers import Peers, tell
from gradwire.errors import CheckpointError, WireError
from gradwire.files import write_whole
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
    files somebody else brings together. Returns the path of the checkpoint.

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
    data = to_bytes({"optimizer": optimizer.state_dict(), "extra": dict(extra or {})})
    failure = ""
    try:
        here.mkdir(parents=True, exist_ok=True)
        if peers.rank == 0:
            (here / _MARKER).unlink(missing_ok=True)
        write_whole(here / _name(peers.rank, peers.size), data)
    except OSError as error:
        failure = str(error)
    told = tell(peers, f"{crc32(data)} {len(data)} {failure}"[:400], _TAG, "the saving of a checkpoint")
    failed = {rank: line.split(" ", 2)[2] for rank, line in enumerate(told) if line.split(" ", 2)[2:] not in ([], [""])}
    if failed:
        raise CheckpointError(f"the checkpoint {here.name} was not saved: {failed}.")
    if peers.rank == 0 and shared and (missing := _missing(here, [int(line.split(" ")[1]) for line in told])):
        failure = f"the first rank does not see the files of ranks {missing}: {folder} must be a folder that all share."
    elif peers.rank == 0:
        files = [line.split(" ")[:2] for line in told]
        marker = {
            "format": 1,
            "ranks": peers.size,
            "steps": optimizer.rounds,
            "files": [[int(x) for x in f] for f in files],
        }
        write_whole(here / _MARKER, json.dumps(marker).encode())
        for old in _complete(Path(folder))[:-keep] if keep else []:
            shutil.rmtree(old, ignore_errors=True)
    failure = tell(peers, failure[:400], _TAG, "the saving of a checkpoint")[0]  # nobody goes on before it counts
    if failure:
        raise CheckpointError(f"the checkpoint {here.name} was not saved: {failure}")
    return here


def _missing(here: Path, sizes: Sequence[int]) -> list[int]:
    """Ranks whose files are not there; those of a network file system may come a little later."""
    end = time.monotonic() + _LATE_S
    while True:
        missing = [rank for rank, size in enumerate(sizes) if not _has(here / _name(rank, len(sizes)), size)]
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


def load_checkpoint(path: str | Path, optimizer: Checkpointed) -> dict[str, Any]:
    """Go on from a checkpoint, saved by as many ranks as there are now or by others. Returns ``extra``.

    Every rank must call it. By another number of ranks ``extra`` is the first rank's.

    >>> import torch.distributed as dist
    >>> from gradwire import ShardedOptimizerBase
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> optimizer = ShardedOptimizerBase(torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1))
    >>> load_checkpoint("/nowhere", optimizer)
    Traceback (most recent call last):
    gradwire.errors.CheckpointError: /nowhere is not a complete checkpoint: it has no COMPLETE.
    >>> dist.destroy_process_group()
    """
    here, peers = Path(path), optimizer.peers
    failure = ""
    states: list[dict[str, Any]] = []
    extra: dict[str, Any] = {}
    try:
        states, extra = _states(here, peers.rank, peers.size, optimizer)
    except CheckpointError as error:
        failure = str(error)
    for rank, words in enumerate(tell(peers, failure, _TAG, "the loading of a checkpoint")):
        if words:
            raise CheckpointError(f"rank {rank}: {words}" if rank != peers.rank else failure)
    optimizer.load_state_dict(states[0] if len(states) == 1 else states)
    return extra


def _states(here: Path, rank: int, ranks: int, optimizer: Checkpointed) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What this rank saved, if that is enough for it, or with what the first one did; or else what all did."""
    marker = _marker(here)
    saved = int(marker["ranks"])

    def read(each: int) -> tuple[dict[str, Any], dict[str, Any]]:
        tree = _read(here / _name(each, saved), *marker["files"][each])
        return tree["optimizer"], tree["extra"]

    if saved == ranks:
        own, extra = read(rank)
        if optimizer.fits(own):
            return [own], extra
        first, _ = read(0)
        if rank and optimizer.fits(own, first):
            return [first, own], extra
    everyone = [read(each) for each in range(saved)]
    return [state for state, _ in everyone], everyone[rank if saved == ranks else 0][1]


def _name(rank: int, ranks: int) -> str:
    return f"rank-{rank:05d}-of-{ranks:05d}.safetensors"


def _complete(folder: Path) -> list[Path]:
    return sorted(each.parent for each in folder.glob(f"step-*/{_MARKER}"))


def _marker(here: Path) -> dict[str, Any]:
    try:
        marker = json.loads((here / _MARKER).read_text())
    except FileNotFoundError:
        inside = latest_checkpoint(here)
        hint = f" Do you mean {inside}?" if inside is not None else ""
        raise CheckpointError(f"{here} is not a complete checkpoint: it has no {_MARKER}.{hint}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{here} is not a checkpoint: its {_MARKER} cannot be read: {error}.") from error
    if not isinstance(marker, dict) or marker.get("format") != 1 or len(marker.get("files", [])) != marker.get("ranks"):
        raise CheckpointError(f"{here} is not a checkpoint of format 1.")
    return marker


def _read(path: Path, checksum: int, nbytes: int) -> dict[str, Any]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"a file of the checkpoint cannot be read: {error}.") from error
    if len(data) != nbytes or crc32(data) != checksum:
        raise CheckpointError(
            f"{path} is damaged: {len(data)} bytes with checksum {crc32(data)}, not {nbytes} with {checksum}."
        )
    try:
        tree = from_bytes(data)
    except WireError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(tree, dict) or not {"optimizer", "extra"} <= set(tree):
        raise CheckpointError(f"{path} is not of a checkpoint.")
    return tree


# By torch.distributed.checkpoint.


def save_distributed_checkpoint(
    path: str | Path, optimizer: Checkpointed, extra: Mapping[str, Any] | None = None, *, storage_writer: Any = None
) -> None:
    """Save by ``torch.distributed.checkpoint``, into safetensors files unless there is another ``storage_writer``.

    Every rank must call it. torch's ranks pickle what they tell each other while they do so, and other writers pickle
    what they write: :func:`save_checkpoint` does neither.

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

    peers = optimizer.peers
    tensors, text = to_tensors({"optimizer": optimizer.state_dict(), "extra": dict(extra or {})})
    prefix = _prefix(peers.rank, peers.size)
    named = {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}
    named[f"{prefix}{_TEXT}"] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    writer = storage_writer or dcp.HuggingFaceStorageWriter(str(path), save_distributed=True)
    dcp.save(named, storage_writer=writer)


def load_distributed_checkpoint(
    path: str | Path, optimizer: Checkpointed, *, storage_reader: Any = None
) -> dict[str, Any]:
    """Go on from what :func:`save_distributed_checkpoint` saved, by as many ranks or by others. Returns ``extra``.

    Every rank must call it.

    >>> load_distributed_checkpoint("/nowhere", None)
    Traceback (most recent call last):
    gradwire.errors.CheckpointError: /nowhere cannot be read: ...
    """
    dcp: Any = importlib.import_module(_DCP)  # which takes a while to import

    reader = storage_reader or dcp.HuggingFaceStorageReader(str(path))
    try:
        there = reader.read_metadata().state_dict_metadata
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    found = sorted(name[: -len(_TEXT)] for name in there if name.endswith(_TEXT))
    ranks = len(found)
    if found != sorted(_prefix(rank, ranks) for rank in range(ranks)) or not ranks:
        raise CheckpointError(f"{path} is not a checkpoint of all its ranks: it has {found}.")

    def read(rank: int) -> dict[str, Any]:
        prefix = _prefix(rank, ranks)
        into = {
            name: torch.empty(about.size, dtype=about.properties.dtype)
            for name, about in there.items()
            if name.startswith((f"{prefix}/", f"{prefix}{_TEXT}"))
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it is meant to be
            dcp.load(into, storage_reader=reader, no_dist=True)
        text = into.pop(f"{prefix}{_TEXT}").numpy().tobytes().decode()
        tree: dict[str, Any] = from_tensors({name[len(prefix) + 1 :]: tensor for name, tensor in into.items()}, text)
        return tree

    own = read(optimizer.peers.rank) if ranks == optimizer.peers.size else None
    if own is not None and optimizer.fits(own["optimizer"]):
        optimizer.load_state_dict(own["optimizer"])
        return dict(own["extra"])
    all_of_them = [read(rank) for rank in range(ranks)]
    optimizer.load_state_dict([each["optimizer"] for each in all_of_them])
    return dict((own or all_of_them[0])["extra"])


def _prefix(rank: int, ranks: int) -> str:
    return f"gradwire-{rank:05d}-of-{ranks:05d}"
