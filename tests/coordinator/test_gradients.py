"""``DistributedGradientsCoordinator`` in one process: every line of what its document promises."""

import random
import threading
import time

import pytest
import torch

from gradwire import (
    ConfigError,
    DistributedGradientsCoordinator,
    NonFiniteError,
    QueueFullError,
    StaleGradientError,
    Staleness,
)


def coordinator(parameters=None, mode="descent", **settings):
    made = DistributedGradientsCoordinator(mode, **settings)
    made.set_model_parameters(torch.zeros(3) if parameters is None else parameters)
    return made


def applied(made, *gradients, **how):
    """The parameters after these gradients."""
    made.start()
    for gradient in gradients:
        made.add_gradients(gradient, **how)
    made.stop()
    return made.get_model_parameters()


# The table of the document.


def test_descent_subtracts_gradients_in_the_order_they_come():
    made = coordinator(torch.tensor([1.0, 2.0, 3.0]))
    found = applied(made, torch.tensor([0.5, 0.0, 1.0]), torch.tensor([0.25, -1.0, 0.0]))
    assert found.tolist() == [0.25, 3.0, 2.0]


def test_ascent_adds_them():
    assert applied(coordinator(mode="ascent"), torch.ones(3), torch.ones(3)).tolist() == [2.0] * 3


@pytest.mark.parametrize("mode", ["Descent", "DESCENT", "Ascent", "aScENT"])
def test_a_mode_is_accepted_in_any_case(mode):
    expected = [-1.0] * 3 if mode.lower() == "descent" else [1.0] * 3
    assert applied(coordinator(mode=mode), torch.ones(3)).tolist() == expected
    changed = coordinator(mode="descent" if mode.lower() == "ascent" else "ascent")
    changed.set_parameters(mode)
    assert applied(changed, torch.ones(3)).tolist() == expected


def test_start_without_parameters_is_an_error():
    with pytest.raises(ConfigError, match="there are no parameters: call set_model_parameters first"):
        DistributedGradientsCoordinator().start()


def test_start_twice_is_an_error():
    made = coordinator()
    made.start()
    with pytest.raises(ConfigError, match="started already"):
        made.start()
    made.stop()


def test_a_change_of_mode_takes_effect_at_the_next_gradient():
    made = coordinator()
    made.start()
    made.add_gradients(torch.ones(3))
    while made.version < 1:
        time.sleep(0.001)
    made.set_parameters("ascent")
    made.set_parameters()
    made.add_gradients(torch.full((3,), 5.0))
    made.stop()
    assert made.get_model_parameters().tolist() == [4.0] * 3


