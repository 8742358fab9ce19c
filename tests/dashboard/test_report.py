"""A report is one file that asks nobody for anything."""

import json
import re
import time
from html.parser import HTMLParser
from importlib.resources import files

from gradwire.dashboard import pages
from gradwire.dashboard.report import report
from gradwire.dashboard.store import Store
from tests.dashboard.folders import append, many_steps, note, quality, start, step, whole_run
from tests.workers.warm import gradwire as run

HOSTILE = "</script><script>window.bad=1</script><!--<script>&amp;\u2028]]>"


class Found(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.data, self.inside = [], {}, None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.inside = (tag, dict(attributes).get("id"))

    def handle_data(self, data):
        self.data.setdefault(self.inside, []).append(data)


def made(folder):
    page, runs = report(Store([folder]))
    return page.decode(), runs


def test_the_file_has_everything_inside_and_nothing_outside(tmp_path):
    page, _ = made(whole_run(tmp_path / "run"))
    found = Found(page)
    names = [name for _, attributes in found.tags for name in attributes]
    assert not {"src", "href", "srcset", "action"} & set(names)
    assert not re.search(r"(https?:)?//[a-z0-9.-]+\.[a-z]{2,}", page.replace("http://www.w3.org/", ""))
    assert "url(" not in page
    assert "@import" not in page
    policy = next(each["content"] for _, each in found.tags if each.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy


def test_the_data_are_those_of_the_run(tmp_path):
    page, runs = made(whole_run(tmp_path / "run"))
    data = json.loads("".join(Found(page).data[("script", "data")]))
    assert data["runs"] == runs
    assert runs[0]["step"] == 50
    assert data["series"]["run0"]["loss"]["values"]["loss"][0] == 2
    assert data["parts"]["run0"]["about"]["start"]["settings"] == {"task": "digits"}
    assert data["layers"]["run0"][0] == {
        "name": "head.weight",
        "step": [10, 20],
        "error": [0.1, 0.1],
        "residual": [0.5, 0.5],
    }
    assert abs(data["made"] - time.time()) < 60


def test_no_string_of_a_run_ends_the_element_it_is_in(tmp_path):
    folder = tmp_path / "a<script>alert(1)<"
    append(folder, "rank-0.jsonl", start(codec=HOSTILE), step(1), note(1, HOSTILE), quality(1, **{HOSTILE: 0.1}))
    page, _ = made(folder)
    found = Found(page)
    assert [tag for tag, _ in found.tags].count("script") == 2
    data = json.loads("".join(found.data[("script", "data")]))
    assert data["parts"]["run0"]["notes"]["notes"][0]["what"] == HOSTILE
    assert data["runs"][0]["name"] == "a<script>alert(1)<"
    assert "".join(found.data[("title", None)]).startswith("a<script>alert(1)<")


def test_the_size_does_not_grow_with_the_steps(tmp_path):
    for name, steps in (("short", 3_000), ("long", 60_000)):
        (tmp_path / name).mkdir()
        many_steps(tmp_path / name / "rank-0.jsonl", steps)
    short, long = (len(made(tmp_path / name)[0]) for name in ("short", "long"))
    assert long < 1.3 * short < 1_000_000


def test_the_command_writes_the_file_and_says_what_is_in_it(tmp_path):
    whole_run(tmp_path / "runs" / "one")
    whole_run(tmp_path / "runs" / "two", codec="int8", scale=2.0)
    command = ["report", "runs", "-o", "out.html"]
    said = run(*command, cwd=tmp_path).stdout
    assert "out.html" in said
    assert "0.125" in said
    assert (tmp_path / "out.html").read_bytes().startswith(b"<!doctype html>")
    told = json.loads(run(*command, "--json", cwd=tmp_path).stdout)
    assert told["bytes"] == (tmp_path / "out.html").stat().st_size
    assert {each["name"]: (each["codec"], each["step"], each["loss"]) for each in told["runs"]} == {
        "one": ("int4", 50, 0.04),
        "two": ("int8", 50, 0.08),
    }


def test_counts_are_whole_numbers_in_json(tmp_path):
    append(tmp_path / "run", "rank-0.jsonl", start(steps=2), step(1, sent=1000), step(2, sent=1001))
    told = json.loads(run("report", "run", "--json", cwd=tmp_path).stdout)["runs"][0]
    counts = ["ranks", "parameters", "planned", "step", "step_bytes", "sent", "dense", "restarts", "dropped", "skipped"]
    assert {name: type(told[name]) for name in counts} == dict.fromkeys(counts, int)
    assert (told["parameters"], told["step_bytes"], told["sent"]) == (1000, 1000, 2001)
    assert {name: type(told[name]) for name in ("seconds", "step_s", "time")} == dict.fromkeys(
        ("seconds", "step_s", "time"), float
    )


def test_a_folder_without_runs_is_named(tmp_path):
    refused = run("report", str(tmp_path), "-o", str(tmp_path / "out.html"), status=2)
    assert "there is no run" in refused.stderr
    assert not (tmp_path / "out.html").exists()


def test_the_page_names_every_file_that_is_there():
    folder = {path.name for path in (files("gradwire.dashboard") / "page").iterdir()}
    assert folder == {"index.html", "icon.svg", *pages.STYLES, *pages.SCRIPTS}
