"""Clipping of slices, by value and by norm."""

import math

import pytest
import torch

from gradwire import ConfigError
from gradwire.sharding.clipping import clip_norm, clip_value


@pytest.mark.parametrize("most", [0.0, -1.0, math.inf, math.nan])
def test_a_norm_is_clipped_to_what_is_positive_and_finite(most):
    with pytest.raises(ConfigError, match="`most` must be above 0 and finite"):
        clip_norm([torch.ones(2)], 1.0, most)


@pytest.mark.parametrize(
    ("least", "most"), [(1.0, 1.0), (2.0, 1.0), (-math.inf, 1.0), (0.0, math.inf), (math.nan, 1.0)]
)
def test_values_are_clipped_between_two_finite_bounds(least, most):
    with pytest.raises(ConfigError, match="`least` must be below `most`, both finite"):
        clip_value([torch.ones(2)], least, most)


def test_a_gradient_of_the_largest_norm_stays_bit_for_bit():
    gradient = torch.tensor([3.0, 4.1]) / 3
    norm = float(gradient.double().norm())
    before = gradient.clone()
    clip_norm([gradient], norm, norm)
    assert torch.equal(gradient, before)
    clip_norm([gradient], norm, norm / 2)
    torch.testing.assert_close(gradient, before / 2)
