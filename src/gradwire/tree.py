"""Nested dicts and lists of tensors and plain values as bytes and back, without pickle.

Tensors are in a safetensors file, the rest is JSON in its header.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from gradwire.errors import WireError

__all__ = ["equal", "from_bytes", "from_file", "from_tensors", "to_bytes", "to_tensors"]

_KEY: Final = "gradwire"
_TENSOR: Final = "tensor:"
_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def to_tensors(tree: Any) -> tuple[dict[str, Tensor], str]:
    """The tensors of a tree by their paths, and the tree itself as JSON with these paths in their places.

    >>> tensors, text = to_tensors({"a": [1, torch.zeros(2)]})
    >>> sorted(tensors), text
    (['a/1'], '{"a": [1, "tensor:a/1"]}')
    """
    tensors: dict[str, Tensor] = {}

    def walk(node: Any, path: str) -> Any:
        if isinstance(node, Tensor):
            tensors[path] = node.detach().to("cpu").contiguous().clone()
            return _TENSOR + path
        if isinstance(node, Mapping):
            for key in node:
                if not isinstance(key, str):
                    raise WireError(
                        f"a state can hold dicts with string keys only; got {key!r} at {path or 'the top'!r}."
                    )
            return {key: walk(value, f"{path}/{key}" if path else key) for key, value in node.items()}
        if isinstance(node, list | tuple):
            return [walk(value, f"{path}/{number}" if path else str(number)) for number, value in enumerate(node)]
        if node is None or isinstance(node, bool | int | float):
            return node
        if isinstance(node, str) and not node.startswith(_TENSOR):
            return node
        raise WireError(f"a state can hold tensors, numbers and strings; got {type(node).__name__} at {path!r}.")

    return tensors, json.dumps(walk(tree, ""))


def from_tensors(tensors: Mapping[str, Tensor], text: str) -> Any:
    """Undo :func:`to_tensors`.

    >>> from_tensors(*to_tensors({"a": [1, torch.zeros(2)]}))
    {'a': [1, tensor([0., 0.])]}
    """

    def walk(node: Any) -> Any:
        if isinstance(node, str) and node.startswith(_TENSOR):
            name = node[len(_TENSOR) :]
            if name not in tensors:
                raise WireError(f"a state names a tensor that is not there: {name!r}.")
            return tensors[name]
        if isinstance(node, dict):
            return {key: walk(value) for key, value in node.items()}
        if isinstance(node, list):
            return [walk(value) for value in node]
        return node

    try:
        described = json.loads(text)
        return walk(described)
    except WireError:
        raise
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a ValueError
        raise WireError(f"the description of a state is not JSON: {error}.") from error


def to_bytes(tree: Any) -> bytes:
    """A tree as one safetensors file.

    >>> from_bytes(to_bytes({"step": 3, "momentum": torch.ones(2)}))
    {'step': 3, 'momentum': tensor([1., 1.])}
    """
    tensors, text = to_tensors(tree)
    return bytes(save(tensors, metadata={_KEY: text}))


def from_bytes(data: bytes) -> Any:
    """Undo :func:`to_bytes`; anything else raises :class:`~gradwire.errors.WireError`.

    >>> from_bytes(b"junk")
    Traceback (most recent call last):
    gradwire.errors.WireError: not a saved state: 4 bytes are no safetensors file.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise WireError(f"a saved state is bytes; got {type(data).__name__}.")
    data = bytes(data)
    try:
        tensors = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        text = header["__metadata__"][_KEY]
    except (SafetensorError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise WireError(f"not a saved state: {len(data)} bytes are no safetensors file.") from error
    return from_tensors(tensors, text)


def from_file(path: str | Path) -> Any:
    """The tree of a file that has what :func:`to_bytes` returned, read without a second copy of its tensors.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / "state").write_bytes(to_bytes({"step": 3, "momentum": torch.ones(2)}))
    ...     from_file(Path(folder) / "state")
    {'step': 3, 'momentum': tensor([1., 1.])}
    """
    with Path(path).open("rb") as file:
        try:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            text = header.pop("__metadata__")[_KEY]
            in_order = sorted(header.items(), key=lambda entry: entry[1]["data_offsets"])
            tensors = {name: _read_tensor(file, **about) for name, about in in_order}
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, MemoryError) as error:
            raise WireError(f"not a saved state: {path} is no safetensors file.") from error
    return from_tensors(tensors, text)


def _read_tensor(file: BufferedReader, dtype: str, shape: list[int], data_offsets: list[int]) -> Tensor:
    """The next tensor of a file."""
    data = torch.empty(data_offsets[1] - data_offsets[0], dtype=torch.uint8)
    if math.prod(shape) * _DTYPES[dtype].itemsize != len(data) or file.readinto(data.numpy().data) < len(data):
        raise ValueError("the file ends early, or its header does not fit")
    return data.view(_DTYPES[dtype]).view(shape)


def equal(one: Any, other: Any) -> bool:
    """Whether two trees hold the same, tensors to the bit.

    >>> equal({"a": torch.ones(2)}, {"a": torch.ones(2)}), equal({"a": 1}, {"a": 2})
    (True, False)
    """
    tensors, text = to_tensors(one)
    others, other_text = to_tensors(other)
    return text == other_text and all(
        tensors[name].dtype == others[name].dtype and torch.equal(tensors[name], others[name]) for name in tensors
    )
