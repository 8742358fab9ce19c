"""What make installs: steps, extras and stamps agree, and pins that cannot be met do not end a set-up."""

import importlib.util
import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAKEFILE = (ROOT / "Makefile").read_text()
EXTRA = re.compile(r"extra == ['\"]([\w-]+)['\"]")


@pytest.fixture(scope="module")
def environment():
    spec = importlib.util.spec_from_file_location("environment", ROOT / "tools" / "environment.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def packages(extras):
    """Names of what extras bring, those of extras in them included."""
    found, wanted = set(), extras.split(",")
    while wanted:
        extra = wanted.pop()
        for each in requires("gradwire"):
            if (condition := EXTRA.search(each)) and condition[1] == extra:
                inner = re.match(r"gradwire\[(.*?)\]", each)
                wanted += inner[1].split(",") if inner else []
                found |= set() if inner else {re.match(r"[\w.-]+", each)[0]}
    return found


def test_every_stamp_of_the_makefile_is_a_step(environment):
    stamps = re.findall(r"^[\w-]+: (\.venv[\w-]*)/\.(\w+)", MAKEFILE, re.MULTILINE)
    assert {name for _, name in stamps} == set(environment.STEPS)
    for folder, name in stamps:
        assert environment.STEPS[name].folder == folder


def test_a_step_installs_all_of_the_steps_it_makes_needless(environment):
    for name, step in environment.STEPS.items():
        for each in step.contains:
            assert packages(environment.STEPS[each].extras) <= packages(step.extras), f"{name} lacks some of {each}"


def test_a_training_needs_nothing_of_the_tests(environment):
    assert packages(environment.STEPS["train"].extras) == {"scikit-learn"}


def test_requirements_are_those_of_the_extra_and_of_extras_in_it(environment):
    found = environment.requirements(Path(sys.executable), "test")
    assert {re.match(r"[\w.-]+", each)[0] for each in found} == packages("test")
    assert any(each.startswith("pytest>=") for each in found)


CONFLICT = "The conflict is caused by:\n    mkdocs>=1\n    The user requested (constraint) mkdocs==9.9\n"


@pytest.mark.parametrize(
    ("lock", "out", "why"),
    [
        ("", "", None),
        ("1", "", "No matching distribution found for mkdocs==9.9"),
        ("1", CONFLICT, "mkdocs==9.9"),
    ],
)
def test_pins_that_cannot_be_met_are_named_and_ranges_are_taken(lock, out, why, environment, monkeypatch, capsys):
    seen = []

    def run(command, **_):
        seen.append(command)
        refused = "ERROR: Could not find a version\nERROR: No matching distribution found for mkdocs==9.9\n"
        pinned = "constraints.txt" in command
        return subprocess.CompletedProcess(command, int(pinned), out, refused if pinned else "")

    monkeypatch.setenv("GRADWIRE_LOCK", lock)
    monkeypatch.setattr(environment.subprocess, "run", run)
    environment.install(Path("python"), ["mkdocs>=1"])
    assert len(seen) == (2 if lock else 1)
    assert "constraints.txt" not in seen[-1]
    told = f"constraints.txt cannot be met here: {why}. Going on with the ranges of pyproject.toml.\n"
    assert capsys.readouterr().out.lstrip() == (told if lock else "")


def test_a_set_up_that_fails_shows_what_pip_said(environment, monkeypatch):
    monkeypatch.delenv("GRADWIRE_LOCK", raising=False)
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: no network\n")
    monkeypatch.setattr(environment.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(SystemExit, match=r"ERROR: no network\s+pip could not install x"):
        environment.install(Path("python"), ["x"])


def test_a_python_without_venv_is_told_what_to_install(environment, monkeypatch):
    monkeypatch.setattr(environment, "find_spec", lambda name: None)
    monkeypatch.setattr(environment.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match=r"apt-get install python3-venv .*g\+\+\nOr name another Python: make PYTHON="):
        environment.check_system()
