"""The best codec that fits a budget of bytes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Final

import torch

from gradwire.codecs import Codec, codec
from gradwire.errors import ConfigError
from gradwire.kernels import ops
from gradwire.wire import Key, TensorSpec

__all__ = ["best_codec", "relative_error"]

_QUANTIZERS: Final = (
    *("none", "bf16", "int8", "int4", "int3", "int2", "sign"),
    *("int4:block=512", "int3:block=512", "int2:block=512"),  # fewer scales, where that is what it takes
)
_VALUES: Final = ("int8", "int4", "int2")
_SAMPLE: Final = 1 << 16


def best_codec(
    spec: TensorSpec,
    ratio: float | None = None,
    *,
    nbytes: int | None = None,
    quantize: bool = True,
    sparsify: bool = True,
) -> Codec:
    """The codec of least error that fits: at most ``ratio`` times float32's bytes, or ``nbytes``, header included.

    Error is the relative squared error on heavy-tailed (Laplace) values, measured here, once. ``quantize`` and
    ``sparsify`` say which families may be used; with neither only ``none`` is left. ``fp16`` is not considered: small
    gradients vanish in its range.

    >>> spec = TensorSpec((1_000_000,))
    >>> for ratio in (0.6, 0.3, 0.15, 0.08, 0.01):
    ...     print(ratio, best_codec(spec, ratio))
    0.6 bf16
    0.3 int8
    0.15 int4
    0.08 topk:0.377+int4
    0.01 topk:0.0363+int2
    >>> best_codec(spec, nbytes=5_000_000)
    NoCompression()
    """
    if not isinstance(spec, TensorSpec):
        raise ConfigError(f"`spec` must be a TensorSpec; got {type(spec).__name__}.")
    if (ratio is None) == (nbytes is None):
        raise ConfigError(f"give either `ratio` or `nbytes`; got ratio={ratio!r} and nbytes={nbytes!r}.")
    if ratio is not None and not (isinstance(ratio, int | float) and 0 < ratio <= 1):
        raise ConfigError(f"`ratio` must be in (0, 1]; got {ratio!r}.")
    if nbytes is not None and not (isinstance(nbytes, int) and nbytes > 0):
        raise ConfigError(f"`nbytes` must be a whole number above 0; got {nbytes!r}.")
    budget = nbytes if nbytes is not None else (ratio or 0) * 4 * spec.numel
    fitting = [c for c in _candidates(spec, budget, quantize, sparsify) if c.layout(spec).nbytes <= budget]
    if not fitting:
        raise ConfigError(
            f"no codec fits {spec.numel} elements into {budget:.0f} bytes, header included "
            f"(ratio={ratio}, nbytes={nbytes}, quantize={quantize}, sparsify={sparsify}). "
            "Encode small tensors together."
        )
    return min(fitting, key=lambda c: (relative_error(str(c)), c.layout(spec).nbytes))


def _candidates(spec: TensorSpec, budget: float, quantize: bool, sparsify: bool) -> Iterator[Codec]:
    yield codec("none")
    if quantize:
        yield from map(codec, _QUANTIZERS)
    if sparsify:
        for values in ("", *(f"+{v}" for v in _VALUES if quantize)):
            density = _largest_density(spec, budget, values)
            if density:
                yield codec(f"topk:{density}{values}")


def _largest_density(spec: TensorSpec, budget: float, values: str) -> float:
    """The largest density up to a half, of three significant digits, that fits; 0 if none does."""

    def fits(density: float) -> bool:
        return codec(f"topk:{density:.3g}{values}").layout(spec).nbytes <= budget

    low, high = 0.5 / max(1, spec.numel), 0.5
    if not fits(low):
        return 0.0
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if fits(middle) else (low, middle)
    return float(f"{low:.3g}")


@functools.lru_cache(maxsize=1024)
def relative_error(name: str) -> float:
    """Relative squared error of one encode of a heavy-tailed (Laplace) sample by a codec.

    >>> relative_error("int8") < relative_error("int4") < relative_error("int2")
    True
    """
    draws = ops.random_bits(Key(), 0, 2 * _SAMPLE, device=torch.device("cpu")).to(torch.float64)
    u = (draws + 0.5) / 2.0**32
    x = (torch.log(u[:_SAMPLE]) - torch.log(u[_SAMPLE:])).to(torch.float32)
    c = codec(name)
    sent, _ = c.encode(x, c.init(TensorSpec((_SAMPLE,)), "cpu"))
    return float((c.decode(sent) - x).double().square().sum() / x.double().square().sum())
