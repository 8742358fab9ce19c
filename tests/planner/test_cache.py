"""The cache of plans is an empty one for a user without a home, and where its file holds anything else."""

import json
import os
import subprocess
import sys

import pytest
import torch

from gradwire import ConfigError
from gradwire.doctor import machine
from gradwire.planner import cache as module
from gradwire.planner.cache import PlanCache, cache_folder
from gradwire.planner.plan import Plan, choose
from tests import needs
from tests.planner.test_plan import situation

PAPER = choose(situation(10))
WEIGHTS = {"w": torch.zeros(4, 4)}


def opened():
    """A cache, and whether it is empty."""
    cache = PlanCache(WEIGHTS, ranks=2)
    return cache, cache.plans == [] and cache.get("int8", [WEIGHTS], 16) is None


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = PlanCache(WEIGHTS, ranks=2)
    cache.put("int8", ["w"], 16, 0.25)
    cache.keep_plans(["a plan"])
    assert not opened()[1]
    return next((tmp_path / "gradwire").iterdir())


GOOD = {"int8 16 00000000": 0.5}
CONTENTS = {
    "nothing": b"",
    "not JSON": b"{",
    "not UTF-8": b"\xff\xfe",
    "deep": b"[" * 300_000,
    "a huge number": b'{"costs": {"a": ' + b"9" * 100_000 + b'}, "plans": []}',
    "a number beyond floats": b'{"costs": {"a": ' + b"9" * 4000 + b'}, "plans": []}',
    "a list": b"[1]",
    "costs that are a list": b'{"costs": [1], "plans": []}',
    "a cost that is a list": b'{"costs": {"a": [1]}, "plans": []}',
    "a cost that is text": b'{"costs": {"a": "1"}, "plans": []}',
    "plans that are a number": json.dumps({"costs": GOOD, "plans": 7}).encode(),
    "plans that are numbers": json.dumps({"costs": GOOD, "plans": [7]}).encode(),
    "no plans": json.dumps({"costs": GOOD}).encode(),
    "too large": json.dumps({"costs": {str(each): 1.0 for each in range(200_000)}, "plans": []}).encode(),
}


@pytest.mark.parametrize("what", [*CONTENTS, "a pipe", "a folder", "a loop", "a hole of 1 TB", "not ours"])
@pytest.mark.timeout(20)
def test_a_file_that_holds_anything_else_counts_as_empty(file, what):
    file.unlink()
    if what == "a pipe":
        os.mkfifo(file)
    elif what == "a folder":
        file.mkdir()
    elif what == "a loop":
        file.symlink_to(file)
    elif what == "a hole of 1 TB":
        with file.open("wb") as hole:
            hole.truncate(1 << 40)
    elif what == "not ours":
        file.symlink_to("/dev/zero")
    else:
        file.write_bytes(CONTENTS[what])
    cache, empty = opened()
    assert empty
    cache.put("int8", ["w"], 16, 0.5)
    cache.save()  # over it, or not at all
    assert all(not name.startswith(".") for name in os.listdir(file.parent))
    assert what == "a folder" or opened()[0].get("int8", [WEIGHTS], 16) == 0.5


@pytest.mark.parametrize("where", ["", "relative", "/dev/null", "/proc/nothing"])
def test_a_folder_that_cannot_be_had_is_no_error(where, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", where)
    monkeypatch.setenv("HOME", "/dev/null")
    monkeypatch.chdir(tmp_path)
    cache, empty = opened()
    assert empty
    cache.put("int8", ["w"], 16, 0.5)
    cache.save()
    assert list(tmp_path.iterdir()) == []


def without_a_home():
    raise RuntimeError("Could not determine home directory.")


def test_a_user_without_a_home_has_an_empty_cache(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(module.Path, "home", without_a_home)
    assert cache_folder() is None
    cache, empty = opened()
    assert empty
    cache.put("int8", ["w"], 16, 0.5)
    cache.save()
    assert "no home folder" in machine._cache().fact


def test_a_user_that_is_not_in_the_list_of_users_trains():
    needs.root("to become a user that has no entry")
    program = (
        "import os, torch; from gradwire.planner.cache import PlanCache, cache_folder; os.setuid(54321); "
        "cache = PlanCache({'w': torch.zeros(4)}, 2); cache.put('int8', ['w'], 4, 0.5); cache.save(); "
        "print(cache_folder(), cache.plans)"
    )
    clean = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}
    done = subprocess.run([sys.executable, "-c", program], env=clean, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("None []", "")


def wrong_plans():
    told = json.loads(PAPER.to_json())
    yield "[" * 5000
    yield "7"
    yield json.dumps({**told, "more": 1})
    for name in told:
        for wrong in (None, True, "x", [1], {"x": [1]}, 10**400):
            if not (wrong is None and name == "measured_s") and not (wrong == "x" and name == "reason"):
                yield json.dumps({**told, name: wrong})


def test_a_plan_of_other_types_is_none():
    assert Plan.from_json(PAPER.to_json()) == PAPER
    for text in wrong_plans():
        with pytest.raises(ConfigError, match="a plan must be what"):
            Plan.from_json(text)
