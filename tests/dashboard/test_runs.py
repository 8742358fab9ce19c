"""Folders of runs are read whatever is in them, and however they grow."""

import json
import math
import os
import random
import time

import pytest

from gradwire.dashboard import columns, views
from gradwire.dashboard.runs import Run
from gradwire.dashboard.store import Store, run_folders
from gradwire.errors import ConfigError
from tests.dashboard.folders import BEGIN, append, coordinator, many_steps, note, plan, quality, start, step, validation
from tests.dashboard.folders import whole_run as whole


def read(folder):
    run = Run(folder)
    while run.poll():
        pass
    return run


def test_what_is_no_folder_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"`RUN_DIR` must be the folder of a run; '.*nothing' is none"):
        Run(tmp_path / "nothing")


def test_records_become_columns(tmp_path):
    run = read(whole(tmp_path / "first"))
    assert (run.name, run.state, run.skipped, sorted(run.ranks)) == ("first", "done", 0, [0, 1])
    rank = run.ranks[0]
    assert rank.start["codec"] == "int4"
    assert rank.starts == 1
    assert rank.done["status"] == "done"
    assert list(rank.columns["step"]) == list(range(1, 51))
    assert rank.columns["loss"][3] == 0.5
    assert rank.columns["sent_total"][-1] == 50e6
    assert rank.columns["seconds_total"][-1] == pytest.approx(5.0)
    assert run.step(0, 50)["buckets"][1]["codec"] == "none"
    assert run.layers["body.weight"].history == [(10, 0.3, 0.5), (20, 0.3, 0.5)]
    assert run.notes[0]["what"] == "plan 'mixed' is used"
    assert (run.plans[0]["name"], run.drops[0]["rank"], run.validations[0]["loss"]) == ("mixed", 1, 0.125)
    assert list(run.coordinator.columns["applied"]) == [0, 3, 6, 9, 12]
    assert run.coordinator.staleness == {0: 5, 2: 7}


def test_what_is_missing_is_nan(tmp_path):
    append(tmp_path, "rank-0.jsonl", {"event": "step", "time": BEGIN, "step": 1, "loss": None})
    rank = read(tmp_path).ranks[0]
    assert all(math.isnan(rank.columns[name][0]) for name in ("loss", "seconds", "sent"))
    assert rank.columns["time"][0] == BEGIN


def test_a_line_is_read_when_it_is_whole(tmp_path):
    append(tmp_path, "rank-0.jsonl", start(), step(1))
    line = json.dumps(step(2)) + "\n"
    run = read(tmp_path)
    for i in range(0, len(line), 40):
        assert len(run.ranks[0].table) == 1
        with (tmp_path / "rank-0.jsonl").open("a") as file:
            file.write(line[i : i + 40])
        run.poll()
    assert list(run.ranks[0].columns["step"]) == [1, 2]
    assert run.skipped == 0


def test_files_and_steps_that_come_later_are_found(tmp_path):
    run = read(tmp_path)
    assert run.state == "empty"
    append(tmp_path, "rank-0.jsonl", start(), step(1))
    run.poll()
    before = run.version
    assert not run.poll()
    assert run.version == before
    append(tmp_path, "rank-11.jsonl", start(11), step(1))
    append(tmp_path, "rank-0.jsonl", step(2))
    run.poll()
    assert run.version > before
    assert {rank: len(each.table) for rank, each in run.ranks.items()} == {0: 2, 11: 1}


def test_of_a_step_that_comes_again_the_later_record_counts(tmp_path):
    append(tmp_path, "rank-0.jsonl", start(), *[step(each, loss=1.0) for each in range(1, 81)], validation(80, 1.0))
    append(tmp_path, "rank-0.jsonl", {"event": "done", "time": 1.0, "status": "failed", "what": "killed"})
    run = read(tmp_path)
    assert run.state == "failed"
    append(tmp_path, "rank-0.jsonl", start(), *[step(each, loss=2.0) for each in range(51, 61)], validation(60, 2.0))
    run.poll()
    rank = run.ranks[0]
    assert (run.state, rank.starts) == ("running", 2)
    assert list(rank.columns["step"]) == list(range(1, 61))
    assert list(rank.columns["loss"]) == [1.0] * 50 + [2.0] * 10
    assert rank.columns["sent_total"][-1] == 60e6
    assert [each["step"] for each in run.validations] == [60]
    assert run.step(0, 55)["loss"] == 2.0


