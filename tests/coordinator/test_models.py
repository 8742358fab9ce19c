"""Merging whole models."""

import threading
import time

import pytest
import torch

from gradwire import ConfigError, DistributedModelParametersCoordinator, NonFiniteError


def coordinator(copies, parameters=None, **settings):
    made = DistributedModelParametersCoordinator(copies, **settings)
    made.set_model_parameters({"w": torch.zeros(2)} if parameters is None else parameters)
    return made


def wait_for(made, version):
    deadline = time.monotonic() + 10
    while made.version < version:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_copies_are_averaged_each_time_enough_have_come():
    made = coordinator(2)
    made.start()
    for value in (1.0, 3.0, 10.0, 20.0, 7.0):
        made.add_model_parameters({"w": torch.full((2,), value)})
    made.stop()
    assert made.get_model_parameters()["w"].tolist() == [15.0, 15.0]
    assert made.metrics() == {"added": 5, "refused": 0, "merged": 4, "waiting": 1, "version": 2}


def test_copies_may_have_weights():
    made = coordinator(2, merge="weighted")
    made.start()
    made.add_model_parameters({"w": torch.full((2,), 1.0)}, weight=3)
    made.add_model_parameters({"w": torch.full((2,), 5.0)}, weight=1)
    made.stop()
    assert made.get_model_parameters()["w"].tolist() == [2.0, 2.0]


def test_a_round_ends_by_the_clock_with_at_least_some_copies():
    made = coordinator(10, every_s=0.1, least=2)
    made.start()
    made.add_model_parameters({"w": torch.full((2,), 4.0)})
    time.sleep(0.35)
    assert made.version == 0  # one copy is too few
    made.add_model_parameters({"w": torch.full((2,), 8.0)})
    wait_for(made, 1)
    made.stop()
    assert made.get_model_parameters()["w"].tolist() == [6.0, 6.0]


def test_whole_numbers_are_rounded():
    made = coordinator(2, [torch.zeros(1), torch.tensor([0])])
    made.start()
    for value in (1, 2):
        made.add_model_parameters([torch.full((1,), float(value)), torch.tensor([value])])
    made.stop()
    found = made.get_model_parameters()
    assert (found[0].item(), found[1].item()) == (1.5, 2)


def test_many_threads():
    made = coordinator(8, torch.zeros(3))
    made.start()
    threads = [
        threading.Thread(target=lambda: [made.add_model_parameters(torch.ones(3)) for _ in range(100)])
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    made.stop()
    assert made.version == 100
    assert made.get_model_parameters().tolist() == [1.0] * 3


def test_bad_copies_are_refused():
    made = coordinator(2, {"a": torch.zeros(2), "b": torch.zeros(1)})
    for bad, error, message in (
        ({"a": torch.zeros(2)}, ConfigError, r"must be a whole model; \['b'\] are missing"),
        ({"a": torch.zeros(3), "b": torch.zeros(1)}, ConfigError, r"`parameters\['a'\]` must have shape \(2,\)"),
        ({"a": torch.full((2,), float("inf")), "b": torch.zeros(1)}, NonFiniteError, "holds NaN or Inf"),
    ):
        with pytest.raises(error, match=message):
            made.add_model_parameters(bad)
    with pytest.raises(ConfigError, match="`weight` must be above 0 and finite; got 0"):
        made.add_model_parameters({"a": torch.zeros(2), "b": torch.zeros(1)}, weight=0)
    assert made.clear_model_parameters() == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"copies": 0}, "`copies` must be a whole number of at least 1; got 0"),
        ({"copies": 2, "merge": "median"}, "`merge` must be 'average' or 'weighted'; got 'median'"),
        ({"copies": 2, "every_s": 0}, "`every_s` must be above 0, or None; got 0"),
        ({"copies": 2, "least": 3}, "`least` must be from 1 to 2, the copies of a round; got 3"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        DistributedModelParametersCoordinator(**settings)


def test_it_needs_a_model():
    with pytest.raises(ConfigError, match="there are no parameters"):
        DistributedModelParametersCoordinator(2).start()
