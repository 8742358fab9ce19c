"""Deadlines of all-reduces that nobody waits for."""

import time

import pytest

from gradwire.collectives import processes


@pytest.fixture
def deadlines(monkeypatch):
    monkeypatch.setattr(processes, "_LOOK_S", 0.01)
    made = processes._Deadlines()
    yield made
    made.close()


def test_what_is_late_is_called_once(deadlines):
    called = []
    number = deadlines.add(0.05, lambda: called.append(1))
    time.sleep(0.3)
    assert called == [1]
    assert not deadlines.take(number)


def test_what_was_taken_back_is_not_called(deadlines):
    called = []
    assert deadlines.take(deadlines.add(0.05, lambda: called.append(1)))
    time.sleep(0.2)
    assert not called


def test_the_clock_begins_again_with_all_progress(deadlines):
    called = []
    numbers = [deadlines.add(0.5, lambda: called.append(1)) for _ in range(4)]
    for number in numbers:  # one after the other, as over a slow link: 0.8 seconds in all
        time.sleep(0.2)
        assert deadlines.take(number)
    assert not called
