"""``auto`` on ranks that are threads, over links that are as slow as a test wants them."""

import functools
import logging
import re
import time
from dataclasses import dataclass, field
from math import nan

import pytest
import torch
from torch import nn

import gradwire
from gradwire import ConfigError
from gradwire.collectives.loopback import Loopback
from gradwire.planner import FIRST, Auto, Autopilot
from gradwire.planner.autopilot import _Pace
from gradwire.reducer import GradientReducer

from ..collectives.threads import on_every_rank, results

SHAPES = {"a": (256, 256), "bias": (256,), "b": (512, 128)}


@dataclass(frozen=True)
class Shaped:
    """Peers whose messages take their time: seconds a byte, which may change."""

    inner: Loopback
    link: dict = field(default_factory=lambda: {"seconds_per_byte": 0.0})

    rank = property(lambda self: self.inner.rank)
    size = property(lambda self: self.inner.size)

    def swap(self, nbytes, tag, what):
        return _ShapedSwap(self, self.inner.swap(nbytes, tag, what))

    def all_reduce(self, x, tag):
        wait = self.inner.all_reduce(x, tag)

        def slowly():
            time.sleep(2 * (self.size - 1) / self.size * 4 * x.numel() * self.link["seconds_per_byte"])
            wait()

        return slowly


@dataclass
class _ShapedSwap:
    peers: Shaped
    inner: object

    def send(self, rank, data):
        time.sleep(data.numel() * self.peers.link["seconds_per_byte"])
        self.inner.send(rank, data)

    def receive(self, rank):
        return self.inner.receive(rank)

    def wait(self):
        self.inner.wait()


class Training:
    """Ranks with an autopilot each, and gradients of rank 4 and some noise."""

    def __init__(self, ranks=2, settings=None, bits_per_s=1e8, noise=0.02, forward_s=0.002, shapes=SHAPES):
        self.link, self.noise, self.step = {"seconds_per_byte": 8 / bits_per_s}, noise, 0
        self.forward_s, self.shapes = forward_s, shapes
        self.peers = [Shaped(each, self.link) for each in Loopback.ranks(ranks)]
        self.settings = settings or Auto(candidates=("int8", "int4", "powersgd:8,start=0+int8"))
        made = results(on_every_rank(self._make, ranks, self.peers))
        self.reducers, self.pilots = [each[0] for each in made], [each[1] for each in made]

    def _make(self, peers):
        parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in self.shapes.items()}
        reducer = GradientReducer(parameters, FIRST, peers, label="auto")
        return reducer, Autopilot(reducer, self.settings)

    def _gradient(self, name, rank, step):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        shape = self.shapes[name]
        noise = self.noise * torch.randn(shape, generator=generator)
        if len(shape) == 1:
            return noise
        basis = torch.Generator().manual_seed(len(name))
        left, right = torch.randn(shape[0], 4, generator=basis), torch.randn(4, shape[1], generator=basis)
        return left @ torch.diag(torch.randn(4, generator=generator)) @ right + noise

    def run(self, steps, loss=None):
        def body(peers):
            reducer, pilot = self.reducers[peers.rank], self.pilots[peers.rank]
            for step in range(self.step, self.step + steps):
                time.sleep(self.forward_s)
                for name, parameter in reducer.parameters.items():
                    parameter.grad = self._gradient(name, peers.rank, step)
                if loss is not None:
                    pilot.observe_loss(loss(step))
                reducer.reduce()
            return {name: p.grad.clone() for name, p in reducer.parameters.items()}

        means = results(on_every_rank(body, len(self.peers), self.peers))
        self.step += steps
        for name in self.shapes:
            assert all(torch.equal(means[0][name].nan_to_num(), each[name].nan_to_num()) for each in means)
        assert len({str(pilot.plan and pilot.plan.methods) for pilot in self.pilots}) == 1
        return self.pilots[0]

    def until(self, holds, most=160, **options):
        """Go on until it holds: a busy machine may have it plan more than once."""
        pilot = self.run(8, **options)
        while not holds(pilot):
            assert self.step < most, [each.what for each in pilot.events]
            pilot = self.run(4, **options)
        return pilot

    def close(self):
        for reducer in self.reducers:
            reducer.close()


