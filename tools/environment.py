"""Install what a target of the Makefile needs, and nothing else: ``python3 tools/environment.py train``.

A target names a step. A step adds the packages of an extra of ``pyproject.toml`` to a virtual environment, and leaves a
stamp (``.venv/.train``) that make compares with the sources. This file needs nothing but the standard library.

With ``GRADWIRE_LOCK=1`` pip takes the exact versions of ``constraints.txt``, as CI does, and goes on with the ranges of
``pyproject.toml`` if the package index does not have them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

# The newest release of which all tests are run by CI; `make test-versions` runs others. Users of the library are not
# bound by it: pyproject.toml has the lower end alone.
TORCH, LEAST, BELOW = "torch>=2.9,<2.14", (2, 9), (2, 14)
# PyTorch's own index of builds without CUDA: 0.2 GB to download where PyPI's have 3 GB.
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CPU_INDEX_TIMEOUT_S = 3.0


class Step(NamedTuple):
    """What a step installs, where, and the steps that it makes needless."""

    extras: str
    contains: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    folder: str = ".venv"


STEPS = {
    "train": Step("demo"),
    "bench": Step("bench", ("train",)),
    "test": Step("test", ("train", "bench")),
    "full": Step("full", ("train", "bench", "test", "docs")),
    "lint": Step("lint"),
    "docs": Step("docs"),
    "dev": Step("dev", ("train", "bench", "test", "full", "lint", "docs")),
    "clusters": Step("test,ray,spark,lightning,accelerate", folder=".venv-clusters"),
    "triton": Step("test", more=("triton==3.6.0",), folder=".venv-triton"),
}


def main(name: str) -> None:
    """Bring the environment of a step up to date."""
    if sys.version_info < (3, 10):  # noqa: UP036 - an older one may run this file
        raise SystemExit(
            f"gradwire needs Python 3.10 or newer; {sys.executable} is {sys.version.split()[0]}. "
            "Name another one: make PYTHON=/path/to/python3 ..."
        )
    step = STEPS[name]
    folder = ROOT / step.folder
    python = folder / "bin" / "python"
    if not (folder / ".package").exists():
        print(f"setting up {step.folder} for {name}: a minute or two, once", flush=True)
    if not python.exists():
        check_system()
        with timed(f"environment of Python {sys.version.split()[0]}"):
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    if subprocess.run([python, "-m", "pip", "--version"], capture_output=True, check=False).returncode:
        with timed("pip"):  # uv makes environments without it
            subprocess.run([python, "-m", "ensurepip", "--default-pip"], stdout=subprocess.DEVNULL, check=True)
    if not LEAST <= installed_torch(python) < BELOW:
        index = ["--extra-index-url", CPU_INDEX] if wants_cpu_index() else []
        with timed(TORCH):
            install(python, [*index, TORCH])
    if is_newer(folder / ".package"):
        with timed(f"packages of the extra `{step.extras}`"):
            install(python, [*requirements(python, step.extras), *step.more])
    else:
        with timed(f"gradwire[{step.extras}], compiled here"):
            install(python, ["--editable", f".[{step.extras}]", *step.more])
        (folder / ".package").touch()
    for each in (*step.contains, name):
        (folder / f".{each}").touch()


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Print what is done, and how long it took."""
    start = time.monotonic()
    print(f"  {what} ...", end="", flush=True)
    try:
        yield
    except BaseException:
        print(" failed", flush=True)
        raise
    print(f" {time.monotonic() - start:.0f} s", flush=True)


