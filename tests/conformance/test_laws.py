"""The laws every codec obeys. A new codec file is covered by being there.

The native backend is held to every law by every example of every codec. Backends agree to the byte (tests/kernels), so
one example of each class holds the reference to them, and none where a law takes many draws or large tensors.
"""

import itertools
import json

import pytest
import torch

import gradwire
from gradwire import ConfigError, Key, NonFiniteError, TensorSpec
from gradwire.codecs import Carrier, Codec
from gradwire.transforms import Chain, ErrorFeedback
from gradwire.wire import pack, unpack
from tests.case import case, tiered

from .cases import (
    CODECS,
    CONTENTS,
    DTYPES,
    KEY,
    NON_FINITE,
    PLAIN,
    SHAPES,
    TENSORS,
    decoded,
    flat,
    heavy,
    here,
    ids,
    normal,
    on_backends,
    same_bits,
    tensor,
)

every_codec = pytest.mark.parametrize("codec", CODECS, ids=ids)
plain_codec = pytest.mark.parametrize("codec", PLAIN, ids=ids)
every_codec_on_backends = on_backends(CODECS)
plain_codec_on_backends = on_backends(PLAIN)


def assert_within_bound(codec, x, y, key):
    spec = TensorSpec.of(x)
    assert y.shape == x.shape
    assert y.dtype == x.dtype
    assert bool(torch.isfinite(y).all())
    values, error = flat(x), (flat(x).double() - flat(y).double()).abs()
    bound = codec.bound(values, spec, key).double()
    info = torch.finfo(x.dtype)
    rounding = 2 * info.eps * (values.abs().double() + bound) + info.smallest_normal * info.eps
    worst = (error - bound - rounding).max() if error.numel() else torch.tensor(-1.0)
    assert worst <= 0, f"an element is {worst} beyond the bound"


@every_codec_on_backends
def test_a_tensor_survives_within_the_stated_bound_and_size(codec, backend):
    for shape, content, dtype in TENSORS:
        with case(f"{content}, {shape}, {dtype}"):
            x = tensor(content, shape, dtype)
            before, spec = x.clone(), TensorSpec.of(x)
            payload, _ = codec.encode(x, codec.init(spec), KEY)
            assert same_bits(x, before), "encode changed its input"
            y = codec.decode(payload)
            assert_within_bound(codec, x, y, KEY)

            layout = codec.layout(spec)
            data = pack(payload)
            assert payload.nbytes == len(data)
            if layout.exact:
                assert layout.nbytes == len(data)
                assert [(p.dtype, p.numel) for p in layout.parts] == [(p.dtype, p.numel()) for p in payload.parts]
            else:
                assert layout.nbytes >= len(data)

            again = gradwire.decode(data)
            if codec.laws(spec).exact_bytes or y.device == again.device:
                assert same_bits(again, y.cpu()), "the bytes decode to something else"
            else:
                assert_within_bound(codec, x, here(again), KEY)


@every_codec_on_backends
def test_zero_decodes_to_zero(codec, backend):
    for shape in SHAPES:
        with case(shape):
            spec = TensorSpec(SHAPES[shape])
            for zeros in (torch.zeros(spec.shape), -torch.zeros(spec.shape)):
                assert not decoded(codec, zeros).any()
            if codec.laws(spec).keeps_zeros:
                x = tensor("half zeros", shape, torch.float32)
                assert not decoded(codec, x)[x == 0].any()


@every_codec_on_backends
def test_nan_and_inf_are_reported_and_never_decoded(codec, backend):
    for dtype, value in itertools.product(DTYPES, NON_FINITE):
        with case(f"{value} in {dtype}"):
            x = normal(300).to(dtype)
            state = codec.init(TensorSpec.of(x))
            _, state = codec.encode(x, state, KEY)
            bad = x.clone()
            bad[[0, 150, 299]] = NON_FINITE[value]
            payload, after = codec.encode(bad, state, KEY)
            assert int(payload.nonfinite) == 3
            assert after.keys() == state.keys()
            assert all(same_bits(after[k], state[k]) for k in state), "a rejected step must leave the state as it was"
            for received in (payload, unpack(pack(payload))):
                with pytest.raises(NonFiniteError):
                    codec.decode(received)
                with pytest.raises(NonFiniteError):
                    codec.decode_add(received, torch.zeros(300))
            with pytest.raises(NonFiniteError, match="3 of 300 values are NaN or Inf"):
                gradwire.encode(bad, codec)


@every_codec_on_backends
def test_decode_writes_and_adds_where_it_is_told(codec, backend):
    x = normal(600).view(20, 30)
    payload, _ = codec.encode(x, codec.init(TensorSpec.of(x)), KEY)
    y = codec.decode(payload)
    out = torch.full((30, 20), torch.nan).t()  # strided
    assert codec.decode(payload, out) is out
    assert torch.equal(out, y)
    acc = torch.ones(20, 30)
    codec.decode_add(payload, acc)
    assert torch.equal(acc, 1.0 + y)
    for wrong in (torch.zeros(600), torch.zeros(20, 30, dtype=torch.int32)):
        with pytest.raises(ConfigError, match=r"`(out|acc)` must be a floating point tensor of shape \(20, 30\)"):
            codec.decode(payload, wrong)
        with pytest.raises(ConfigError, match=r"`acc` must be"):
            codec.decode_add(payload, wrong)


