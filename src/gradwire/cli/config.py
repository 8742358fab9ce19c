"""``gradwire --config FILE``: options of commands, by a file in TOML.

A table a command, ``[train]`` or ``[bench.train]``, with its long options as keys. What is on the command line wins
over the file, the file over the defaults.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from gradwire.errors import ConfigError
from gradwire.files import read_toml

__all__ = ["load_config"]

_KINDS: dict[Any, tuple[Any, str]] = {
    bool: (bool, "true or false"),
    int: (int, "a whole number"),
    float: ((int, float), "a number"),
    str: (str, "a string"),
    Path: (str, "a path, as a string"),
}


def load_config(path: Path, root: Any) -> dict[str, Any]:
    """The defaults that a file sets, by command and parameter, as click's ``default_map`` has them.

    ``root`` is the command of the whole program; what it does not know is an error.

    >>> import tempfile, typer, typer.main
    >>> app = typer.Typer()
    >>> app.callback()(lambda: None) and None
    >>> @app.command()
    ... def train(workers: int = 2) -> None: ...
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "a.toml"
    ...     _ = file.write_text("[train]\\nworker = 4")
    ...     load_config(file, typer.main.get_command(app))
    Traceback (most recent call last):
    gradwire.errors.ConfigError: ...a.toml: `train.worker` is no option of `gradwire train`; did you mean workers? ...
    """
    table = read_toml(path)
    try:
        return _of_group(root, table, ())
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _of_group(group: Any, table: Mapping[str, Any], where: tuple[str, ...]) -> dict[str, Any]:
    commands: Mapping[str, Any] = group.commands
    own = {key: value for key, value in table.items() if key not in commands}
    if not where and own:
        key, tables = next(iter(own)), {each: f"[{each}]" for each in commands}
        raise ConfigError(f"`{key}` is no command, and the file has a table for each; {_suggested(key, tables)}.")
    found = _of_command(group, own, where) if own else {}
    for name in commands:
        if name in table:
            found[name] = _of_table(commands[name], table[name], (*where, name))
    return found


def _of_table(command: Any, table: Any, where: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise ConfigError(f"`{'.'.join(where)}` must be a table of options; got {table!r}.")
    return (_of_group if hasattr(command, "commands") else _of_command)(command, table, where)


def _of_command(command: Any, table: Mapping[str, Any], where: tuple[str, ...]) -> dict[str, Any]:
    options, kinds = _options(command), _kinds(command)
    commands = getattr(command, "commands", {})
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = ".".join((*where, key))
        parameter = options.get(key.replace("_", "-"))
        if parameter is None:
            known = {each: each for each in options} | {each: f"[{'.'.join((*where, each))}]" for each in commands}
            raise ConfigError(f"`{name}` is no option of `gradwire {' '.join(where)}`; {_suggested(key, known)}.")
        if parameter.name in found:
            raise ConfigError(f"`{name}` is given twice, under two of its names.")
        found[parameter.name] = _value(kinds[parameter.name], value, name)
        parameter.show_default = True  # in --help: this one, whatever words stand for the default of the program
    return found


def _options(command: Any) -> dict[str, Any]:
    """The parameters of a command by their long options, without dashes."""
    return {
        option[2:]: parameter
        for parameter in command.params
        if parameter.param_type_name == "option" and parameter.name in _kinds(command)
        for option in parameter.opts
        if option.startswith("--")
    }


def _kinds(command: Any) -> dict[str, Any]:
    """What the parameters of a command are, as its function says; its help and completion are no parameters of that."""
    function = inspect.unwrap(command.callback) if command.callback is not None else None
    return typing.get_type_hints(function) if function is not None else {}


def _value(kind: Any, value: Any, name: str) -> Any:
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        kind = next(each for each in typing.get_args(kind) if each is not types.NoneType)
    if typing.get_origin(kind) is list:
        (one,) = typing.get_args(kind)
        several = value if isinstance(value, list) else [value]
        return [_checked(one, each, name, several=True) for each in several]
    return _checked(kind, value, name)


def _checked(kind: Any, value: Any, name: str, *, several: bool = False) -> Any:
    if typing.get_origin(kind) is typing.Literal:
        if value not in (choices := typing.get_args(kind)):
            raise ConfigError(f"`{name}` must be one of {', '.join(map(str, choices))}; got {value!r}.")
        return value
    allowed, words = _KINDS.get(kind, (object, "anything"))  # what is left is checked by the command itself
    if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"`{name}` must be {words}{', or a list of such' if several else ''}; got {value!r}.")
    return value


def _suggested(key: str, known: Mapping[str, str]) -> str:
    """Names that are known, and the one that was meant; each with the way to write it."""
    close = get_close_matches(key.replace("_", "-"), known, n=1)
    return (f"did you mean {known[close[0]]}? Known: " if close else "known: ") + ", ".join(known.values())
