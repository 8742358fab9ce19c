"""Both files of a release, looked at and tried: ``make dist`` runs it after building them.

The wheel is installed by itself, the source with the extras ``demo`` and ``serve``, each into an environment of its
own in a temporary folder; then ``smoke.py`` runs there. Compiling and installing take a few minutes.
"""

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from tools.environment import TORCH, install

ROOT = Path(__file__).parent.parent.parent
SMOKE = Path(__file__).parent / "smoke.py"

# What a source release needs to be built, and to be understood.
NEEDED = ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE", "CHANGELOG.md", "SECURITY.md")
JUNK = re.compile(
    r"(^|/)(\.git|\.venv[^/]*|\.ci|site|build|dist|runs|__pycache__|\.\w+_cache|\.hypothesis)/|\.(so|pyc|log)$|(^|/)\.env"
)


def sources() -> set[str]:
    """Files of the package and of its native core, as they are here."""
    found = [*(ROOT / "src").rglob("*"), *(ROOT / "csrc").rglob("*")]
    return {str(path.relative_to(ROOT)) for path in found if path.is_file() and not JUNK.search(str(path))}


def check_source(path: Path) -> None:
    """The archive has everything that a build needs, and nothing that was made here."""
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    missing = ({*NEEDED} | sources()) - names
    assert not missing, f"{path.name} lacks {sorted(missing)}"
    junk = sorted(name for name in names if JUNK.search(name))
    assert not junk, f"{path.name} has {junk}"


def check_wheel(path: Path) -> None:
    """The wheel has the package, compiled, and nothing beside it."""
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
    package = {name.removeprefix("src/") for name in sources() if name.startswith("src/gradwire/")}
    missing = package - names
    assert not missing, f"{path.name} lacks {sorted(missing)}"
    compiled = [name for name in names if name.startswith("gradwire/_native.") and name.endswith(".so")]
    assert len(compiled) == 1, f"{path.name} has {compiled or 'no native core'}"
    strange = sorted(
        name for name in names - package - {*compiled} if not re.match(r"gradwire-[^/]+\.dist-info/", name)
    )
    assert not strange, f"{path.name} has {strange}"


def try_out(path: Path, version: str, extras: list[str], folder: Path) -> None:
    """Install a file into a new environment, outside the repository, and run the smoke test in it."""
    name = "wheel" if path.suffix == ".whl" else "source"
    environment = folder / name
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python = environment / "bin" / "python"
    what = f"{path}[{','.join(extras)}]" if extras else str(path)
    install(python, [TORCH, what])
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    subprocess.run([python, "-I", SMOKE, version, *extras], check=True, cwd=folder, env=clean)


def main() -> None:
    """Check ``dist/``."""
    (wheel,), (source,) = (list((ROOT / "dist").glob(pattern)) for pattern in ("*.whl", "*.tar.gz"))
    version = source.name.removeprefix("gradwire-").removesuffix(".tar.gz")
    check_source(source)
    check_wheel(wheel)
    with tempfile.TemporaryDirectory(prefix="gradwire-release-") as folder:
        try_out(wheel, version, [], Path(folder))
        try_out(source, version, ["demo", "serve"], Path(folder))
    print(f"{wheel.name} and {source.name}: complete, installed and working")


if __name__ == "__main__":
    main()
