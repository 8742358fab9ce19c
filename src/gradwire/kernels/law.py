"""Constants of the numeric law, shared by all backends; ``ops`` explains them."""

import functools
from typing import Final

import numpy as np
import torch

FLOOR: Final = 2.0**-100
LANES: Final = 16
MSE_ROUNDS: Final = 4
# Least-squares step of a Gaussian over its mean magnitude, by bits: where the rounds of the "mse" scaling start.
MSE_START: Final = {2: 1.53, 3: 0.82}

STREAM_ROUNDING: Final = 0
STREAM_SELECTION: Final = 1
STREAM_ROTATION: Final = 2
STREAM_SKETCH: Final = 3

FLOAT8_LARGEST: Final = {"e4m3": 448.0, "e5m2": 57344.0}


def reciprocal(number: float) -> float:
    """1 / number in float32: dividing by a constant is this product.

    >>> reciprocal(3.0)
    0.3333333432674408
    """
    return float(np.float32(1.0 / number))


def short_block(block: int, length: int) -> float:
    """What the sum of a block of that many elements is multiplied by to become their mean: block / length in float32.

    >>> short_block(16, 3)
    5.333333492279053
    """
    return float(np.float32(block) / np.float32(length))


@functools.cache
def largest_scale(largest_code: float, dtype: torch.dtype) -> float:
    """The largest scale of that dtype whose product with the code is finite.

    >>> largest_scale(127, torch.bfloat16) * 127 < torch.finfo(torch.float32).max
    True
    """
    below = np.nextafter(np.float32(np.finfo(np.float32).max / largest_code), np.float32(0.0))
    if dtype == torch.bfloat16:
        below = (below.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return float(below)


ORTHOGONAL_SHIFT: Final = 1e-12
"""Of the trace, added to a Gram matrix: keeps the factorization of one without full rank."""

ORTHOGONAL_LEAST: Final = 1e-200
"""Added besides: keeps the factorization of zeros, whose factors stay zeros."""
