"""Bytes frozen in ``tests/golden``: old payloads decode for ever, and codecs keep producing them."""

import numpy as np
import pytest
import torch

import gradwire
from gradwire.wire import unpack

from ..golden.freeze import FOLDER, KEY, golden_input, own_codecs, path
from .cases import here, ids

FILES = sorted(FOLDER.glob("*.gw"))


@pytest.mark.parametrize("codec", own_codecs(), ids=ids)
def test_every_codec_has_frozen_bytes(codec):
    assert path(codec).exists(), f"{codec} has no golden bytes: run `make golden` and commit the new files"


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_frozen_bytes_decode_to_the_same_values(file, backend):
    expected = torch.from_numpy(np.fromfile(file.with_suffix(".f32"), dtype=np.float32)).view(20, 30)
    decoded = gradwire.decode(file.read_bytes())
    if gradwire.codec(unpack(file.read_bytes()).codec).laws(gradwire.TensorSpec((20, 30))).exact_bytes:
        assert torch.equal(decoded, expected)
    else:
        torch.testing.assert_close(decoded, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_the_frozen_tensor_encodes_to_the_same_bytes(file, backend):
    data = file.read_bytes()
    codec = gradwire.codec(unpack(data).codec)
    again = gradwire.encode(here(golden_input()), codec, key=KEY)
    if codec.laws(gradwire.TensorSpec((20, 30))).exact_bytes:
        assert again == data
    else:
        torch.testing.assert_close(gradwire.decode(again), gradwire.decode(data), rtol=1e-3, atol=1e-3)