@every_codec
def test_a_codec_is_its_config_its_string_and_its_repr(codec):
    config = json.loads(json.dumps(codec.config()))
    assert gradwire.codec(config) == codec
    assert gradwire.codec(str(codec)) == codec
    names = {cls.__name__: cls for cls in gradwire.registered().values()}
    assert eval(repr(codec), names) == codec
    assert hash(gradwire.codec(str(codec))) == hash(codec)


@plain_codec_on_backends
def test_bytes_depend_on_the_key_only_if_the_codec_says_so(codec, backend):
    x = normal(2000).view(40, 50)
    law = codec.laws(TensorSpec.of(x))
    parts = {}
    for key in (KEY, KEY, Key(1, 3, 1), Key(7, 4, 1), Key(7, 3, 2)):
        payload, _ = codec.encode(x, key=key)
        parts.setdefault(key, []).append(b"".join(p.view(torch.uint8).cpu().numpy().tobytes() for p in payload.parts))
    assert parts[KEY][0] == parts[KEY][1], "the same key must give the same bytes"
    assert len({p[0] for p in parts.values()}) == (4 if law.random else 1)


# Matrix products may differ in the last bit.
EXACT = [c for c in PLAIN if c.laws(TensorSpec((1000, 1200))).exact_bytes]


@pytest.mark.parametrize("codec", EXACT, ids=ids)
def test_bytes_do_not_depend_on_the_number_of_threads(codec):
    x = heavy(1_200_000).view(1000, 1200)  # enough for kernels to divide the work
    try:
        torch.set_num_threads(2)
        two = gradwire.encode(x, codec, key=KEY)
    finally:
        torch.set_num_threads(1)
    assert two == gradwire.encode(x, codec, key=KEY)


@every_codec
def test_a_16_bit_tensor_never_costs_more_than_a_float32_one(codec):
    for shape in SHAPES.values():
        sizes = [codec.layout(TensorSpec(shape, dtype)).nbytes for dtype in DTYPES]
        assert max(sizes[1:]) <= sizes[0]


def squared_error(codec, x, keys):
    errors = [(decoded(codec, x, Key(seed)) - x).double().square().sum() for seed in range(keys)]
    return float(torch.stack(errors).mean())


@plain_codec
def test_contraction_and_variance_hold_as_declared(codec, fastest_backend):
    n = 8192
    for content in ("normal", "heavy tails", "one spike", "all equal", "almost equal", "ties", "tiny"):
        with case(content):
            x = CONTENTS[content](n).view(64, 128)
            law = codec.laws(TensorSpec.of(x))
            if law.random and content == "one spike":
                continue  # one element: the mean over a few keys says nothing
            error = squared_error(codec, x, keys=12 if law.random else 1)
            energy, slack = float(x.double().square().sum()), 1.02 if law.random else 1 + 1e-5
            if law.contraction is not None:
                assert error <= (1 - law.contraction) * energy * slack + n * 1e-30
            if law.variance is not None:
                assert error <= law.variance * energy * slack + n * 1e-30


UNBIASED = [c for c in PLAIN if c.laws(TensorSpec((512,))).unbiased and c.laws(TensorSpec((512,))).random]


def bias_score(codec, x, keys=400):
    """Standard scores of the mean error, summed over the tensor along its own signs and along random ones."""
    samples = torch.stack([decoded(codec, x, Key(seed, step=seed % 3)) for seed in range(keys)]).double()
    error, spread = samples.mean(dim=0) - x.double(), samples.var(dim=0) / keys
    directions = torch.stack([x.sign().double(), *(normal(x.numel(), s).sign().double() for s in range(4))])
    return float((directions @ error / spread.sum().sqrt().clamp(min=1e-12)).abs().max())


@pytest.mark.parametrize("codec", UNBIASED, ids=ids)
@pytest.mark.parametrize("content", [normal, heavy], ids=["normal", "heavy"])
def test_unbiased_means_unbiased(codec, content, fastest_backend):
    assert bias_score(codec, content(512)) < 4.5


@pytest.mark.parametrize("biased", ["qsgd:4,shrink=0.95", "ternary:shrink=0.9", "randomk:0.5"])
def test_the_test_of_unbiasedness_finds_a_bias(biased):
    assert bias_score(gradwire.codec(biased), normal(512)) > 8


def feedback(codec):
    """The codec inside error feedback, where that makes sense."""
    return ErrorFeedback(codec.contractive())