@pytest.mark.parametrize("how", ["shorter", "replaced", "longer"])
def test_a_file_that_was_written_anew_is_read_anew(tmp_path, how):
    path = tmp_path / "rank-0.jsonl"
    append(tmp_path, path.name, start(), *[step(each) for each in range(1, 11)], note(3, "old"))
    run = read(tmp_path)
    if how == "replaced":
        path.rename(tmp_path / "kept")
    else:
        os.truncate(path, 0)
    steps = 3 if how == "shorter" else 30
    append(tmp_path, path.name, start(codec="int8"), *[step(each) for each in range(1, steps + 1)])
    run.poll()
    assert len(run.ranks[0].table) == steps
    assert run.ranks[0].start["codec"] == "int8"
    assert run.notes == []


LINES = [
    b"not json",
    b"[1, 2]",
    b"7",
    b"{}",
    b'{"event": 5}',
    b'{"event": "step"}',
    b'{"event": "step", "step": -1}',
    b'{"event": "step", "step": 1.5}',
    b'{"event": "step", "step": true}',
    b'{"event": "step", "step": 1e400}',
    b'{"event": "quality", "step": 1, "layers": [1]}',
    b'{"event": "quality", "step": 1, "layers": {"a": 1}}',
    b'{"event": "note", "step": 1}',
    b'{"event": "layout", "buckets": 3}',
    b'{"event": "plan", "buckets": 3}',
    b'{"event": "validation", "loss": 3}',
    b'{"event": "drop"}',
    b"\xff\xfe\x00",
    b"[" * 100_000,
    b'{"event": ' + b"9" * 10_000 + b"}",
]


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_a_line_that_is_no_record_is_counted_and_left_out(tmp_path, line):
    append(tmp_path, "rank-0.jsonl", start(), step(1))
    with (tmp_path / "rank-0.jsonl").open("ab") as file:
        file.write(line + b"\n")
    append(tmp_path, "rank-0.jsonl", step(2))
    run = read(tmp_path)
    assert run.skipped == 1
    assert list(run.ranks[0].columns["step"]) == [1, 2]


def test_a_line_without_end_costs_no_memory_and_is_left_out(tmp_path):
    append(tmp_path, "rank-0.jsonl", step(1))
    with (tmp_path / "rank-0.jsonl").open("ab") as file:
        for _ in range(20):
            file.write(b"x" * (1 << 20))
    run = read(tmp_path)
    append(tmp_path, "rank-0.jsonl", {}, step(2))
    while run.poll():
        pass
    assert run.skipped == 1
    assert list(run.ranks[0].columns["step"]) == [1, 2]


def test_events_and_fields_that_are_not_known_are_ignored(tmp_path):
    append(tmp_path, "rank-0.jsonl", {"event": "weather", "time": 1.0}, step(1, humidity=3))
    run = read(tmp_path)
    assert run.skipped == 0
    assert len(run.ranks[0].table) == 1


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "rank-0.jsonl")
    (tmp_path / "rank-1.jsonl").mkdir()
    append(tmp_path, "rank-2.jsonl", step(1))
    begun = time.monotonic()
    assert list(read(tmp_path).ranks) == [2]
    assert time.monotonic() - begun < 5


def test_the_same_note_of_all_ranks_is_one(tmp_path):
    for rank in range(3):
        append(tmp_path, f"rank-{rank}.jsonl", note(4, "plan changed"), plan(4), quality(4, a=0.1 * (rank + 1)))
    append(tmp_path, "rank-2.jsonl", note(5, "sent again"))
    run = read(tmp_path)
    assert {each["what"]: sorted(each["ranks"]) for each in run.notes} == {"plan changed": [0, 1, 2], "sent again": [2]}
    assert run.layers["a"].error == pytest.approx(0.1)
    assert len(run.plans) == 1


def test_lists_are_bounded(tmp_path):
    notes = [note(each, f"note {each}") for each in range(3000)]
    layers = {f"layer {each}": 0.1 for each in range(6000)}
    append(tmp_path, "rank-0.jsonl", *notes, *[plan(each) for each in range(300)], quality(1, **layers))
    append(tmp_path, "rank-0.jsonl", *[quality(each, one=0.1) for each in range(1, 1000)])
    run = read(tmp_path)
    assert len(run.notes) == len(run._noted) == 500
    assert run.notes[-1]["what"] == "note 2999"
    assert len(run.plans) == 100
    assert len(run.layers) == 5000


