"""``gradwire --config``: a file sets defaults, the command line wins, and what is not known is said."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gradwire.cli import main
from tests.workers.warm import gradwire as run


@pytest.fixture
def config(tmp_path):
    def write(text):
        file = tmp_path / "gradwire.toml"
        file.write_text(text)
        return str(file)

    return write


QUICK = '[train]\nworkers = 1\nsteps = 2\nbatch_size = 30\ncodec = "int8"\njson = true\nfeedback = false\n'


@pytest.mark.full
def test_the_file_wins_over_defaults_and_the_command_line_over_the_file(config):
    file = config(QUICK)
    told = json.loads(run("--config", file, "train").stdout)
    assert told["codec"] == "int8"
    assert told["steps"] == 2
    assert told["settings"]["workers"] == 1
    assert told["settings"]["feedback"] is False
    told = json.loads(run("--config", file, "train", "--codec", "int4", "--steps", "1", "--feedback").stdout)
    assert told["codec"] == "int4"
    assert told["steps"] == 1
    assert told["settings"]["batch_size"] == 30
    assert told["settings"]["feedback"] is True


@pytest.mark.full
def test_the_environment_names_the_file(config):
    command = [sys.executable, "-m", "gradwire", "train", "--steps", "1"]
    environment = os.environ | {"GRADWIRE_CONFIG": config(QUICK)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(result.stdout)["codec"] == "int8"


def test_commands_of_commands_have_tables_in_tables_and_options_may_be_lists(config):
    file = config('[bench.codecs]\nbytes = true\nelements = 10_000\ncodec = ["int8", "sign"]\njson = true')
    told = json.loads(run("--config", file, "bench", "codecs").stdout)
    assert [row["codec"] for row in told["codecs"]] == ["int8", "sign"]
    told = json.loads(run("--config", file, "bench", "codecs", "--codec", "int4").stdout)
    assert [row["codec"] for row in told["codecs"]] == ["int4"]


def test_help_shows_the_defaults_of_the_file(config):
    assert "[default: 7]" in run("--config", config("[train]\nworkers = 7"), "train", "--help").stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[trian]\n", "`trian` is no command, and the file has a table for each; did you mean [train]? Known: ["),
        ("workers = 2\n", "`workers` is no command, and the file has a table for each; known: [doctor], [train]"),
        ("train = 2\n", "`train` must be a table of options; got 2."),
        ("[train]\nworker = 2\n", "`train.worker` is no option of `gradwire train`; did you mean workers? Known: task"),
        ("[train]\nhelp = true\n", "`train.help` is no option of `gradwire train`"),
        ('[train]\nworkers = "two"\n', "`train.workers` must be a whole number; got 'two'."),
        ("[train]\nworkers = true\n", "`train.workers` must be a whole number; got True."),
        ("[train]\ncodec = 4\n", "`train.codec` must be a string; got 4."),
        ('[train]\nratio = "0.1"\n', "`train.ratio` must be a number; got '0.1'."),
        ("[train]\nfeedback = 1\n", "`train.feedback` must be true or false; got 1."),
        ("[train]\ncheckpoints = 1\n", "`train.checkpoints` must be a path, as a string; got 1."),
        ("[train]\nbatch-size = 1\nbatch_size = 2\n", "`train.batch_size` is given twice, under two of its names."),
        ("[plan]\nhosts = 2\nworkers = 2\n", "`plan.workers` is given twice, under two of its names."),
        ("[plan]\ncodec = [4]\n", "`plan.codec` must be a string, or a list of such; got 4."),
        ("[bench]\nrounds = 4\n", "`bench.rounds` must be a table of options; got 4."),
        ("[bench.codex]\n", "`bench.codex` is no option of `gradwire bench`; did you mean [bench.codecs]?"),
        ("[serve]\nport = 1\n", "`serve.port` is no option of `gradwire serve`; known: config, [serve.status]"),
        ("[train\n", "is not TOML: "),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_what_is_allowed(text, message, config, monkeypatch, capsys):
    file = config(text)
    monkeypatch.setattr(sys, "argv", ["gradwire", "--config", file, "inspect", "nothing"])
    with pytest.raises(SystemExit) as status:
        main()
    assert status.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: {file}")
    assert message in told


def test_the_file_of_the_manual_is_one(config):
    page = (Path(__file__).parents[2] / "docs" / "commands.md").read_text()
    (example,) = re.findall(r"^```toml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    told = json.loads(run("--config", config(example), "bench", "codecs", "--elements", "10000", "--json").stdout)
    assert [row["codec"] for row in told["codecs"]] == ["int8", "int4"]
    assert "[default: 30]" in run("--config", config(example), "train", "--help").stdout


def test_a_file_that_is_not_there_is_named(tmp_path):
    missing = tmp_path / "nothing.toml"
    result = run("--config", str(missing), "doctor", status=2)
    assert f"error: {missing} cannot be read: No such file or directory." in result.stderr


def test_settings_of_the_server_do_not_stop_its_other_commands(config, tmp_path):
    file = config('[serve]\nconfig = "serve.toml"\n[serve.token]\nrole = "read"\njson = true')
    assert json.loads(run("--config", file, "serve", "token", "w1").stdout)["roles"] == ["read"]
    refused = run("serve", "--config", "serve.toml", "token", "w1", status=2).stderr
    assert "`--config` is for serving" in refused
