"""``--json`` everywhere there is a table: one document on standard output, and nothing else there."""

import json
import os
import subprocess
import sys

import pytest
import torch
import typer.main

import gradwire
from gradwire.cli import app
from gradwire.cli.output import print_json
from tests import needs
from tests.case import tiered
from tests.workers.warm import gradwire as run

from .test_help import commands

SPEECHLESS = {"lab run", "lab down", "serve snapshot", "serve drain"}  # they print what others say, or a word


def test_every_command_that_prints_facts_has_json():
    for path, command in commands(typer.main.get_command(app)):
        if not hasattr(command, "commands") and " ".join(path) not in SPEECHLESS | {"dash"}:
            assert "--json" in {option for parameter in command.params for option in parameter.opts}, path


DOCUMENTS = [
    ("doctor", "--workers", "0"),
    ("train", "--steps", "2", "--batch-size", "30"),
    ("plan", "--model", "torch.nn:Transformer", "--step-ms", "100", "--simulate", "--hosts", "4"),
    ("bench", "codecs", "--bytes", "--elements", "10000"),
    ("bench", "codecs", "--quick", "--codec", "int8", "--op", "encode", "--elements", "10240"),
    ("bench", "stragglers", "--workers", "2", "--steps", "50", "--pause", "0.5", "--rounds", "1"),
    ("bench", "train", "--rate", "loopback", "--workers", "2", "--method", "ddp", "--steps", "1", "--rounds", "1"),
    ("serve", "token", "w1"),
]


@pytest.mark.parametrize("words", tiered([" ".join(each) for each in DOCUMENTS], first=["serve token w1"]))
def test_standard_output_is_one_document(words):
    assert isinstance(json.loads(run(*words.split(), "--json").stdout), dict)


@pytest.mark.full
def test_labs_in_json():
    needs.lab()
    name = f"json-{os.getpid()}"
    try:
        made = json.loads(run("lab", "up", "--hosts", "2", "--rate", "100mbit", "--name", name, "--json").stdout)
        assert made["rate"] == "100mbit"
        assert len(made["hosts"]) == 2
        assert json.loads(run("lab", "reshape", "--rate", "1gbit", "--name", name, "--json").stdout)["rate"] == "1gbit"
        (shown,) = json.loads(run("lab", "show", "--name", name, "--json").stdout)["labs"]
        assert shown["name"] == name
    finally:
        run("lab", "down", "--name", name)


@pytest.mark.full
def test_an_exchange_over_a_link_in_json():
    needs.lab()
    told = json.loads(
        run(
            "bench", "exchange", "--workers", "2", "--rate", "1gbit", "--codec", "int4", "--rounds", "1", "--json"
        ).stdout
    )
    assert set(told) == {"1gbit"}


def test_a_payload_and_a_journal_in_json(tmp_path):
    file = tmp_path / "gradient.gw"
    file.write_bytes(gradwire.encode(torch.ones(100), "int8"))
    assert json.loads(run("inspect", str(file), "--json").stdout)["codec"] == "int8"
    with file.open("rb") as data:
        command = ["gradwire", "inspect", "-", "--json"]
        told = subprocess.run([sys.executable, "-m", *command], stdin=data, capture_output=True, check=True).stdout
    assert json.loads(told)["codec"] == "int8"


def test_what_json_has_no_word_for_is_null(capsys):
    print_json({"loss": float("nan"), "times": [1.0, float("inf")]})
    assert json.loads(capsys.readouterr().out) == {"loss": None, "times": [1.0, None]}
