"""Codecs by name: the registry, and the language of codec strings.

::

    codec  := term ("+" term)*                      sparse, then its values quantized
    term   := name [":" params] ["(" codec ")"]     the parentheses hold what a transform wraps
    params := param ("," param)*
    param  := value | key "=" value                 positional first, in the order of the codec's fields

``int4``, ``int4:block=64,rounding=stochastic``, ``topk:0.01+int8``, ``ef:decay=0.9(topk:0.01)``, ``rotate(int3)``.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import warnings
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, Final, NoReturn, TypeVar

from gradwire.codecs.base import Codec, fields_of
from gradwire.errors import ConfigError

__all__ = ["codec", "register", "registered"]

ENTRY_POINTS: Final = "gradwire.codecs"
_MAX_LENGTH: Final = 1024
_MAX_DEPTH: Final = 8
_WORD: Final = r"[0-9.]+e\+[0-9]+|[A-Za-z0-9_.\-]+"  # 1e+20 is one word, though '+' joins codecs elsewhere
_registry: Final[dict[str, type[Codec]]] = {}
_plugins_loaded = False

C = TypeVar("C", bound=type[Codec])


def register(cls: C) -> C:
    """Make a codec known under its ``id``; used as a decorator.

    Packages outside gradwire name their module as an entry point of the group ``gradwire.codecs``; it is imported
    when a name is not known here.

    >>> from gradwire.codecs.topk import TopK
    >>> register(TopK) is registered()["topk"]
    True
    """
    known = _registry.setdefault(cls.id, cls)
    if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ConfigError(f"codec id {cls.id!r} is taken by {known.__module__}.{known.__qualname__}.")
    _registry[cls.id] = cls
    return cls


def registered() -> dict[str, type[Codec]]:
    """All codecs by id, those of installed plugins included.

    >>> sorted(registered())[:3]
    ['bf16', 'blocktopk', 'chain']
    """
    _load_plugins()
    return dict(sorted(_registry.items()))


def codec(what: str | Mapping[str, Any] | Codec) -> Codec:
    """Make a codec from its string or its config; a codec is returned as it is.

    >>> codec("topk:0.01+int8")
    Chain(carrier=TopK(density=0.01), values=Int8(block=256, scale='bf16', rounding='nearest'))
    >>> codec(codec("int4").config()) == codec("int4")
    True
    >>> codec("in4")
    Traceback (most recent call last):
    gradwire.errors.ConfigError: unknown codec 'in4'; did you mean 'int4'? Known: bf16, blocktopk, ...
    """
    if isinstance(what, Codec):
        return what
    if isinstance(what, str):
        return _Parser(what).parse()
    if isinstance(what, Mapping):
        return _from_config(what)
    raise ConfigError(f"`codec` must be a codec string, a config or a Codec; got {type(what).__name__}.")


def _load_plugins() -> None:
    global _plugins_loaded
    if not _plugins_loaded:
        _plugins_loaded = True
        for entry in entry_points(group=ENTRY_POINTS):
            try:
                entry.load()
            except Exception as error:  # one broken plugin must not take the others down
                message = f"the codec plugin {entry.name!r} ({entry.value}) could not be loaded: {error!r}"
                warnings.warn(message, RuntimeWarning, stacklevel=3)


def _class(name: str) -> type[Codec]:
    if name not in _registry:
        _load_plugins()
    if name not in _registry:
        close = difflib.get_close_matches(name, _registry, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(f"unknown codec {name!r}; {hint}Known: {', '.join(sorted(set(_registry) - {'chain'}))}.")
    return _registry[name]


def _build(cls: type[Codec], arguments: Mapping[str, Any]) -> Codec:
    missing = [
        name
        for name, (field, _) in fields_of(cls).items()
        if name not in arguments and field.default is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"`{cls.id}` needs {_list(missing)}; {_usage(cls)}")
    return cls(**arguments)


def _from_config(config: Mapping[str, Any]) -> Codec:
    name = config.get("codec")
    if not isinstance(name, str):
        raise ConfigError(f"a codec config must have a 'codec' naming it; got {dict(config)!r}.")
    cls = _class(name)
    arguments = {k: _from_config(v) if isinstance(v, Mapping) else v for k, v in config.items() if k != "codec"}
    for key in arguments:
        _known(cls, key)
    return _build(cls, arguments)


def _known(cls: type[Codec], key: str) -> None:
    if key not in fields_of(cls):
        raise ConfigError(f"`{cls.id}` has no parameter {key!r}; {_usage(cls)}")


def _usage(cls: type[Codec]) -> str:
    fields = fields_of(cls)
    return f"its parameters: {', '.join(fields)}." if fields else "it has no parameters."


def _list(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


class _Parser:
    """Recursive descent over a codec string. Strings come off the wire too, so length and depth are limited."""

    def __init__(self, text: str) -> None:
        if len(text) > _MAX_LENGTH:
            raise ConfigError(f"a codec string has at most {_MAX_LENGTH} characters; got {len(text)}.")
        self.text, self.at, self.depth = text, 0, 0

    def parse(self) -> Codec:
        result = self.chain()
        if self.at != len(self.text):
            self.fail("the end, '+' or '('")
        return result

    def chain(self) -> Codec:
        terms = [self.term()]
        while self.take(r"\+"):
            terms.append(self.term())
        result = terms.pop()
        while terms:
            result = _build(_class("chain"), {"carrier": terms.pop(), "values": result})
        return result

    def term(self) -> Codec:
        name = self.take(r"[a-z][a-z0-9_]*") or self.fail("a codec name")
        cls = _class(name)
        arguments = self.params(cls) if self.take(":") else {}
        if self.take(r"\("):
            field = self.wrapped_field(cls)
            arguments[field] = self.inner()
        return _build(cls, arguments)

    def inner(self) -> Codec:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise ConfigError(f"a codec string nests at most {_MAX_DEPTH} deep.")
        result = self.chain()
        if not self.take(r"\)"):
            self.fail("')'")
        self.depth -= 1
        return result

    def wrapped_field(self, cls: type[Codec]) -> str:
        wrapped = [name for name, (_, kind) in fields_of(cls).items() if kind is Codec]
        if len(wrapped) > 1:
            raise ConfigError(f"`{cls.id}` is written with '+', as in topk:0.01+int8.")
        if not wrapped:
            raise ConfigError(
                f"`{cls.id}` wraps no codec; parameters stand after a colon, as in topk:0.01 or int8:block=64."
            )
        return wrapped[0]

    def params(self, cls: type[Codec]) -> dict[str, Any]:
        fields = fields_of(cls)
        positional = [name for name, (f, kind) in fields.items() if not f.kw_only and kind is not Codec]
        arguments: dict[str, Any] = {}
        while True:
            word = self.take(_WORD) or self.fail("a parameter")
            if self.take("="):
                key, word = word, self.take(_WORD) or self.fail("a value")
                _known(cls, key)
            elif positional and positional[0] not in arguments:
                key = positional.pop(0)
            else:
                raise ConfigError(f"`{cls.id}` takes no further value {word!r} by position; {_usage(cls)}")
            if key in arguments:
                raise ConfigError(f"`{cls.id}` was given {key!r} twice.")
            arguments[key] = _value(cls, key, word, fields[key][1])
            if not self.take(","):
                return arguments

    def take(self, pattern: str) -> str:
        match = re.compile(pattern).match(self.text, self.at)
        if match is None:
            return ""
        self.at = match.end()
        return match.group()

    def fail(self, expected: str) -> NoReturn:
        plain = self.text == self.text.lower() and " " not in self.text
        hint = "" if plain else " Codec strings are lower case, without spaces."
        raise ConfigError(f"bad codec string {self.text!r}: expected {expected} at position {self.at}.{hint}")


def _value(cls: type[Codec], key: str, word: str, kind: Any) -> Any:
    try:
        if kind is bool:
            return {"true": True, "false": False}[word]
        return kind(word) if kind in (int, float) else word
    except (KeyError, ValueError):
        allowed = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
        raise ConfigError(f"`{cls.id}({key}=...)` must be {allowed}; got {word!r}.") from None
