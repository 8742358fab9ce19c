"""Single-line mutations of ``src/gradwire``, and which of them are drawn.

A mutation changes behaviour, or the tests cannot be blamed for missing it. So the generator leaves out, by rule:

- what only a reader sees: docstrings, annotations, f-strings, the text of an error or a log line, ``__repr__``;
- what is a matter of degree: module constants, defaults of arguments, decorators (a cache's size), numbers above 8, and
  every number that is a time, a size of room or a count of digits (``_DEGREE``). A comparison of two times is
  turned around, and not moved by one, because two times are never equal;
- what has no effect by itself: a call that only sleeps, logs, or asks for speed (``_NO_EFFECT``), and swapped arguments
  of a symmetric function (``_SYMMETRIC``);
- what the tests of ``make test`` cannot import: modules that need Ray, Spark, Lightning, Accelerate or Transformers.

The draw is spread over the packages by the square root of their lines. It takes at most one mutant of a function, and
begins with a few lines of each danger (``_DANGERS``).
"""

import ast
import hashlib
import math
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SOURCE = Path("src/gradwire")

# Measured, not tested (benchmarks); needs a GPU or an interpreter of its own (triton).
_LEFT_OUT = ("benchmarks/", "cli/bench", "kernels/triton/")
_NOT_INSTALLED = re.compile(
    rb'(?:^\s*(?:import|from) |require\(")(?:ray|pyspark|lightning|accelerate|transformers)\b', re.M
)
_ONLY_READ = {"__repr__", "__str__", "__rich__", "__dir__"}
_TEXTS = re.compile(r"Error$|Warning$|^(print|echo|secho|warn|warning|debug|info|log|error|exception|fail|format)$")
_NO_EFFECT = re.compile(
    r"^(print|echo|warn|warning|debug|info|sleep|collect|reserve|set_num_threads|setsockopt|nice|prctl|setswitchinterval)$"
)
_SYMMETRIC = {"max", "min", "gcd", "isinstance", "issubclass", "equal", "allclose", "maximum", "minimum", "suppress"}
_DEGREE = re.compile(
    r"(_s|_ms|_ns|_mb|_bytes|_gbit|_us)$|timeout|delay|interval|pause|patience|seconds|monotonic|perf_counter|deadline"
    r"|elapsed|sleep|backoff|maxsize|capacity|backlog|width|digits|decimals|indent|round$|workers|threads|chunk"
)
# What must not go wrong: each is drawn a few times before anything else is.
_DANGERS = {
    "what is owed": re.compile(r"residual|owed|momentum|error_feedback|untaken"),
    "who gets what": re.compile(r"\branks?\b|slice|owner|\bsource\b|\btarget\b|\boffset|\bfirst\b|\blast\b"),
    "what is on disk": re.compile(r"fsync|rename|replace|truncate|flush|journal|write_whole|unlink"),
    "what comes after what": re.compile(r"version|sequence|\bsteps?\b|\btag|epoch|\bround\b"),
    "where a decision turns": re.compile(r"threshold|limit|\bmost\b|\bleast\b|margin|enough"),
}
_OF_EACH_DANGER = 4

# How likely each kind is beside the others. Names of variables make for many swaps and constants, so these count less.
KINDS = {
    "flip a comparison": 1.0,
    "swap + and -": 1.0,
    "drop an operand": 1.0,
    "change a constant": 0.5,
    "negate a condition": 0.5,
    "drop a statement": 0.7,
    "swap two arguments": 0.4,
    "move a slice": 1.5,
    "return early": 0.2,
}

