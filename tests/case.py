"""Tests of many cases: which of them failed, and which of them ``make test`` runs."""

import contextlib

import pytest


@contextlib.contextmanager
def case(what):
    """Name one case of a test that goes through many.

    >>> with case("int8, 3 ranks"):
    ...     assert 1 == 2, "the means differ"
    Traceback (most recent call last):
    AssertionError: int8, 3 ranks: the means differ
    """
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{what}: {error}") from error


def tiered(values, first):
    """Parameters of a test: ``make test`` runs those in ``first``, ``make test-all`` runs all.

    >>> [each.values for each in tiered(["int8", "int4"], first=["int8"]) if not each.marks]
    [('int8',)]
    """
    left_out = [value for value in first if value not in values]
    assert not left_out, f"{left_out} are not among {values}"
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=() if value in first else pytest.mark.full,
        )
        for value in values
    ]
