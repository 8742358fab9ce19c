"""Checkpoints of a sharded training: a folder a checkpoint, a safetensors file a rank, and a marker that all are there.

A checkpoint is written into a folder of its own. Each rank writes its file, to the disk, under another name first; when
all have, the first rank writes ``COMPLETE`` with the number and checksums of the files. Without it a folder is not a
checkpoint, whenever the ranks were killed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

from gradwire.collectives.peers import tell
from gradwire.errors import CheckpointError, WireError
from gradwire.tree import from_bytes, to_bytes

if TYPE_CHECKING:
    from gradwire.optim.sharded_optimizer import ShardedOptimizerBase

__all__ = ["latest_checkpoint", "load_checkpoint", "save_checkpoint"]

_MARKER: Final = "COMPLETE"
_TAG: Final = 3


def save_checkpoint(
    folder: str | Path, optimizer: ShardedOptimizerBase, extra: Mapping[str, Any] | None = None, *, keep: int = 2
) -> Path:
    """Save an optimizer, the weights it moves and ``extra``, of tensors and plain values, as this rank has them.

    Every rank must call it, between steps, with the same folder, which all can reach. Of earlier checkpoints in it the
    last ``keep`` complete ones stay, this one among them. Returns the path of the checkpoint.

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
    peers = optimizer.exchange.peers
    here = Path(folder) / f"step-{optimizer.rounds:010d}"
    here.mkdir(parents=True, exist_ok=True)
    data = to_bytes({"optimizer": optimizer.state_dict(), "extra": dict(extra or {})})
    failure = ""
    try:
        if peers.rank == 0:
            (here / _MARKER).unlink(missing_ok=True)
        _write(here / _name(peers.rank, peers.size), data)
    except OSError as error:
        failure = str(error)
    told = tell(peers, f"{crc32(data)} {len(data)} {failure}"[:400], _TAG, "the saving of a checkpoint")
    failed = {rank: line.split(" ", 2)[2] for rank, line in enumerate(told) if line.split(" ", 2)[2:] not in ([], [""])}
    if failed:
        raise CheckpointError(f"the checkpoint {here.name} was not saved: {failed}.")
    if peers.rank == 0:
        files = [line.split(" ")[:2] for line in told]
        marker = {"format": 1, "ranks": peers.size, "steps": optimizer.rounds, "files": [[int(x) for x in f] for f in files]}
        _write(here / _MARKER, json.dumps(marker).encode())
        for old in _complete(Path(folder))[:-keep] if keep else []:
            shutil.rmtree(old, ignore_errors=True)
    tell(peers, "saved", _TAG, "the saving of a checkpoint")  # nobody goes on before it counts
    return here


def latest_checkpoint(folder: str | Path) -> Path | None:
    """The last complete checkpoint in a folder, or None.

    >>> latest_checkpoint("/nowhere") is None
    True
    """
    found = _complete(Path(folder))
    return found[-1] if found else None


def load_checkpoint(path: str | Path, optimizer: ShardedOptimizerBase) -> dict[str, Any]:
    """Go on from a checkpoint, saved by as many ranks as there are now or by others. Returns ``extra``.

    Every rank must call it. By another number of ranks ``extra`` is the first rank's.
    """
    here, peers = Path(path), optimizer.exchange.peers
    marker = _marker(here)
    ranks = int(marker["ranks"])
    same = ranks == peers.size
    states, extra = [], {}
    for rank in [peers.rank] if same else range(ranks):
        state = _read(here / _name(rank, ranks), *marker["files"][rank])
        states.append(state["optimizer"])
        extra = state["extra"] if rank == (peers.rank if same else 0) else extra
    if same and not optimizer.fits(states[0]):  # another stage, or other buckets: all pieces are needed
        states = [_read(here / _name(rank, ranks), *marker["files"][rank])["optimizer"] for rank in range(ranks)]
    optimizer.load_state_dict(states[0] if len(states) == 1 else states)
    return extra


def _name(rank: int, ranks: int) -> str:
    return f"rank-{rank:05d}-of-{ranks:05d}.safetensors"


def _write(path: Path, data: bytes) -> None:
    """All of it or nothing, and on the disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _complete(folder: Path) -> list[Path]:
    return sorted(each.parent for each in folder.glob(f"step-*/{_MARKER}"))


def _marker(here: Path) -> dict[str, Any]:
    try:
        marker = json.loads((here / _MARKER).read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{here} is not a complete checkpoint: it has no {_MARKER}.") from None
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
        raise CheckpointError(f"{path} is damaged: {len(data)} bytes with checksum {crc32(data)}, not {nbytes} with {checksum}.")
    try:
        tree = from_bytes(data)
    except WireError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(tree, dict) or not {"optimizer", "extra"} <= set(tree):
        raise CheckpointError(f"{path} is not of a checkpoint.")
    return tree
