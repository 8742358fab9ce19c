"""Integer codecs."""

import torch

import gradwire


def test_the_worst_block_loses_what_the_law_allows_and_no_more():
    """A bound that no block comes near would hide an error in the law, or in the rounding of scales."""
    codec = gradwire.codec("int8")
    allowed = 1 - codec.laws(gradwire.TensorSpec((codec.block,))).contraction
    worst = 0.0
    for scale in (1.0, 1 + 2.0**-7):  # neighbours in bf16
        for largest in (scale, scale - 2.0**-12):
            block = torch.full((codec.block,), 0.4999 * scale / 127)  # half a step, which rounds to 0
            block[0] = largest
            lost = (gradwire.decode(gradwire.encode(block, codec)) - block).double().square().sum()
            worst = max(worst, float(lost / block.double().square().sum()))
    assert 0.97 * allowed < worst <= allowed
