"""Constants of the numeric law, shared by all backends; ``ops`` explains them."""

from typing import Final

FLOOR: Final = 2.0**-100
LANES: Final = 16
MSE_ROUNDS: Final = 4
# Least-squares step of a Gaussian over its mean magnitude, by bits: where the rounds of the "mse" scaling start.
MSE_START: Final = {2: 1.53, 3: 0.82}

STREAM_ROUNDING: Final = 0
STREAM_SELECTION: Final = 1
STREAM_ROTATION: Final = 2
STREAM_SKETCH: Final = 3
