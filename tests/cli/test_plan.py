"""``gradwire plan``, as a person types it."""

import json

import pytest

from gradwire.cli import main
from tests.workers.warm import gradwire as run


def test_a_plan_on_paper_is_a_table():
    out = " ".join(run("plan", "--model", "digits", "--rate", "100mbit").stdout.split())
    for words in ("digits: 2,030,058 parameters, 4 hosts, 100mbit", "travels as", "A step:", "are computing", "dense"):
        assert words in out


def test_a_slower_link_is_never_expected_to_be_faster():
    plans = [
        json.loads(run("plan", "--model", "torch.nn:Transformer", "--step-ms", "200", "--rate", rate, "--json").stdout)
        for rate in ("50mbit", "1gbit", "100gbit")
    ]
    steps = [plan["plans"]["4"]["predicted_s"] for plan in plans]
    dense = [plan["plans"]["4"]["alternatives"]["dense"] for plan in plans]
    assert dense == sorted(dense, reverse=True)
    assert steps[0] > steps[-1]
    assert all(step <= alone * 1.01 for step, alone in zip(steps, dense, strict=True))


def test_clusters_nobody_has_are_simulated_and_drawn(tmp_path):
    picture = tmp_path / "scaling.png"
    out = run("plan", "--simulate", "--hosts", "100", "--rate", "10gbit", "--plot", str(picture)).stdout
    hosts = [int(line.split("│")[1]) for line in out.splitlines() if line.startswith("│") and "MB" in line]
    assert hosts[:7] == [2, 4, 8, 16, 32, 64, 100]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_model_without_gradients_says_what_is_not_known():
    out = run("plan", "--model", "torch.nn:Transformer", "--step-ms", "100").stdout
    assert "nobody knows what a method loses" in " ".join(out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hosts", "1"], "`--hosts` must be from 2 to 100000; got 1"),
        (["--rate", "fast"], "`--rate` must be in kbit, mbit or gbit"),
        (["--latency-ms", "-1"], "`--latency-ms` must be from 0 to 1e+07; got -1.0"),
        (["--model", "mnist"], "`--model` must be one of digits, charlm, or package.module:function; got 'mnist'"),
        (["--model", "torch.nn:Transformer"], "`--step-ms` must say how long computing a step"),
        (["--model", "torch.nn:nothing", "--step-ms", "1"], "`--model` must be package.module:function"),
        (["--model", "no_such_module:f", "--step-ms", "1"], "`--model` must be package.module:function"),
        (["--model", "time:time", "--step-ms", "1"], "`--model` must return a torch.nn.Module"),
        (["--codec", "int5"], "unknown codec"),
        (["--plot", "x.png"], "`--plot` needs `--simulate`"),
        (["--simulate", "--plot", "x.txt"], "`--plot` must be a .png, .svg or .pdf file; got 'x.txt'"),
        (["--latency-ms", "inf"], "`--latency-ms` must be from 0 to 1e+07; got inf"),
        (["--batch-size", "0"], "`--batch-size` must be at least 1; got 0"),
        (["--step-ms", "5"], "`--step-ms` is for a model of your own: a step of digits is measured; got 5.0"),
        (["--model", "torch.nn:Transformer", "--step-ms", "inf"], "above 0, at most 1e+07; got inf"),
        (["--model", "a:b:c", "--step-ms", "1"], "'a:b:c': No module named 'a'"),
    ],
)
def test_a_wrong_option_is_told_what_is_allowed(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gradwire", "plan", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
