"""Codec strings: what they mean, and what a wrong one is told."""

import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradwire
from gradwire import ConfigError
from gradwire.codecs import integer, registry
from gradwire.codecs.none import NoCompression
from gradwire.codecs.threshold import Threshold
from gradwire.codecs.topk import TopK
from gradwire.transforms import Chain, ErrorFeedback, Rotate, WarmUp


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("int4", integer.Int4()),
        ("int4:block=64,rounding=stochastic", integer.Int4(block=64, rounding="stochastic")),
        ("topk:0.01", TopK(0.01)),
        ("topk:density=0.01", TopK(0.01)),
        ("topk:1", TopK(1.0)),
        ("topk:1e-3", TopK(0.001)),
        ("threshold:1e+20", Threshold(1e20)),
        ("threshold:1e+20+int8", Chain(Threshold(1e20), integer.Int8())),
        ("topk:0.01+int8", Chain(TopK(0.01), integer.Int8())),
        ("ef(topk:0.01+int8)", ErrorFeedback(Chain(TopK(0.01), integer.Int8()))),
        ("ef:decay=0.9(topk:0.01)", ErrorFeedback(TopK(0.01), decay=0.9)),
        ("topk:0.1+rotate(int4)", Chain(TopK(0.1), Rotate(integer.Int4()))),
        ("ef(warmup:100(topk:0.01))", ErrorFeedback(WarmUp(TopK(0.01), 100))),
    ],
)
def test_a_string_means_a_codec(text, expected):
    assert gradwire.codec(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"bad codec string '': expected a codec name at position 0"),
        ("int5", r"unknown codec 'int5'; did you mean 'int\d'\? Known: bf16, .*topk"),
        ("zip", r"unknown codec 'zip'; .*Known"),
        ("topk", r"`topk` needs `density`; its parameters: density"),
        ("topk:0", r"`topk\(density=...\)` must be in \(0, 1\]; got 0.0"),
        ("topk:1.5", r"must be in \(0, 1\]; got 1.5"),
        ("topk:nan", r"`topk\(density=...\)` must be a finite number; got nan"),
        ("topk:x", r"`topk\(density=...\)` must be a number; got 'x'"),
        ("topk:0.1,0.2", r"`topk` takes no further value '0.2' by position"),
        ("topk:0.1,density=0.1", r"`topk` was given 'density' twice"),
        ("topk:0.1,size=3", r"`topk` has no parameter 'size'; its parameters: density"),
        ("int8:block=100", r"`int8\(block=...\)` must be a power of two from 16 to 65536; got 100"),
        ("int8:block=64.5", r"`int8\(block=...\)` must be a whole number; got '64.5'"),
        ("int8:rounding=up", r"`int8\(rounding=...\)` must be nearest or stochastic; got 'up'"),
        ("int8:scale=fp8", r"`int8\(scale=...\)` must be bf16 or fp32; got 'fp8'"),
        ("int8:64", r"`int8` takes no further value '64' by position"),
        ("fp8:e3m4", r"`fp8\(form=...\)` must be e4m3 or e5m2; got 'e3m4'"),
        ("qsgd:0", r"`qsgd\(levels=...\)` must be from 1 to 32767; got 0"),
        ("threshold:-1", r"`threshold\(tau=...\)` must be at least 0; got -1.0"),
        ("lowrank:0", r"`lowrank\(rank=...\)` must be from 1"),
        ("randomk:0.1,unbiased=yes", r"`randomk\(unbiased=...\)` must be true or false; got 'yes'"),
        ("int8+int4", r"before '\+' must stand a sparse or low-rank codec, such as topk:0.01; got int8"),
        ("topk:0.1+topk:0.1", r"after '\+' must stand a codec that keeps every value, such as int8; got topk:0.1"),
        ("topk:0.1+", r"expected a codec name at position 9"),
        ("topk:0.1 + int8", r"expected the end, '\+' or '\(' at position 8"),
        ("chain(int8)", r"`chain` is written with '\+', as in topk:0.01\+int8"),
        ("topk:0.1+rotate(threshold:1)", r"after '\+' must stand a codec that keeps every value"),
        ("rotate(rotate(int8))", r"`rotate\(inner=...\)` must be a codec that does not rotate itself"),
        ("int8(int4)", r"`int8` wraps no codec; parameters stand after a colon"),
        ("topk(density=0.01)", r"`topk` wraps no codec; parameters stand after a colon, as in topk:0.01"),
        ("INT4", r"expected a codec name at position 0. Codec strings are lower case, without spaces"),
        ("ef", r"`ef` needs `inner`"),
        ("ef(int8", r"expected '\)' at position 7"),
        ("ef(ef(int8))", r"`ef\(inner=...\)` must be a codec without state of its own"),
        ("ef:decay=0(int8)", r"`ef\(decay=...\)` must be in \(0, 1\]; got 0.0"),
        ("rotate:block=128(int8)", r"`rotate\(block=...\)` must be a power of 4 from 16 to 65536; got 128"),
        ("rotate(ef(int8))", r"`rotate\(inner=...\)` must be a codec, not a training transform"),
        ("dgc:momentum=1(topk:0.1)", r"`dgc\(momentum=...\)` must be in \[0, 1\)"),
        ("warmup:10(int8)", r"`warmup\(inner=...\)` must be a codec with a density"),
        ("warmup:0(topk:0.1)", r"`warmup\(steps=...\)` must be at least 1"),
        ("ef(" * 9 + "int8" + ")" * 9, r"nests at most 8 deep"),
        ("int8" * 500, r"at most 1024 characters"),
    ],
)
def test_a_bad_string_is_told_what_is_allowed(text, message):
    with pytest.raises(ConfigError, match=message):
        gradwire.codec(text)