_FLIPPED: dict[type, tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_REVERSED: dict[type, tuple[str, str]] = {
    ast.Lt: ("<", ">="),
    ast.LtE: ("<=", ">"),
    ast.Gt: (">", "<="),
    ast.GtE: (">=", "<"),
}


@dataclass(frozen=True)
class Mutant:
    """One line of one file, changed."""

    path: Path  # from the root of the repository
    line: int
    kind: str
    function: str
    before: str
    after: str

    @property
    def place(self) -> str:
        return f"{self.path.relative_to(SOURCE)}:{self.line}"

    def apply(self, root: Path) -> None:
        """Change that line of the copy of the repository in ``root``."""
        file = root / self.path
        file.write_bytes(self.changed(file.read_bytes()))

    def changed(self, text: bytes) -> bytes:
        lines = text.split(b"\n")
        if lines[self.line - 1].decode() != self.before:
            raise ValueError(f"{self.place} is not {self.before!r}")
        lines[self.line - 1] = self.after.encode()
        return b"\n".join(lines)


class _Finder(ast.NodeVisitor):
    """The mutations of one file, in the order of its lines."""

    def __init__(self, path: Path, text: bytes) -> None:
        self.path = path
        self.lines = text.split(b"\n")
        self.scope: list[str] = []
        self.inside = 0  # functions around this node
        self.indexes = 0  # and subscripts
        self.found: list[Mutant] = []

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.scope.append(node.name)
        self._each(node.body)
        self.scope.pop()

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name in _ONLY_READ:
            return
        self.scope.append(node.name)
        self.inside += 1
        body = node.body[1:] if ast.get_docstring(node) else node.body
        if len(body) > 1 and _simple(body[0]) and not isinstance(body[0], ast.Return):
            self._replace("return early", body[0], "return None")
        self._each(body)
        self.inside -= 1
        self.scope.pop()

    def visit_If(self, node: ast.If) -> None:
        if _name(node.test) == "TYPE_CHECKING":
            return
        self._negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_Raise(self, node: ast.Raise) -> None:
        self._replace("drop a statement", node, "pass")

    def visit_Assert(self, node: ast.Assert) -> None:
        pass  # for the type checker

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(call, ast.Call) and not _NO_EFFECT.search(_name(call.func)):
            self._replace("drop a statement", node, "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.op, ast.Add | ast.Sub) and not self._of_degree(node):
            signs = ("+=", "-=") if isinstance(node.op, ast.Add) else ("-=", "+=")
            self._between("swap + and -", node.target, node.value, *signs)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        table = _FLIPPED | _REVERSED if self._of_degree(node) else _FLIPPED
        left = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            self._between("flip a comparison", left, right, *table[type(operator)])
            left = right
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if any(isinstance(part, ast.JoinedStr) or _is_text(part) for part in (node.left, node.right)):
            return
        if isinstance(node.op, ast.Add | ast.Sub):
            signs = ("+", "-") if isinstance(node.op, ast.Add) else ("-", "+")
            self._between("swap + and -", node.left, node.right, *signs)
            self._replace("drop an operand", node, self._wrapped(node.left))
        elif isinstance(node.op, ast.Mult | ast.FloorDiv | ast.Mod):
            self._replace("drop an operand", node, self._wrapped(node.left))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        word = " and " if isinstance(node.op, ast.And) else " or "
        for left_out in node.values:
            parts = [self._wrapped(part) for part in node.values if part is not left_out]
            self._replace("drop an operand", node, word.join(parts) if len(parts) == 1 else f"({word.join(parts)})")
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        piece = node.slice
        if isinstance(piece, ast.Slice) and piece.step is None:
            if piece.lower and piece.upper:
                self._replace("move a slice", piece, f":{self._text(piece.upper)}")
            elif piece.lower:
                self._replace("move a slice", piece, f":{self._text(piece.lower)}")
            elif piece.upper:
                self._replace("move a slice", piece, f"{self._text(piece.upper)}:")
        self.visit(node.value)
        self.indexes += 1
        self.visit(piece)
        self.indexes -= 1

    def visit_Call(self, node: ast.Call) -> None:
        name = _name(node.func)
        if _TEXTS.search(name):
            return
        if name not in _SYMMETRIC:
            for left, right in zip(node.args, node.args[1:], strict=False):
                self._swap(left, right)
        self.visit(node.func)
        if not _DEGREE.search(name):
            self._each(node.args)
            self._each(word.value for word in node.keywords if not _DEGREE.search(word.arg or ""))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if not isinstance(node.operand, ast.Constant) or self.indexes:
            self.generic_visit(node)  # but a negative number that is no index is a sign for "none"

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._replace("change a constant", node, str(not value))
        elif isinstance(value, int | float) and value in (0.5, *range(9)):
            self._replace("change a constant", node, str(value + 1))

    def visit_Assign(self, node: ast.Assign) -> None:
        if not self._of_degree(*node.targets):
            self.generic_visit(node)

    def _each(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    def _negate(self, test: ast.expr) -> None:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            self._replace("negate a condition", test, self._wrapped(test.operand))
        elif not isinstance(test, ast.Compare):  # which is flipped
            self._replace("negate a condition", test, f"(not ({self._text(test)}))")

    def _swap(self, left: ast.expr, right: ast.expr) -> None:
        if isinstance(left, ast.Starred) or isinstance(right, ast.Starred) or left.lineno != right.end_lineno:
            return
        line = self.lines[left.lineno - 1]
        between = line[left.end_col_offset : right.col_offset].decode()
        self._put("swap two arguments", left, right, self._text(right) + between + self._text(left))

    def _between(self, kind: str, left: ast.expr, right: ast.expr, before: str, after: str) -> None:
        """Change the operator between two operands on one line."""
        if left.end_lineno == right.lineno:
            line = self.lines[right.lineno - 1]
            between = line[left.end_col_offset : right.col_offset].decode()
            start = (left.end_col_offset or 0) + len(between.partition(before)[0].encode())
            self._change(kind, right.lineno, start, start + len(before), after)

    def _replace(self, kind: str, node: ast.expr | ast.stmt, text: str) -> None:
        if text:
            self._put(kind, node, node, text)

    def _put(self, kind: str, first: ast.expr | ast.stmt, last: ast.expr | ast.stmt, text: str) -> None:
        if first.lineno == last.end_lineno:
            self._change(kind, first.lineno, first.col_offset, last.end_col_offset or 0, text)

    def _change(self, kind: str, line: int, start: int, end: int, text: str) -> None:
        before = self.lines[line - 1]
        after = before[:start] + text.encode() + before[end:]
        if self.inside and after != before:
            function = ".".join(self.scope)
            self.found.append(Mutant(self.path, line, kind, function, before.decode(), after.decode()))

    def _text(self, node: ast.expr) -> str:
        if node.lineno != node.end_lineno:
            return ""
        return self.lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()

    def _wrapped(self, node: ast.expr) -> str:
        text = self._text(node)
        plain = isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript | ast.Constant)
        return text if plain or not text else f"({text})"

    def _of_degree(self, *nodes: ast.AST) -> bool:
        return any(_DEGREE.search(_name(part)) for node in nodes for part in ast.walk(node))


def _name(node: ast.AST) -> str:
    """The last part of a dotted name, or nothing."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _simple(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr | ast.Assign | ast.AugAssign | ast.Raise)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def mutations(path: Path, text: bytes) -> list[Mutant]:
    """Every single-line mutation of a file; not every one compiles."""
    finder = _Finder(path, text)
    finder.visit(ast.parse(text))
    return finder.found


def compiles(mutant: Mutant, text: bytes) -> bool:
    """Whether the changed file is Python, without a warning of the compiler's."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compile(mutant.changed(text), str(mutant.path), "exec")
    except (SyntaxError, SyntaxWarning):
        return False
    return True


def sources(root: Path = ROOT) -> dict[Path, bytes]:
    """The files that may be mutated, by their path from the root."""
    folder = root / SOURCE
    paths = [path.relative_to(folder) for path in sorted(folder.rglob("*.py"))]
    files = {SOURCE / path: (folder / path).read_bytes() for path in paths if not str(path).startswith(_LEFT_OUT)}
    return {path: text for path, text in files.items() if not _NOT_INSTALLED.search(text)}


def draw(number: int, seed: int, files: dict[Path, bytes]) -> list[Mutant]:
    """Choose mutants: the same for the same sources, and mostly the same after an unrelated edit."""
    lines: dict[str, int] = {}
    for path, text in files.items():
        lines[_package(path)] = lines.get(_package(path), 0) + text.count(b"\n")
    shares = _shares(lines, number)
    found = [mutant for path, text in files.items() for mutant in mutations(path, text)]
    found.sort(key=lambda mutant: _chance(mutant, seed))
    drawn: list[Mutant] = []
    for danger in _DANGERS.values():
        dangerous = [mutant for mutant in found if danger.search(mutant.before)]
        _take(dangerous, min(len(drawn) + _OF_EACH_DANGER, number), shares, drawn, files)
    _take(found, number, shares, drawn, files)
    return sorted(drawn, key=lambda mutant: (mutant.path, mutant.line))


def _take(
    found: list[Mutant], number: int, shares: dict[str, int], drawn: list[Mutant], files: dict[Path, bytes]
) -> None:
    """Add the first of them to the draw, until it has that many."""
    functions = {(mutant.path, mutant.function) for mutant in drawn}
    for mutant in found:
        if len(drawn) == number:
            return
        function = (mutant.path, mutant.function)
        if shares[_package(mutant.path)] and function not in functions and compiles(mutant, files[mutant.path]):
            shares[_package(mutant.path)] -= 1
            functions.add(function)
            drawn.append(mutant)


def _package(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0]
    return "" if first.endswith(".py") else first


def _shares(lines: dict[str, int], number: int) -> dict[str, int]:
    """Divide the draw by the square root of each package's lines; one at least for each."""
    roots = {name: math.sqrt(count) for name, count in sorted(lines.items()) if count}
    shares = dict.fromkeys(roots, 1)
    for _ in range(number - len(shares)):
        shares[max(roots, key=lambda name: roots[name] / (shares[name] + 1))] += 1
    return shares


def _chance(mutant: Mutant, seed: int) -> float:
    """A random number that depends on the mutation alone, and is smaller for a kind that weighs more."""
    what = f"{seed} {mutant.path} {mutant.function} {mutant.kind} {mutant.before.strip()} {mutant.after.strip()}"
    chance = (int.from_bytes(hashlib.blake2b(what.encode(), digest_size=6).digest(), "big") + 1) / (1 << 48)
    return -math.log(chance) / KINDS[mutant.kind]