def test_the_history_of_a_layer_is_thinned_and_keeps_its_ends(tmp_path):
    append(tmp_path, "rank-0.jsonl", *[quality(each, one=each) for each in range(1, 1001)])
    history = read(tmp_path).layers["one"].history
    assert len(history) <= 200
    assert (history[0][0] <= 10, history[-1][0]) == (True, 1000)
    assert [entry[0] for entry in history] == sorted(entry[0] for entry in history)


def test_columns_are_thinned_before_memory_is_out(tmp_path, monkeypatch):
    monkeypatch.setattr(columns, "ROWS", 100)
    append(tmp_path, "rank-0.jsonl", *[step(each) for each in range(1, 1001)])
    run = read(tmp_path)
    table = run.ranks[0].table
    assert len(table) <= 100
    assert table.columns["sent_total"][-1] == 1000e6
    assert run.step(0, 1000)["step"] == 1000


def test_random_damage_never_ends_the_reading(tmp_path):
    draw = random.Random(5)
    whole(tmp_path / "good")
    for attempt in range(150):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        for name in ("rank-0.jsonl", "coordinator.jsonl"):
            data = bytearray((tmp_path / "good" / name).read_bytes())
            for _ in range(draw.randrange(1, 60)):
                at = draw.randrange(len(data))
                data[at : at + draw.randrange(3)] = draw.choice(
                    [b'"', b"{", b"null", b"-1", b"1e999", b"[]", b"\n", b"x"]
                )
            (folder / name).write_bytes(data)
        run = read(folder)
        views.summary(run)
        made = [views.series(run, views.GROUPS), views.timeline(run), *[make(run) for make in views.PARTS.values()]]
        json.dumps(made, allow_nan=False)


def test_a_value_of_any_type_in_any_field_can_be_shown(tmp_path):
    draw, odd = random.Random(6), [None, True, "x", [], {}, [None], {"a": None}, -1, 1e308, 10**400, 0, 0.5, "\ud800"]
    for attempt in range(300):
        records = [start(), step(1), quality(1, a=0.1), plan(1), note(1, "n"), validation(1, 0.1), coordinator(1)]
        records.append({"event": "layout", "time": 1.0, "step": 0, "buckets": [{"names": ["a"], "numel": 3}]})
        records.append({"event": "done", "time": 1.0, "status": "done", "what": ""})
        for record in records:
            for name in record:
                if name != "event" and draw.random() < 0.3:
                    record[name] = draw.choice(odd)
        folder = tmp_path / str(attempt)
        append(folder, "rank-0.jsonl", *records)
        append(folder, "coordinator.jsonl", *records)
        run = read(folder)
        made = [views.summary(run), views.series(run, views.GROUPS), views.timeline(run)]
        json.dumps([*made, *[make(run) for make in views.PARTS.values()]], allow_nan=False)


def test_a_hundred_thousand_steps_are_read_in_slices_and_shown_in_1500_points(tmp_path):
    many_steps(tmp_path / "rank-0.jsonl", 100_000)
    run = Run(tmp_path)
    begun = time.monotonic()
    assert run.poll(0.05)
    assert time.monotonic() - begun < 1.0
    assert 0 < run.progress < 1
    while run.poll():
        pass
    assert time.monotonic() - begun < 30
    assert run.progress == 1
    assert len(run.ranks[0].table) == 100_000
    shown = views.series(run, views.GROUPS)
    for group in shown.values():
        assert len(group["step"]) <= 1502
        assert (group["step"][0], group["step"][-1]) == (1, 100_000)


def test_a_spike_of_one_step_stays_visible_and_a_zoom_shows_every_step(tmp_path):
    steps = [step(each, loss=50.0 if each == 7777 else 1.0) for each in range(1, 20_001)]
    append(tmp_path, "rank-0.jsonl", *steps)
    run = read(tmp_path)
    shown = views.series(run, ["loss"])["loss"]
    assert shown["values"]["loss"][shown["step"].index(7777)] == 50.0
    near = views.series(run, ["loss"], "step", 7700, 7800)["loss"]
    assert near["step"] == list(range(7699, 7802))
    by_bytes = views.series(run, ["loss"], "bytes", 7700e6, 7800e6)["loss"]
    assert by_bytes["step"] == near["step"]
    assert by_bytes["bytes"][0] == 7699_000_000