@plain_codec_on_backends
def test_error_feedback_loses_nothing(codec, backend):
    ef = feedback(codec)
    for dtype in DTYPES:
        with case(str(dtype)):
            state, sent, given = ef.init(TensorSpec((30, 20), dtype)), torch.zeros(30, 20).double(), 0.0
            largest = 0.0
            for step in range(25):
                x = heavy(600, seed=step).view(30, 20).to(dtype)
                payload, state = ef.encode(x, state, Key(1, step))
                decoded32 = torch.zeros(30, 20)
                ef.decode_add(payload, decoded32)
                sent += decoded32.double()
                given = given + x.double()
                largest = max(largest, float(decoded32.abs().max()), float(state["residual"].abs().max()))
            missing = (sent + state["residual"].double() - given).abs().max()
            assert missing <= 25 * 2.0**-22 * largest


@every_codec_on_backends
def test_nothing_returned_is_the_memory_of_something_else(codec, backend):
    x, spec = heavy(600).clone().view(20, 30), TensorSpec((20, 30))
    payload, state = codec.encode(x, codec.init(spec), KEY)
    expected = codec.decode(payload)
    mean, state = codec.finish(codec.decode(payload), state)
    kept = {k: v.clone() for k, v in state.items()}
    x.fill_(7.0)
    mean.fill_(7.0)
    codec.decode(payload).fill_(7.0)
    assert torch.equal(codec.decode(payload), expected)
    assert all(same_bits(state[k], kept[k]) for k in kept)


@plain_codec
def test_a_contractive_variant_has_a_contraction(codec):
    law = codec.contractive().laws(TensorSpec((40, 50)))
    # Errors in the factors of a low-rank chain multiply: it promises none.
    assert law.contraction is not None or not law.exact_bytes


def contraction(codec):
    """What one step of error feedback around the codec is sure to send, of the energy of 2000 values."""
    return feedback(codec).inner.laws(TensorSpec((2000,))).contraction or 0.0


@pytest.mark.parametrize("codec", [c for c in PLAIN if contraction(c) >= 0.02], ids=ids)
def test_error_feedback_stays_bounded_for_a_contraction(codec, fastest_backend):
    ef = feedback(codec)
    x = heavy(2000)
    state = ef.init(TensorSpec((2000,)))
    for step in range(150):
        _, state = ef.encode(x, state, Key(1, step))
    assert state["residual"].norm() <= 2 / contraction(codec) * x.norm()


@every_codec_on_backends
def test_state_goes_in_and_comes_out_and_is_not_changed_in_place(codec, backend):
    x, spec = heavy(300), TensorSpec((300,))
    state = codec.init(spec)
    _, state = codec.encode(x, state, KEY)
    kept = {k: v.clone() for k, v in state.items()}
    one = codec.encode(x, state, KEY)
    two = codec.encode(x, state, KEY)
    assert all(same_bits(state[k], kept[k]) for k in kept)
    assert pack(one[0]) == pack(two[0]), "the same state and key must give the same bytes"
    assert all(isinstance(v, torch.Tensor | int) for v in one[1].values())


CARRIERS = [c for c in PLAIN if isinstance(c, Carrier)]
QUANTIZERS = [cls.examples()[0] for cls in gradwire.registered().values()]
QUANTIZERS = [q for q in QUANTIZERS if q in PLAIN and not isinstance(q, Carrier | Chain)]
QUANTIZERS += [gradwire.codec("rotate(sign)"), gradwire.codec("rotate(int2)")]


@pytest.mark.parametrize("carrier", CARRIERS, ids=ids)
def test_every_carrier_chains_with_every_quantizer(carrier: Codec, fastest_backend):
    for quantizer in QUANTIZERS:
        chain = gradwire.codec(f"{carrier}+{quantizer}")
        assert chain == Chain(carrier, quantizer)
        for content in ("normal", "one spike", "zeros"):
            x = CONTENTS[content](1200).view(30, 40)
            data = gradwire.encode(x, chain, key=KEY)
            y = here(gradwire.decode(data))
            assert len(data) <= chain.layout(TensorSpec.of(x)).nbytes
            with case(f"{chain} of {content}"):
                assert_within_bound(chain, x, y, KEY)
                assert content != "zeros" or not y.any()


# One codec of each family of kernels.
TEN_MILLION = [
    *((cls.examples()[0], torch.float32) for cls in gradwire.registered().values() if cls.examples()[0] in PLAIN),
    *((gradwire.codec(text), torch.bfloat16) for text in ("int8", "topk:0.01")),
]
FEW = [(gradwire.codec(text), torch.float32) for text in ("int8", "topk:0.01")]


@pytest.mark.parametrize(("codec", "dtype"), tiered(TEN_MILLION, first=FEW), ids=str)
def test_ten_million_elements(codec, dtype, fastest_backend):
    x = heavy(3163 * 3162).view(3163, 3162).to(dtype)
    payload, _ = codec.encode(x, key=KEY)
    layout = codec.layout(payload.spec)
    assert payload.nbytes == layout.nbytes if layout.exact else payload.nbytes <= layout.nbytes
    y = codec.decode(payload)
    assert_within_bound(codec, x, y, KEY)
