import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

from gradwire import kernels

torch.set_num_threads(1)
settings.register_profile("gradwire", deadline=None, derandomize=True, max_examples=200)
settings.load_profile("gradwire")


@pytest.fixture(params=kernels.backends())
def backend(request):
    """Every kernel backend of this installation in turn."""
    with kernels.use(request.param):
        yield request.param
