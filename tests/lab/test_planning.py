"""Plans and rounds over real links."""

import json

import pytest

from gradwire.benchmarks import auto, drift, plans, rounds
from gradwire.benchmarks.courses import Course
from gradwire.benchmarks.rounds import RoundsReport
from gradwire.cli import main

pytestmark = pytest.mark.timeout(300)


@pytest.mark.full
def test_the_plan_follows_a_link_within_30_steps(name):
    report = drift.measure(drift.Settings(workers=2, rates=("1gbit", "20mbit"), steps=44))
    assert list(report.changes.values()) == ["20mbit"]
    followed = report.followed()["20mbit"]
    assert followed is not None, report.planned
    assert followed <= 30
    first, last = report.medians()["20mbit"]
    assert last < first


@pytest.mark.full
def test_predictions_are_compared_with_the_clock(name, tmp_path, monkeypatch, capsys):
    picture = tmp_path / "plans.png"
    options = ["--task", "digits", "--workers", "2", "--rate", "100mbit", "--rounds", "1", "--json"]
    monkeypatch.setattr("sys.argv", ["gradwire", "bench", "plan", *options, "--plot", str(picture)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code
    told = json.loads(capsys.readouterr().out)
    assert {cell["method"] for cell in told["cells"]} >= {"dense", "int8", "int4"}
    assert all(0.1 < cell["predicted_s"] / cell["measured_s"] < 10 for cell in told["cells"])
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_rounds_are_trained_over_the_link_and_compared_with_ddp(name, tmp_path):
    methods = ("localsgd:every=5,codec=int4", "accumulate:every=5")
    report = rounds.measure(rounds.Settings("digits", 2, "200mbit", methods, steps=60, target_steps=10, ddp_steps=3))
    rounds.draw(report, tmp_path / "rounds.png")
    assert (tmp_path / "rounds.png").read_bytes().startswith(b"\x89PNG")
    assert report.ddp_step_bytes == pytest.approx(8.1e6, rel=0.1)
    found = report.against_ddp(methods[0])
    assert found is not None
    assert found["times_fewer_bytes"] > 2
    assert json.dumps(report.as_json())


@pytest.mark.full
def test_auto_is_trained_over_the_link_and_compared_with_fixed_methods(name, tmp_path):
    calm = auto.Settings("digits", (2,), ("200mbit",), ("int8",), 20, timed_steps=6, repeats=2, learning_rate=0.002)
    report = auto.measure(calm)
    auto.draw(report, tmp_path / "auto.png")
    assert (tmp_path / "auto.png").read_bytes().startswith(b"\x89PNG")
    (cell,) = report.cells
    assert cell.best == "int8"
    assert len(cell.fixed["ddp"]) == len(cell.auto) == len(cell.plans) == 2
    assert cell.against_ddp < 1
    assert all(abs(loss) < 0.02 for loss in cell.losses)
    assert json.loads(json.dumps(report.as_json()))["cells"][0]["best"] == "int8"


def test_a_loss_that_is_not_reached_is_none():
    course = Course([0.1, 0.2], [(2, 1.5, 100.0)])
    report = RoundsReport(rounds.Settings(), {}, 1.0, [(10, 1.0)], 1.0, 1e6, {"x": course})
    assert report.against_ddp("x") is None
    assert course.first_below(1.5) == (2, 0.2, 100.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: drift.Settings(rates=("1gbit",)), "`--rate` must be given twice or more"),
        (lambda: drift.Settings(steps=3), "`--steps` must be at least 20"),
        (lambda: auto.Settings(timed_steps=2), "`--timed-steps` must be at least 6; got 2"),
        (lambda: auto.Settings(learning_rate=0.0), "`--learning-rate` must be positive and finite; got 0.0"),
        (lambda: plans.Settings(tasks=("x",)), "`--task` must be one of"),
        (lambda: plans.Settings(workers=(1,)), "`--workers` must be from 2 to 64; got 1"),
        (lambda: rounds.Settings(methods=("diloco:codec=int4",)), "must say how many steps are between exchanges"),
        (lambda: rounds.Settings(methods=("diloco:every",)), "must be name=value"),
        (lambda: rounds.Settings(ddp_steps=1), "`--ddp-steps` must be at least 2; got 1"),
    ],
)
def test_settings_say_what_is_allowed(make, message):
    with pytest.raises(Exception, match=message):
        make()
