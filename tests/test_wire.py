"""Bytes: what is written comes back, and what was not written is refused with a reason."""

import dataclasses
import re
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradwire
from gradwire import ConfigError, GradwireError, Key, NonFiniteError, WireError
from gradwire.wire import TensorSpec, crc32, pack, unpack
from tests.case import tiered

from .conformance.cases import CODECS, CONTENTS, KEY, same_bits


def frame(codec="int8", n=20, shape=None):
    x = torch.linspace(-1, 1, n).reshape(shape or (n,))
    return gradwire.encode(x, codec, key=KEY)


def resealed(data):
    """The frame with a checksum that fits: what a hostile or buggy sender could make."""
    return data[:4] + struct.pack("<I", zlib.crc32(data[8:])) + data[8:]


@given(st.binary(max_size=300), st.integers(0, 2**32 - 1))
def test_the_native_checksum_is_that_of_zlib(data, start):
    assert crc32(data, start) == zlib.crc32(data, start)


def test_the_native_checksum_of_every_length_and_alignment():
    data = np.random.default_rng(0).bytes(5000)
    for start in range(17):
        for length in [*range(200), 1023, 1024, 1025, 4096, 4900]:
            piece = memoryview(data)[start : start + length]
            assert crc32(piece) == zlib.crc32(piece)


def test_the_native_checksum_is_compiled_and_takes_no_converted_array():
    from gradwire import _native

    assert crc32 is _native.crc32
    with pytest.raises(TypeError):
        _native.crc32(np.zeros(4, dtype=np.float64))
    with pytest.raises(TypeError):
        _native.crc32(np.zeros(8, dtype=np.uint8)[::2])


@given(
    st.sampled_from(CODECS),
    st.lists(st.integers(0, 7), max_size=4),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.builds(Key, st.integers(0, 2**64 - 1), st.integers(0, 2**56 - 1), st.integers(0, 2**32 - 1)),
)
def test_a_payload_is_its_bytes(codec, shape, dtype, key):
    x = torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape).to(dtype)
    payload, _ = codec.encode(x, codec.init(TensorSpec.of(x)), key)
    back = unpack(pack(payload))
    assert (back.codec, back.spec, back.key) == (payload.codec, payload.spec, payload.key)
    assert int(back.nonfinite) == 0
    assert all(same_bits(a, b) for a, b in zip(back.parts, payload.parts, strict=True))


def test_a_payload_decodes_without_its_sender(tmp_path):
    """In another process, from a file, with nothing but the bytes."""
    expected = {}
    for i, codec in enumerate(CODECS):
        data = gradwire.encode(CONTENTS["heavy tails"](500).view(20, 25), codec, key=KEY)
        (tmp_path / f"{i}.gw").write_bytes(data)
        expected[f"{i}.gw"] = zlib.crc32(gradwire.decode(data).numpy().tobytes())
    program = (
        "import sys, zlib, pathlib, gradwire\n"
        "for f in sorted(pathlib.Path(sys.argv[1]).glob('*.gw')):\n"
        "    print(f.name, zlib.crc32(gradwire.decode(f.read_bytes()).numpy().tobytes()))\n"
    )
    run = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True)
    assert dict(line.split() for line in run.stdout.splitlines()) == {k: str(v) for k, v in expected.items()}


def test_truncated_bytes_are_named_at_every_length():
    data = frame()
    for length in range(len(data)):
        with pytest.raises(WireError, match="truncated"):
            gradwire.decode(data[:length])


def test_trailing_bytes_are_oversized():
    with pytest.raises(WireError, match=r"oversized: the header says 102 bytes; got 103"):
        gradwire.decode(frame() + b"\0")


