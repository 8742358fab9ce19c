"""``gradwire doctor`` on this machine, with real ranks and real links; and on machines that lack something."""

import json
import os
import subprocess
import sys

import pytest

import gradwire
from gradwire.lab import Lab
from tests import needs
from tests.workers.warm import gradwire as run


def doctor(*arguments, status=0, **environment):
    result = run("doctor", "--json", *arguments, environment=environment, status=status)
    told = json.loads(result.stdout)
    return {check["name"]: check for check in told["checks"]}, told


def test_everything_is_looked_at_and_links_are_measured_beside_gloo():
    checks, told = doctor()
    for name in ("gradwire", "Python", "torch", "C++ compiler", "kernels, CPU", "kernels, CUDA", "gloo", "NCCL", "MPI"):
        assert checks[name]["level"] in ("ok", "warning")
    for name in ("processors", "cache", "clock", "interface lo", "gloo uses", "loopback", "extra ray", "lab", "ranks"):
        assert checks[name]["fact"]
    assert checks["gradwire"]["fact"] == gradwire.__version__
    assert told["verdict"] in ("ok", "warning")
    (pair,) = told["links"]["pairs"]
    assert pair["ranks"] == [0, 1]
    assert pair["mbit_s"] > 100  # loopback
    assert pair["all_reduce_mbit_s"] > 100
    assert 0 < pair["ms"] < 100


def test_people_get_a_line_a_check_and_the_commands_that_mend():
    out = run("doctor", "--workers", "0").stdout
    assert "kernels, CPU" in out
    assert "loopback" in out
    assert "problems" in out.splitlines()[-1]
    missing = [line for line in out.splitlines() if "not installed" in line]
    assert not missing or "fix: pip install 'gradwire[" in out


def test_a_problem_is_told_with_its_fix_and_an_exit_status():
    checks, told = doctor("--workers", "0", status=1, GLOO_SOCKET_IFNAME="nothing0")
    assert told["verdict"] == "problem"
    assert checks["gloo uses"]["level"] == "problem"
    assert "'nothing0', which does not exist" in checks["gloo uses"]["fact"]
    assert "GLOO_SOCKET_IFNAME" in checks["gloo uses"]["fix"]


def test_a_cache_that_cannot_be_written_is_a_warning():
    checks, told = doctor("--workers", "0", XDG_CACHE_HOME="/dev/null/there")
    assert told["verdict"] == "warning"
    assert checks["cache"]["level"] == "warning"
    assert "XDG_CACHE_HOME" in checks["cache"]["fix"]


def after(preparation):
    """The checks of a process that has been prepared."""
    program = f"{preparation}; from gradwire.cli import main; main()"
    command = [sys.executable, "-c", program, "doctor", "--workers", "0", "--json"]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout)
    return {check["name"]: check for check in told["checks"]}


@pytest.mark.full
def test_more_threads_than_cores_are_a_warning():
    processors = after(f"import torch; torch.set_num_threads({(os.cpu_count() or 1) + 1})")["processors"]
    assert processors["level"] == "warning"
    assert processors["fix"].startswith("export OMP_NUM_THREADS=")


def test_kernels_that_are_not_built_are_a_warning_that_says_how_to_build_them():
    kernels = after("import sys; sys.modules['gradwire._native'] = None")["kernels, CPU"]
    assert kernels["level"] == "warning"
    assert kernels["fact"].startswith("reference, in plain torch")
    assert "pip install" in kernels["fix"]


@pytest.mark.full
def test_under_torchrun_the_links_of_its_ranks_are_measured_and_the_first_rank_prints():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "--master-addr", "127.0.0.1"]
    command += ["--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    result = subprocess.run(
        [*command, "-m", "gradwire", "doctor", "--json"], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert [pair["ranks"] for pair in told["links"]["pairs"]] == [[0, 1], [0, 2], [1, 2]]
    assert all(pair["mbit_s"] > 0 and pair["error"] is None for pair in told["links"]["pairs"])


@pytest.mark.full
def test_a_link_of_a_known_rate_is_measured_as_such():
    needs.lab()
    measured = []
    with Lab.up(2, "100mbit", name=f"doctor-{os.getpid()}") as lab:
        command = [sys.executable, "-m", "gradwire", "doctor", "--json"]
        while len(measured) < 3 and not measured[-1:] > [80]:  # whatever else this machine does makes a link slower
            ranks = [lab.popen(rank, command, stdout=subprocess.PIPE, text=True) for rank in range(2)]
            outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
            assert [rank.returncode for rank in ranks] == [0, 0]
            assert outputs[1] == ""
            (pair,) = json.loads(outputs[0])["links"]["pairs"]
            measured.append(pair["mbit_s"])
    assert 80 < max(measured) < 130


def test_a_wrong_number_of_workers_is_refused():
    assert "`--workers` must be from 0 to 64; got -1" in run("doctor", "--workers", "-1", status=2).stderr
