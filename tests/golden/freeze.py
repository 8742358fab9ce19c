"""Freeze the bytes of codecs that have none yet: ``make golden``. Existing files are never rewritten.

A codec's frozen frame is what every later version must still decode, and still produce. To change a codec's bytes on
purpose, give it a new id.
"""

from pathlib import Path

import torch

import gradwire

FOLDER = Path(__file__).parent
KEY = gradwire.Key(seed=0x0123456789ABCDEF, step=1000, bucket=5)


def golden_input() -> torch.Tensor:
    """600 values of both signs over several magnitudes, some of them zero, from integers alone."""
    i = torch.arange(600)
    hashed = (i * 2654435761) % (1 << 32)
    values = ((hashed >> 8) - (1 << 23)).to(torch.float32) * 2.0**-23
    scales = torch.tensor([0.0, 0.25, 1.0, 1.0, 1.0, 4.0, 64.0])[i % 7]
    return (values * scales).view(20, 30)


def path(codec: gradwire.Codec) -> Path:
    name = str(codec)
    for character, word in {":": "~", "(": "[", ")": "]", "=": "@"}.items():
        name = name.replace(character, word)
    return FOLDER / f"{name}.gw"


def own_codecs() -> list[gradwire.Codec]:
    """gradwire's own; the bytes of a plugin are its package's business."""
    from tests.conformance.cases import PLAIN

    return [codec for codec in PLAIN if type(codec).__module__.startswith("gradwire.")]


def main() -> None:
    for codec in own_codecs():
        target = path(codec)
        if not target.exists():
            data = gradwire.encode(golden_input(), codec, key=KEY)
            target.write_bytes(data)
            target.with_suffix(".f32").write_bytes(gradwire.decode(data).numpy().tobytes())
            print(f"froze {target.name}: {len(data)} bytes")


if __name__ == "__main__":
    main()
