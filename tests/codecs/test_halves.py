"""Facts the originals' own suites check, and edges of the 16-bit forms."""

import torch

import gradwire


def test_truncate16_is_the_originals_16_bit_form():
    x = torch.tensor([1.111111, 2.111111, 3.111111, 4.111111, 5.111111])
    decoded = gradwire.decode(gradwire.encode(x, "truncate16"))
    assert decoded.tolist() == [1.109375, 2.109375, 3.109375, 4.09375, 5.09375]


def test_fp16_sums_in_float32_and_is_exact_where_the_original_is_not():
    """512 x 1.0 / 512: the original's re-truncated running sum gives 0.5."""
    codec = gradwire.codec("fp16")
    payload, _ = codec.encode(torch.ones(4))
    acc = torch.zeros(4)
    for _ in range(512):
        codec.decode_add(payload, acc)
    assert (acc / 512).tolist() == [1.0] * 4


def test_no_finite_value_becomes_infinite():
    x = torch.tensor([3.4e38, -3.4e38, 65520.0, -65520.0])
    assert gradwire.decode(gradwire.encode(x, "fp16")).tolist() == [65504.0, -65504.0, 65504.0, -65504.0]
    assert torch.isfinite(gradwire.decode(gradwire.encode(x, "bf16"))).all()
