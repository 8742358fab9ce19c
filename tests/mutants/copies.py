"""Copies of the repository in which a changed source is what every process imports.

The checkout is installed as editable: a finder in its site-packages answers ``import gradwire`` before any path does.
So a copy has an environment of its own, in ``.venv``, with one ``.pth`` file of two lines: the copy's ``src``, and the
checkout's site-packages as a plain path. Python reads no ``.pth`` file there, so the finder is not installed. The
compiled extension is linked into the copy's package. A process that a test starts with ``sys.executable``, or by the
name of a command, runs in the same environment.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from tests.mutants.draw import ROOT, SOURCE

_MARK = "GRADWIRE_MUTANT"  # in the environment of all that runs in a copy: its folder
# How the commands of an environment begin; pip writes the second form where the path of Python has a space.
_HEAD = re.compile(rb"#!\S*/python3?\n|#!/bin/sh\n'''exec' .*\n' '''\n")
_START = "#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\n"
_PREFIX = f"gradwire-mutant-{os.getpid()}-"  # of the folders of this process


class Copy:
    """The repository in a folder of its own, with an environment of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / ".venv" / "bin"
        for name in _files():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
        self._link_extension()
        self._make_environment()

    def run(self, command: list[str], timeout_s: float, cwd: Path | None = None) -> tuple[int | None, str]:
        """Return the exit status, or None after ``timeout_s``, and the output. No process of it is left."""
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
        }
        env = inherited | {_MARK: str(self.folder), "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}"}
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                [str(self.bin / command[0]), *command[1:]],
                cwd=cwd or self.folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                status = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                process.kill()
                process.wait()
                _end(f"{_MARK}={self.folder}")
            output.seek(0)
            return status, output.read()

    def check(self) -> None:
        """Raise unless this copy is what its processes import, with the compiled extension."""
        program = "import gradwire, gradwire._native as n; print(gradwire.__file__); print(n.__file__)"
        status, output = self.run(["python", "-c", program], 120, cwd=Path(tempfile.gettempdir()))
        package = str(self.folder / SOURCE) + os.sep
        if status or not all(line.startswith(package) for line in output.split()):
            raise RuntimeError(f"the copy in {self.folder} is not what its Python imports: {output}")

    def _link_extension(self) -> None:
        spec = find_spec("gradwire._native")
        if spec is None or spec.origin is None:
            raise RuntimeError("gradwire._native is not built: run `make setup`")
        extension = Path(spec.origin)
        (self.folder / SOURCE / extension.name).symlink_to(extension)

    def _make_environment(self) -> None:
        """Make ``.venv``, and the checkout's commands in it."""
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.bin.parent], check=True)
        scheme = {"base": str(self.bin.parent), "platbase": str(self.bin.parent)}
        ours, theirs = Path(sysconfig.get_path("purelib", "venv", scheme)), sysconfig.get_path("purelib")
        (ours / "mutant.pth").write_text(f"{self.folder / 'src'}\n{theirs}\n")
        for script in Path(sysconfig.get_path("scripts")).iterdir():
            text = script.read_bytes() if script.is_file() else b""
            head = _HEAD.match(text)
            target = self.bin / script.name
            if head and not target.exists():
                target.write_bytes(_START.format(python=self.bin / "python").encode() + text[head.end() :])
                target.chmod(0o755)


def end_all() -> None:
    """End what runs in any copy of this process."""
    _end(f"{_MARK}={Path(tempfile.gettempdir()) / _PREFIX}")


def _end(mark: str) -> None:
    """End every process whose environment has a variable that starts so, each by its id."""
    for _ in range(50):
        left = [pid for pid in _processes() if any(name.startswith(mark.encode()) for name in _environment(pid))]
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            return
        time.sleep(0.1)


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []  # it has ended, or is another user's


def _files() -> list[str]:
    """What git has or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    return [name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


@contextmanager
def copy() -> Iterator[Copy]:
    """A copy that is removed at the end."""
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as folder:
        yield Copy(Path(folder))
