"""``gradwire inspect FILE``: what is in a payload."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from gradwire import wire
from gradwire.cli.output import JsonOption, print_json, show, size, table
from gradwire.codecs import codec
from gradwire.errors import ConfigError, WireError

__all__ = ["inspect"]


def inspect(
    file: Annotated[
        Path,
        typer.Argument(
            help="Holds the bytes of one payload, as gradwire.encode returns them; - for standard input.",
            metavar="FILE",
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Print the header, codec and sizes of a payload.

    Nothing is decoded, but every check is made: a file that is cut, changed or no payload at all is an error that says
    what is wrong, with exit status 1.

    Examples, for a file that holds what gradwire.encode returned:

      $ gradwire inspect gradient.gw
      $ cat gradient.gw | gradwire inspect - --json
    """
    try:
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise ConfigError(f"`FILE` {str(file)!r} cannot be read: {error.strerror}.") from error
    try:
        payload = wire.unpack(data, max_bytes=1 << 62)
        facts = _facts(payload, len(data))
    except WireError as error:
        raise WireError(f"{file}: {error}") from error
    if as_json:
        print_json(facts)
        return
    key = payload.key
    rows = [
        ("codec", payload.codec + ("" if facts["known"] else "  (not registered here)")),
        ("tensor", f"{tuple(facts['shape'])} {facts['dtype']}, {payload.spec.numel:,} elements"),
        ("random key", f"seed {key.seed}, step {key.step}, bucket {key.bucket}"),
        ("finite", "yes" if facts["finite"] else "no: the tensor held NaN or Inf"),
        ("wire version", str(facts["version"])),
        ("header", size(facts["header_bytes"])),
        ("body", size(facts["body_bytes"])),
        ("frame", f"{size(len(data))} ({len(data):,} bytes), checksum good"),
        (
            "against float32",
            f"{facts['ratio']:.4f} ({facts['bits_per_element']:.3f} bits an element)" if payload.spec.numel else "-",
        ),
    ]
    show(table(str(file), {"": "left", "payload": "left"}, rows))
    parts = [(p["name"], p["dtype"], f"{p['items']:,}", f"{p['bytes']:,}") for p in facts["parts"]]
    show(table("parts", {"part": "left", "dtype": "left", "items": "right", "bytes": "right"}, parts))


def _facts(payload: wire.Payload, length: int) -> dict[str, Any]:
    spec = payload.spec
    try:
        decoder = codec(payload.codec)
        decoder._checked_parts(payload)
        names, known = [part.name for part in decoder.layout(spec).parts], True
    except ConfigError:
        names, known = [f"part {i}" for i in range(len(payload.parts))], False
    parts = [
        {
            "name": n,
            "dtype": str(p.dtype).removeprefix("torch."),
            "items": p.numel(),
            "bytes": p.numel() * p.dtype.itemsize,
        }
        for n, p in zip(names, payload.parts, strict=True)
    ]
    return {
        "version": wire.VERSION,
        "codec": payload.codec,
        "known": known,
        "shape": list(spec.shape),
        "dtype": str(spec.dtype).removeprefix("torch."),
        "key": {"seed": payload.key.seed, "step": payload.key.step, "bucket": payload.key.bucket},
        "finite": not int(payload.nonfinite),
        "frame_bytes": length,
        "header_bytes": length - payload.body_nbytes,
        "body_bytes": payload.body_nbytes,
        "ratio": length / (4 * spec.numel) if spec.numel else None,
        "bits_per_element": 8 * length / spec.numel if spec.numel else None,
        "parts": parts,
    }
