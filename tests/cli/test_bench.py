"""``gradwire bench codecs`` for speed, as a person types it; its sizes are in ``test_cli``."""

import json
import sys

import pytest

from gradwire.cli import bench_train, main
from gradwire.errors import ConfigError, LabError, MissingExtraError
from tests import needs
from tests.workers.warm import gradwire as run


def test_bench_prints_ours_beside_the_peers():
    out = run("bench", "codecs", "--quick", "--elements", "20000").stdout
    for words in (
        "19,456 float32 on",
        "encode, error feedback",
        "ef(fp8:e4m3)",
        "decode and add 8",
        "M.T @ P",
        "x copy",
        "best peer",
        "faster",
        "Median of 3 interleaved rounds",
    ):
        assert words in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 100


def test_bench_in_json_has_medians_quartiles_and_settings():
    arguments = ("--quick", "--elements", "10240", "--codec", "int8", "--op", "encode", "--op", "decode_add_8")
    document = json.loads(run("bench", "codecs", *arguments, "--rounds", "2", "--json").stdout)
    assert document["settings"]["elements"] == 10240
    assert document["settings"]["rounds"] == 2
    assert document["machine"]["device"]
    assert [(result["group"], result["op"]) for result in document["results"]] == [
        ("encode", "int8"),
        ("decode_add_8", "int8"),
    ]
    for result in document["results"]:
        for timing in (result["ours"], result["copy"], result["read"], result["peers"]["eager"]):
            assert 0 < timing["lower_quartile_s"] <= timing["median_s"] <= timing["upper_quartile_s"]
        assert result["ours"]["gb_s"] == pytest.approx(4 * 10240 / result["ours"]["median_s"] / 1e9)
        assert result["times_faster"] > 0


def test_bench_of_several_threads_ends_with_the_scaling():
    arguments = ("--quick", "--elements", "10240", "--codec", "sign", "--op", "encode")
    out = run("bench", "codecs", *arguments, "--threads", "1", "--threads", "2").stdout
    for words in ("1 thread\n", "2 threads\n", "GB/s, 2", "1 to 2", "copy 1 to 2"):
        assert words in "\n".join(line.rstrip() for line in (out + "\n").splitlines()) + "\n"


@pytest.mark.full
def test_bench_compiles_its_peers():
    arguments = ("--elements", "10240", "--codec", "int8", "--op", "decode", "--rounds", "1", "--json")
    result = run("bench", "codecs", *arguments)
    assert "compiling the peers" in result.stderr
    (decode,) = json.loads(result.stdout)["results"]
    assert "compiled" in decode["peers"] or "compiled" in decode["failed"]  # failed: no compiler here


def test_bench_draws_a_picture(tmp_path):
    needs.module("matplotlib", "make test")
    file = tmp_path / "speed.png"
    run("bench", "codecs", "--quick", "--elements", "10240", "--plot", str(file))
    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib_says_what_to_install(monkeypatch, tmp_path):
    import importlib

    from gradwire.benchmarks import plot

    def without(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(MissingExtraError, match=r"pip install 'gradwire\[bench\]'"):
        plot.check(tmp_path / "a.png")


def test_training_is_measured_over_loopback_where_no_lab_can_be_made(monkeypatch, capsys):
    reason = "a lab needs root: it makes network namespaces; run with sudo."
    measured = []

    def measure(settings, *_):
        measured.append(settings.rates)
        raise ConfigError("enough")

    monkeypatch.setattr(bench_train, "unavailable", lambda: reason)
    monkeypatch.setattr(bench_train, "measure", measure)
    with pytest.raises(ConfigError, match="enough"):
        bench_train.train()
    assert measured == [("loopback",)]
    assert f"{reason} Measuring over loopback instead." in " ".join(capsys.readouterr().err.split())
    with pytest.raises(LabError, match=r"needs root.*Without links: `gradwire bench train --rate loopback`"):
        bench_train.train(rates=["100mbit"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--elements", "10"], "`--elements` must be from 1024 to"),
        (["--device", "tpu"], "`--device` must be cpu or cuda; got 'tpu'."),
        (["--quick", "--plot", "a.txt"], "`--plot` must be a .png, .svg or .pdf file; got 'a.txt'."),
        (
            ["--quick", "--plot", "nowhere/a.png"],
            "in an existing folder; got 'nowhere/a.png'.",
        ),
        (["--op", "cook"], "`--op` must be one of feedback, encode"),
        (["--bytes", "--quick"], "`--quick` is about speed; `--bytes` takes --elements, --codec and --json."),
        (["--codec", "int4", "--op", "select"], "no operation is left: none of `--op` has one of `--codec`."),
        (["--bytes", "--elements", "0"], "`--elements` must be from 1 to 100000000; got 0."),
    ],
)
def test_a_wrong_option_is_told_what_is_allowed(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gradwire", "bench", "codecs", *arguments])
    with pytest.raises(SystemExit) as status:
        main()
    assert status.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
