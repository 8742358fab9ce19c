"""The commands as a person types them."""

import json
import sys

import pytest
import torch

import gradwire
from gradwire.cli import main
from tests.workers.warm import gradwire as run


def train(*arguments):
    return json.loads(run("train", "--json", *arguments).stdout)


@pytest.mark.full
def test_train_learns_the_task_with_an_eighth_of_the_bytes():
    result = train("--epochs", "2")
    assert result["codec"] == "int4"
    assert result["test_accuracy"] > 0.9
    assert result["ratio"] < 0.135
    assert result["steps"] == 44


@pytest.mark.full
def test_equal_seeds_give_equal_runs_and_feedback_is_on_for_sparse_codecs():
    short = ("--epochs", "1", "--batch-size", "180", "--codec", "topk:0.05+int8", "--seed", "3")
    first, second = train(*short), train(*short)
    assert first["codec"] == "ef(topk:0.05+int8)"
    assert first["ratio"] < 0.04
    del first["seconds"], second["seconds"]
    assert first == second


@pytest.mark.full
def test_train_with_a_sharded_optimizer_goes_on_from_its_checkpoints(tmp_path):
    short = ("--batch-size", "60", "--ratio", "0.1", "--checkpoints", str(tmp_path), "--checkpoint-every", "3")
    first = train(*short, "--steps", "7")
    assert first["codec"] == "gradients ef(int3), weights int3"
    assert first["ratio"] <= 0.1
    assert first["steps"] == 7
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0000000003", "step-0000000006"]
    second = train(*short, "--steps", "9", "--stage", "2")
    assert second["steps"] == 3
    straight = train("--batch-size", "60", "--ratio", "0.1", "--steps", "9")
    assert straight["test_loss"] == second["test_loss"]


def test_train_prints_a_table_for_people():
    out = run("train", "--epochs", "1", "--batch-size", "300").stdout
    for words in (
        "test accuracy",
        "bytes sent a worker",
        "of a float32 all-reduce",
        "bit-identical on all workers",
        "ms a step",
    ):
        assert words in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--codec", "int5"], "error: unknown codec 'int5'; did you mean"),
        (["--codec", "topk:3"], "error: `topk(density=...)` must be in (0, 1]; got 3.0."),
        (["--task", "imagenet"], "error: `--task` must be one of digits, charlm; got 'imagenet'."),
        (["--workers", "0"], "error: `--workers` must be from 1 to 64; got 0."),
        (["--epochs", "0"], "error: `--epochs` must be at least 1; got 0."),
        (["--batch-size", "1000"], "error: `--batch-size` must be from 1 to 718 with 2 workers; got 1000."),
        (["--seed", "9999999999"], "error: `--seed` must be from 0 to 2147483647"),
        (["--ratio", "2"], "error: `--ratio` must be in (0, 1]; got 2.0."),
        (["--ratio", "0.1", "--stage", "3"], "error: `--stage` must be 0, 1 or 2; got 3."),
        (["--checkpoints", "x"], "error: `--checkpoints` needs `--ratio`: it is of a sharded optimizer."),
        (["--stage", "2"], "error: `--stage` needs `--ratio`: it is of a sharded optimizer."),
        (["--ratio", "0.1", "--codec", "int8"], "error: give either `--ratio`, which chooses codecs, or `--codec`;"),
        (["--retry-times", "-1"], "error: `retry_times` must be a whole number of at least 0; got -1."),
        (["--seed", "-1"], "error: `--seed` must be from 0 to 2147483647; got -1."),
    ],
)
def test_a_wrong_option_is_told_what_is_allowed_before_anything_starts(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gradwire", "train", *arguments])
    with pytest.raises(SystemExit) as status:
        main()
    assert status.value.code == 2
    assert capsys.readouterr().err.startswith(message)


@pytest.fixture
def payload(tmp_path):
    file = tmp_path / "gradient.gw"
    file.write_bytes(gradwire.encode(torch.randn(100, 100), "topk:0.01+int8", key=gradwire.Key(1, 2, 3)))
    return file


def test_inspect_prints_header_codec_and_sizes(payload):
    out = run("inspect", str(payload)).stdout
    for words in (
        "topk:0.01+int8",
        "(100, 100) float32",
        "seed 1, step 2, bucket 3",
        "values.scales",
        "indices",
        "313",
    ):
        assert words in out
    facts = json.loads(run("inspect", str(payload), "--json").stdout)
    assert facts["frame_bytes"] == payload.stat().st_size == facts["header_bytes"] + facts["body_bytes"]
    assert sum(part["bytes"] for part in facts["parts"]) == facts["body_bytes"]


def test_inspect_of_a_codec_that_is_not_registered_still_shows_the_header(payload):
    from ..test_wire import resealed

    payload.write_bytes(resealed(payload.read_bytes().replace(b"topk", b"tapk")))
    out = run("inspect", str(payload)).stdout
    assert "tapk:0.01+int8  (not registered here)" in out
    assert "part 2" in out


def test_inspect_shows_markup_as_it_is(tmp_path):
    from ..test_wire import resealed

    file = tmp_path / "a[b].gw"
    file.write_bytes(resealed(gradwire.encode(torch.ones(4), "int8").replace(b"int8", b"[/x]")))
    out = run("inspect", str(file)).stdout
    assert "a[b].gw" in out
    assert "[/x]  (not registered here)" in out


def test_inspect_says_what_is_wrong_with_a_file(payload, tmp_path):
    payload.write_bytes(payload.read_bytes()[:-1])
    assert "truncated: the header says 313 bytes; got 312" in run("inspect", str(payload), status=1).stderr
    assert "cannot be read: No such file" in run("inspect", str(tmp_path / "nothing"), status=2).stderr


def test_bench_weighs_every_codec():
    rows = json.loads(run("bench", "codecs", "--bytes", "--elements", "250000", "--json").stdout)["codecs"]
    by_name = {row["codec"]: row for row in rows}
    for name, row in by_name.items():
        frame = len(gradwire.encode(torch.randn(500, 500), name))
        if row["exact"]:
            assert row["bits_per_element"] == 8 * frame / 250_000
        if row["index_over_entropy"] is not None:
            assert 1 <= row["index_over_entropy"] <= 1.1
    ids = {name.split(":")[0].split("(")[0].split("+")[0] for name in by_name}
    assert ids >= set(gradwire.registered()) - {"chain", "ef", "ef21", "dgc", "warmup"}
    table = run("bench", "codecs", "--bytes", "--codec", "int4", "--codec", "topk:0.01").stdout
    assert "4.1257" in table
    assert "1.058" in table


def test_help_and_version():
    assert "train" in run("--help").stdout
    assert run("--version").stdout.strip() == f"gradwire {gradwire.__version__}"
    assert "Usage" in run("bench", "codecs", "--help").stdout
