"""Run the first tier of the tests with the oldest torch we claim, the newest and the pinned one.

``python3 tools/versions.py`` makes an environment for each (``.venv-torch-2.9.0``), installs gradwire there with
the packages of its tests, runs the tests, and prints a table. ``--torch 2.11.0`` takes another version instead. Other
arguments go to pytest in place of the first tier: ``python3 tools/versions.py tests/adapters -x``.

This file needs nothing but the standard library. An environment of a CUDA build takes 5 GB; with
``PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu`` pip takes PyTorch's builds without CUDA, of 1 GB.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
EXTRA = "test"  # of pyproject.toml: what the first tier needs
# As `make test`, and FSDP2, which takes most of torch's private names.
FIRST_TIER = ["-n", "2", "--dist", "loadfile", "-m", "not full", "--ignore-glob=tests/engines/test_[!f]*.py"]
OLDEST, NEWEST, PINNED = "oldest", "newest", "pinned"


class Run(NamedTuple):
    """The tests with one torch."""

    torch: str
    python: str
    passed: int
    failed: int
    skipped: int
    minutes: float
    problem: str = ""

    @property
    def good(self) -> bool:
        """Whether there were tests, and all passed."""
        return not self.problem and not self.failed and self.passed > 0


def oldest() -> str:
    """The lower end of pyproject.toml's range: ``2.9`` there is release 2.9.0."""
    found = re.search(r'^  "torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found, 'pyproject.toml has no line `"torch>=..."`'
    return found[1] if found[1].count(".") == 2 else f"{found[1]}.0"


def pinned() -> str:
    """The release in constraints.txt."""
    found = re.search(r"^torch==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert found, "constraints.txt has no line `torch==...`"
    return found[1]


def newest() -> str:
    """The newest release that pip's package index has for this Python."""
    command = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"^torch \(([\d.]+)", asked.stdout, re.MULTILINE)
    if not found:
        raise SystemExit(
            f"pip did not say which torch is the newest: {asked.stderr.strip() or asked.stdout.strip()}\n"
            "Name the versions: --torch 2.9.0 --torch 2.13.0"
        )
    return found[1]


def environment(version: str) -> Path:
    """Return the Python of an environment with that torch, made or brought up to date if it must be."""
    folder = ROOT / f".venv-torch-{version}"
    python, stamp = folder / "bin" / "python", folder / ".ready"
    sources = [ROOT / "pyproject.toml", ROOT / "CMakeLists.txt", Path(__file__), *(ROOT / "csrc").iterdir()]
    if stamp.exists() and stamp.stat().st_mtime > max(each.stat().st_mtime for each in sources):
        return python
    print(f"setting up {folder.name}: some minutes, once", flush=True)
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    # The pins are those of one torch: others get what a user's pip takes today.
    pins = ["-c", "constraints.txt"] if version == pinned() else []
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    subprocess.run([*install, *pins, f"torch=={version}", "--editable", f".[{EXTRA}]"], cwd=ROOT, check=True)
    stamp.touch()
    return python


def run(version: str, arguments: list[str]) -> Run:
    """Run the tests with one torch."""
    started = time.monotonic()
    try:
        python = environment(version)
    except subprocess.CalledProcessError:
        return Run(version, "", 0, 0, 0, 0.0, "could not be installed")
    program = "import platform, torch; print(torch.__version__, platform.python_version())"
    asked = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False)
    if asked.returncode:
        return Run(version, "", 0, 0, 0, 0.0, "could not be imported: " + asked.stderr.strip().splitlines()[-1])
    found, python_version = asked.stdout.split()
    print(f"torch {found}, Python {python_version}", flush=True)
    report, started = python.parent.parent / "tests.xml", time.monotonic()
    report.unlink(missing_ok=True)
    done = subprocess.run([python, "-m", "pytest", f"--junitxml={report}", *arguments], cwd=ROOT, check=False)
    minutes = (time.monotonic() - started) / 60
    if not report.exists():
        return Run(found, python_version, 0, 0, 0, minutes, f"pytest ended with status {done.returncode}")
    return Run(found, python_version, *counts(report.read_text()), minutes)


def counts(report: str) -> tuple[int, int, int]:
    """Tests that passed, failed and were skipped, by a report of pytest's; errors are failures."""
    suites = list(ElementTree.fromstring(report).iter("testsuite"))
    total, bad, skipped = (
        sum(int(each.get(name, 0)) for each in suites for name in names)
        for names in (("tests",), ("failures", "errors"), ("skipped",))
    )
    return total - bad - skipped, bad, skipped


def table(runs: list[Run]) -> str:
    """The runs, as a table in Markdown."""
    lines = ["| torch | Python | passed | failed | skipped | minutes |", "|---|---|---|---|---|---|"]
    for each in runs:
        figures = each.problem or f"{each.passed} | {each.failed} | {each.skipped} | {each.minutes:.0f}"
        lines.append(f"| {each.torch} | {each.python} | {figures} |")
    return "\n".join(lines)


def main() -> int:
    """Run the tests with every version; the status says whether all passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", action="append", metavar="VERSION", help="oldest, newest, pinned or a version")
    options, arguments = parser.parse_known_args()
    named = {OLDEST: oldest, NEWEST: newest, PINNED: pinned}
    versions = [named[each]() if each in named else each for each in options.torch or named]
    runs = [run(each, arguments or FIRST_TIER) for each in dict.fromkeys(versions)]
    print(f"\n{table(runs)}")
    return 0 if all(each.good for each in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
