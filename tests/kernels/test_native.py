"""The native core against the reference, on every instruction set of this machine."""

import pytest
import torch

from gradwire import Key, kernels
from gradwire.kernels import native, ops
from gradwire.kernels.formats import Float8, Half, Sign
from tests import needs
from tests.case import tiered

from . import fuzz

_native = needs.module("gradwire._native", "make test, with a C++ compiler")


@pytest.fixture(params=_native.instruction_sets())
def instruction_set(request):
    before = _native.instruction_set()
    _native.use_instruction_set(request.param)
    yield request.param
    _native.use_instruction_set(before)


@pytest.mark.parametrize("seeds", tiered([range(40), range(40, 400), range(400, 800)], first=[range(40)]), ids=str)
def test_bytes_equal_those_of_the_reference(instruction_set, seeds):
    for seed in seeds:
        fuzz.one(seed, "native")


def test_the_best_instruction_set_is_in_use():
    assert _native.instruction_set() == _native.instruction_sets()[-1]
    with pytest.raises(ValueError, match="does not run 'mmx'"):
        _native.use_instruction_set("mmx")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_found_wherever_it_is(instruction_set, bad):
    for count in (1, 15, 4096, 4097, 100_003):
        x = torch.full((count,), -3.4e38)
        assert native.is_finite(x)
        for place in {0, count // 2, count - 1}:
            x[place] = bad
            assert not native.is_finite(x)
            x[place] = 0.0
    assert native.is_finite(torch.empty(0))


def test_a_backend_that_was_forced_is_forgotten_again():
    x, key = torch.tensor([1.0, float("nan")]), {name: kernels.available("cpu")[name] for name in ("divide",)}
    for backend in ("reference", "native"):
        with kernels.use(backend):
            assert kernels.available("cpu")["divide"] == backend
            assert int(ops.count_nonfinite(x)) == 1
    assert {name: kernels.available("cpu")[name] for name in key} == key


def test_every_op_is_native():
    assert set(kernels.available("cpu").values()) == {"native"}


def test_bytes_do_not_depend_on_how_the_caller_treats_denormals(instruction_set):
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * 1e-39
    forms = Sign(128, torch.float32), Half(1024, "fp16"), Float8(128, "e5m2", torch.float32)
    wanted = [native.encode_blocks(x, form, Key(), x, 0.9) for form in forms]
    try:
        torch.set_flush_denormal(True)
        got = [native.encode_blocks(x, form, Key(), x, 0.9) for form in forms]
    finally:
        torch.set_flush_denormal(False)
    fuzz.same(wanted, got, "flushed")
    assert bool((wanted[0][3] != 0).any())


@pytest.mark.parametrize("values", ["zeros", "few", "constant", "two levels"])
def test_top_k_of_tensors_full_of_ties(values, instruction_set):
    n = 300_000
    x = torch.zeros(n)
    g = torch.Generator().manual_seed(0)
    if values == "few":
        x[torch.randperm(n, generator=g)[:1500]] = 1.0 + torch.rand(1500, generator=g)
    elif values == "constant":
        x = torch.randn(n, generator=g).sign()
    elif values == "two levels":
        x[torch.randperm(n, generator=g)[:40_000]] = 1.0
        x[torch.randperm(n, generator=g)[:100]] = -2.0
    for count in (1, 3000, 20_000, 60_000):
        with kernels.use("reference"):
            expected = ops.select_top(x, count)
        assert torch.equal(ops.select_top(x, count), expected)


def test_memory_of_dead_tensors_is_used_again_and_bounded():
    _native.release_memory()
    assert _native.kept_memory() == 0
    size = 8 << 20
    address = _native.take_memory(size).data_ptr()
    assert _native.kept_memory() == size
    again = _native.take_memory(size)
    assert again.data_ptr() == address
    tensors = [_native.take_memory(16 << 20) for _ in range(12)]
    del tensors  # 192 MB given back while 8 are in use
    assert _native.kept_memory() <= (64 + 8) << 20
    again.fill_(7)
    assert int(again.sum(dtype=torch.int64)) == 7 * size
    del again
    _native.release_memory()
    assert _native.kept_memory() == 0
