"""Completion, as shells ask for it."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import gradwire
from tests import needs
from tests.workers.warm import gradwire as run

GRADWIRE = Path(sys.executable).with_name("gradwire")


def bash(*words):
    """What bash gets for the last of these words."""
    environment = {"_GRADWIRE_COMPLETE": "complete_bash", "COMP_WORDS": "\n".join(words)}
    environment |= {"COMP_CWORD": str(len(words) - 1)}
    return run(environment=environment).stdout.split()


def test_bash_gets_commands_options_and_values():
    assert bash("gradwire", "do") == ["doctor"]
    assert "--codec" in bash("gradwire", "train", "--c")
    assert bash("gradwire", "train", "--task", "") == ["digits", "charlm"]
    assert bash("gradwire", "plan", "--model", "c") == ["charlm"]
    assert "ddp" in bash("gradwire", "bench", "train", "--method", "")
    assert "up" in bash("gradwire", "lab", "")


def test_every_codec_that_needs_no_quotes_is_completed_and_each_is_one():
    found = bash("gradwire", "train", "--codec", "")
    for name in found:
        if name not in ("auto", "powersgd:16+int8"):
            gradwire.codec(name)
    ids = {name.split(":")[0].split("+")[0] for name in found}
    assert ids >= set(gradwire.registered()) - {"chain", "ef", "ef21", "dgc", "warmup", "rotate"}


def test_bash_breaks_words_at_colons_and_gets_the_rest_of_them():
    assert bash("gradwire", "train", "--codec", "powersgd", ":", "1") == ["16+int8"]
    assert bash("gradwire", "train", "--codec", "topk", ":") == ["0.01+int8", "0.01+int4", "0.01"]
    assert bash("gradwire", "train", "--codec", "=", "powersgd", ":", "1") == ["16+int8"]
    assert bash("gradwire", "train", "--codec", "topk", ":", "0.5+int") == ["0.5+int8", "0.5+int4", "0.5+int2"]


def test_zsh_and_fish_get_words_with_what_they_mean():
    def ask(shell, **more):
        environment = {"_GRADWIRE_COMPLETE": f"complete_{shell}", **more}
        environment["_TYPER_COMPLETE_ARGS"] = "gradwire train --task d"
        return run(environment=environment).stdout.strip()

    assert ask("zsh") == """_arguments '*: :(("digits":"a CNN on scanned digits"))'"""
    assert ask("fish", _TYPER_COMPLETE_FISH_ACTION="get-args") == "digits\ta CNN on scanned digits"


@pytest.mark.parametrize(("shell", "file"), [("bash", ".bashrc"), ("zsh", ".zshrc"), ("fish", ".config/fish")])
def test_completion_is_shown_and_installed(shell, file, tmp_path):
    # Without the name of a shell it is that of the process above; the tests' is none.
    environment = {"HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}

    def ask(option):
        return run(option, shell, environment=environment).stdout

    assert "_GRADWIRE_COMPLETE=complete_" in ask("--show-completion")
    assert f"{shell} completion installed in" in ask("--install-completion")
    assert (tmp_path / file).exists()


def test_a_real_bash_completes_with_the_script_that_is_shown():
    needs.program("bash", "apt-get install bash")
    program = shlex.quote(str(GRADWIRE))  # its path may have spaces
    script = f"""
        eval "$(_GRADWIRE_COMPLETE=source_bash {program})"
        COMP_WORDS=(gradwire train --codec powersgd : 1) COMP_CWORD=5
        _gradwire_completion {program}
        echo "${{COMPREPLY[@]}}"
    """
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "16+int8"
