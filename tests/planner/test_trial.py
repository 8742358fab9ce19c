"""What a method costs, found out by doing it."""

import pytest
import torch

from gradwire import NonFiniteError
from gradwire.planner import try_method
from gradwire.reducer import GradientReducer

from ..collectives.threads import on_every_rank, results

SHAPES = {"a": (1024, 384), "b": (256, 1200)}
NUMEL = sum(torch.Size(shape).numel() for shape in SHAPES.values())


def gradients(seed, rank=0):
    generator = torch.Generator().manual_seed(10 * seed + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def sent_by_a_rank(what, ranks):
    def body(peers):
        parameters = {name: torch.nn.Parameter(each) for name, each in gradients(0).items()}
        reducer = GradientReducer(parameters, what, peers)
        for step in range(2):
            for name, gradient in gradients(step, peers.rank).items():
                parameters[name].grad = gradient
            traffic = reducer.reduce()
        reducer.close()
        return traffic.sent_bytes

    return sum(results(on_every_rank(body, ranks))) / ranks


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("what", ["int8", "int4", "topk:0.05", "powersgd:4,start=0+int8", "lowrank:2"])
def test_bytes_are_those_a_training_sends(what, ranks):
    trial = try_method(what, [gradients(0), gradients(1)], NUMEL, ranks)
    # Of more ranks than are played, and of slices that are not equal, it is an estimate.
    assert trial.cost.sent_bytes == pytest.approx(sent_by_a_rank(what, ranks), rel=0.1 if ranks <= 4 else 0.25)


def test_a_larger_bucket_costs_as_much_more():
    one, ten = (try_method("int4", [gradients(0)] * 2, size, 4).cost for size in (NUMEL, 10 * NUMEL))
    assert ten.sent_bytes == pytest.approx(10 * one.sent_bytes)
    assert one.processor_s > 0
    assert one.rounds == 2
    assert try_method("int4", [gradients(0)], NUMEL, 2).cost.rounds == 1


def test_errors_are_those_of_all_that_was_sent():
    two, many = ([gradients(seed) for seed in range(count)] for count in (2, 12))
    exact = try_method("none", two, NUMEL, 2).errors
    assert max(exact.values()) < 1e-9
    biased = {what: try_method(what, two, NUMEL, 2).errors["a"] for what in ("int8", "int4", "topk:0.01")}
    assert biased["int8"] < 1e-3 < biased["int4"] < 0.05 < biased["topk:0.01"]
    # Error feedback makes up for it.
    assert try_method("topk:0.3", many, NUMEL, 2).errors["a"] < try_method("topk:0.3", two, NUMEL, 2).errors["a"]


def test_what_is_known_is_not_measured_again_unless_it_is_less():
    assert try_method("int8", [gradients(0)], NUMEL, 2, known_processor_s=0.0).cost.processor_s == 0.0
    assert try_method("int8", [gradients(0)], NUMEL, 2, known_processor_s=1e9).cost.processor_s < 60


def test_an_error_of_a_rank_is_raised_and_nothing_hangs():
    bad = gradients(0)
    bad["a"][0, 4] = torch.nan  # of a row that is looked at
    with pytest.raises(NonFiniteError):
        try_method("int8", [bad], NUMEL, 3)
