"""``gradwire lab`` as a person types it, and what docs/lab.md shows."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradwire.cli import main
from gradwire.lab import Lab
from tests import needs

PAGE = Path(__file__).parent.parent.parent / "docs" / "lab.md"


@pytest.fixture
def gradwire(monkeypatch, capfd):
    """Runs ``gradwire lab ...`` in this process, which has loaded torch already; returns its output."""

    def run(*arguments, status=0):
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["gradwire", "lab", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        said = capfd.readouterr()
        assert (end.value.code or 0) == status, said.err
        return said

    return run


def test_up_run_show_reshape_down(gradwire, name):
    assert re.fullmatch(
        rf"lab {name}: 2 hosts, 10\.77\.\d+\.1 to 10\.77\.\d+\.2, 100mbit\n",
        gradwire("up", "--hosts", "2", "--rate", "100mbit", "--name", name).out,
    )
    speak = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"
    spoken = gradwire("run", "--name", name, "--", "python", "-c", speak).out
    assert sorted(spoken.splitlines()) == ["[0] rank 0 of 2", "[1] rank 1 of 2"]
    assert gradwire("run", "--name", name, "--rank0", "python", "-c", speak).out == "rank 0 of 2\n"
    assert "20mbit" in gradwire("reshape", "--rate", "20mbit", "--name", name).out
    table = gradwire("show", "--name", name).out
    for words in (f"lab {name}", "bytes sent", f"gradwire-{name}-1", "20mbit", " B"):
        assert words in table
    (lab,) = json.loads(gradwire("show", "--name", name, "--json").out)["labs"]
    assert (lab["name"], lab["rate"], [host["rank"] for host in lab["hosts"]]) == (name, "20mbit", [0, 1])
    assert all(host["sent_bytes"] >= 0 for host in lab["hosts"])
    assert name in [each["name"] for each in json.loads(gradwire("show", "--json").out)["labs"]]
    gradwire("down", "--name", name)
    assert f"error: no lab '{name}' is up" in gradwire("down", "--name", name, status=1).err


def test_run_ends_with_the_status_of_the_rank_that_failed_and_names_it(gradwire, lab):
    fail = "import os, sys, time; time.sleep(1); sys.exit(9 if os.environ['RANK'] == '1' else 0)"
    done = gradwire("run", "--name", lab.name, "--", "python", "-c", fail, status=9)
    assert done.err == "error: rank 1 exited with status 9.\n"
    done = gradwire("run", "--name", lab.name, "--timeout", "1", "--", "sleep", "100", status=124)
    assert done.err == "error: 2 ranks, not done after 1 s.\n"


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_run_that_is_told_to_end_ends_its_ranks(lab):
    speak = "import os, time; print(os.getpid()); time.sleep(100)"
    command = [sys.executable, "-m", "gradwire", "lab", "run", "--name", lab.name, "--", "python", "-c", speak]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        pids = [int(run.stdout.readline().split()[1]) for _ in range(2)]
        started = time.monotonic()
        run.send_signal(signal.SIGTERM)
        assert run.wait(30) == 143
    assert time.monotonic() - started < 20
    while any(map(is_running, pids)):  # who inherits an ended process takes its time to bury it
        assert time.monotonic() - started < 30
        time.sleep(0.05)


@pytest.mark.full
def test_a_training_that_is_told_to_end_takes_its_workers_and_its_lab_down():
    needs.lab()
    command = [sys.executable, "-m", "gradwire", "train", "--rate", "1gbit", "--steps", "100000"]
    training = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    its, deadline = f"train-{training.pid}", time.monotonic() + 60
    try:
        while not (pids := [pid for lab in Lab.find_all() if lab.name == its for pid in inside(lab)]):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        for _ in range(2):  # as `timeout` does
            training.send_signal(signal.SIGTERM)
            time.sleep(0.05)
        assert training.wait(60) == 143
        assert its not in [lab.name for lab in Lab.find_all()]
        assert not any(map(is_running, pids))
    finally:
        training.kill()
        training.wait()
        for lab in Lab.find_all():
            if lab.name == its:
                lab.down()


def inside(lab):
    """Processes in the network of a lab's last host."""
    listed = subprocess.run(
        ["ip", "netns", "pids", lab.hosts[-1].namespace], capture_output=True, text=True, check=False
    )
    return [int(pid) for pid in listed.stdout.split()]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["up", "--hosts", "0"], "error: `--hosts` must be from 1 to 254; got 0."),
        (
            ["up", "--rate", "fast"],
            "error: `--rate` must be in kbit, mbit or gbit (bits a second), from 1mbit to 400gbit",
        ),
        (
            ["up", "--name", "A/B"],
            "error: `--name` must be 1 to 32 of a-z, 0-9 and -, and begin with a letter; got 'A/B'.",
        ),
        (["run", "--timeout", "-1", "--", "true"], "error: `--timeout` must be more than 0; got -1.0."),
        (["reshape", "--rate", "1tbit"], "error: `--rate` must be"),
        (["down", "--name", ""], "error: `--name` must be"),
    ],
)
def test_a_wrong_option_is_told_what_is_allowed(gradwire, arguments, message):
    assert gradwire(*arguments, status=2).err.startswith(message)


def test_who_is_not_root_gets_one_line(gradwire, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert gradwire("show", status=1).err == "error: a lab needs root: it makes network namespaces; run with sudo.\n"


@pytest.mark.full
def test_what_the_page_shows_runs(gradwire, name, tmp_path, monkeypatch):
    """Under this test's names, because the ones on the page may be in use on this machine."""
    page = PAGE.read_text()
    program, python = re.findall(r"^```py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    made = {f"{name}-{each}" for each in ("lab", "pair", "docs")}
    try:
        for line in re.findall(r"^\$ sudo gradwire lab (.*)$", page, re.MULTILINE):
            verb, *words = shlex.split(line.replace("--name pair", f"--name {name}-pair"))
            mine = [] if "--name" in words else ["--name", f"{name}-lab"]
            said = gradwire(verb, *mine, *words).out
            if verb == "run":
                # A ring of four sends 1.5 times the tensor: 0.50 s of 100 megabit, or more if the machine is busy.
                assert 0.4 < float(re.fullmatch(r"4 MB between 4 ranks: ([\d.]+) s\n", said)[1]) < 4
        python = python.replace('"docs"', f'"{name}-docs"')
        said = subprocess.run(
            [sys.executable, "-c", python], capture_output=True, text=True, check=True, timeout=120
        ).stdout
        assert "[1] 4 MB between 2 ranks" in said
        assert re.search(r"^\d{7} bytes from host 0 in", said, re.MULTILINE)
        assert not made & {lab.name for lab in Lab.find_all()}
    finally:
        for lab in Lab.find_all():
            if lab.name in made:
                lab.down()
