"""What each transform is for, shown on numbers small enough to check by hand."""

import pytest
import torch

import gradwire
from gradwire import ConfigError, Key, TensorSpec
from gradwire.transforms import EF21, MomentumCorrection, for_training

from ..conformance.cases import heavy, normal


def test_deep_gradient_compression_follows_its_paper():
    """u = m u + g; v += u; send the top of v; zero both there."""
    dgc = MomentumCorrection("topk:0.25", momentum=0.5)
    state = dgc.init(TensorSpec((4,)))
    u, v = torch.zeros(4), torch.zeros(4)
    for step in range(20):
        g = normal(4, seed=step)
        u = 0.5 * u + g
        v = v + u
        kept = v.abs().argmax()
        payload, state = dgc.encode(g, state, Key(0, step))
        expected = torch.zeros(4)
        expected[kept] = v[kept]
        assert torch.equal(dgc.decode(payload), expected)
        u[kept] = v[kept] = 0
        assert torch.equal(state["velocity"], u)
        assert torch.equal(state["unsent"], v)


def test_momentum_correction_keeps_what_quantizing_its_values_lost():
    dgc = gradwire.codec("dgc:momentum=0(topk:0.5+int2)")
    x = torch.tensor([1.0, 0.7, 0.1, 0.0])
    payload, state = dgc.encode(x, dgc.init(TensorSpec((4,))))
    assert torch.allclose(dgc.decode(payload) + state["unsent"], x)


def test_ef21_reaches_a_constant_gradient_and_loses_nothing():
    ef21 = EF21("topk:0.1")
    x = heavy(200)
    state, seen = ef21.init(TensorSpec((200,))), torch.zeros(200)
    for step in range(30):
        payload, state = ef21.encode(x, state, Key(0, step))
        mean, state = ef21.finish(ef21.decode(payload), state)
        seen += ef21.decode(payload)
        torch.testing.assert_close(mean, seen)
        torch.testing.assert_close(state["estimate"], seen)
    assert torch.allclose(mean, x, atol=1e-6)


def test_ef21_of_two_ranks_finishes_at_the_mean():
    ef21, spec = EF21("int4"), TensorSpec((64,))
    xs, states = [normal(64, 1), normal(64, 2)], [ef21.init(spec), ef21.init(spec)]
    for step in range(12):
        changes = []
        for rank in range(2):
            payload, states[rank] = ef21.encode(xs[rank], states[rank], Key(rank, step))
            changes.append(ef21.decode(payload))
        means = []
        for rank in range(2):
            mean, states[rank] = ef21.finish((changes[0] + changes[1]) / 2, states[rank])
            means.append(mean)
        assert torch.equal(means[0], means[1])
    torch.testing.assert_close(means[0], (xs[0] + xs[1]) / 2, atol=1e-5, rtol=1e-4)


def test_ef21_sender_and_receivers_do_not_drift_after_a_burst():
    ef21 = EF21("topk:0.5")
    small, state, seen = torch.tensor([0.1, 0.2]), ef21.init(TensorSpec((2,))), torch.zeros(2)
    for x in [small] * 4 + [small * 1e9] + [small] * 20:
        payload, state = ef21.encode(x, state)
        seen += ef21.decode(payload)
        assert torch.equal(seen, state["estimate"])
    assert torch.allclose(seen, small)


def test_ef21_survives_clipping_in_place():
    ef21, x = EF21("int8"), heavy(500)
    state = ef21.init(TensorSpec((500,)))
    for _ in range(5):
        payload, state = ef21.encode(x, state)
        mean, state = ef21.finish(ef21.decode(payload), state)
        error = (mean - x).norm() / x.norm()
        mean.mul_(0.001)
    assert error < 1e-3


@pytest.mark.parametrize(
    "codec",
    [
        "ef(int2:rounding=stochastic)",
        "ef(rotate(int2:rounding=stochastic))",
        "ef(qsgd:1)",
        "dgc(qsgd:1)",
        "ef(warmup:10(randomk:0.1,unbiased=true))",
        "dgc(randomk:0.1,unbiased=true)",
    ],
)
def test_feedback_around_an_expanding_codec_does_not_diverge(codec):
    codec, x = gradwire.codec(codec), heavy(1000)
    state = codec.init(TensorSpec((1000,)))
    for step in range(120):
        _, state = codec.encode(x, state, Key(0, step))
    assert max(value.norm() for value in state.values()) < 400 * x.norm()


