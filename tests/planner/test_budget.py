"""The best codec for a number of bytes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradwire
from gradwire import ConfigError, TensorSpec, best_codec


@given(st.integers(1000, 3_000_000), st.floats(0.001, 1.0), st.booleans(), st.booleans())
def test_the_chosen_codec_keeps_the_promise(n, ratio, quantize, sparsify):
    spec = TensorSpec((n,))
    try:
        codec = best_codec(spec, ratio, quantize=quantize, sparsify=sparsify)
    except ConfigError:
        smallest = "topk:1e-9+int2" if quantize else "topk:1e-9"
        smallest = smallest if sparsify else ("sign" if quantize else "none")
        assert gradwire.codec(smallest).layout(spec).nbytes > ratio * 4 * n
        return
    assert codec.layout(spec).nbytes <= ratio * 4 * n
    assert sparsify or "topk" not in str(codec)
    assert quantize or "int" not in str(codec)


def test_more_bytes_never_mean_more_error():
    spec, x = TensorSpec((200_000,)), torch.randn(200_000, generator=torch.Generator().manual_seed(0)) ** 3
    errors = []
    for ratio in (0.002, 0.01, 0.03, 0.05, 0.08, 0.1, 0.14, 0.3, 0.6, 1.1):
        y = gradwire.decode(gradwire.encode(x, best_codec(spec, nbytes=int(ratio * 800_000))))
        errors.append(float((x - y).norm()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] == 0


def test_what_cannot_be_met_is_said():
    with pytest.raises(ConfigError, match=r"no codec fits 10 elements into 4 bytes, header included \(ratio=0.1"):
        best_codec(TensorSpec((10,)), 0.1)
    for ratio in (0, 1000, "x", float("nan")):
        with pytest.raises(ConfigError, match=r"`ratio` must be in \(0, 1\]; got"):
            best_codec(TensorSpec((10,)), ratio)
    with pytest.raises(ConfigError, match=r"`nbytes` must be a whole number above 0; got 0.5"):
        best_codec(TensorSpec((10,)), nbytes=0.5)
    with pytest.raises(ConfigError, match=r"give either `ratio` or `nbytes`; got ratio=None and nbytes=None"):
        best_codec(TensorSpec((10,)))
