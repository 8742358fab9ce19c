"""Threads of reductions, and how they end."""

import subprocess
import sys
import threading

import torch

from gradwire.collectives.base import Reduced
from gradwire.collectives.pipeline import Pipeline

ENDS_EARLY = """
import torch
from gradwire.collectives.pipeline import Pipeline

def reduction():
    x = torch.randn(1500, 1500)
    for _ in range(10):
        x = torch.nn.functional.normalize(x @ x)
    yield

pipeline = Pipeline()
pipeline.submit(reduction())
"""


def test_a_program_may_end_while_something_is_reduced():
    ended = subprocess.run([sys.executable, "-c", ENDS_EARLY], capture_output=True, text=True, check=False, timeout=60)
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
