"""``--help`` as a manual, at 80 and 120 columns; and what is typed wrongly."""

import os
import re
import shlex
import subprocess
import sys

import pytest
import typer.main
from typer.testing import CliRunner

from gradwire.cli import app
from tests.workers.warm import gradwire as run


def commands(command=None, path=()):
    command = command or typer.main.get_command(app)
    yield path, command
    for name, each in getattr(command, "commands", {}).items():
        yield from commands(each, (*path, name))


ALL = {" ".join(path) or "gradwire": command for path, command in commands()}


def shown(path, columns):
    arguments = [*path.replace("gradwire", "").split(), "--help"]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": str(columns)})
    assert result.exit_code == 0
    return [line.rstrip() for line in result.stdout.splitlines()]


@pytest.mark.parametrize("path", ALL)
@pytest.mark.parametrize("columns", [120, 80])
def test_help_has_a_sentence_an_explanation_examples_and_the_exit_status(path, columns):
    lines = shown(path, columns)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= columns
    assert re.search(r"Usage: .*\n\n \S[^\n]*(\n \S[^\n]*)*\.\n\n \S", text), text  # a sentence, then a paragraph
    examples = [line for line in lines if re.match(r"   \$ .*gradwire", line)]
    assert examples, text
    assert "130 it was interrupted" in " ".join(text.split())
    assert "``" not in text


@pytest.mark.parametrize("path", ALL)
def test_examples_fit_and_name_commands_and_options_that_exist(path):
    for line in re.findall(r"^  \$ (.*)$", ALL[path].help, re.MULTILINE):
        assert len(line) <= 74, line
        words = shlex.split(re.split(r" >> | {3,}", line)[0].rpartition("| ")[2])
        words = words[words.index("gradwire") + 1 :]
        words = words[: words.index("--")] if "--" in words else words
        command = ALL["gradwire"]
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        assert {word for word in words if word.startswith("--")} <= options, line


@pytest.mark.parametrize("path", ALL)
def test_every_option_is_explained_by_a_sentence(path):
    for parameter in ALL[path].params:
        assert parameter.help, f"{path} {parameter.name}"


@pytest.mark.parametrize("path", ALL)
def test_a_flag_shows_no_type_of_a_value_and_an_option_does(path):
    text = "\n".join(shown(path, 120))
    assert "--help" in text
    assert "bool" not in text.lower()
    if path == "train":
        assert re.search(r"--workers\W+<int>", text)


@pytest.mark.parametrize(
    ("arguments", "suggestion"),
    [
        (["trian"], "Did you mean 'train'?"),
        (["bench", "codex"], "Did you mean 'codecs'?"),
        (["train", "--worker", "2"], "--workers"),
        (["train", "--workers", "two"], "--workers"),
        (["inspect"], "FILE"),
    ],
)
def test_what_is_typed_wrongly_ends_with_status_2_and_a_suggestion(arguments, suggestion):
    assert suggestion in run(*arguments, status=2).stderr


def test_without_a_command_there_is_help():
    result = subprocess.run(
        [sys.executable, "-m", "gradwire"], env=os.environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 2
    assert "Start here" in result.stdout + result.stderr
