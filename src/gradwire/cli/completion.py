"""What the shell may complete: names of codecs, tasks and models."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Iterator
from typing import Final

import typer

from gradwire.codecs import registered
from gradwire.tasks import TASKS

__all__ = ["bash_protocol", "complete_codec", "complete_method", "complete_model", "complete_task"]

_EXAMPLES: Final = {
    "auto": "measure, and choose for every bucket",
    "none": "float32, as it is",
    "int4": "4 bits, and a scale for every block",
    "int8": "8 bits, and a scale for every block",
    "topk:0.01+int8": "the largest 1% of the values, in 8 bits",
    "topk:0.01+int4": "the largest 1% of the values, in 4 bits",
    "blocktopk:0.01+int4": "the largest 1% of every block, in 4 bits",
    "powersgd:16+int8": "factors of rank 16, in 8 bits",
}
_VALUES: Final = ("int8", "int4", "int2", "fp8", "bf16", "fp16", "sign")  # what the second part of a chain may be
_TASKS: Final = {"digits": "a CNN on scanned digits", "charlm": "a small GPT on text, character by character"}
_BREAKS: Final = re.compile(r"^[:=]+$")


def complete_codec(incomplete: str) -> list[tuple[str, str]]:
    """Codecs, and good examples of several put together.

    >>> [name for name, _ in complete_codec("int")][:3]
    ['int4', 'int8', 'int2']
    >>> [name for name, _ in complete_codec("topk:0.1+int")]
    ['topk:0.1+int8', 'topk:0.1+int4', 'topk:0.1+int2']
    """
    carrier, plus, _ = incomplete.rpartition("+")
    if plus:
        return [(f"{carrier}+{each}", "") for each in _VALUES if f"{carrier}+{each}".startswith(incomplete)]
    firsts = {str(kind.examples()[0]): _first_line(kind) for kind in registered().values()}
    plain = {name: about for name, about in firsts.items() if "(" not in name}  # which needs quotes in a shell
    known = _EXAMPLES | {name: about for name, about in plain.items() if name not in _EXAMPLES}
    return [(name, about) for name, about in known.items() if name.startswith(incomplete)]


def complete_method(incomplete: str) -> list[tuple[str, str]]:
    """Codecs, and plain DDP.

    >>> complete_method("dd")
    [('ddp', 'plain DistributedDataParallel')]
    """
    peers = [("ddp", "plain DistributedDataParallel")]
    return [each for each in (*peers, *complete_codec(incomplete)) if each[0].startswith(incomplete)]


def complete_task(incomplete: str) -> list[tuple[str, str]]:
    """Built-in trainings.

    >>> complete_task("d")
    [('digits', 'a CNN on scanned digits')]
    """
    return [(name, _TASKS.get(name, "")) for name in TASKS if name.startswith(incomplete)]


def complete_model(incomplete: str) -> list[tuple[str, str]]:
    """The models of built-in trainings; those of your own have too many names.

    >>> [name for name, _ in complete_model("")]
    ['digits', 'charlm']
    """
    return complete_task(incomplete)


def _first_line(kind: type) -> str:
    return (kind.__doc__ or "").strip().partition("\n")[0].rstrip(".")


@contextlib.contextmanager
def bash_protocol(variable: str = "_GRADWIRE_COMPLETE") -> Iterator[None]:
    """While bash asks for completions: words that it has broken at ``:`` and ``=`` are whole again.

    Bash takes ``topk:0.01`` for three words, and replaces the last of them only: it is told no more than that.
    """
    if os.environ.get(variable) != "complete_bash":
        yield
        return
    line = os.environ["COMP_WORDS"]
    words, place, told = whole_words(line.split("\n" if "\n" in line else " "), int(os.environ["COMP_CWORD"]))
    os.environ |= {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(place)}
    answer = io.StringIO()
    try:
        with contextlib.redirect_stdout(answer):
            yield
    finally:
        for line in answer.getvalue().splitlines():
            typer.echo(line.removeprefix(told))


def whole_words(words: list[str], place: int) -> tuple[list[str], int, str]:
    """Words that bash has broken, put together; where the one under the cursor is, and what of it bash has already.

    >>> whole_words(["gradwire", "train", "--codec", "topk", ":", "0"], 5)
    (['gradwire', 'train', '--codec', 'topk:0'], 3, 'topk:')
    >>> whole_words(["gradwire", "train", "--codec", "=", "topk", ":"], 5)
    (['gradwire', 'train', '--codec=topk:'], 2, 'topk:')
    """
    whole: list[str] = []
    there, told, broken = len(words), "", True  # nothing is put to the first one
    for at, word in enumerate(words):
        breaks = bool(_BREAKS.match(word))
        if at and (breaks or not broken):
            whole[-1] += word
        else:
            whole.append(word)
        if at == place:
            there, told = len(whole) - 1, whole[-1] if breaks else whole[-1].removesuffix(word)
        broken = not breaks
    if told.startswith("-"):
        told = told.partition("=")[2]  # a value is completed without the name of its option
    return whole, min(there, len(whole)), told