def check_system() -> None:
    """End with the command that installs what this Python or this machine lacks."""
    lacking = {}
    if not find_spec("venv") or not find_spec("ensurepip"):
        lacking["python3-venv"] = "the modules `venv` and `ensurepip`"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        lacking["python3-dev"] = "`Python.h`"
    if not any(map(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++"))):
        lacking["g++"] = "a C++ compiler"
    if lacking:
        raise SystemExit(
            f"gradwire cannot be set up with {sys.executable}: {', '.join(lacking.values())} not found.\n"
            f"On Debian or Ubuntu: sudo apt-get install {' '.join(lacking)}\n"
            "Or name another Python: make PYTHON=/path/to/python3 ..."
        )


def installed_torch(python: Path) -> tuple[int, ...]:
    """Major and minor version of the environment's torch; nothing if there is none."""
    program = "from importlib.metadata import version; print(version('torch'))"
    found = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False).stdout
    return tuple(map(int, re.findall(r"\d+", found)[:2]))


def wants_cpu_index() -> bool:
    """Whether this machine has no NVIDIA driver, and PyTorch's index of CPU builds answers."""
    if not sys.platform.startswith("linux") or Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi"):
        return False
    if os.environ.get("PIP_NO_INDEX"):
        return False
    answers = threading.Event()

    def ask() -> None:
        try:
            with urllib.request.urlopen(f"{CPU_INDEX}/torch/", timeout=CPU_INDEX_TIMEOUT_S):
                answers.set()
        except (OSError, ValueError):
            pass  # pip goes on with the indexes that it has

    # The look-up of a name has no time limit of its own.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(CPU_INDEX_TIMEOUT_S)
    return answers.is_set()


def is_newer(stamp: Path) -> bool:
    """Whether a stamp is newer than all that the package is compiled from."""
    sources = [ROOT / "pyproject.toml", ROOT / "CMakeLists.txt", *(ROOT / "csrc").iterdir()]
    return stamp.exists() and stamp.stat().st_mtime > max(each.stat().st_mtime for each in sources)


def requirements(python: Path, extras: str) -> list[str]:
    """Packages of extras of the installed gradwire: pip would compile it again for ``.[extras]``."""
    program = """if True:
        import sys
        from importlib.metadata import requires
        from pip._vendor.packaging.requirements import Requirement

        wanted, done, found = sys.argv[1].split(","), set(), set()
        while wanted:
            done.add(extra := wanted.pop())
            for each in map(Requirement, requires("gradwire")):
                if each.marker and not each.marker.evaluate({"extra": ""}) and each.marker.evaluate({"extra": extra}):
                    if each.name == "gradwire":
                        wanted += each.extras - done
                    else:
                        each.marker = None
                        found.add(str(each))
        print("\\n".join(sorted(found)))
    """
    return subprocess.run(
        [python, "-c", program, extras], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.splitlines()


def install(python: Path, what: list[str]) -> None:
    """Let pip install; with the versions of CI if they are asked for and can be had."""
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    if not os.environ.get("PYTHONDONTWRITEBYTECODE"):
        # pip would compile every file of torch and scipy: 20 s and 250 MB, for files of which few are ever imported.
        pip.append("--no-compile")

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*pip, *more, *what], cwd=ROOT, capture_output=True, text=True, check=False)

    if os.environ.get("GRADWIRE_LOCK") == "1":
        locked = run("-c", "constraints.txt")
        if locked.returncode == 0:
            return
        # The pin in conflict is on standard output; the last error is often no more than an address of pip's manual.
        pins = re.findall(r"The user requested \(constraint\) (.*)", locked.stdout)
        *_, why = pins or re.findall(r"^ERROR: (.*?)\.?$", locked.stderr, re.MULTILINE) or ["pip gave no reason"]
        print(f"\nconstraints.txt cannot be met here: {why}. Going on with the ranges of pyproject.toml.", flush=True)
    ranged = run("--quiet")
    if ranged.returncode:
        raise SystemExit(f"\n{ranged.stdout}{ranged.stderr}\npip could not install {' '.join(what)}: see above why.")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in STEPS:
        raise SystemExit(f"usage: python3 tools/environment.py {{{','.join(STEPS)}}}")
    main(sys.argv[1])
