"""Python, byte by byte: a GPT of 10.9 million parameters on the sources of Python's own standard library."""

from __future__ import annotations

import os
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.errors import ConfigError
from gradwire.tasks.base import Task

__all__ = ["ByteGPT", "CharLM"]

_TEXT_BYTES: Final = 12_000_000  # at most; the standard library of Python 3.10 and later has about as many
_LEAST_BYTES: Final = 1_000_000
_HELD_OUT_BYTES: Final = 200_000  # the end of the text
_HELD_OUT_WINDOWS: Final = 32
_EPOCH_STEPS: Final = 100

_SKIPPED: Final = {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}
# Written when Python was built or by whoever installed it, so not the same on two machines with the same Python.
_LOCAL_FOLDER: Final = "config-"
_LOCAL_FILES: Final = ("_sysconfigdata", "sitecustomize", "usercustomize")


class ByteGPT(nn.Module):
    """A decoder-only transformer over bytes, with learned positions.

    >>> sum(p.numel() for p in ByteGPT().parameters())
    10893312
    """

    def __init__(self, *, context: int = 128, width: int = 384, layers: int = 6, heads: int = 6) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.apply(_initialize)

    def forward(self, text: Tensor) -> Tensor:
        """Scores of the 256 next bytes at every position."""
        scores: Tensor = self.head(self.norm(self.blocks(self.bytes(text) + self.positions.weight[: text.shape[1]])))
        return scores


class _Block(nn.Module):
    """Attention to what came before, then a perceptron; each is added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.perceptron_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.attention_norm(x))
        y: Tensor = x + self.perceptron(self.perceptron_norm(x))
        return y

    def _attend(self, x: Tensor) -> Tensor:
        examples, length, width = x.shape
        split = self.query_key_value(x).view(examples, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed: Tensor = self.mix(seen.transpose(1, 2).reshape(x.shape))
        return mixed


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


@dataclass(frozen=True)
class CharLM(Task):
    """Which byte comes next? Every step draws windows of the text anew, so an epoch is a hundred steps by decree.

    The text is that of the running Python: another version of Python trains on other bytes.

    >>> text, next_bytes = CharLM().batch(0, rank=0, ranks=2)
    >>> text.shape, bool((text[:, 1:] == next_bytes[:, :-1]).all())
    (torch.Size([4, 128]), True)
    """

    name: ClassVar[str] = "charlm"
    train_examples: ClassVar[int] = (_TEXT_BYTES - _HELD_OUT_BYTES) // 128  # windows side by side
    batch_size: int = 4
    learning_rate: float = 6e-4
    context: int = 128  # bytes the model sees at once
    width: int = 384
    layers: int = 6
    heads: int = 6

    def __post_init__(self) -> None:
        super().__post_init__()
        most = _HELD_OUT_BYTES // _HELD_OUT_WINDOWS - 1
        self._check("context", 1 <= self.context <= most, f"from 1 to {most}")
        self._check("layers", self.layers >= 1, "at least 1")
        self._check("heads", self.heads >= 1, "at least 1")
        self._check(
            "width", self.width >= 1 and self.width % self.heads == 0, f"a positive multiple of {self.heads} heads"
        )

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(model.parameters(), lr=self.learning_rate, betas=(0.9, 0.95))

    def steps(self, ranks: int) -> int:
        """A hundred, whatever the ranks: a pass over the text would take hours on a processor."""
        self._together(ranks)
        return _EPOCH_STEPS

    def _network(self) -> nn.Module:
        return ByteGPT(context=self.context, width=self.width, layers=self.layers, heads=self.heads)

    def _draw(self, step: int, examples: int) -> Tensor:
        # A generator of its own for every seed and step: no two runs share a stretch of windows, as they would if
        # seed and step were added up.
        starts = np.random.Philox(key=[self.seed, step]).random_raw(examples)
        return torch.from_numpy((starts % (len(_text()) - _HELD_OUT_BYTES - self.context)).astype(np.int64))

    def _examples(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        windows = _text()[indices[:, None] + torch.arange(self.context + 1)].long()
        return windows[:, :-1], windows[:, 1:]

    def _held_out(self) -> tuple[Tensor, Tensor]:
        spacing = _HELD_OUT_BYTES // _HELD_OUT_WINDOWS
        return self._examples(len(_text()) - _HELD_OUT_BYTES + spacing * torch.arange(_HELD_OUT_WINDOWS))


def _text() -> Tensor:
    return _read(Path(sysconfig.get_path("stdlib")))


@cache
def _read(folder: Path) -> Tensor:
    """The sources under a folder, one after the other, as bytes."""
    text = bytearray()
    for file in _sources(folder):
        text += file.read_bytes().replace(b"\r\n", b"\n")
        if len(text) >= _TEXT_BYTES:
            break
    if len(text) < _LEAST_BYTES:
        raise ConfigError(
            f"the charlm task trains on the sources of Python's standard library and needs {_LEAST_BYTES:,} bytes of "
            f"them; {folder} has {len(text):,}. This Python's library is zipped or stripped: use one that has its .py "
            "files, or the digits task."
        )
    return torch.frombuffer(text[:_TEXT_BYTES], dtype=torch.uint8)


def _sources(folder: Path) -> list[Path]:
    """The library's own .py files, in an order no file system decides."""
    found: list[Path] = []
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED and not name.startswith(_LOCAL_FOLDER)]
        found += [Path(root, name) for name in files if name.endswith(".py") and not name.startswith(_LOCAL_FILES)]
    return sorted(found, key=lambda file: file.relative_to(folder).as_posix())