def test_every_flipped_bit_is_found():
    data = frame()
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError):
            gradwire.decode(changed)


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, b"PK\x03\x04", r"not a gradwire payload: it starts with b'PK"),
        (8, b"\x02", r"unknown version: this gradwire reads version 1; got 2"),
        (9, b"\x82", r"a reserved field is not zero"),
        (10, b"\x48\x00", r"its length of 72 does not fit"),
        (12, b"\x00", r"unknown tensor dtype code 0"),
        (13, b"\xff", r"does not fit its own fields"),
        (38, b"\xff\xff", r"the step must be below 2\*\*56"),
        (48, struct.pack("<Q", 21), r"part 'codes' of int8 for shape \(21,\) must have 21 items"),
        (48, struct.pack("<Q", 1 << 62), r"oversized: the header declares a tensor of shape \(4611686018427387904,\)"),
        (56, struct.pack("<Q", 4 << 56 | 2), r"parts must be whole items, in order of falling item size"),
        (56, struct.pack("<Q", 9 << 56 | 2), r"unknown part dtype code 9"),
        (56, struct.pack("<Q", 2 << 56 | 1 << 40), r"its parts have 1099511627796 bytes, the body 22"),
        (72, b"int9", r"cannot be used here: unknown codec 'int9'"),
        (72, b"int4", r"part 'codes' of int4 for shape \(20,\) must have 10 items"),
        (72, b"\xff\xfe\xfd\xfc", r"the codec string is not ASCII"),
        (77, b"\x01", r"a reserved field is not zero"),
        (80, b"\x80\x7f", r"decodes to NaN or Inf"),
    ],
)
def test_a_wrong_field_under_a_good_checksum_is_named(position, value, message):
    data = frame()
    with pytest.raises(WireError, match=message):
        gradwire.decode(resealed(data[:position] + value + data[position + len(value) :]))


def test_a_codec_string_has_one_spelling_on_the_wire():
    data = frame("topk:0.5")
    assert b"topk:0.5" in data
    with pytest.raises(WireError, match="not written as"):
        gradwire.decode(resealed(data.replace(b"topk:0.5", b"topk:.50")))


def test_a_huge_sparse_tensor_is_refused_before_it_is_allocated():
    payload, _ = gradwire.codec("threshold:1").encode(torch.zeros(8))
    data = pack(payload)
    for size, limit in [(1 << 40, 1 << 32), (1 << 20, 1 << 16)]:
        huge = resealed(data[:48] + struct.pack("<Q", size) + data[56:])
        with pytest.raises(WireError, match=rf"oversized: .* {4 * size} bytes; the limit is {limit}"):
            gradwire.decode(huge, max_bytes=limit)
    with pytest.raises(WireError, match="oversized"):
        gradwire.decode(frame(n=100), max_bytes=399)
    assert gradwire.decode(frame(n=100), max_bytes=400).shape == (100,)


def test_a_flagged_payload_raises_wherever_it_is_decoded():
    payload, _ = gradwire.codec("int8").encode(torch.tensor([1.0, torch.nan]))
    with pytest.raises(NonFiniteError):
        gradwire.decode(pack(payload))


@pytest.mark.parametrize("codec", ["ef(int8)", "ef21(int8)", "dgc(topk:0.5)", "warmup:5(topk:0.5)"])
def test_a_frame_cannot_name_a_transform_of_the_sender(codec):
    payload, _ = gradwire.codec("int8").encode(torch.ones(4))
    with pytest.raises(WireError, match=r"the payload's codec cannot be used here"):
        gradwire.decode(pack(dataclasses.replace(payload, codec=codec)))


@pytest.mark.parametrize("shape", [(0, 2**32, 2**32), (2**32, 2**32, 0), (0, 2**63)])
def test_an_impossible_empty_shape_is_oversized(shape):
    payload, _ = gradwire.codec("none").encode(torch.ones(0))
    data = pack(payload)
    changed = data[:13] + bytes([len(shape)]) + data[14:48] + struct.pack(f"<{len(shape)}Q", *shape) + data[56:]
    header = (48 + 8 * (len(shape) + 1) + 4 + 7) // 8 * 8
    changed = changed[:10] + struct.pack("<H", header) + changed[12:40] + struct.pack("<Q", len(changed)) + changed[48:]
    with pytest.raises(WireError, match="oversized: the header declares"):
        gradwire.decode(resealed(changed))


