"""What ``make dist`` finds wrong with a release; that a release works is found by ``make dist`` itself."""

import io
import re
import tarfile
import zipfile
from pathlib import Path

import pytest

import gradwire
from tests.release.check import NEEDED, ROOT, check_source, check_wheel, sources


def archive(path, names):
    with tarfile.open(path, "w:gz") as file:
        for name in names:
            file.addfile(tarfile.TarInfo(f"gradwire-0/{name}"), io.BytesIO())
    return path


def wheel(path, names):
    with zipfile.ZipFile(path, "w") as file:
        for name in names:
            file.writestr(name, "")
    return path


def test_a_source_release_has_all_that_is_needed_and_no_junk(tmp_path):
    whole = {*NEEDED, *sources()}
    assert {"csrc/module.cpp", "src/gradwire/py.typed", "src/gradwire/coordinator/protocol/coordinator.proto"} <= whole
    check_source(archive(tmp_path / "whole.tar.gz", whole))
    with pytest.raises(AssertionError, match=r"lacks \['csrc/module.cpp'\]"):
        check_source(archive(tmp_path / "less.tar.gz", whole - {"csrc/module.cpp"}))
    for junk in (".git/config", ".venv/bin/python", "site/index.html", "src/gradwire/__pycache__/api.pyc", "build/x.o"):
        with pytest.raises(AssertionError, match="has "):
            check_source(archive(tmp_path / "more.tar.gz", whole | {junk}))


def test_a_wheel_has_the_package_compiled_and_nothing_else(tmp_path):
    package = {name.removeprefix("src/") for name in sources() if name.startswith("src/")}
    whole = package | {"gradwire/_native.abc.so", "gradwire-0.dist-info/METADATA"}
    check_wheel(wheel(tmp_path / "whole.whl", whole))
    with pytest.raises(AssertionError, match="no native core"):
        check_wheel(wheel(tmp_path / "plain.whl", whole - {"gradwire/_native.abc.so"}))
    with pytest.raises(AssertionError, match=r"has \['tests/x.py'\]"):
        check_wheel(wheel(tmp_path / "more.whl", whole | {"tests/x.py"}))


def test_the_version_is_in_one_place():
    project = re.search(r"^\[project\]$.*?^\[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)[0]
    assert re.search(r'^dynamic = \["version"\]', project, re.MULTILINE)
    assert not re.search(r"^version", project, re.MULTILINE)
    source = Path(ROOT / "src" / "gradwire" / "__init__.py").read_text()
    assert re.findall(r'^__version__ = "(.*)"$', source, re.MULTILINE) == [gradwire.__version__]
    changes = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert changes[0] == "Unreleased" or changes[0] == gradwire.__version__
