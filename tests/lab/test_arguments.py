"""What a lab may be asked for. Needs no root."""

import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire import ConfigError, LabError
from gradwire.lab import Lab, parse_rate, tools, unavailable
from gradwire.lab.arguments import format_rate


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("100mbit", 100_000_000),
        ("1gbit", 1_000_000_000),
        ("25gbit", 25_000_000_000),
        ("2.5Gbit", 2_500_000_000),
        ("1500kbit", 1_500_000),
        ("none", None),
        (None, None),
    ],
)
def test_rates_are_bits_a_second(text, bits):
    assert parse_rate(text) == bits


@given(st.integers(1_000_000, 400_000_000_000))
def test_a_rate_reads_back_as_it_was_written(bits):
    assert parse_rate(format_rate(bits)) == bits


@pytest.mark.parametrize(
    "text", ["", "fast", "100", "100mbps", "100 mbit", "-1gbit", "1e3mbit", "999kbit", "0gbit", "401gbit", "١gbit"]
)
def test_a_bad_rate_is_shown_with_what_is_allowed(text):
    with pytest.raises(
        ConfigError, match=r"`rate` must be in kbit, mbit or gbit .* '100mbit'.* or 'none'; got"
    ) as error:
        parse_rate(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, "1gbit", "lab"), "`hosts` must be from 1 to 254; got 0"),
        ((255, "1gbit", "lab"), "`hosts` must be from 1 to 254; got 255"),
        ((2, "1gbps", "lab"), "`rate` must be .* got '1gbps'"),
        ((2, "1gbit", "../lab"), r"`name` must be .* got '\.\./lab'"),
        ((2, "1gbit", ""), "`name` must be .* got ''"),
        ((2, "1gbit", "a" * 33), "`name` must be 1 to 32"),
    ],
)
def test_a_bad_argument_is_told_before_anything_is_made(arguments, message):
    hosts, rate, name = arguments
    with pytest.raises(ConfigError, match=message):
        Lab.up(hosts, rate, name=name)


def test_who_is_not_root_is_told_to_use_sudo(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for ask in (lambda: Lab.up(2, "1gbit"), Lab.find, Lab.find_all):
        with pytest.raises(LabError, match=r"needs root: it makes network namespaces; run with sudo\."):
            ask()


def test_another_system_is_named(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "needs Linux" in unavailable()
    assert "darwin" in unavailable()


def test_root_without_rights_is_told_about_containers(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(tools, "_effective_capabilities", lambda: 1 << 12)
    assert "needs CAP_SYS_ADMIN, which root lacks here; start the container with --privileged" in unavailable()


@pytest.mark.parametrize(("missing", "package"), [("ip", "iproute2"), ("tc", "iproute2"), ("nsenter", "util-linux")])
def test_a_missing_program_is_named_with_its_package(missing, package, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(tools, "_effective_capabilities", lambda: (1 << 40) - 1)
    monkeypatch.setattr(tools, "_which", lambda name: None if name == missing else f"/bin/{name}")
    assert f"program '{missing}'" in unavailable()
    assert unavailable().endswith(f"package {package}.")