def test_decay_forgets():
    ef = gradwire.codec("ef:decay=0.5(threshold:10)")
    state = ef.init(TensorSpec((1,)))
    for _ in range(50):
        _, state = ef.encode(torch.ones(1), state)
    assert state["residual"].item() == pytest.approx(2.0)  # 1 + 1/2 + 1/4 + ...


def test_warm_up_follows_the_step_and_every_payload_decodes():
    codec = gradwire.codec("ef(warmup:100(topk:0.001+int8))")
    state, kept = codec.init(TensorSpec((10_000,))), []
    for step in range(0, 130, 10):
        payload, state = codec.encode(normal(10_000), state, Key(0, step))
        kept.append(int((codec.decode(payload) != 0).sum()))
        assert payload.nbytes <= codec.layout(payload.spec).nbytes
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > 2400
    assert kept[-1] == 10


def test_rotation_spreads_a_spike():
    x = torch.zeros(4096)
    x[::128] = 1.0  # one in every block
    x += 0.01 * normal(4096)
    plain, rotated = ((gradwire.decode(gradwire.encode(x, c)) - x).norm() for c in ("sign", "rotate(sign)"))
    assert rotated < 0.75 * plain


def test_rotation_of_heavy_tails_is_as_good_as_of_a_gaussian():
    errors = []
    for x in (normal(1 << 18), heavy(1 << 18)):
        y = gradwire.decode(gradwire.encode(x, "rotate(int3)"))
        errors.append(float((x - y).square().sum() / x.square().sum()))
    assert errors[1] < 1.1 * errors[0] < 0.06


@pytest.mark.parametrize(
    ("codec", "trained"),
    [
        ("none", "none"),
        ("fp16", "fp16"),
        ("fp8:e4m3", "fp8:e4m3"),
        ("int8", "int8"),
        ("int4", "int4"),
        ("int4:rounding=stochastic", "int4:rounding=stochastic"),
        ("int3", "ef(int3)"),
        ("int2", "ef(int2)"),
        ("sign", "ef(sign)"),
        ("topk:0.01", "ef(topk:0.01)"),
        ("topk:0.01+int8", "ef(topk:0.01+int8)"),
        ("blocktopk:0.01", "ef(blocktopk:0.01)"),
        ("threshold:0.1", "ef(threshold:0.1)"),
        ("randomk:0.1", "ef(randomk:0.1)"),
        ("lowrank:4", "ef(lowrank:4)"),
        ("rotate(int3)", "ef(rotate(int3))"),
        ("rotate(int4)", "rotate(int4)"),
        ("warmup:40(topk:0.01)", "ef(warmup:40(topk:0.01))"),
        ("qsgd:16", "qsgd:16"),
        ("natural", "natural"),
        ("ef:decay=0.9(int4)", "ef:decay=0.9(int4)"),
        ("dgc(topk:0.01)", "dgc(topk:0.01)"),
    ],
)
def test_biased_codecs_are_trained_with_error_feedback(codec, trained):
    assert str(for_training(codec)) == trained


def test_error_feedback_makes_an_unbiased_codec_contractive():
    ef = gradwire.codec("ef(qsgd:1)")
    assert ef.inner.laws(TensorSpec((1000,))).contraction > 0
    assert gradwire.codec(str(ef)) == ef


def test_a_state_of_something_else_is_named():
    ef = gradwire.codec("ef(int4)")
    with pytest.raises(ConfigError, match=r"`state` of 'ef\(int4\)' must hold 'residual' of shape \(4,\); got \(3,\)"):
        ef.encode(torch.ones(4), ef.init(TensorSpec((3,))))
    with pytest.raises(ConfigError, match=r"must hold 'residual' of shape \(4,\); got dict without it"):
        ef.encode(torch.ones(4), {"velocity": torch.ones(4)})
