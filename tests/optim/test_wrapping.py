"""Wrapped optimizers, saved and loaded."""

import pytest
import torch

from gradwire import ConfigError
from gradwire.optim.wrapping import load_optimizer, saved_optimizer


def trained(**settings):
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = torch.optim.AdamW([weight], **settings)
    weight.grad = torch.tensor([0.5, 0.25])
    optimizer.step()
    return optimizer


def test_a_loaded_optimizer_has_the_settings_and_the_state_that_were_saved():
    saved = trained(lr=0.5, betas=(0.8, 0.9), weight_decay=0.25)
    loaded = trained(lr=0.1)
    load_optimizer(loaded, saved_optimizer(saved))
    assert {**loaded.param_groups[0], "params": 0} == {**saved.param_groups[0], "params": 0}
    (mine,), (theirs,) = loaded.state.values(), saved.state.values()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_a_state_of_other_groups_changes_nothing():
    loaded = trained(lr=0.1)
    state = saved_optimizer(trained(lr=0.5))
    with pytest.raises(ConfigError, match="the state has 2 parameter groups; this optimizer has 1"):
        load_optimizer(loaded, {**state, "param_groups": state["param_groups"] * 2})
    assert loaded.param_groups[0]["lr"] == 0.1
