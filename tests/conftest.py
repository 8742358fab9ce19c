import os
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="gradwire-cache-")  # what plans remember of this machine

import pytest
import torch
from hypothesis import settings

from gradwire import kernels

torch.set_num_threads(1)
settings.register_profile("gradwire", deadline=None, derandomize=True, max_examples=200)
settings.load_profile("gradwire")


@pytest.fixture(params=kernels.backends())
def backend(request):
    """Every kernel backend of this installation in turn; tensors are made where it runs."""
    with kernels.use(request.param), torch.device(_home(request.param)):
        yield request.param


@pytest.fixture
def fastest_backend():
    """What runs if nobody says otherwise; for large tensors."""
    name = "triton" if torch.cuda.is_available() else kernels.available("cpu")["encode_blocks"]
    with kernels.use(name), torch.device(_home(name)):
        yield name


def _home(backend):
    return "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"


def pytest_terminal_summary(terminalreporter):
    """Say how much of the suite this machine cannot run; every skip is one of ``tests.needs``."""
    skipped = len(terminalreporter.stats.get("skipped", ()))
    if skipped:
        terminalreporter.write_line(
            f"{skipped} skipped for what this machine lacks: the lines above say what provides it"
        )
