"""Threads of reductions, and how they end."""

import subprocess
import sys
import threading
from concurrent.futures import Future

import pytest
import torch

from gradwire.collectives.base import Reduced
from gradwire.collectives.pipeline import Pipeline
from gradwire.errors import NonFiniteError, PeerError
from tests.case import tiered

ENDS_EARLY = """
import threading, time, torch
from gradwire.collectives.pipeline import Pipeline
from gradwire.collectives.waiting import waiting
from tests.case import tiered

def works():
    x, until = torch.randn(500, 500), time.monotonic() + 3
    while time.monotonic() < until:
        x = torch.nn.functional.normalize(x @ x)
    yield

def waits():
    with waiting():
        threading.Event().wait()
    yield

pipeline = Pipeline()
pipeline.submit({}())
"""


@pytest.mark.parametrize("what", tiered(["works", "waits"], first=["waits"]))
def test_a_program_may_end_while_something_is_reduced(what):
    """Work is waited for, however slow the machine is; a message that never comes is not."""
    program = [sys.executable, "-c", ENDS_EARLY.replace("{}", what)]
    ended = subprocess.run(program, capture_output=True, text=True, check=False, timeout=50)
    assert ended.returncode == 0, ended.stderr


def test_threads_have_ended_when_a_pipeline_is_closed():
    def reduction():
        yield
        return Reduced(torch.ones(1), {}, 0, 0, 0)

    before = set(threading.enumerate())
    pipeline, late = Pipeline(), threading.Event()
    future = pipeline.submit(reduction())
    future.add_done_callback(lambda _: (torch.randn(1500, 1500).matmul(torch.randn(1500, 1500)), late.set()))
    future.result()
    pipeline.close()
    assert late.is_set()
    assert set(threading.enumerate()) <= before


def failed(error):
    future = Future()
    future.set_exception(error)
    return future


def ends_well():
    yield
    return Reduced(torch.ones(1), {}, 0, 0, 0)


def test_after_a_reduction_that_it_only_follows_has_failed_all_later_ones_do():
    pipeline, gone = Pipeline(), PeerError("rank 1 is gone")
    pipeline.follow(lambda: failed(gone))
    assert pipeline.submit(ends_well()).exception() is gone
    assert pipeline.follow(Future).exception() is gone
    pipeline.close()


def test_nan_fails_nothing_but_itself():
    pipeline = Pipeline()
    pipeline.follow(lambda: failed(NonFiniteError("NaN")))
    assert pipeline.submit(ends_well()).result().mean == 1
    pipeline.close()
