"""The choice of methods."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire import ConfigError
from gradwire.planner import Bucket, Cost, Link, Machine, Network, Plan, Situation, Trial, choose
from gradwire.planner.plan import CANDIDATES, DENSE, plan_of, safer

INT8, INT4, LOW = CANDIDATES[1:]
BYTES = {DENSE: 6.0, INT8: 1.53, INT4: 0.8, LOW: 0.1}  # by element, four ranks
SECONDS = {DENSE: 0.0, INT8: 2e-8, INT4: 2e-8, LOW: 4e-8}
ERRORS = {DENSE: 0.0, INT8: 1e-4, INT4: 0.02, LOW: 0.03}


def trials(bucket, errors=ERRORS, worse=None):
    return {
        what: Trial(
            Cost(SECONDS[what] * bucket.numel, BYTES[what] * bucket.numel, 2, dense=what == DENSE),
            {name: (worse or {}).get((what, name), errors[what]) for name in bucket.names},
        )
        for what in CANDIDATES
    }


def situation(mbit, sizes=((1_000_000, 500_000), (2_000_000,)), worse=None, quality=0.25, computing=0.5):
    buckets = tuple(
        Bucket(tuple(f"{place}.{i}" for i in range(len(numels))), tuple(numels), (f"{place}.bias",), 100)
        for place, numels in enumerate(sizes)
    )
    link = Link(1e-4, 8 / (mbit * 1e6), 1e-10)
    ready = tuple(computing * (place + 1) / len(buckets) for place in range(len(buckets)))
    tried = tuple(trials(bucket, worse=worse) for bucket in buckets)
    return Situation(4, buckets, ready, tried, Network(link, link, None), Machine(2.0, 0.0), quality)


def test_faster_links_ask_for_less_compression():
    names = [choose(situation(mbit)).name for mbit in (10, 100, 100_000)]
    assert names[0] == LOW
    assert names[-1] == DENSE
    assert len(set(names)) >= 2


def test_dense_is_all_that_is_left_if_nothing_may_be_lost():
    plan = choose(situation(10, quality=0.0))
    assert set(plan.methods.values()) == {DENSE}
    assert plan.extra_steps == 0


def test_a_layer_that_loses_too_much_steps_back_alone():
    plan = choose(situation(3, worse={(LOW, "0.1"): 0.5, (INT4, "0.1"): 0.3}))
    assert plan.methods["0.0"] == plan.methods["1.0"] == LOW
    assert plan.methods["0.1"] == INT8
    assert "67%" in plan.buckets[0].method
    assert "int8 (33%)" in plan.buckets[0].method


def test_small_tensors_are_dense_where_their_bucket_is():
    assert choose(situation(100_000)).methods["0.bias"] == DENSE
    assert choose(situation(3)).methods["0.bias"] == "none"


@given(
    st.floats(1, 100_000),
    st.lists(st.lists(st.integers(5_000, 5_000_000), min_size=1, max_size=3), min_size=1, max_size=4),
    st.floats(0.001, 2.0),
)
def test_a_plan_is_never_expected_to_be_worse_than_dense(mbit, sizes, computing):
    here = situation(mbit, sizes, computing=computing)
    plan = choose(here)
    assert plan.predicted_s * (1 + plan.extra_steps) <= plan.alternatives[DENSE] * (1 + 1e-9)
    assert choose(here) == plan  # of the same figures every rank makes the same plan


def test_a_plan_is_text_and_back():
    plan = replace(choose(situation(100)), measured_s=0.25)
    assert Plan.from_json(plan.to_json()) == plan
    for text in ("", "[]", "{}", plan.to_json().replace('"latency_s"', '"x"')):
        with pytest.raises(ConfigError, match="a plan must be what to_json"):
            Plan.from_json(text)


def test_the_table_has_what_travels_and_when():
    here = situation(100)
    uniform = [dict.fromkeys(bucket.names, INT4) for bucket in here.buckets]
    plan = plan_of(here, uniform, {}, "a test")
    assert [bucket.method for bucket in plan.buckets] == [INT4, INT4]
    assert plan.buckets[0].parameters == 1_500_100
    assert plan.buckets[0].sent_bytes == pytest.approx(0.8 * 1_500_000)
    assert plan.buckets[1].ready_s >= plan.computing_s
    assert plan.predicted_s == pytest.approx(plan.buckets[1].ready_s + plan.buckets[1].predicted_s)


def test_the_ladder_ends_at_dense():
    assert safer(DENSE, CANDIDATES) == DENSE
    assert safer("ef(topk:0.01)", (*CANDIDATES, "ef(topk:0.01)")) == INT4


@pytest.mark.parametrize("slower", [1.0, 1.2, 1.4])
def test_steps_that_were_taken_say_how_slow_the_link_is(slower):
    here = situation(100)
    int8 = [dict.fromkeys(bucket.names, "int8") for bucket in here.buckets]
    taken = replace(here, slower=slower).predict(int8)
    found = replace(here, ready_s=taken.ready).calibrated(int8, taken.seconds)
    assert found.slower == pytest.approx(slower)
    assert found.predict(int8).seconds == pytest.approx(taken.seconds, rel=0.02)
    assert found.network == here.network  # as it was measured


def test_a_link_that_is_no_limit_is_left_alone():
    here = situation(100)
    fast = replace(here, network=replace(here.network, between=Link(1e-4, 0.0, 1e-9)))
    int8 = [dict.fromkeys(bucket.names, "int8") for bucket in here.buckets]
    assert fast.calibrated(int8, 100.0).slower == 1.0
