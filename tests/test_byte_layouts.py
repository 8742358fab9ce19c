"""What docs/byte-layouts.md says is what travels: its examples, its programs, and that no codec is missing."""

import dataclasses
import re
import struct

import pytest
import torch

import gradwire
from gradwire import wire
from gradwire.codecs.registry import registered
from gradwire.codecs.sparse import index_width, pack
from gradwire.kernels import ops
from gradwire.transforms.base import SenderTransform
from tests.test_docs import ROOT, blocks

PAGE = ROOT / "docs" / "byte-layouts.md"
(VALUES,), *EXAMPLES = ([line for line in each.splitlines() if line.strip()] for each in blocks(PAGE, "text"))
LAYOUTS = [each for each in EXAMPLES if each[0].startswith("codec ")]
TRAVEL = {  # ids that frames name; a chain is written with '+'
    name
    for name, kind in registered().items()
    if kind.__module__.startswith("gradwire.") and not issubclass(kind, SenderTransform) and name != "chain"
}
INDICES = [each for each in EXAMPLES if each[0].startswith("indices ")]


def numbers(text):
    return torch.tensor([float(each) for each in text.split()])


class Example:
    """A codec's worked example, as the page has it."""

    def __init__(self, lines):
        self.parts, told = [], {"shape": "8", "input": VALUES}
        for line in lines:
            name, text = line.split(maxsplit=1)
            if name in ("codec", "shape", "input", "decoded"):
                told[name] = text
            else:
                dtype, data = text.split(maxsplit=1)
                self.parts.append((name, dtype, bytes.fromhex(data)))
        self.codec, self.decoded = told["codec"], numbers(told["decoded"])
        self.shape = [int(each) for each in told["shape"].split()]
        self.tensor = numbers(told["input"]).view(self.shape)


@pytest.fixture(scope="module")
def program():
    """The functions of the page."""
    found = {}
    exec("\n".join(blocks(PAGE, "python")), found)
    return found


@pytest.fixture(params=LAYOUTS, ids=lambda lines: lines[0].split()[1])
def example(request):
    return Example(request.param)


def test_an_example_is_what_the_codec_sends(example):
    codec, spec = gradwire.codec(example.codec), wire.TensorSpec.of(example.tensor)
    layout = [(part.name, str(part.dtype).removeprefix("torch.")) for part in codec.layout(spec).parts]
    assert [(name, dtype) for name, dtype, _ in example.parts] == layout
    payload = wire.unpack(gradwire.encode(example.tensor, codec))
    assert payload.codec == example.codec
    sent = [part.view(torch.uint8).numpy().tobytes() for part in payload.parts]
    if codec.laws(spec).exact_bytes:
        assert sent == [data for _, _, data in example.parts]
    else:
        assert list(map(len, sent)) == [len(data) for _, _, data in example.parts]


def test_an_example_decodes_to_what_it_says(example, program):
    frame = program["frame"](example.codec, example.shape, [(dtype, data) for _, dtype, data in example.parts])
    assert torch.equal(gradwire.decode(frame), example.decoded.view(example.shape))


def test_every_codec_that_travels_has_an_example():
    strings = [lines[0].split()[1] for lines in LAYOUTS]
    assert {re.split(r"[:(]", string)[0] for string in strings if "+" not in string} == TRAVEL
    assert any("+" in string for string in strings)


def test_the_table_of_defaults_is_that_of_the_codecs():
    rows = re.findall(r"^\| (`[a-z].*?) \| (.*?) ?\| (.*?) ?\|$", PAGE.read_text(), re.MULTILINE)
    seen = set()
    for names, _, defaults in rows:
        told = re.findall(r"`(\w+)=([\w.]+)`", defaults)
        for name in re.findall(r"`(\w+)`", names):
            fields = dataclasses.fields(registered()[name])
            assert told == [(f.name, str(f.default).lower()) for f in fields if f.kw_only], name
            seen.add(name)
    assert seen == TRAVEL


@pytest.mark.parametrize("lines", INDICES)
def test_indices_are_packed_as_they_are_shown(lines, program):
    told = dict(line.split(maxsplit=1) for line in lines)
    kept, below = [int(each) for each in told["indices"].split()], int(told["below"])
    assert index_width(below, len(kept)) == int(told["width"]) > 0
    assert pack(torch.tensor(kept), below).numpy().tobytes() == bytes.fromhex(told["bytes"])
    assert program["indices"](kept, below) == bytes.fromhex(told["bytes"])


@pytest.mark.parametrize("n", [0, 1, 5, 127, 128, 129, 256, 700])
def test_the_encoder_of_the_page_makes_the_same_frames(program, n):
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)) * torch.logspace(-6, 3, n)
    x[n // 2 : n // 2 + 1] = 3.4028234e38  # its scale is cut, so that it stays finite
    if n == 700:  # blocks with a scale of 1, of int8 and of int4, and ties, which go to the even code
        x[512:640] = torch.tensor([127, 0.5, 1.5, -0.5]).repeat(32)
        x[640:] = torch.tensor([7, 0.5, 1.5, -0.5]).repeat(15)
    values = x.tolist()
    frame, topk = program["frame"], program["topk"]
    whole = [("float32", struct.pack(f"<{n}f", *values))]
    assert frame("none", [n], whole) == gradwire.encode(x, "none")
    assert frame("int8", [n], program["integers"](values, 8, 256)) == gradwire.encode(x, "int8")
    assert frame("int4", [n], program["integers"](values, 4, 128)) == gradwire.encode(x, "int4")
    for density in (0.01, 0.1, 0.5, 1.0) if n else ():
        assert frame(f"topk:{density}", [n], topk(values, density)) == gradwire.encode(x, f"topk:{density}")


def test_the_frame_of_the_wire_format_is_what_is_sent():
    (shown,) = blocks(ROOT / "docs" / "wire-format.md", "text")
    data = b"".join(bytes.fromhex(re.match(r"(?:[0-9a-f]{2} ?)+", line)[0]) for line in shown.splitlines())
    assert data == gradwire.encode(numbers(VALUES), "int8")


@pytest.mark.parametrize("key", [wire.Key(), wire.Key(seed=(1 << 64) - 3, step=(1 << 40) + 7, bucket=5)])
def test_the_random_bits_of_the_page_are_those_of_the_kernels(program, key):
    for stream in range(3):
        expected = ops.random_bits(key, stream, 200, device="cpu").tolist()
        draws = [program["draw"](i, stream, key.seed, key.step, key.bucket) for i in range(200)]
        assert draws == expected