def low_rank(pilot):
    return pilot.plan.methods["a"].startswith("powersgd")


@pytest.fixture
def training():
    made = []

    def make(**options):
        made.append(Training(**options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_slow_link_gets_small_messages_and_every_rank_the_same_plan(training, ranks):
    run = training(ranks=ranks, bits_per_s=2e7)
    pilot = run.until(lambda pilot: pilot.settled and low_rank(pilot))
    assert pilot.plan.methods["bias"] == "none"
    assert pilot.plan.measured_s < pilot.plan.alternatives["dense"]
    assert [each.methods for each in run.reducers] == [run.reducers[0].methods] * ranks
    assert [each.events for each in run.pilots] == [pilot.events] * ranks


@pytest.mark.full
def test_a_rival_that_waits_much_longer_is_given_up_halfway(training, monkeypatch):
    monkeypatch.setattr("gradwire.planner.autopilot._CLOSE", 1000.0)  # all candidates are rivals, dense too
    run, flown = training(bits_per_s=2e7), []
    while not run.run(1).settled:
        flown.append(run.reducers[0].methods["a"])
        assert len(flown) < 80
    assert flown.count("dense") == 2
    assert len(set(flown)) == 4


@pytest.mark.full
@pytest.mark.parametrize(("close", "again"), [(1000.0, 2), (0.0, 0)])
def test_the_two_best_plans_are_timed_again_if_they_are_close(training, monkeypatch, close, again):
    monkeypatch.setattr("gradwire.planner.autopilot._CLOSE", 1000.0)
    monkeypatch.setattr("gradwire.planner.autopilot._RUN_OFF", close)
    pilot = training(bits_per_s=2e7).until(lambda pilot: pilot.settled)
    plans = [str(plan.methods) for plan in pilot._rivals]
    assert len(pilot._measured) == len(plans) == len(set(plans)) + again
    assert len(set(plans[-2:])) == 2


@pytest.mark.full
def test_without_patience_a_fast_link_is_tried_too(training):
    methods = ("int8", "int4", "powersgd:8,start=0+int8")
    tried = [
        training(bits_per_s=1e12, forward_s=0.05, settings=Auto(methods, patience_s=patience)).run(10).plan.alternatives
        for patience in (1.0, 0.0)
    ]
    assert [set(each) for each in tried] == [{"dense"}, {"dense", *methods}]


def test_steps_that_begin_dense_and_wait_for_it_do_not_go_on_so(training):
    run, flown = training(bits_per_s=2e8), []  # all of it takes 21 ms to send, and 2 to compute
    for _ in range(4):
        run.run(1)
        flown.append(run.reducers[0].methods["a"])
    assert flown == ["dense", "dense", "int8", "int8"]


@pytest.mark.parametrize("patience_s", [0.0, 1.0])
def test_quality_zero_is_dense_from_the_first_step_on(training, patience_s):
    run, flown = training(settings=Auto(quality=0.0, patience_s=patience_s), bits_per_s=2e7), set()
    for _ in range(16):
        pilot = run.run(1)
        flown |= set(run.reducers[0].methods.values())
        assert not run.reducers[0].on_gradient  # nothing is tried
    assert flown == set(pilot.plan.methods.values()) == {"dense"}


@pytest.mark.full
def test_gradients_that_no_low_rank_holds_travel_otherwise(training):
    pilot = training(bits_per_s=2e7, noise=20.0).until(lambda pilot: pilot.settled)
    assert pilot.plan.methods["a"] == "int4"


def test_the_plan_follows_the_link(training, caplog):
    caplog.set_level(logging.INFO, "gradwire.planner")
    run = training(bits_per_s=1e10)
    run.until(lambda pilot: pilot.settled and not low_rank(pilot))
    run.link["seconds_per_byte"] = 8 / 1e7
    pilot = run.until(lambda pilot: pilot.settled and low_rank(pilot))
    assert any("instead of" in each.what for each in pilot.events)
    assert "instead of" in caplog.text


@pytest.mark.full
def test_nothing_is_tried_where_nothing_is_to_gain_until_there_is(training):
    run = training(bits_per_s=1e11, forward_s=0.1)
    pilot = run.until(lambda pilot: pilot.settled)
    assert re.search(r"% of a step waits for the network, 0\.\d s so far\): dense expected at", pilot.events[0].what)
    assert set(pilot.plan.methods.values()) == {"dense"}
    assert set(pilot.plan.alternatives) == {"dense"}
    run.link["seconds_per_byte"] = 8 / 1e7
    pilot = run.until(lambda pilot: pilot.settled and low_rank(pilot))
    assert len(pilot.plan.alternatives) == 4


@pytest.mark.full
def test_computing_that_takes_longer_is_no_reason_to_plan_again(training):
    run = training(bits_per_s=1e11, forward_s=0.1)
    pilot = run.until(lambda pilot: pilot.settled)
    events = len(pilot.events)
    run.forward_s = 0.25
    assert len(run.run(16).events) == events


@pytest.mark.full
@pytest.mark.parametrize(
    ("waits", "replans"),
    [((0.5, 0.5), True), ((0.5, 0.1), False), ((0.5, 0.1, 0.5, 0.1), False), ((1.2,), True), ((0.3, 0.3), False)],
)
def test_steps_that_wait_a_little_longer_must_do_so_twice(training, waits, replans):
    """A processor that another program wanted for a moment is no reason to measure everything again."""
    run = training(bits_per_s=1e11, forward_s=0.01)
    pilot = run.until(lambda pilot: pilot.settled)
    events = len(pilot.events)
    for wait in waits:
        for each in run.pilots:
            each._pace = _Pace(1.0, 0.1, 0.0, 0)
            each._since, each._note = run.reducers[0].step, lambda wait=wait: lambda: (_Pace(1.0, wait, 0.0, 0), nan)
        run.run(9)  # the last begins with the review
    run.run(6)  # gradients are looked at first
    assert any("instead of 100" in each.what for each in pilot.events[events:]) == replans


def test_vectors_alone_travel_as_they_are(training):
    run = training(bits_per_s=2e7, shapes={"bias": (256,)})
    run.until(lambda pilot: pilot.settled)
    pilot = run.run(40)
    assert pilot.plan.methods == {"bias": "dense"}
    assert sum("the first plan" in each.what for each in pilot.events) == 1


def test_a_loss_that_leaves_its_band_steps_back_toward_dense(training):
    run = training(bits_per_s=2e7)
    run.until(lambda pilot: pilot.settled and low_rank(pilot), loss=lambda step: 1.0)
    start = run.step
    pilot = run.until(lambda pilot: pilot.settled and not low_rank(pilot), loss=lambda step: 1 + 0.05 * (step - start))
    assert any("stepping back from powersgd" in each.what for each in pilot.events)


@pytest.mark.full
def test_gradients_that_change_are_looked_at_again(training, monkeypatch):
    monkeypatch.setattr("gradwire.planner.autopilot._QUALITY_STEPS", 10)
    run = training(bits_per_s=2e7)
    run.until(lambda pilot: pilot.settled and low_rank(pilot))
    run.noise = 20.0
    pilot = run.until(lambda pilot: pilot.settled and pilot.plan.methods["a"] == "int4")
    assert any("lose more than 0.25" in each.what for each in pilot.events)


def test_a_link_that_gets_faster_is_noticed(training, monkeypatch):
    monkeypatch.setattr("gradwire.planner.autopilot._PROBE_S", 0.05)
    run = training(bits_per_s=1e7)
    run.until(lambda pilot: pilot.settled and low_rank(pilot))
    run.link["seconds_per_byte"] = 0.0
    told = ("the link has changed", "instead of")
    run.until(lambda pilot: any(words in each.what for each in pilot.events for words in told))


def test_what_a_plan_costs_is_remembered(training, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("gradwire.planner.autopilot._QUALITY_STEPS", 10)
    monkeypatch.setattr("gradwire.planner.autopilot._LINK_DRIFT", 100.0)  # a busy machine makes the same link another
    first = training(settings=Auto()).until(lambda pilot: pilot.settled)
    (file,) = (tmp_path / "gradwire").iterdir()
    assert file.name.startswith("plan-")
    run = training(settings=Auto())
    run.until(lambda pilot: pilot.settled)
    again = run.run(20)  # what is lost of gradients is looked at once
    assert "as in the last training" in again.events[0].what
    assert again.plan.methods == first.plan.methods or len(again.events) > 1  # the clock may speak against it
    assert not any("the first plan" in each.what for each in again.events)
    for damage in ("not JSON", "{}", '{"costs": {}, "plans": ["not JSON"]}', '{"costs": 3, "plans": []}'):
        file.write_text(damage)
        assert "the first plan" in training(settings=Auto()).until(lambda pilot: pilot.plan).events[0].what


def compositions(caplog):
    """What was said to travel in what, since the last time it was asked for."""
    lines = [each.getMessage() for each in caplog.records if each.name == "gradwire"]
    caplog.clear()
    return lines


@pytest.mark.full
def test_a_plan_that_is_taken_up_logs_what_travels_in_what(training, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("gradwire.planner.autopilot._LINK_DRIFT", 100.0)  # a busy machine makes the same link another
    caplog.set_level("INFO", logger="gradwire")
    first = training(settings=Auto(), bits_per_s=2e7)
    first.until(lambda pilot: pilot.settled)
    *_, line = compositions(caplog)
    assert line == f"gradients of a step: {first.reducers[0].composition}"
    again = training(settings=Auto(), bits_per_s=2e7)
    again.run(1)
    assert again.pilots[0].plan.methods == first.pilots[0].plan.methods
    assert compositions(caplog) == [line]
    resumed = training(settings=Auto(), bits_per_s=1e8)
    for reducer, pilot, old, of_old in zip(resumed.reducers, resumed.pilots, first.reducers, first.pilots, strict=True):
        reducer.load_state_dict(old.state_dict())
        pilot.load_state_dict(of_old.state_dict())
    assert compositions(caplog) == [line]


@pytest.mark.full
def test_the_plan_of_an_earlier_training_over_another_link_is_not_taken_up(training, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    training(settings=Auto(), bits_per_s=2e7).until(lambda pilot: pilot.settled)
    again = training(settings=Auto(), bits_per_s=2e8).until(lambda pilot: pilot.plan)
    assert "the first plan" in again.events[0].what


def test_ranks_with_different_settings_are_told():
    def body(peers):
        parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
        reducer = GradientReducer(parameters, FIRST, peers, label="auto")
        Autopilot(reducer, Auto(quality=0.1 * (peers.rank + 1)))

    errors = on_every_rank(body, 2)
    assert all("all ranks must have the same" in str(error) for error in errors)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (functools.partial(Auto, quality=2), "`quality` must be from 0 to 1; got 2"),
        (
            functools.partial(Auto, candidates="int8"),
            "a tuple of strings such as 'int4'; got 'int8'",
        ),
        (functools.partial(Auto, candidates=3), "`candidates` must be a tuple of strings such as 'int4'; got 3"),
        (functools.partial(Auto, candidates=("int5",)), "unknown codec"),
        (functools.partial(Auto, patience_s=-1), "`patience_s` must be 0 or more, and finite; got -1"),
        (functools.partial(Auto, review_every=1), "`review_every` must be a whole number of at least 5; got 1"),
    ],
)
def test_bad_settings_are_told_what_is_allowed(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_state_of_something_else_is_refused(training):
    pilot = training().pilots[0]
    with pytest.raises(ConfigError, match="with a plan; got"):
        pilot.load_state_dict({})


def test_the_first_plan_after_a_checkpoint_says_so(training):
    run = training(bits_per_s=2e7)
    for pilot in run.pilots:
        pilot.load_state_dict({"plan": "", "settled": False})
    assert "the first plan after a checkpoint" in run.until(lambda pilot: pilot.plan).events[0].what


def test_auto_is_public():
    assert gradwire.Auto is Auto


def test_gradients_with_nan_are_not_planned_by(training):
    run = training(bits_per_s=2e7)
    for reducer in run.reducers:
        reducer.nonfinite = "propagate"
    own = run._gradient
    run._gradient = lambda name, rank, step: own(name, rank, step) * (float("nan") if step == 5 and rank else 1.0)
    pilot = run.until(lambda pilot: pilot.settled)
    assert "the first plan" in pilot.events[0].what
    assert pilot.events[0].step > 6
