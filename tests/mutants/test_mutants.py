"""What ``make mutants`` changes, and that its copies run what was changed."""

import ast
from pathlib import Path

import pytest

from tests.mutants.copies import copy
from tests.mutants.draw import SOURCE, compiles, draw, mutations, sources
from tests.mutants.trial import nearest

FILES = sources()
DRAWN = draw(40, 0, FILES)
PATH = SOURCE / "example.py"


def lines_of(text):
    """The lines that may be changed, without their indent."""
    return {mutant.before.strip() for mutant in mutations(PATH, text.encode())}


def after(text):
    return {mutant.after.strip() for mutant in mutations(PATH, text.encode())}


def test_every_drawn_mutant_changes_one_line_and_compiles():
    assert len(DRAWN) == 40
    for mutant in DRAWN:
        before, changed = FILES[mutant.path].split(b"\n"), mutant.changed(FILES[mutant.path]).split(b"\n")
        assert len(before) == len(changed)
        assert [n for n, pair in enumerate(zip(before, changed, strict=True), 1) if pair[0] != pair[1]] == [mutant.line]
        assert compiles(mutant, FILES[mutant.path])


def test_the_draw_depends_on_the_seed_and_on_no_place_in_a_file():
    some = {path: text for path, text in FILES.items() if path.parent.name in ("codecs", "telemetry")}
    drawn = [mutant.after for mutant in draw(8, 0, some)]
    moved = {path: b"# a comment\n" + text for path, text in some.items()}
    assert [mutant.after for mutant in draw(8, 0, moved)] == drawn
    assert [mutant.after for mutant in draw(8, 1, some)] != drawn


def test_every_package_has_a_mutant_and_no_function_has_two():
    assert {mutant.path.parent for mutant in DRAWN} >= {path.parent for path in FILES if path.name == "__init__.py"} - {
        SOURCE / "coordinator" / "protocol"
    }
    assert len({(mutant.path, mutant.function) for mutant in DRAWN}) == len(DRAWN)


@pytest.mark.parametrize(
    "line",
    [
        '"""Say 1 + 1 < 3."""',
        'raise ValueError(f"{1 + x}", x + 1)',
        "log.warning(x + 1, x)",
        "assert x < 1",
        "sleep(1)",
        "timeout_s = x + 1",
        "y: Literal[1]",
        "if TYPE_CHECKING: import x.y",
    ],
)
def test_what_no_test_could_notice_is_not_changed(line):
    changed = mutations(PATH, f"def f(x: 1 + 1 = 1) -> 1 + 1:\n    g(x)\n    {line}\n    h(x)\n".encode())
    assert [mutant.after.strip() for mutant in changed if mutant.line == 3] in ([], ["pass"])  # a whole raise may go


def test_module_constants_and_representations_are_not_changed():
    assert lines_of("A = 1 + 1\nclass B:\n    c = 1 < 2\n    def __repr__(self):\n        return 1 + 1\n") == set()


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("sent = gradient + residual", {"sent = gradient - residual", "sent = gradient"}),
        ("if a < b: c()", {"if a <= b: c()", "if a < b: pass"}),
        ("if a_s < b_s: c()", {"if a_s >= b_s: c()", "if a_s < b_s: pass"}),
        ("x = a is None", {"x = a is not None"}),
        ("x = (a + b) * c", {"x = (a - b) * c", "x = (a) * c", "x = (a + b)"}),
        ("x = a and b", {"x = a", "x = b"}),
        ("os.fsync(file)", {"pass"}),
        ("send(source, target)", {"send(target, source)", "pass"}),
        ("x = y[a:b]", {"x = y[:b]"}),
        ("x = y[0]", {"x = y[1]"}),
        ("x = max(a, b)", set()),
        ('x = "ä" + y[a:]', set()),
        ("x = ä + y[a:]", {"x = ä - y[a:]", "x = ä", "x = ä + y[:a]"}),
    ],
)
def test_a_mutation_changes_what_it_says_and_nothing_else(line, changed):
    assert after(f"def f():\n    if x:\n        {line}\n") - {"if (not (x)):"} == changed


def test_a_copy_imports_its_own_source_in_every_process():
    with copy() as place:
        (place.folder / SOURCE / "__init__.py").write_text("raise SystemExit(7)\n")
        within = (
            "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', 'import gradwire']).returncode)"
        )
        for command in (["python", "-c", "import gradwire"], ["python", "-c", within], ["gradwire", "--help"]):
            assert place.run(command, 60, cwd=Path("/"))[0] == 7, command


def test_the_nearest_tests_are_the_modules_own_then_its_packages():
    first, rest = nearest(SOURCE / "codecs" / "registry.py")
    assert first[:2] == ["src/gradwire/codecs/registry.py", "tests/codecs/test_registry.py"]
    assert "tests/codecs/test_halves.py" in rest
    assert all(ast.parse(Path(test).read_text()) for test in first)