def test_a_bad_gradient_is_rejected_to_its_sender_and_the_loop_lives():
    made = coordinator({"a": torch.zeros(2), "b": torch.zeros(2, 2)})
    made.start()
    for bad, error, message in (
        ({"a": torch.zeros(3)}, ConfigError, r"`gradients\['a'\]` must have shape \(2,\), .*; got \(3,\)"),
        ({"c": torch.zeros(3)}, ConfigError, r"`gradients\['c'\]` is not one of the parameters: 'a', 'b'"),
        ({"a": torch.zeros(2, dtype=torch.float64)}, ConfigError, "must be torch.float32, .*; got torch.float64"),
        ({"a": [1.0, 2.0]}, ConfigError, r"`gradients\['a'\]` must be a tensor; got list"),
        ({"b": torch.full((2, 2), float("nan"))}, NonFiniteError, r"`gradients\['b'\]` holds NaN or Inf"),
        ([torch.zeros(2), torch.zeros(2, 2)], ConfigError, "`gradients` must be a dict, as the parameters; got a list"),
        ({}, ConfigError, "`gradients` must hold at least one tensor"),
        ("abc", ConfigError, "must be a tensor, a list of tensors or a dict of tensors; got str"),
        ({3: torch.zeros(2)}, ConfigError, "names that are strings; got 3"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            made.add_gradients(bad)
    made.add_gradients({"a": torch.ones(2)})
    made.stop()
    assert made.get_model_parameters()["a"].tolist() == [-1.0, -1.0]
    assert made.metrics()["refused"]["NonFiniteError"] == 1


def test_stop_drains_joins_and_can_be_called_twice():
    made = coordinator()
    made.start()
    for _ in range(1000):
        made.add_gradients(torch.ones(3))
    made.stop()
    made.stop()
    assert made.get_model_parameters().tolist() == [-1000.0] * 3
    assert not any(thread.name == "gradwire-coordinator" for thread in threading.enumerate())


def test_stop_before_start_does_nothing():
    DistributedGradientsCoordinator().stop()


def test_quick_stops_and_starts_leave_one_loop():
    made = coordinator()
    for _ in range(50):
        made.start()
        made.add_gradients(torch.ones(3))
        made.stop()
    made.start()
    assert sum(thread.name == "gradwire-coordinator" for thread in threading.enumerate()) == 1
    made.stop()
    assert made.get_model_parameters().tolist() == [-50.0] * 3


def test_gradients_that_came_before_start_are_applied():
    made = coordinator()
    made.add_gradients(torch.ones(3))
    assert made.get_model_parameters().tolist() == [0.0] * 3
    made.start()
    made.stop()
    assert made.get_model_parameters().tolist() == [-1.0] * 3


def test_clear_gradients_drops_what_has_not_been_applied():
    made = coordinator()
    for _ in range(3):
        made.add_gradients(torch.ones(3))
    assert made.clear_gradients() == 3
    made.start()
    made.stop()
    assert made.get_model_parameters().tolist() == [0.0] * 3


@pytest.mark.parametrize("kind", ["tensor", "list", "dict"])
def test_tensors_lists_and_dicts_are_parameters(kind):
    def make(value):
        one, two = torch.full((2,), value), torch.full((1, 3), value)
        return {"tensor": one, "list": [one, two], "dict": {"x": one, "y": two}}[kind]

    found = applied(coordinator(make(1.0)), make(3.0))
    flat = [found] if kind == "tensor" else list(found) if kind == "list" else list(found.values())
    assert all((each == -2.0).all() for each in flat)
    assert type(found) is type(make(0.0))


def test_a_list_must_be_whole_and_a_dict_may_be_partial():
    with pytest.raises(ConfigError, match="`gradients` must have 2 tensors; got 1"):
        coordinator([torch.zeros(2), torch.zeros(1)]).add_gradients([torch.zeros(2)])
    found = applied(coordinator({"a": torch.zeros(1), "b": torch.zeros(1)}), {"b": torch.ones(1)})
    assert (found["a"].item(), found["b"].item()) == (0.0, -1.0)


def test_parameters_are_copied_unless_told_otherwise():
    mine = torch.zeros(3)
    made = coordinator(mine)
    applied(made, torch.ones(3))
    assert mine.tolist() == [0.0] * 3
    copy = made.get_model_parameters()
    copy.fill_(9.0)
    assert made.get_model_parameters().tolist() == [-1.0] * 3
    shared = DistributedGradientsCoordinator()
    shared.set_model_parameters(mine, do_not_deep_copy=True)
    applied(shared, torch.ones(3))
    assert mine.tolist() == [-1.0] * 3
    assert shared.get_model_parameters(do_not_deep_copy=True).data_ptr() == mine.data_ptr()


@pytest.mark.full
@pytest.mark.timeout(300)
def test_16_threads_of_10000_gradients_add_up_exactly_while_start_stop_and_clear_race():
    made, each, threads = coordinator(torch.zeros(4, dtype=torch.int64)), 10_000, 16
    made.start()
    done, cleared = threading.Event(), []

    def work(number):
        for step in range(each):
            made.add_gradients(torch.tensor([1, number, step % 7, -1]))

    def disturb():
        draw = random.Random(3)
        while not done.is_set():
            time.sleep(draw.uniform(0, 0.02))
            made.stop()
            if draw.random() < 0.3:
                made.set_parameters("descent")
            made.start()

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    disturber = threading.Thread(target=disturb)
    for thread in (*workers, disturber):
        thread.start()
    for thread in workers:
        thread.join()
    done.set()
    disturber.join()
    made.stop()
    assert made.get_model_parameters().tolist() == [
        -threads * each, -each * sum(range(threads)), -threads * sum(step % 7 for step in range(each)), threads * each
    ]  # fmt: skip
    # And with gradients that are cleared meanwhile: the rest add up.
    again = coordinator(torch.zeros(1, dtype=torch.int64))
    again.start()
    done.clear()

    def clear():
        while not done.is_set():
            cleared.append(again.clear_gradients())

    clearer = threading.Thread(target=clear)
    clearer.start()
    for _ in range(20_000):
        again.add_gradients(torch.ones(1, dtype=torch.int64))
    done.set()
    clearer.join()
    again.stop()
    assert again.get_model_parameters().item() == -(20_000 - sum(cleared))
    assert again.metrics()["cleared"] == sum(cleared)


def test_what_is_read_is_of_one_version():
    made = coordinator([torch.zeros(50_000), torch.zeros(50_000)])
    made.start()
    adding = threading.Thread(target=lambda: [made.add_gradients([torch.ones(50_000)] * 2) for _ in range(300)])
    adding.start()
    while adding.is_alive():
        version, (one, two) = made.read()
        assert (one == -version).all()
        assert (two == -version).all()
    adding.join()
    made.stop()


# Options.


def test_a_learning_rate():
    assert applied(coordinator(learning_rate=0.5), torch.ones(3)).tolist() == [-0.5] * 3


def test_the_mean_of_several():
    made = coordinator(average_over=3)
    found = applied(made, torch.ones(3), torch.full((3,), 2.0), torch.full((3,), 6.0), torch.full((3,), 100.0))
    assert found.tolist() == [-3.0] * 3
    assert made.version == 1
    assert made.metrics()["waiting"] == 1
    assert made.clear_gradients() == 1


@pytest.mark.parametrize("mode", ["descent", "ascent"])
def test_any_torch_optimizer(mode):
    start = torch.randn(10)
    made = coordinator(start, mode, optimizer=lambda p: torch.optim.AdamW(p, lr=0.1))
    gradients = [torch.randn(10) for _ in range(5)]
    found = applied(made, *gradients)
    alone = torch.nn.Parameter(start.clone())
    plain = torch.optim.AdamW([alone], lr=0.1)
    for gradient in gradients:
        alone.grad = gradient if mode == "descent" else -gradient
        plain.step()
    assert torch.equal(found, alone.detach())


def test_a_gradient_that_is_too_old_is_refused_with_the_present_version():
    made = coordinator(staleness=Staleness(bound=2))
    applied(made, *[torch.ones(3)] * 5)
    with pytest.raises(
        StaleGradientError, match="of version 2, 3 behind the present one, 5; at most 2 is allowed"
    ) as error:
        made.add_gradients(torch.ones(3), version=2)
    assert error.value.current == 5
    made.add_gradients(torch.ones(3), version=3)
    with pytest.raises(ConfigError, match="`version` must be from 0 to the present one, 5; got 6"):
        made.add_gradients(torch.ones(3), version=6)


def test_old_gradients_count_less():
    made = coordinator(staleness=Staleness(rule="weight"))
    applied(made, *[torch.zeros(3)] * 3)
    assert applied(made, torch.full((3,), 8.0), version=0).tolist() == [-2.0] * 3
    assert made.metrics()["ages"] == {3: 1}


def test_old_gradients_are_compensated():
    made = coordinator(torch.ones(3), staleness=Staleness(rule="compensate", strength=0.5))
    version, then = made.read(worker="slow")
    applied(made, torch.full((3,), 0.25))
    now = made.get_model_parameters()
    g = torch.full((3,), 2.0)
    found = applied(made, g, version=version, worker="slow")
    assert torch.equal(found, now - (g + 0.5 * g * g * (now - then)))


def test_nonfinite_values_may_be_taken_for_zeros():
    made = coordinator(nonfinite="zero")
    found = applied(made, torch.tensor([float("nan"), float("inf"), 1.0]))
    assert found.tolist() == [0.0, 0.0, -1.0]


def test_a_full_queue_refuses_or_makes_wait():
    refusing = coordinator(max_queue=2, when_full="refuse")
    waiting = coordinator(max_queue=2)
    for made in (refusing, waiting):
        for _ in range(2):
            made.add_gradients(torch.ones(3))
    with pytest.raises(QueueFullError, match="2 gradients wait already; at most 2 may"):
        refusing.add_gradients(torch.ones(3))
    started = time.monotonic()
    with pytest.raises(QueueFullError):
        waiting.add_gradients(torch.ones(3), timeout_s=0.1)
    assert 0.1 <= time.monotonic() - started < 5
    later = threading.Timer(0.1, waiting.start)
    later.start()
    waiting.add_gradients(torch.ones(3), timeout_s=20)
    later.join()
    waiting.stop()
    assert waiting.get_model_parameters().tolist() == [-3.0] * 3


def test_callbacks_and_what_they_raise():
    versions = []

    def told(version):
        versions.append(version)
        if version == 2:
            raise ValueError("somebody's mistake")

    made = coordinator(on_update=told)
    applied(made, *[torch.ones(3)] * 4)
    assert versions == [1, 2, 3, 4]
    assert str(made.last_error) == "somebody's mistake"


def test_stop_by_a_callback_is_refused():
    made = coordinator(on_update=lambda version: made.stop())
    made.start()
    made.add_gradients(torch.ones(3))
    deadline = time.monotonic() + 10
    while made.last_error is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "stop cannot be called by on_update" in str(made.last_error)


def test_parameters_may_be_replaced_while_it_runs():
    made = coordinator()
    made.start()
    made.add_gradients(torch.ones(3))
    while made.version < 1:
        time.sleep(0.001)
    made.set_model_parameters(torch.full((2,), 5.0))
    made.add_gradients(torch.ones(2))
    made.stop()
    assert made.get_model_parameters().tolist() == [4.0, 4.0]
    assert made.version == 3


def test_metrics():
    made = coordinator()
    applied(made, torch.ones(3), torch.ones(3))
    found = made.metrics()
    assert {name: found[name] for name in ("added", "applied", "queued", "version", "failed")} == {
        "added": 2, "applied": 2, "queued": 0, "version": 2, "failed": 0
    }  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"gradient_change_mode": "sideways"},
            "`gradient_change_mode` must be 'descent' or 'ascent', in any case; got 'sideways'",
        ),
        ({"gradient_change_mode": None}, "`gradient_change_mode` must be 'descent' or 'ascent', in any case; got None"),
        ({"learning_rate": 0}, "`learning_rate` must be above 0; got 0"),
        ({"average_over": 0}, "`average_over` must be a whole number of at least 1; got 0"),
        ({"max_queue": 0}, "`max_queue` must be at least 1, or None; got 0"),
        ({"nonfinite": "maybe"}, "`nonfinite` must be 'refuse' or 'zero'; got 'maybe'"),
        ({"when_full": "wait"}, "`when_full` must be 'block' or 'refuse'; got 'wait'"),
        ({"staleness": 3}, "`staleness` must be a Staleness, or None; got 3"),
        ({"optimizer": 3}, "`optimizer` must be a function from parameters to an optimizer; got 3"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        DistributedGradientsCoordinator(**settings)


@pytest.mark.parametrize("settings", [{"bound": -1}, {"rule": "guess"}, {"strength": -1.0}])
def test_bad_staleness(settings):
    with pytest.raises(ConfigError, match="of staleness must"):
        Staleness(**settings)
