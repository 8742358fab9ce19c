"""What must work of an installed gradwire, wherever it is: run by ``make dist`` in an empty environment.

``python smoke.py VERSION [EXTRA ...]``: the version that was built, and the extras that were installed with it. Nothing
of the repository is needed, and nothing of it may be found.
"""

import importlib.metadata
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

COMMANDS = ("doctor", "train", "plan", "inspect", "dash", "report", "bench", "lab", "serve")


def command(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the installed ``gradwire``, which must end with a status."""
    program = shutil.which("gradwire", path=str(Path(sys.executable).parent))
    assert program is not None, "the command is not installed"
    run = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=300)
    assert run.returncode == status, f"gradwire {' '.join(arguments)}: {run.returncode}, {run.stdout}{run.stderr}"
    return run


def check_package(version: str) -> None:
    """It is the one that was built, installed, typed and with its files."""
    import gradwire

    folder = Path(gradwire.__file__).parent
    assert folder.is_relative_to(sys.prefix), f"imported from {folder}, which is not this environment"
    assert gradwire.__version__ == importlib.metadata.version("gradwire") == version, gradwire.__version__
    for name in ("py.typed", "coordinator/protocol/coordinator.proto"):
        assert (folder / name).is_file(), f"{name} is missing"
    for name in gradwire.__all__:
        assert getattr(gradwire, name) is not None


def check_kernels() -> None:
    """Tensors survive encode and decode, by the native kernels."""
    import torch

    import gradwire
    from gradwire import kernels

    assert set(kernels.available("cpu").values()) == {"native"}, kernels.available("cpu")
    tensor = torch.randn(100, 1000)
    for codec, error in (("none", 0.0), ("int8", 1e-3), ("int4", 0.05), ("topk:0.5+int8", 0.5)):
        again = gradwire.decode(gradwire.encode(tensor, codec))
        assert (again - tensor).square().sum() <= error * tensor.square().sum(), codec


def check_commands(version: str, extras: list[str]) -> None:
    """The command line runs; what needs an extra works with it, and says which without."""
    assert command("--version").stdout.strip() == f"gradwire {version}"
    command("doctor", "--workers", "0")
    known = command("--help").stdout.split()
    for name in COMMANDS:
        assert name in known, f"`gradwire {name}` is missing"
        command(name, "--help")
    if "demo" in extras:
        facts = json.loads(command("train", "--steps", "2", "--workers", "2", "--run-dir", "run", "--json").stdout)
        assert facts["steps"] == 2
        assert facts["replicas_identical"]
        command("report", "run", "-o", "report.html")  # its page is a file of the package
        assert "canvas" in Path("report.html").read_text()
    else:
        assert "pip install 'gradwire[demo]'" in command("train", "--steps", "2", status=1).stderr
    if "serve" not in extras:
        assert "pip install 'gradwire[serve]'" in command("serve", status=1).stderr


def main() -> None:
    """All of it."""
    version, *extras = sys.argv[1:]
    check_package(version)
    check_kernels()
    check_commands(version, extras)
    print(f"gradwire {version} works in {sys.prefix}, with {', '.join(extras) or 'no extras'}")


if __name__ == "__main__":
    main()
