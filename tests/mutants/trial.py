"""Whether the tests find a mutant: those nearest to it first, then all others."""

import ast
import re
import time
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.copies import Copy, copy
from tests.mutants.draw import ROOT, SOURCE, Mutant

COMMAND = ["python", "-m", "pytest", "-n", "2", "--dist", "loadfile", "--ignore=tests/engines"]
TIERS = {"first": "not full", "full": "full"}
TIER_S = {"first": 240, "full": 1800}  # how long a tier takes

_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", re.MULTILINE)
_NOTHING_RAN = 5  # pytest's exit status
_ENDINGS = {None: "the time limit", 4: "conftest.py, which cannot be imported"}
_RETRIES = 3  # failures that do not repeat, before one counts after all


@dataclass(frozen=True)
class Tests:
    """Which tests to run on a mutant, and for how long."""

    tier: str
    nearest_only: bool = False
    limit_s: float | None = None  # None: three times as long as the tier takes
    options: tuple[str, ...] = ()  # pytest's

    @property
    def stages(self) -> list[list[str]]:
        """What comes after the nearest."""
        return [] if self.nearest_only else [["tests", "src"]]

    @property
    def command(self) -> list[str]:
        return [*COMMAND, "-x", "-m", TIERS[self.tier], *self.options]

    def deadline(self) -> float:
        return time.monotonic() + (self.limit_s or 3 * TIER_S[self.tier])

    def has(self, test: str) -> bool:
        """Whether pytest's own options leave it in."""
        ignored = [option.removeprefix("--ignore=") for option in self.options if option.startswith("--ignore=")]
        return not any(Path(test).is_relative_to(folder) for folder in ignored)


@dataclass(frozen=True)
class Failure:
    """What ended a run of the tests."""

    test: str  # its name, or what else it was
    output: str


@dataclass
class Verdict:
    """What came of one mutant."""

    killed_by: str | None  # None if it survived
    seconds: float

    def __str__(self) -> str:
        seconds = f"{self.seconds:.0f} s"
        return f"killed by {self.killed_by} after {seconds}" if self.killed_by else f"SURVIVED {seconds}"


def nearest(path: Path) -> list[list[str]]:
    """Return the tests to try first: the module's own and those that name it, then those of its package."""
    module = path.relative_to(SOURCE).with_suffix("")
    names = _public_names(path) | {"gradwire." + ".".join(module.parts)}
    word = re.compile(rf"\b({'|'.join(re.escape(name) for name in sorted(names))})\b")
    own, naming = [str(path)], []
    for test in sorted((ROOT / "tests").rglob("test_*.py")):
        count = len(word.findall(test.read_text()))
        if module.name.strip("_") in test.stem:
            own.append(str(test.relative_to(ROOT)))
        elif count:
            naming.append((-count, str(test.relative_to(ROOT))))
    first = [*own, *(name for _, name in sorted(naming)[:4])]
    folder = ROOT / "tests" / module.parts[0]
    package = [str(test.relative_to(ROOT)) for test in sorted(folder.rglob("test_*.py"))] if folder.is_dir() else []
    return [first, [name for name in package if name not in first]]


def _public_names(path: Path) -> set[str]:
    """The classes and functions that a test may import from a module; short names mean too much else."""
    kinds = ast.ClassDef | ast.FunctionDef
    names = {node.name for node in ast.parse((ROOT / path).read_bytes()).body if isinstance(node, kinds)}
    return {name for name in names if len(name) > 5 and not name.startswith("_")}


def judge(mutant: Mutant, tests: Tests) -> Verdict:
    """Run the tests on a copy with the mutant, until one fails."""
    started = time.monotonic()
    with copy() as place:
        mutant.apply(place.folder)
        failure = _first_failure(place, [*nearest(mutant.path), *tests.stages], tests)
    return Verdict(failure.test if failure else None, time.monotonic() - started)


def check_unmutated(mutants: list[Mutant], tests: Tests) -> None:
    """Raise unless the tests nearest to the mutants pass on a copy without any."""
    stages = [stage for mutant in mutants for stage in nearest(mutant.path)]
    with copy() as place:
        place.check()
        failure = _first_failure(place, [list(dict.fromkeys(test for stage in stages for test in stage))], tests)
    if failure:
        raise SystemExit(f"without a mutant the tests fail too: {failure.test}\n{failure.output[-4000:]}")


def _first_failure(place: Copy, stages: list[list[str]], tests: Tests) -> Failure | None:
    """Return the test that fails, and fails again when it runs alone; a flaky test finds nothing."""
    done: list[str] = []
    flaky: list[str] = []
    deadline = tests.deadline()
    for stage in [[test for test in stage if tests.has(test)] for stage in stages]:
        passed = not stage
        while not passed:
            without = [f"--ignore={test}" for test in done] + [f"--deselect={test}" for test in flaky]
            left_s = max(1, deadline - time.monotonic())
            status, output = place.run([*tests.command, *without, *stage], left_s)
            failed = _FAILED.search(output)
            passed = status in (0, _NOTHING_RAN)
            if status is None or not (passed or failed):
                return Failure(_ENDINGS.get(status, f"pytest's exit status {status}"), output)
            if not passed and failed:
                again, _ = place.run(["python", "-m", "pytest", "-x", *tests.options, failed[1]], left_s)
                if again or len(flaky) == _RETRIES:
                    return Failure(failed[1], output)
                flaky.append(failed[1])
        done += stage
    return None
