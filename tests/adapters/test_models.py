"""Which models ``compress`` takes; the words of its refusals are tested in test_ddp.py, with real ranks."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gradwire import ConfigError
from gradwire.adapters.models import parameters_to_reduce


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128, torch.float32])
@pytest.mark.parametrize("codec", ["dense", "int4"])
@pytest.mark.parametrize("delayed", [False, True])
def test_only_ddps_own_all_reduce_takes_double_precision(dtype, codec, delayed):
    module = nn.ParameterDict({"w": nn.Parameter(torch.zeros(3, dtype=dtype))})
    model = SimpleNamespace(module=module, _delay_all_reduce_params=list(module.values()) if delayed else [])
    if dtype == torch.float32 or (codec == "dense" and not delayed):
        assert list(parameters_to_reduce(model, codec)) == ["w"]
    else:
        with pytest.raises(ConfigError, match=f"'w' is {dtype}, and its gradient would travel in 32 bits"):
            parameters_to_reduce(model, codec)
