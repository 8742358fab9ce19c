"""Residuals of a training that goes on from a folder of another library's."""

from __future__ import annotations

import warnings
from pathlib import Path

from gradwire.adapters.ddp import Compression
from gradwire.checkpoint import latest_checkpoint, load_checkpoint
from gradwire.collectives.peers import tell

__all__ = ["load_residuals"]

_TAG = 3  # as that of checkpoints: nothing else is under way


def load_residuals(folder: Path, compression: Compression) -> bool:
    """Load what ``save_checkpoint`` saved last in a folder; warn and return False if no rank finds anything.

    Every rank must call it. A rank that finds nothing where others do ends the loading on all of them:
    :class:`~gradwire.CheckpointError`.
    """
    peers, last = compression.peers, latest_checkpoint(folder)
    found = tell(peers, "yes" if last is not None else "no", _TAG, "the loading of a checkpoint")
    if "yes" in found:
        load_checkpoint(last or folder, compression)
        return True
    warnings.warn(
        f"{folder} has no residuals of gradwire, which start from zero now. They are saved with every checkpoint of a "
        "training that gradwire compresses.",
        stacklevel=2,
    )
    return False
