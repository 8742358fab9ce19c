"""Everything the documentation shows is run."""

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import gradwire
from tests.case import tiered

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", tiered(PAGES, first=[ROOT / "docs" / "codecs.md"]), ids=lambda p: p.name)
def test_python_and_commands_of_a_page_run_in_order(page, tmp_path):
    program = "\n".join(blocks(page, "python"))
    if program:
        subprocess.run([sys.executable, "-W", "error", "-c", program], cwd=tmp_path, check=True, timeout=120)
    for command in re.findall(r"^\$ gradwire (.*)$", page.read_text(), re.MULTILINE):
        subprocess.run([sys.executable, "-m", "gradwire", *command.split()], cwd=tmp_path, check=True, timeout=120)


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_make_targets_that_are_printed_exist():
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        code = re.findall(r"^```.*?^```|`[^`\n]+`", page.read_text(), re.MULTILINE | re.DOTALL)
        for target in re.findall(r"(?:^|`)make ([a-z-]+)", "\n".join(code), re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name}: make {target}"


@pytest.mark.full
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


@pytest.mark.full
def test_the_program_of_the_first_page_trains_two_workers_in_4_bits(tmp_path):
    (program,) = blocks(ROOT / "docs" / "start.md", "py")
    (tmp_path / "train.py").write_text(program)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    run = subprocess.run(torchrun, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    found = [(float(loss), float(sent)) for loss, sent in re.findall(r"loss (\S+), sent (\S+) of float32", run.stdout)]
    assert len(found) == 4
    assert found[-1][0] < found[0][0] / 2
    assert all(0.12 < sent < 0.14 for _, sent in found)


def test_tests_that_are_named_exist():
    named = re.findall(r"`(tests/\S+\.py)::(\w+)`", (ROOT / "docs" / "faq.md").read_text())
    assert len(named) > 15
    for path, name in named:
        assert f"def {name}(" in (ROOT / path).read_text(), f"{path}::{name}"


# The built site.


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    return folder


PUBLIC = ("gradwire.clusters", "gradwire.lab", "gradwire.telemetry")


@pytest.mark.full
def test_every_public_name_has_an_entry_in_the_reference(site):
    reference = "".join(page.read_text() for page in (site / "api").rglob("*.html"))
    entries = set(re.findall(r'<h2 id="([\w.]+)"', reference))
    names = {f"gradwire.{name}" for name in gradwire.__all__}
    for module in map(import_module, PUBLIC):
        names |= {f"{module.__name__}.{name}" for name in module.__all__ if name not in gradwire.__all__}
    assert len(names) > 70
    missing = sorted(names - entries)
    assert not missing, "add `::: NAME` to a page of docs/api"


@pytest.mark.full
def test_docstrings_of_the_reference_are_not_left_as_they_are_written(site):
    """Roles and doctests are reStructuredText, and the pages are not."""
    for page in (site / "api").rglob("*.html"):
        text = page.read_text()
        assert not re.search(r":(class|func|meth|mod|data):", text), page
        assert "<blockquote>" not in text, page
    training = (site / "api" / "training" / "index.html").read_text()
    assert re.search(r'<a[^>]*href="#gradwire.Auto"[^>]*><code>Auto</code></a>', training)


@pytest.mark.full
def test_no_page_loads_anything_from_outside(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        text = page.read_text()
        loaded = re.findall(r"<(?:script|img|iframe|source|video|audio|embed)\b[^>]*?\bsrc=[\"']?([^\"'\s>]+)", text)
        loaded += re.findall(r"<link\b[^>]*?\bhref=[\"']?([^\"'\s>]+)", text)
        assert loaded, page
        for target in loaded:
            assert not re.match(r"(?:\w+:)?//", target), f"{page.relative_to(site)} loads {target}"
            file = target.split("?")[0].split("#")[0]
            where = site if file.startswith("/") else page.parent
            assert not file or (where / file.lstrip("/")).exists(), f"{page.relative_to(site)}: no {target}"
    for style in [*site.rglob("*.css"), *site.rglob("*.svg")]:
        found = re.findall(r"(?:url\([\"']?|@import [\"']?|href=[\"'])(https?://[^\"')]+)", style.read_text())
        assert not found, f"{style.relative_to(site)} loads {found}"
