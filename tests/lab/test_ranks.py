"""What runs in a lab: its environment, its output, and its end."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gradwire import ConfigError
from gradwire.lab.ranks import run_ranks


def python(text):
    return [sys.executable, "-c", f"import os, sys, time; rank = int(os.environ['RANK'])\n{text}"]


def collect(lab, command, **options):
    lines = []
    outcome = lab.run(command, output=lambda rank, line: lines.append((rank, line)), timeout_s=60, **options)
    return outcome, sorted(lines)


def test_a_rank_has_the_environment_of_torchrun(lab):
    show = python("print(*[os.environ[n] for n in sys.argv[1:]])")
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME"]
    names += ["NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "TORCH_CPP_LOG_LEVEL", "GRADWIRE_LAB", "MINE", "MASTER_PORT"]
    outcome, lines = collect(lab, [*show, *names], env={"MINE": "yes"})
    assert outcome.statuses == (0, 0)
    assert (outcome.failed, outcome.exit_status) == (None, 0)
    master = lab.hosts[0].address
    ports = set()
    for rank, line in lines:
        *values, port = line.split()
        assert values == [str(rank), "0", "2", "1", master, "eth0", "eth0", "eth0", "ERROR", lab.name, "yes"]
        ports.add(int(port))
    assert len(lines) == 2
    assert len(ports) == 1
    assert ports.pop() > 1023


def test_threads_are_one_unless_the_shell_says_otherwise(lab, monkeypatch):
    show = python("print(os.environ['OMP_NUM_THREADS'])")
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert collect(lab, show)[1] == [(0, "1"), (1, "1")]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert collect(lab, show)[1] == [(0, "3"), (1, "3")]
    assert collect(lab, show, env={"OMP_NUM_THREADS": "2"})[1] == [(0, "2"), (1, "2")]


def test_python_is_the_one_gradwire_runs_in_even_without_a_path(lab, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    outcome, lines = collect(lab, ["python", "-c", "import sys; print(sys.prefix)"])
    assert outcome.exit_status == 0
    assert lines == [(0, sys.prefix), (1, sys.prefix)]


def test_output_is_printed_with_its_rank(lab, capfd):
    speak = python("print('to', 'out'); print('to', 'err', file=sys.stderr)")
    lab.run(speak)
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[0] to out", "[1] to out"]
    assert sorted(err.splitlines()) == ["[0] to err", "[1] to err"]
    lab.run(speak, output="rank0")
    out, err = capfd.readouterr()
    assert out == "to out\n"
    assert sorted(err.splitlines()) == ["[0] to err", "[1] to err"]


def test_a_rank_that_fails_is_named_and_ends_the_others(lab, tmp_path, monkeypatch):
    monkeypatch.setattr("gradwire.lab.ranks._GRACE_S", 0.3)
    waits = f"open(rf'{tmp_path}/{{rank}}', 'w').write(str(os.getpid())); time.sleep(0.5 * rank)"
    started = time.monotonic()
    outcome, _ = collect(lab, python(f"{waits}\nif rank == 1: sys.exit(7)\ntime.sleep(100)"))
    assert time.monotonic() - started < 20
    assert (outcome.failed, outcome.exit_status) == (1, 7)
    assert outcome.statuses == (-signal.SIGTERM, 7)
    assert outcome.story() == "rank 1 exited with status 7"
    assert not any(alive(int((tmp_path / str(rank)).read_text())) for rank in range(2))


def test_a_rank_that_is_killed_is_named(lab):
    outcome, _ = collect(lab, python("if rank == 0: os.kill(os.getpid(), 9)"))
    assert (outcome.failed, outcome.exit_status) == (0, 137)
    assert outcome.story() == "rank 0 was killed by SIGKILL"


def test_time_that_is_up_ends_all_ranks_even_those_that_do_not_want_to(lab, monkeypatch):
    monkeypatch.setattr("gradwire.lab.ranks._TERM_S", 0.3)
    stubborn = python("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100)")
    outcome = lab.run(stubborn, timeout_s=1.0)
    assert outcome.timed_out
    assert (outcome.failed, outcome.exit_status) == (None, 124)
    assert outcome.statuses == (-signal.SIGKILL, -signal.SIGKILL)
    assert outcome.story() == "2 ranks, not done after 1 s"


def test_children_of_a_rank_end_with_it(lab):
    outcome, lines = collect(lab, python("import subprocess; print(subprocess.Popen(['sleep', '100']).pid)"))
    assert outcome.exit_status == 0
    assert outcome.seconds < 30
    deadline = time.monotonic() + 10  # they have been killed, but not by a parent that waits for them
    while any(alive(int(pid)) for _, pid in lines):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_command_that_does_not_exist_says_so(lab, capfd):
    outcome = lab.run(["gradwire-no-such-program"])
    assert outcome.exit_status == 127
    assert "gradwire-no-such-program: No such file" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ([], {}, r"`command` must be a list .* got \[\]"),
        ("python train.py", {}, "`command` must be a list .* got 'python train.py'"),
        (["true"], {"timeout_s": 0}, "`timeout_s` must be more than 0; got 0"),
        (["true"], {"output": "some"}, "`output` must be 'all', 'rank0' or a function .* got 'some'"),
    ],
)
def test_a_bad_request_is_told_what_is_allowed(lab, command, options, message):
    with pytest.raises(ConfigError, match=message):
        lab.run(command, **options)


@pytest.mark.full
def test_torch_meets_over_the_links(lab):
    reduce = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.full((500_000,), float(rank + 1))
dist.all_reduce(x)
print(x[0].item())
dist.destroy_process_group()
"""
    before = [lab.wire_bytes(rank) for rank in range(2)]
    outcome, lines = collect(lab, python(reduce))
    assert outcome.exit_status == 0
    assert lines == [(0, "3.0"), (1, "3.0")]
    for rank in range(2):  # a ring of two sends the tensor once
        assert lab.wire_bytes(rank) - before[rank] == pytest.approx(2_000_000 / 1448 * 1514, rel=0.05)


def alive(pid):
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.fixture
def sleepers():
    started = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def test_a_signal_that_comes_while_ranks_are_started_ends_them_too(sleepers):
    def leave(*_):
        raise SystemExit(1)

    def start(rank, stdout):
        sleepers.append(subprocess.Popen(["sleep", "100"], start_new_session=True))
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.2)  # time for the exception to come here, if this were the thread that takes signals
        return sleepers[-1]

    before = signal.signal(signal.SIGUSR1, leave)
    try:
        with pytest.raises(SystemExit):
            run_ranks(start, 2, timeout_s=None, output="all")
        assert [process.poll() for process in sleepers] == [-signal.SIGTERM]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_that_comes_while_the_thread_begins_that_starts_ranks_ends_them_too(sleepers, monkeypatch):
    begin, begun = threading.Thread.start, threading.Event()

    def start_and_leave(thread):
        begin(thread)
        if threading.current_thread() is threading.main_thread():
            begun.wait()
            raise SystemExit(1)  # as the handler of a signal would, while it is waited for that the thread runs

    def start(rank, stdout):
        begun.set()
        time.sleep(0.2)
        sleepers.append(subprocess.Popen(["sleep", "100"], start_new_session=True))
        return sleepers[-1]

    monkeypatch.setattr(threading.Thread, "start", start_and_leave)
    with pytest.raises(SystemExit):
        run_ranks(start, 2, timeout_s=None, output="all")
    assert [process.poll() for process in sleepers] == [-signal.SIGTERM]
