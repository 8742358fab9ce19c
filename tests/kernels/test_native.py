"""The native core against the reference, on every instruction set of this machine."""

import pytest

from gradwire import kernels

from . import fuzz

_native = pytest.importorskip("gradwire._native")


@pytest.fixture(params=_native.instruction_sets())
def instruction_set(request):
    before = _native.instruction_set()
    _native.use_instruction_set(request.param)
    yield request.param
    _native.use_instruction_set(before)


@pytest.mark.parametrize("part", range(8))
def test_bytes_equal_those_of_the_reference(instruction_set, part):
    for seed in range(100 * part, 100 * part + 100):
        fuzz.one(seed, "native")


def test_the_best_instruction_set_is_in_use():
    assert _native.instruction_set() == _native.instruction_sets()[-1]
    with pytest.raises(ValueError, match="does not run 'mmx'"):
        _native.use_instruction_set("mmx")


def test_every_op_is_native():
    assert set(kernels.available("cpu").values()) == {"native"}