def test_a_slow_worker_is_marked(tmp_path):
    for rank, compute in enumerate((0.06, 0.06, 0.12, 0.06)):
        append(tmp_path, f"rank-{rank}.jsonl", start(rank, 4), *[step(each, compute_s=compute) for each in range(1, 6)])
    run = read(tmp_path)
    assert [each["rank"] for each in views.workers(run) if each["slow"]] == [2]


def test_a_worker_is_known_to_live_until_its_last_record_of_any_kind(tmp_path):
    append(tmp_path, "rank-0.jsonl", start(0, 2), step(1), note(50, "waiting"))
    append(tmp_path, "rank-1.jsonl", start(1, 2), step(1), {"event": "done", "time": BEGIN + 9, "status": "failed"})
    told = views.workers(read(tmp_path))
    assert [(each["state"], each["time"]) for each in told] == [("running", BEGIN + 5), ("failed", BEGIN + 9)]


def test_a_run_started_when_it_was_started_last(tmp_path):
    append(tmp_path / "run", "rank-0.jsonl", start(time=BEGIN + 7), step(1), start(time=BEGIN + 30))
    assert views.summary(read(tmp_path / "run"))["started"] == BEGIN + 30
    append(tmp_path / "served", "coordinator.jsonl", coordinator(5), coordinator(6))
    assert views.summary(read(tmp_path / "served"))["started"] == BEGIN + 5
    append(tmp_path / "odd", "rank-0.jsonl", start(time="noon"))
    assert views.summary(read(tmp_path / "odd"))["started"] is None


def test_a_run_that_nobody_has_looked_at_is_still_to_be_read(tmp_path):
    run = Run(whole(tmp_path / "run"))
    assert (run.reading, run.progress) == (True, 0.0)
    while run.poll():
        pass
    assert (run.reading, run.progress) == (False, 1.0)


def test_a_timeline_is_of_the_last_step_that_all_have_or_of_any(tmp_path):
    for rank, steps in enumerate((20, 19, 20)):
        append(tmp_path, f"rank-{rank}.jsonl", *[step(each, compute_s=each / 100) for each in range(1, steps + 1)])
    run = read(tmp_path)
    shown = views.timeline(run)
    assert (shown["step"], shown["last"], len(shown["rows"])) == (19, 20, 3)
    assert [row["compute_s"] for row in views.timeline(run, 7)["rows"]] == [0.07] * 3
    assert [bucket["codec"] for bucket in shown["rows"][0]["buckets"]] == ["int4", "none"]


def test_folders_of_runs_are_found_and_new_ones_appear(tmp_path):
    whole(tmp_path / "a")
    (tmp_path / "empty").mkdir()
    assert run_folders(tmp_path) == [tmp_path / "a"]
    assert run_folders(tmp_path / "a") == [tmp_path / "a"]
    with Store([tmp_path, tmp_path / "a"]) as store:
        assert [run["name"] for run in store.overview(-1)["runs"]] == ["a"]
        whole(tmp_path / "b")
        for _ in range(100):
            told = store.overview(-1)["runs"]
            if len(told) == 2 and told[1]["step"] == 50:
                break
            time.sleep(0.1)
        assert [run["name"] for run in told] == ["a", "b"]
        time.sleep(0.5)
        version = store.overview(-1)["version"]
        assert store.overview(version) == {"version": version}


@pytest.mark.parametrize("target", ["self", "nowhere", "/dev/null"])
def test_a_link_that_leads_to_no_folder_hides_no_run(tmp_path, target):
    whole(tmp_path / "a")
    (tmp_path / "self").symlink_to(target)
    assert run_folders(tmp_path) == [tmp_path / "a"]


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    whole(tmp_path / "x" / "run")
    whole(tmp_path / "y" / "run")
    store = Store([tmp_path / "x", tmp_path / "y"])
    store.read_all()
    assert [run["name"] for run in store.overview(-1)["runs"]] == ["run", "run (2)"]
