"""A griffe extension: our docstrings, which are reStructuredText with doctests, as the Markdown mkdocstrings expects.

Roles become links where the site has the name, and code where it has not; doctests become highlighted blocks; the
comment behind a field becomes its description; names that ``gradwire`` imports only when asked (``gradwire.lightning``)
are known.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from typing import Any

from griffe import Alias, Attribute, Class, Docstring, Extension, Function, Module, Object

_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr|exc):`(~?)([\w.]+)`")
_DOCTEST = re.compile(r"(?:^>>> .*\n?)(?:^(?!\s*$).+\n?)*", re.MULTILINE)


class Docstrings(Extension):
    """Rewrites every docstring of the package once it is loaded."""

    def on_package(self, *, pkg: Module, **kwargs: Any) -> None:
        _add_later_names(pkg)
        for thing in _everything(pkg):
            if isinstance(thing, Attribute) and thing.docstring is None and (comment := _comment_behind(thing)):
                thing.docstring = Docstring(comment[0].upper() + comment[1:] + ".", parent=thing)
            if thing.docstring is not None:
                thing.docstring.value = to_markdown(thing.docstring.value, thing)


def to_markdown(text: str, thing: Object) -> str:
    """A docstring of ``thing``, as Markdown."""
    text = re.sub(r"^::$\n", "", text, flags=re.MULTILINE)  # what is indented below it is code anyway
    text = _DOCTEST.sub(lambda match: f"```pycon\n{_without_flags(match[0])}\n```\n", text)
    return _ROLE.sub(lambda match: _link(match[2], shortened=bool(match[1]), thing=thing), text)


def _without_flags(doctest: str) -> str:
    return re.sub(r"\s*# doctest:.*", "", doctest).rstrip("\n")


def _link(name: str, *, shortened: bool, thing: Object) -> str:
    """An optional reference: names that have no entry in the site stay code."""
    shown = f"<code>{name.rpartition('.')[2] if shortened else name}</code>"
    target = _find(name, thing)
    return shown if target is None else f'<autoref identifier="{target}" optional>{shown}</autoref>'


def _find(name: str, thing: Object) -> str | None:
    """The path of a name that a docstring mentions: in its class, in its module, in the package."""
    package = thing.package
    if name.startswith(f"{package.name}."):
        return name
    scope: Object | Alias | None = thing
    while scope is not None:
        if name.split(".")[0] in scope.members:
            return f"{scope.path}.{name}"
        scope = scope.parent
    return None


def _everything(scope: Module | Class) -> Iterator[Object]:
    yield scope
    for member in list(scope.members.values()):
        if isinstance(member, Module | Class):
            yield from _everything(member)
        elif isinstance(member, Function | Attribute):
            yield member


def _add_later_names(package: Module) -> None:
    """What the package's ``__getattr__`` imports when asked: its table says which module is meant."""
    later = package.members.get("_LATER")
    if isinstance(later, Attribute) and later.value is not None:
        for name, module in ast.literal_eval(str(later.value)).items():
            if name not in package.members:
                package.set_member(name, Alias(name, f"{package.name}.{module}"))


def _comment_behind(field: Attribute) -> str:
    """The comment on the line of a field of a class: ``density: float  # fraction kept``."""
    if not isinstance(field.parent, Class) or field.endlineno is None:
        return ""
    line = field.lines_collection[field.filepath][field.endlineno - 1].strip()
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(line).readline))
    except tokenize.TokenError:  # the last line of a value of several lines
        return ""
    return next((token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT), "")
