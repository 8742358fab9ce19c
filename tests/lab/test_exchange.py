"""``gradwire bench exchange``."""

import json
import sys

import pytest

from gradwire.cli import main


@pytest.fixture
def exchange(monkeypatch, capfd):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["gradwire", "bench", "exchange", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code or 0, capfd.readouterr()

    return run


@pytest.mark.full
def test_the_share_of_a_link_is_measured_beside_gloo(name, exchange):
    small = ("--workers", "2", "--rate", "100mbit", "--codec", "int8", "--rounds", "1")
    status, said = exchange(*small, "--json")
    assert status == 0, said.err
    told = json.loads(said.out)["100mbit"]
    assert list(told) == ["int8", "gloo all_to_all"]
    for each in told.values():
        assert 0.1 < each["efficiency"] < 0.956
        assert each["sent_bytes"] == pytest.approx(100e6 / 8 / 4, rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "1"], "`--workers` must be from 2 to 64; got 1."),
        (["--rounds", "0"], "`--rounds` must be at least 1; got 0."),
        (["--rate", "none"], "`--rate` must be a rate such as 100mbit, to know the share of; got none."),
        (["--codec", "int99"], "int99"),
    ],
)
def test_bad_options_are_named(arguments, message, exchange):
    status, said = exchange(*arguments)
    assert status != 0
    assert message in " ".join(said.err.split())
