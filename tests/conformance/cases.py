"""What the conformance suite runs over: every registered codec, and tensors that break codecs."""

import functools
import math

import pytest
import torch

import gradwire
from gradwire import kernels
from gradwire.transforms.base import SenderTransform

CODECS = tuple(c for cls in gradwire.registered().values() for c in cls.examples())
# Those whose payloads are their own: a sender transform's are its inner codec's.
PLAIN = tuple(c for c in CODECS if not isinstance(c, SenderTransform))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = {
    "empty": (0,),
    "empty 2-D": (3, 0),
    "scalar": (),
    "one": (1,),
    "odd": (37,),
    "block - 1": (127,),
    "block": (128,),
    "block + 1": (129,),
    "two blocks + 1": (257,),
    "2-D": (24, 40),
    "4-D": (4, 3, 5, 7),
    "non-contiguous": (40, 33),
    "strided": (300,),
    "big block + 1": (4097,),
}
KEY = gradwire.Key(seed=7, step=3, bucket=1)


def ids(codec):
    return str(codec)


def on_backends(codecs):
    """Parametrize a test by codec and backend: all codecs; on the reference, if it is not alone, one of each class."""
    first = tuple({type(codec): codec for codec in reversed(codecs)}.values())
    few = first if len(kernels.backends()) > 1 else codecs
    pairs = [
        pytest.param(codec, backend, id=f"{codec}-{backend}")
        for backend in kernels.backends()
        for codec in (few if backend == "reference" else codecs)
    ]
    return pytest.mark.parametrize(("codec", "backend"), pairs, indirect=["backend"])


def here(x):
    """The tensor where the backend under test runs."""
    return x.to(torch.get_default_device())


def normal(n, seed=0):
    return here(torch.randn(n, generator=torch.Generator().manual_seed(seed), device="cpu"))


def heavy(n, seed=0):
    """Student's t with 3 degrees of freedom."""
    return here(_heavy(n, seed))


@functools.lru_cache(maxsize=4)
def _heavy(n, seed):
    g = torch.Generator().manual_seed(seed)
    parts = torch.randn(4, n, generator=g, device="cpu")
    return parts[0] / (parts[1:].square().sum(dim=0) / 3).sqrt().clamp(min=1e-3)


def spike(n):
    x = torch.zeros(n)
    x[n // 3 : n // 3 + 1] = -5.0
    return x


def almost_equal(n):
    """One element a little larger than all others: the worst case of a scale that follows the maximum."""
    x = torch.full((n,), 0.999)
    x[:1] = 1.0
    return x


def all_magnitudes(n):
    """Both signs, and every power of ten that float32 has, in one tensor."""
    g = torch.Generator().manual_seed(0)
    exponents = torch.rand(n, generator=g, device="cpu").double() * 76 - 38
    return here((10**exponents * torch.randn(n, generator=g, device="cpu").sign()).to(torch.float32))


CONTENTS = {
    "zeros": torch.zeros,
    "minus zeros": lambda n: -torch.zeros(n),
    "denormals": lambda n: normal(n) * 1e-40,
    "tiny": lambda n: normal(n) * 1e-20,
    "huge": lambda n: normal(n).clamp(-1, 1) * 3.4e38,
    "largest": lambda n: torch.full((n,), torch.finfo(torch.float32).max),
    "all equal": lambda n: torch.full((n,), -0.37),
    "one spike": spike,
    "almost equal": almost_equal,
    "all magnitudes": all_magnitudes,
    "ties": lambda n: normal(n).round(),
    "half zeros": lambda n: normal(n).clamp(min=0),
    "normal": normal,
    "heavy tails": heavy,
}
# Every shape with every content, and each of these with every dtype.
TENSORS = [
    (shape, content, DTYPES[(row + column) % len(DTYPES)])
    for row, shape in enumerate(SHAPES)
    for column, content in enumerate(CONTENTS)
]
NON_FINITE = {"NaN": math.nan, "Inf": math.inf, "-Inf": -math.inf}


def tensor(content, shape, dtype):
    """A tensor of that content; the shape named non-contiguous is a transposed view, strided one of every second."""
    values = CONTENTS[content](math.prod(SHAPES[shape])).to(torch.float32)
    limit = torch.finfo(dtype).max
    x = values.clamp(-limit, limit).to(dtype).reshape(SHAPES[shape])
    if shape == "strided":
        return torch.stack([x, x], dim=1)[:, 0]
    return x.t() if shape == "non-contiguous" else x


def same_bits(a, b):
    """Equal dtype, shape and bytes; -0 differs from 0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def flat(x):
    return x.detach().reshape(-1).to(torch.float32).contiguous()


def decoded(codec, x, key=KEY):
    return codec.decode(codec.encode(x, codec.init(gradwire.TensorSpec.of(x)), key)[0])
