"""torchrun: two nodes, workers that are killed, nodes that are lost."""

import contextlib
import itertools
import os
import signal
import sys

import pytest

from gradwire.lab import Lab, unavailable
from tests.engines.program import EXAMPLES, Program, assert_went_on, processes, torchrun

STEPS = 60
_COUNT = itertools.count()


@pytest.fixture
def lab():
    if reason := unavailable():
        pytest.skip(reason)
    with Lab.up(2, "1gbit", name=f"engines-{os.getpid()}-{next(_COUNT)}") as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    with torchrun("torchrun_digits.py", "--steps", STEPS, "--checkpoints", folder) as program:
        return program.finish()


def node(lab, rank, *options, agent):
    """An agent of torchrun on a host of the lab. All hosts have one name here, so they are told whose the store is."""
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{lab.hosts[0].address}:29400", "--rdzv-id", "test"]
    where += ["--rdzv-conf", f"is_host={int(rank == 0)},last_call_timeout=3"]
    where += ["--local-addr", lab.hosts[rank].address, "--nproc-per-node", "1", *agent]
    command = [sys.executable, "-m", "torch.distributed.run", *where, str(EXAMPLES / "torchrun_digits.py")]

    def start(command, env, **pipes):
        env = {**env, "GLOO_SOCKET_IFNAME": lab.hosts[rank].interface}
        return lab.popen(rank, command, env, **pipes)

    return Program([*command, *map(str, options)], start=start)


def workers_of(program):
    return processes(r"python\S* \S*-u \S*torchrun_digits\.py", program.process.pid)


def test_two_nodes_of_a_lab_train_as_two_processes_do(lab, undisturbed, tmp_path):
    options = ("--steps", STEPS, "--checkpoints", tmp_path)
    with node(lab, 0, *options, agent=["--nnodes", "2"]) as one, node(lab, 1, *options, agent=["--nnodes", "2"]) as two:
        one.finish(), two.finish()
    losses = one.losses or two.losses  # whichever agent has rank 0
    assert losses == undisturbed.losses


def test_a_worker_that_is_killed_is_started_again(undisturbed, tmp_path):
    agent = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "3")
    with torchrun("torchrun_digits.py", "--steps", STEPS, "--checkpoints", tmp_path, agent=agent) as program:
        program.wait_for_step(25)
        os.kill(workers_of(program)[-1], signal.SIGKILL)
        program.finish()
    assert_went_on(program, undisturbed, STEPS, least=20)


def test_a_node_that_is_lost_is_done_without(lab, undisturbed, tmp_path):
    """The group forms again at the new size, and goes on from the checkpoint that two ranks saved."""
    agent = ["--nnodes", "1:2", "--max-restarts", "3"]
    options = ("--steps", STEPS, "--checkpoints", tmp_path)
    with node(lab, 0, *options, agent=agent) as one, node(lab, 1, *options, agent=agent) as two:
        told = None
        while told is None:
            told = next((each for each in (one, two) if max(each.losses, default=0) >= 25), None)
            assert one.process.poll() is None, one.text()
            assert two.process.poll() is None, two.text()
        for pid in [two.process.pid, *processes("", two.process.pid)]:  # agent and worker; node 0 has the store
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        one.finish()
    steps = {**two.losses, **one.losses}
    assert sorted(steps) == list(range(1, STEPS + 1))
    assert told.ranks[20] == 2
    assert one.began[-1] >= 20  # from a checkpoint
    assert one.ranks[STEPS] == 1
    assert one.accuracy == pytest.approx(undisturbed.accuracy, abs=0.05)
