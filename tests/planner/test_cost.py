"""The model of a step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.planner import Cost, Link, Machine, predict_step
from gradwire.planner.cost import pure_times

NOTHING = Link(0.0, 0.0, 0.0)

costs = st.builds(Cost, st.floats(0, 0.2), st.floats(0, 1e7), st.integers(1, 4), st.booleans())
links = st.builds(Link, st.floats(0, 0.01), st.floats(0, 1e-6), st.floats(0, 1e-8))
machines = st.builds(Machine, st.floats(1, 4), st.floats(0, 1))
steps = st.integers(1, 4).flatmap(
    lambda n: st.tuples(
        st.lists(st.floats(0.01, 1.0), min_size=n, max_size=n).map(sorted),
        st.lists(st.lists(costs, max_size=2), min_size=n, max_size=n),
    )
)


def seconds(ready, what, link, machine):
    return predict_step(ready, what, link, link, machine).seconds


def test_nothing_to_send_takes_no_time():
    step = predict_step([0.5, 1.0], [[], []], NOTHING, NOTHING, Machine())
    assert (step.seconds, step.exposed_s, step.ready, step.done) == (1.0, 0.0, (0.5, 1.0), (0.5, 1.0))


@given(steps, links, machines)
def test_a_step_takes_at_least_what_its_parts_take(step, link, machine):
    ready, what = step
    every = [cost for bucket in what for cost in bucket]
    took = seconds(ready, what, link, machine)
    assert took >= ready[-1] - 1e-9
    assert took >= sum(cost.sent_bytes for cost in every) * link.seconds_per_byte - 1e-9
    work = sum(cost.processor_s + cost.sent_bytes * link.processor_per_byte for cost in every) * machine.crowding
    assert took >= work - 1e-9
    if machine.spare == 0:
        assert took >= ready[-1] + work - 1e-6
    waits = sum(cost.rounds for cost in every) * link.latency_s
    wire = sum(cost.sent_bytes for cost in every) * link.seconds_per_byte
    assert took <= ready[-1] + work + wire + waits + 1e-6


@given(steps, links, machines)
def test_predictions_grow_with_a_slower_link(step, link, machine):
    ready, what = step
    slower = Link(link.latency_s, 2 * link.seconds_per_byte, link.processor_per_byte)
    # Not exactly so: a bucket that comes later may let another one pass before it.
    assert seconds(ready, what, slower, machine) >= 0.9 * seconds(ready, what, link, machine)


@given(steps, links, machines)
def test_encoding_can_only_have_delayed_a_bucket(step, link, machine):
    ready, what = step
    seen = predict_step(ready, what, link, link, machine).ready
    pure = pure_times(seen, what, link, link, machine)
    assert all(early <= late + 1e-9 for early, late in zip(pure, seen, strict=True))
    assert list(pure) == sorted(pure)


@pytest.mark.parametrize("spare", [0.0, 0.5, 1.0])
def test_times_without_encoding_are_found_from_those_with_it(spare):
    link, machine, what = Link(1e-3, 1e-8, 1e-9), Machine(2.0, spare), [[Cost(0.02, 3e6, 2)]] * 3
    ready = [0.3, 0.7, 1.0]
    seen = predict_step(ready, what, link, link, machine).ready
    assert (seen[-1] > ready[-1] + 0.04) == (spare < 1)
    assert pure_times(seen, what, link, link, machine) == pytest.approx(ready, rel=0.02)


def test_a_transfer_hides_behind_computing():
    slow = Link(0.0, 1e-7, 0.0)
    cost = [Cost(0.0, 5e6, 1)]
    assert seconds([0.1, 1.0], [cost, []], slow, Machine()) == pytest.approx(1.0)
    assert seconds([0.1, 1.0], [[], cost], slow, Machine()) == pytest.approx(1.5)
