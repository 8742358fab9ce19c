"""Rules of the tree that no linter here checks."""

import ast
import importlib
import importlib.util
import pkgutil
import subprocess
import sys
from importlib.metadata import metadata, requires
from pathlib import Path

import pytest

import gradwire
from gradwire.extras import EXTRAS, require

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src" / "gradwire").rglob("*.py"))
PROJECT = metadata("gradwire")


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_codecs_transforms_and_kernels_never_communicate():
    quiet = [p for p in SOURCES if p.parent.name in ("codecs", "transforms", "kernels") or p.name == "wire.py"]
    assert len(quiet) > 30
    for path in quiet:
        assert not [name for name in imports(path) if name.startswith("torch.distributed")], path


def test_nothing_is_unpickled():
    for path in SOURCES:
        text = path.read_text()
        assert "torch.load" not in text, path
        assert "allow_pickle" not in text, path
        assert "pickle" not in " ".join(imports(path)), path


def test_importing_gradwire_imports_nothing_optional():
    optional = [name.split(".")[0] for names in EXTRAS.values() for name in names]
    program = f"import sys, gradwire; print([m for m in {optional} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_every_extra_is_declared_and_a_missing_one_is_named():
    for_work_on_gradwire = {"test", "full", "lint", "docs", "dev"}
    assert set(EXTRAS) | for_work_on_gradwire == set(PROJECT.get_all("Provides-Extra"))
    with pytest.raises(
        gradwire.MissingExtraError, match=r"streaming needs 'grpc.nothing'.*pip install 'gradwire\[serve\]'"
    ):
        require("grpc.nothing", purpose="streaming")
    with pytest.raises(gradwire.MissingExtraError, match=r"pip install 'gradwire\[demo\]'"):  # the smallest that helps
        require("sklearn.nothing", purpose="the digits task")


def test_core_dependencies_are_the_five():
    names = {d.split(">")[0] for d in requires("gradwire") if "extra ==" not in d}
    assert names - {"tomli"} == {"torch", "numpy", "safetensors", "typer", "rich"}  # tomli: of Python 3.10 only


def test_the_version_is_said_once():
    assert PROJECT["Version"] == gradwire.__version__


def test_every_top_level_name_has_a_docstring_with_an_example():
    assert [name for name in gradwire.__all__ if ">>>" not in (getattr(gradwire, name).__doc__ or "")] == []


def test_every_public_name_exists():
    for info in pkgutil.walk_packages(gradwire.__path__, "gradwire."):
        if info.name.startswith("gradwire.kernels.triton") and not importlib.util.find_spec("triton"):
            continue  # comes with torch for CUDA
        if not info.name.endswith(("__main__", "_native")):
            try:
                module = importlib.import_module(info.name)
            except gradwire.MissingExtraError:
                continue  # `make test-clusters` has it
            assert [name for name in getattr(module, "__all__", ()) if not hasattr(module, name)] == []