def test_an_unflagged_infinity_of_16_bits_is_found():
    payload, _ = gradwire.codec("none").encode(torch.ones(4, dtype=torch.float16))
    bad = dataclasses.replace(payload, parts=(torch.full((4,), torch.inf, dtype=torch.float16),))
    with pytest.raises(WireError, match="decodes to NaN or Inf"):
        gradwire.decode(pack(bad))


def test_the_table_of_the_docs_is_that_of_the_docstring():
    def rows(text, pattern):
        found = re.findall(pattern, text, re.MULTILINE)
        return [(a.strip(" |"), " ".join(b.replace("`", "").split())) for a, b in found]

    docs = (Path(__file__).parent.parent / "docs" / "wire-format.md").read_text()
    in_docs = rows(docs, r"^\| (\d+) \| [\d D]+ \| (.*) \|$")
    in_code = rows(gradwire.wire.__doc__, r"^(\d+)      ?[\d D]+ {3,5}(.*)$")
    assert in_docs == in_code
    assert len(in_docs) == 16


def test_any_buffer_decodes():
    data = frame()
    expected = gradwire.decode(data)
    for buffer in (bytearray(data), memoryview(data), np.frombuffer(data, dtype=np.uint8)):
        assert torch.equal(gradwire.decode(buffer), expected)
    for wrong in ("text", None, 5, np.zeros(3, "M8[s]"), np.frombuffer(data, dtype=np.uint8)[::2]):
        with pytest.raises(ConfigError, match="`data` must be bytes-like"):
            gradwire.decode(wrong)


def mutated(rng, data):
    """A changed copy. Three in four keep their structure, so that the change reaches the codec behind the checks."""
    changed = bytearray(data)
    header, name = int.from_bytes(data[10:12], "little"), int.from_bytes(data[16:18], "little")
    tables = 48 + 8 * (data[13] + data[14])
    for _ in range(rng.integers(1, 4)):
        match rng.integers(0, 7):
            case 0 | 1 if len(data) > header:  # the parts
                changed[int(rng.integers(header, len(data)))] = int(rng.integers(0, 256))
            case 2 | 3:  # the codec string
                changed[tables + int(rng.integers(0, name))] = int(rng.choice(list(b"0123456789.,:+-()=abeiknort")))
            case 4:  # a dimension
                struct.pack_into("<Q", changed, 48, int(rng.integers(0, 300)))
            case 5:  # a part's length or dtype
                changed[48 + 8 * data[13] + int(rng.integers(0, 8 * data[14]))] ^= 1 << int(rng.integers(0, 8))
            case _:  # anywhere
                changed[int(rng.integers(0, len(data)))] ^= 1 << int(rng.integers(0, 8))
    if rng.random() < 0.2:  # cut or insert bytes, with a length that fits
        at = int(rng.integers(48, len(data)))
        changed[at : at + int(rng.integers(0, 9))] = rng.bytes(int(rng.integers(0, 9)))
        struct.pack_into("<Q", changed, 40, len(changed))
    return resealed(bytes(changed)) if rng.random() < 0.9 else bytes(changed)


@pytest.mark.parametrize("part", tiered(range(4), first=[0]))
def test_a_decoder_fed_a_hundred_thousand_mutated_payloads_only_ever_raises_its_own_errors(part):
    rng = np.random.default_rng(part)
    seeds = [gradwire.encode(CONTENTS["heavy tails"](n).view(n // 7, 7), c, key=KEY) for c in CODECS for n in (7, 140)]
    refused = 0
    for _ in range(25_000):
        data = mutated(rng, seeds[rng.integers(0, len(seeds))])
        try:
            tensor = gradwire.decode(data, max_bytes=1 << 16)
        except WireError:
            refused += 1
        except NonFiniteError:
            pass  # the flag was flipped
        except GradwireError as error:
            pytest.fail(f"{type(error).__name__} instead of WireError: {error}\n{data!r}")
        else:
            assert bool(torch.isfinite(tensor).all())
    assert refused > 10_000
