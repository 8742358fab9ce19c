"""A folder of runs may come from anybody: it takes no more than 256 MB, of the dashboard and of a report."""

import http.client
import json
import os
import subprocess
import sys
import time
from urllib.parse import urlsplit

import pytest

from gradwire.dashboard import views
from gradwire.dashboard.report import report
from gradwire.dashboard.room import Room, cost_of
from gradwire.dashboard.runs import Run
from gradwire.dashboard.store import Store
from tests.dashboard.folders import append, hostile_runs, note, plan, quality, start, step, whole_run

SCALE = float(os.environ.get("GRADWIRE_HOSTILE", "0.02"))
MOST_MB = 256
PEAK = "\nprint(open('/proc/self/status').read(), file=sys.stderr)"


def peak_mb(status):
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM"))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    hostile_runs(folder, SCALE)
    return folder


def served(folder):
    """The most memory that a dashboard took which has read a folder and shown all of it, and its runs."""
    command = [sys.executable, "-m", "gradwire", "dash", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            url = urlsplit(process.stdout.readline().strip())

            def ask(path):
                connection = http.client.HTTPConnection("127.0.0.1", url.port, timeout=60)
                connection.request("GET", f"/api/{path}{'&' if '?' in path else '?'}{url.query}")
                answer = connection.getresponse()
                assert answer.status == 200, path
                body = answer.read()
                connection.close()
                return json.loads(body)

            runs = ask("runs")["runs"]
            while any(run["reading"] for run in runs):
                time.sleep(0.2)
                runs = ask("runs")["runs"]
            for run in runs:
                for part in views.PARTS:
                    ask(f"part?run={run['id']}&part={part}")
                ask(f"series?run={run['id']}")
                ask(f"timeline?run={run['id']}")
            with open(f"/proc/{process.pid}/status") as status:
                return peak_mb(status.read()), runs
        finally:
            process.kill()


@pytest.mark.full
@pytest.mark.timeout(600 if SCALE < 1 else 3000)
def test_a_dashboard_of_hostile_runs_takes_256_mb(hostile, tmp_path):
    whole_run(tmp_path / "run")
    idle, _ = served(tmp_path)
    peak, runs = served(hostile)
    print(f"\ndashboard at scale {SCALE}: {idle:.0f} MB for a small run, {peak:.0f} MB for hostile ones")
    assert peak - idle < MOST_MB
    assert len(runs) >= 13
    assert next(run for run in runs if run["name"] == "tiny")["step"] > 0


@pytest.mark.full
@pytest.mark.timeout(600 if SCALE < 1 else 3000)
def test_a_report_of_hostile_runs_takes_256_mb(hostile, tmp_path):
    whole_run(tmp_path / "run")

    def made(folder):
        program = f"""import sys
from pathlib import Path
from gradwire.dashboard.report import report
from gradwire.dashboard.store import Store
Path({str(tmp_path / "page")!r}).write_bytes(report(Store([Path({str(folder)!r})]))[0]){PEAK}"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        return peak_mb(done.stderr), (tmp_path / "page").stat().st_size / 1e6

    (idle, _), (peak, page) = made(tmp_path / "run"), made(hostile)
    print(
        f"\nreport at scale {SCALE}: {idle:.0f} MB for a small run, {peak:.0f} MB for hostile ones, {page:.0f} MB page"
    )
    assert peak - idle < MOST_MB


def read(folder, room):
    run = Run(folder, room)
    while run.poll():
        pass
    return run


def test_the_longest_tables_of_all_runs_are_thinned_when_room_is_short(tmp_path):
    append(tmp_path / "long", "rank-0.jsonl", *[step(each) for each in range(1, 2001)])
    append(tmp_path / "short", "rank-0.jsonl", *[step(each) for each in range(1, 51)])
    room = Room(rows=500 * 128)
    runs = [read(tmp_path / name, room) for name in ("long", "short")]
    tables = [run.ranks[0].table for run in runs]
    assert 200 < len(tables[0]) <= 500
    assert len(tables[1]) == 50
    assert tables[0].columns["step"][-1] == 2000
    assert tables[0].columns["sent_total"][-1] == 2000e6
    assert sum(table.nbytes() for table in tables) <= 500 * 128
    assert [run.skipped for run in runs] == [0, 0]


def test_histories_of_layers_are_thinned_too(tmp_path):
    records = [quality(each, **{f"layer {n}": 0.1 for n in range(20)}) for each in range(1, 201)]
    append(tmp_path, "rank-0.jsonl", *records)
    run = read(tmp_path, Room(rows=20 * 160 * 50))
    assert sum(layer.nbytes() for layer in run.layers.values()) <= 20 * 160 * 50
    assert {layer.history[-1][0] for layer in run.layers.values()} == {200}


def test_records_that_there_is_no_room_for_are_counted_and_the_latest_stay(tmp_path):
    append(tmp_path, "rank-0.jsonl", start(), *[plan(each, reason="x" * 1500) for each in range(50)])
    append(tmp_path, "rank-0.jsonl", *[note(each, "y" * 1500) for each in range(50)])
    run = read(tmp_path, Room(records=200_000))
    assert run.ranks[0].start["codec"] == "int4"
    assert 5 < len(run.plans) < 50
    assert run.plans[-1]["step"] == 49
    assert sum(map(cost_of, run.plans)) < 50_000
    assert run.skipped > 0


def test_what_is_read_anew_gives_its_room_back(tmp_path):
    room = Room()
    before = (room.rows, room.records, room.files)
    run = read(whole_run(tmp_path / "run"), room)
    assert all(left < had for left, had in zip((room.rows, room.records, room.files), before, strict=True))
    run._clear()
    assert (room.rows, room.records, room.files) == before


def test_a_lower_rank_that_tells_later_takes_over_with_nothing_lost(tmp_path):
    room = Room()
    for rank in (3, 1):
        more = [plan(4), quality(4, a=0.1), {"event": "validation", "step": 1, "loss": 1.0}]
        append(tmp_path, f"rank-{rank}.jsonl", *more, {"event": "drop", "step": 1, "what": "stale"})
        if rank == 3:
            run = read(tmp_path, room)
            left = (room.rows, room.records)
    while run.poll():
        pass
    assert (room.rows, room.records) == left
    assert len(run.plans) == len(run.drops) == len(run.layers) == 1


def test_files_beyond_the_limit_are_not_read(tmp_path):
    for rank in range(20):
        append(tmp_path, f"rank-{rank}.jsonl", step(1))
    assert sorted(read(tmp_path, Room(files=5)).ranks) == [0, 1, 2, 3, 4]


def test_a_record_of_too_many_values_is_left_out(tmp_path):
    append(tmp_path, "rank-0.jsonl", start(settings=[[]] * 300_000), start(codec="int8"))
    run = read(tmp_path, Room())
    assert run.skipped == 1
    assert run.ranks[0].start["codec"] == "int8"


def test_charts_of_many_runs_have_fewer_points(tmp_path):
    for run in range(3):
        append(tmp_path / f"run {run}", "rank-0.jsonl", *[step(each) for each in range(1, 3001)])
    page, _ = report(Store([tmp_path]))
    few = Run(tmp_path / "run 0")
    while few.poll():
        pass
    assert len(views.series(few, ["loss"], points=300)["loss"]["step"]) <= 302
    assert page.count(b'"run2":') == 4
