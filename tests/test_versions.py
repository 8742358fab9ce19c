"""tools/versions.py: which releases of torch it takes, and what it says of a run."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from gradwire.torch_internals import TESTED

ROOT = Path(__file__).parent.parent
REPORT = '<testsuites><testsuite name="pytest" errors="1" failures="2" skipped="3" tests="10"/></testsuites>'


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("versions", ROOT / "tools" / "versions.py")
    module = sys.modules["versions"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_oldest_is_of_pyproject_and_the_pinned_one_of_the_constraints(tool):
    assert tool.oldest().startswith(f"{TESTED[0]}.")
    assert f'"torch>={TESTED[0]},' in (ROOT / "tools" / "environment.py").read_text()
    assert f"\ntorch=={tool.pinned()}\n" in (ROOT / "constraints.txt").read_text()


def test_the_newest_is_asked_of_the_package_index(tool, monkeypatch):
    answers = {"stdout": "torch (2.99.1)\nAvailable versions: 2.99.1, 2.99.0\n", "stderr": "WARNING: experimental\n"}
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, **answers))
    assert tool.newest() == "2.99.1"
    answers |= {"stdout": "", "stderr": "ERROR: no matching distribution"}
    with pytest.raises(SystemExit, match=r"no matching distribution\nName the versions: --torch"):
        tool.newest()


def test_a_report_is_counted_and_told_as_a_table(tool):
    assert tool.counts(REPORT) == (4, 3, 3)
    runs = [tool.Run("2.6.0", "3.11.7", 4, 3, 3, 12.4), tool.Run("9.9", "", 0, 0, 0, 0.0, "could not be installed")]
    assert tool.table(runs).splitlines()[2:] == [
        "| 2.6.0 | 3.11.7 | 4 | 3 | 3 | 12 |",
        "| 9.9 |  | could not be installed |",
    ]
    assert not any(each.good for each in runs)
    assert runs[0]._replace(failed=0).good


def test_every_version_is_run_once_and_the_status_says_whether_all_passed(tool, monkeypatch, capsys):
    seen = []

    def run(version, arguments):
        seen.append((version, arguments))
        return tool.Run(version, "3.11", 5, int(version == tool.oldest()), 0, 1.0)

    monkeypatch.setattr(tool, "run", run)
    monkeypatch.setattr(tool, "newest", tool.pinned)
    monkeypatch.setattr(sys, "argv", ["versions.py"])
    assert tool.main() == 1
    assert seen == [(tool.oldest(), tool.FIRST_TIER), (tool.pinned(), tool.FIRST_TIER)]
    seen.clear()
    monkeypatch.setattr(sys, "argv", ["versions.py", "--torch", "2.9.1", "--torch", "pinned", "tests/optim", "-x"])
    assert tool.main() == 0
    assert seen == [("2.9.1", ["tests/optim", "-x"]), (tool.pinned(), ["tests/optim", "-x"])]
    assert "| 2.9.1 | 3.11 | 5 | 0 | 0 | 1 |" in capsys.readouterr().out