@given(st.text(alphabet="topkintef0148.:,=()+-x_ ", max_size=30))
def test_any_text_is_a_codec_or_a_config_error(text):
    try:
        codec = gradwire.codec(text)
    except ConfigError:
        return
    assert gradwire.codec(str(codec)) == codec


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, r"must have a 'codec'"),
        ({"codec": "int8", "size": 1}, r"`int8` has no parameter 'size'"),
        ({"codec": "topk", "density": "0.1"}, r"`topk\(density=...\)` must be a number; got '0.1'"),
        ({"codec": "int8", "block": True}, r"`int8\(block=...\)` must be a whole number; got True"),
        ({"codec": "ef", "inner": {"codec": "nope"}}, r"unknown codec 'nope'"),
        ({"codec": "ef", "inner": 3}, r"`codec` must be a codec string, a config or a Codec; got int"),
        (7, r"`codec` must be a codec string, a config or a Codec; got int"),
    ],
)
def test_a_bad_config_is_told_what_is_allowed(config, message):
    with pytest.raises(ConfigError, match=message):
        gradwire.codec(config)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bool, torch.uint8])
def test_a_dtype_no_codec_takes_is_named(dtype):
    with pytest.raises(ConfigError, match=r"`dtype` must be one of float32, float16, bfloat16; got"):
        gradwire.encode(torch.zeros(3, dtype=dtype), "int8")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gradwire.encode(torch.ones(2), "int8", key=5), r"`key` must be a gradwire.Key; got int"),
        (lambda: gradwire.encode(torch.ones(2).to_sparse(), "int8"), r"`tensor` must be dense .* got torch.sparse_coo"),
        (lambda: gradwire.encode(torch.ones(2, device="meta"), "int8"), r"`tensor` must be dense .* on meta"),
        (lambda: gradwire.codec("int8").encode([1.0]), r"`tensor` must be a torch.Tensor; got list"),
        (lambda: gradwire.codec("int8").encode(torch.ones(2), gradwire.Key()), r"`state` must be a mapping, .*got Key"),
        (lambda: gradwire.codec("int8").encode(torch.ones(2), {}, 3), r"`key` must be a gradwire.Key; got int"),
        (lambda: gradwire.codec("ef(int8)").encode(torch.ones(2)), r"`state` of 'ef\(int8\)' must hold 'residual'"),
        (lambda: gradwire.codec("ef(int8)").init((3,)), r"`spec` must be a TensorSpec; got tuple"),
        (lambda: gradwire.codec("int8").layout((3,)), r"`spec` must be a TensorSpec; got tuple"),
        (
            lambda: gradwire.codec("int8").decode(b"GRDW"),
            r"`payload` must be a Payload; got bytes. Bytes: gradwire.dec",
        ),
        (lambda: gradwire.TensorSpec((-3, 4)), r"`shape` must be a tuple of at most 255 whole sizes, none negative"),
        (lambda: gradwire.codec("ef(int8)").encode([1.0]), r"`tensor` must be a torch.Tensor; got list"),
        (lambda: gradwire.codec("dgc(topk:0.1)").encode([1.0]), r"`tensor` must be a torch.Tensor; got list"),
        (lambda: gradwire.codec("ef21(int8)").encode([1.0]), r"`tensor` must be a torch.Tensor; got list"),
        (lambda: gradwire.Key(seed=1.5), r"`Key\(seed=...\)` must be a whole number in \[0, 2\*\*64\); got 1.5"),
        (lambda: gradwire.Key(step=-1), r"`Key\(step=...\)` must be a whole number"),
        (lambda: gradwire.TensorSpec(5), r"`shape` must be a tuple of at most 255 whole sizes, none negative; got 5"),
        (lambda: gradwire.TensorSpec((3.5,)), r"`shape` must be a tuple"),
        (lambda: gradwire.decode(b"", max_bytes=None), r"`max_bytes` must be a whole number of bytes; got None"),
        (lambda: gradwire.best_codec((1000,), 0.5), r"`spec` must be a TensorSpec; got tuple"),
        (lambda: gradwire.best_codec(gradwire.TensorSpec((9,)), "x"), r"`ratio` must be in \(0, 1\]; got 'x'"),
        (lambda: gradwire.codec({"codec": "topk", "density": 10**400}), r"`topk\(density=...\)` must be a finite"),
    ],
)
def test_a_wrong_argument_is_named(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


def test_what_is_no_tensor_is_named():
    with pytest.raises(ConfigError, match=r"`tensor` must be a torch.Tensor; got list"):
        gradwire.encode([1.0, 2.0], "int8")


def test_a_payload_of_another_codec_is_named():
    payload, _ = gradwire.codec("int8").encode(torch.ones(4))
    with pytest.raises(ConfigError, match=r"`payload` was encoded with 'int8'; this codec is 'int4'"):
        gradwire.codec("int4").decode(payload)


def test_an_id_cannot_be_taken_twice():
    with pytest.raises(ConfigError, match=r"codec id 'int8' is taken by gradwire.codecs.integer.Int8"):

        @registry.register
        @dataclass(frozen=True)
        class Other(NoCompression):
            id: ClassVar[str] = "int8"


def test_a_broken_plugin_is_named_and_takes_nothing_down(monkeypatch):
    entry = EntryPoint("broken", "no_such_module_here", "gradwire.codecs")
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
    monkeypatch.setattr(registry, "_plugins_loaded", False)
    with pytest.warns(RuntimeWarning, match=r"codec plugin 'broken' \(no_such_module_here\) could not be loaded"):
        assert "int8" in gradwire.registered()


def test_a_codec_of_another_package_is_found_by_its_entry_point(tmp_path, monkeypatch):
    (tmp_path / "plugin_codec.py").write_text(
        "from dataclasses import dataclass\n"
        "from typing import ClassVar\n"
        "from gradwire.codecs import register\n"
        "from gradwire.codecs.none import NoCompression\n"
        "@register\n@dataclass(frozen=True)\n"
        "class Plugged(NoCompression):\n    id: ClassVar[str] = 'plugged'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    entry = EntryPoint("plugged", "plugin_codec", "gradwire.codecs")
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry] if group == "gradwire.codecs" else [])
    monkeypatch.setattr(registry, "_plugins_loaded", False)
    try:
        data = gradwire.encode(torch.ones(3), "plugged")
        assert torch.equal(gradwire.decode(data), torch.ones(3))
    finally:
        registry._registry.pop("plugged", None)
        sys.modules.pop("plugin_codec", None)
