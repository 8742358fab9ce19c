"""Plans keep their ratio, whatever the model."""

from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gradwire import ConfigError
from gradwire.optim.plan import make_plan

SHAPES = st.lists(
    st.one_of(st.tuples(st.integers(1, 3000)), st.tuples(st.integers(1, 200), st.integers(1, 400))),
    min_size=1,
    max_size=12,
)


@pytest.mark.full
@settings(max_examples=60, deadline=None)
@given(
    shapes=SHAPES, ranks=st.integers(1, 9), ratio=st.floats(1e-4, 1), quantize=st.booleans(), sparsify=st.booleans(),
    whole=st.booleans(), bucket=st.integers(1024, 200_000),
)  # fmt: skip
def test_the_ratio_is_kept_or_refused(shapes, ranks, ratio, quantize, sparsify, whole, bucket):
    assume(quantize or sparsify)
    how = {"quantize": quantize, "sparsify": sparsify, "whole": whole, "bucket_bytes": bucket}
    try:
        plan = make_plan(shapes, ranks, ratio=ratio, **how)
    except ConfigError:
        return  # headers alone take more
    for rank in range(ranks):
        sent, dense = plan.sent_bytes(rank), plan.dense_bytes(rank)
        if dense[0] == 0:  # it owns everything: its flags count with the weights it sends
            sent, dense = (sum(sent),), (sum(dense),)
        assert all(there <= ratio * at_most for there, at_most in zip(sent, dense, strict=True))
    assert sorted(place for each in plan.buckets for place in each.places) == list(range(len(shapes)))


@settings(max_examples=60, deadline=None)
@given(shapes=SHAPES, ranks=st.integers(1, 9), whole=st.booleans(), bucket=st.integers(1024, 200_000))
def test_every_element_has_one_owner(shapes, ranks, whole, bucket):
    plan = make_plan(shapes, ranks, ratio=None, whole=whole, bucket_bytes=bucket)
    for each in plan.buckets:
        edges = [(where.start, where.stop) for where in each.slices]
        sizes = [_numel(shapes[place]) for place in each.places]
        assert edges[0][0] == 0
        assert edges[-1][1] == sum(sizes)
        assert all(one[1] == other[0] for one, other in pairwise(edges))
        if whole:
            starts = {sum(sizes[:count]) for count in range(len(sizes) + 1)}
            assert {edge for pair in edges for edge in pair} <= starts


@pytest.mark.parametrize("ratio", [0.5, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001])
def test_a_model_of_usual_size_can_have_any_ratio(ratio):
    shapes = [(384, 384), (384,)] * 40
    plan = make_plan(shapes, 4, ratio=ratio)
    assert plan.keeps(ratio)
    assert plan.sent_bytes(0)[0] > 0.5 * ratio * plan.dense_bytes(0)[0]  # and uses what it may


def test_whole_tensors_are_shared_out_evenly():
    shapes = [(100, 100)] * 16 + [(50,)] * 8
    plan = make_plan(shapes, 4, ratio=None, whole=True, bucket_bytes=100_000)
    loads = [sum(each.slices[rank].stop - each.slices[rank].start for each in plan.buckets) for rank in range(4)]
    assert max(loads) - min(loads) <= 10_000


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("ratio", [0.5, 0.1, 0.03])
def test_fewer_matrices_than_ranks(ratio, ranks):
    plan = make_plan([(256, 256)], ranks, ratio=ratio, whole=True)
    for rank in range(ranks):
        assert sum(plan.sent_bytes(rank)) <= ratio * sum(plan.dense_bytes(rank))
    assert plan.sent_bytes(0)[0] == 2 * (ranks - 1)  # flags, and which parameters have a gradient
    assert plan.sent_bytes(1)[1] == 0


def test_a_model_that_is_too_small_for_a_ratio():
    with pytest.raises(ConfigError, match=r"`compression_ratio` must be larger for a model of 6 parameters on 2 ranks"):
        make_plan([(2, 3)], 2, ratio=0.1)


def _numel(shape):
    total = 1
    for each in shape:
        total *= each
    return total
