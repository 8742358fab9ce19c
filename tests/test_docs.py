"""Everything the documentation shows is run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_and_commands_of_a_page_run_in_order(page, tmp_path):
    program = "\n".join(blocks(page, "python"))
    if program:
        subprocess.run([sys.executable, "-W", "error", "-c", program], cwd=tmp_path, check=True, timeout=120)
    for command in re.findall(r"^\$ gradwire (.*)$", page.read_text(), re.MULTILINE):
        subprocess.run([sys.executable, "-m", "gradwire", *command.split()], cwd=tmp_path, check=True, timeout=120)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_make_targets_that_are_printed_exist():
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for target in re.findall(
            r"\bmake ([a-z]+)\b", "".join(re.findall(r"`[^`]+`|^make.*$", page.read_text(), re.M))
        ):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name}: make {target}"


def test_the_codec_of_the_docs_is_short_and_the_conformance_suite_picks_it_up(tmp_path):
    """As a plugin: a module beside an entry point, as pip would install it."""
    code = blocks(ROOT / "docs" / "add-a-codec.md", "python")[0]
    assert len(code.splitlines()) < 60
    (tmp_path / "tensor8.py").write_text(code)
    metadata = tmp_path / "tensor8-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tensor8\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[gradwire.codecs]\ntensor8 = tensor8\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    arguments = ["-m", "pytest", "tests/conformance", "-k", "tensor8", "-p", "no:cacheprovider", "-n", "0"]
    run = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    assert int(re.search(r"(\d+) passed", run.stdout).group(1)) > 60
