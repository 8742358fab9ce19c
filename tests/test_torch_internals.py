"""What gradwire uses of torch's internals: that the installed torch has it, and what happens with one that lacks it."""

import ast
import re
from importlib.metadata import requires
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import ConfigError, torch_internals
from gradwire.adapters import ddp

SOURCES = Path(gradwire.__file__).parent
# Of other libraries, and of Python.
NOT_OF_TORCH = {"_exit", "_load_optimizer_and_scheduler", "_models", "_native"}
_LOOK_UPS = {"getattr", "hasattr", "setattr", "delattr"}
_USED = re.compile(r"""[.'" ](_[a-z]\w*|_C)\b""")
_OWN = re.compile(r"(?:(?:def|class) |(?:self|cls)\.(?=\w+(?:,|:| =))|^ *(?=\w+(?:,|:| =)))(_\w+)", re.MULTILINE)


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def linear():
    torch.manual_seed(0)
    return DistributedDataParallel(torch.nn.Linear(8, 4))


def trained(model, steps=3):
    """The weights after a few steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 8), 1.0 + step)).square().sum().backward()
        optimizer.step()
    return torch.cat([each.detach().flatten() for each in model.parameters()])


class Without:
    """An object without one of its attributes."""

    def __init__(self, of, *names):
        self._of, self._names = of, names

    def __getattr__(self, name):
        if name in self._names:
            raise AttributeError(f"no {name}")
        return getattr(self._of, name)


# The rule.


def _private_names():
    """Each name with an underscore that is looked up outside of ``torch_internals`` and is not ours, and where."""
    texts = {path: path.read_text() for path in SOURCES.rglob("*.py")}
    known = NOT_OF_TORCH.union(*(_OWN.findall(text) for text in texts.values()))
    found = {}
    for path, text in texts.items():
        if path.name == "torch_internals.py" or "benchmarks" in path.parts:
            continue
        if known.issuperset(_USED.findall(text)):
            continue
        for node in ast.walk(ast.parse(text)):  # not of comments and messages
            for name in _looked_up(node):
                if name not in known:
                    found[name] = f"{path.relative_to(SOURCES)}:{node.lineno}"
    return found


def _looked_up(node):
    names = []
    if isinstance(node, ast.Attribute):
        names = [node.attr]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _LOOK_UPS:
        names = [each.value for each in node.args[1:2] if isinstance(each, ast.Constant)]
    elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
        names = [*node.module.split("."), *(alias.name for alias in node.names)]
    return [name for name in names if name.startswith("_") and not name.startswith("__")]


def test_private_names_of_torch_are_looked_up_in_one_module():
    assert _private_names() == {}


def test_the_releases_tested_begin_with_the_oldest_that_is_allowed():
    assert f"torch>={torch_internals.TESTED[0]}" in requires("gradwire")


# Process groups and stores.


def test_the_default_store_is_the_one_the_group_was_made_with():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        before = store.num_keys()
        torch_internals.default_store().set("word", "here")
        assert torch_internals.default_store().get("word") == b"here"
        assert store.num_keys() == before + 1
    finally:
        dist.destroy_process_group()


def test_without_a_default_store_the_groups_own_is_taken(group, monkeypatch):
    monkeypatch.delattr(dist.distributed_c10d, "_get_default_store")
    torch_internals.default_store().set("word", "here")
    assert torch_internals.default_store().get("word") == b"here"
    gradwire.compress(linear(), "int8").close()
    monkeypatch.delattr(dist.ProcessGroup, "get_group_store")
    with pytest.raises(ConfigError, match=r"needs torch\.distributed.*_get_default_store, which torch .* not have"):
        torch_internals.default_store()


def test_without_a_process_group_the_default_store_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="init_process_group"):
        torch_internals.default_store()
    monkeypatch.delattr(dist.distributed_c10d, "_get_default_store")
    with pytest.raises(ValueError, match="init_process_group"):
        torch_internals.default_store()


def test_gloo_is_found_and_its_absence_is_named(monkeypatch):
    backend = torch_internals.gloo_backend(dist.HashStore(), 0, 1, 10.0)
    assert backend.size() == 1
    monkeypatch.delattr(dist, "ProcessGroupGloo")
    with pytest.raises(ConfigError, match="ProcessGroupGloo"):
        torch_internals.gloo_backend(dist.HashStore(), 0, 1, 10.0)


# DDP.


@pytest.mark.parametrize("codec", ["dense", "int8"])
def test_ddp_trains_with_and_without_a_group_that_can_be_replaced(group, monkeypatch, codec):
    model = linear()
    assert torch_internals.can_replace_group(model)
    compression = gradwire.compress(model, codec)
    assert (compression._plain is not None) == (codec == "dense")
    expected = trained(model)
    compression.close()

    monkeypatch.setattr(torch_internals, "_REPLACE", "_a_name_that_torch_dropped")
    other = linear()
    assert not torch_internals.can_replace_group(other)
    compression = gradwire.compress(other, codec)
    assert compression._plain is None  # a hook
    assert torch.equal(trained(other), expected)
    compression.close()


def test_a_hook_is_found_and_forgotten(group):
    model = linear()
    assert not torch_internals.has_hook(model)
    torch_internals.forget_hook(model)  # of none

    def hook(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model.register_comm_hook(None, hook)
    assert torch_internals.has_hook(model)
    with pytest.raises(ConfigError, match="hook already"):
        gradwire.compress(model)
    torch_internals.forget_hook(model)
    assert not torch_internals.has_hook(model)
    with pytest.raises(RuntimeError, match="can only be called once"):  # where torch keeps no list
        model.register_comm_hook(None, hook)
    assert not torch_internals.has_hook(Without(model, "_comm_hooks"))
    torch_internals.forget_hook(Without(model, "_comm_hooks"))


@pytest.mark.parametrize("lacks", [(), ("_join_config",)])
def test_means_of_the_ranks_that_have_inputs_are_noticed(group, lacks):
    model = linear()
    seen = Without(model, *lacks)
    assert torch_internals.divides_by_all_ranks(seen)
    with model.join():
        assert torch_internals.divides_by_all_ranks(seen)
        trained(model, 1)
    with model.join(divide_by_initial_world_size=False):
        assert not torch_internals.divides_by_all_ranks(seen)
        trained(model, 1)


def test_means_are_right_where_ranks_count_inputs_and_need_not(group, monkeypatch):
    model, other = linear(), linear()
    compressions = [gradwire.compress(each, "int8") for each in (model, other)]
    expected = trained(model)
    monkeypatch.setattr(ddp, "divides_by_all_ranks", lambda _: False)
    assert torch.equal(trained(other), expected)
    for each in compressions:
        each.close()


def test_what_ddp_was_wrapped_with_is_found(group):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    plain = DistributedDataParallel(net)
    assert not torch_internals.delays_parameters(plain)
    assert not torch_internals.uses_python_reducer(plain)
    assert torch_internals.ignored_parameters(plain) == frozenset()
    delayed = DistributedDataParallel(
        net, delay_all_reduce_named_params=[("1.bias", net[1].bias)], param_to_hook_all_reduce=net[0].weight
    )
    assert torch_internals.delays_parameters(delayed)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["0.bias"])
    assert torch_internals.ignored_parameters(DistributedDataParallel(net)) == {"0.bias"}


def test_a_python_reducer_is_found(group):
    import torch._dynamo

    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        assert torch_internals.uses_python_reducer(linear())


def test_a_compiled_model_is_unpacked_or_refused(group):
    model = linear()
    compiled = torch.compile(model, backend="eager")
    assert torch_internals.uncompiled(compiled) is model
    with pytest.raises(ConfigError, match=r"`model` must be a .*DistributedDataParallel"):
        gradwire.compress(Without(compiled, "_orig_mod"))


# Autograd.


def test_what_is_queued_is_called_when_backward_ends():
    queue, calls = torch_internals.backward_queue(), []
    x = torch.ones(2, requires_grad=True)
    x.register_post_accumulate_grad_hook(lambda _: queue(lambda: calls.append(x.grad.tolist())))
    x.sum().backward()
    assert calls == [[1.0, 1.0]]
    with pytest.raises(RuntimeError):
        queue(lambda: None)


def test_compress_says_that_the_queue_is_missing(group, monkeypatch):
    monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", None)
    with pytest.raises(ConfigError, match=r"gradwire\.compress needs torch\.autograd.*queue_callback, which torch"):
        gradwire.compress(linear(), "int8")


# GradScaler.


def test_what_a_scaler_knows_is_found():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    torch_internals.set_found_inf(scaler, optimizer, torch.tensor(1.0))  # of an optimizer it does not know
    assert not torch_internals.is_unscaled(scaler, optimizer)
    scaler.scale(parameter.sum()).backward()
    scaler.unscale_(optimizer)
    assert torch_internals.is_unscaled(scaler, optimizer)
    torch_internals.set_found_inf(scaler, optimizer, torch.tensor(1.0))
    scaler.step(optimizer)
    scaler.update()
    assert parameter.tolist() == [1.0, 1.0]  # the step was skipped
    assert scaler.get_scale() == 2.0


def test_a_scaler_without_its_states_is_refused_and_one_of_another_kind_is_not():
    scaler = torch.amp.GradScaler("cpu")
    del scaler._per_optimizer_states
    with pytest.raises(ConfigError, match=r"a sharded optimizer with a scaler needs .*_per_optimizer_states"):
        torch_internals.is_unscaled(scaler, object())
    assert not torch_internals.is_unscaled(object(), object())
    torch_internals.set_found_inf(object(), object(), torch.tensor(1.0))


# FSDP2.


def test_fsdp_modules_are_looked_into(group):
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    model = torch.nn.Sequential(fully_shard(torch.nn.Linear(4, 4), mesh=mesh), torch.nn.ReLU())
    empty = fully_shard(torch.nn.Sequential(fully_shard(torch.nn.Linear(2, 2), mesh=mesh)), mesh=mesh)
    module_kind, _, scatter_kind = torch_internals.fsdp_communication()
    assert isinstance(model[0], module_kind)
    assert torch_internals.fsdp_group(model[0]).size() == 1
    assert torch_internals.fsdp_group(empty) is None
    assert isinstance(torch_internals.fsdp_reduce_scatter(model[0]), scatter_kind)
    compression = gradwire.fsdp2.compress(model, "int8")
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(ConfigError, match="compresses already"):
        gradwire.fsdp2.compress(model, "int8")
    compression.close()


def test_a_class_that_fsdp_lacks_is_named(monkeypatch):
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard import _fsdp_api

    with monkeypatch.context() as without:
        without.delattr(_fsdp_api, "ReduceScatter")
        with pytest.raises(ConfigError, match=r"gradwire\.fsdp2 needs AllGather and ReduceScatter of .*_fsdp_api"):
            torch_internals.fsdp_communication()
    with monkeypatch.context() as without:
        without.delattr(FSDPModule, "set_custom_all_gather")
        with pytest.raises(ConfigError, match=r"needs FSDPModule\.set_custom_all_gather"):
            torch_internals.fsdp_communication()
    with pytest.raises(ConfigError, match=r"needs object\._get_fsdp_state"):
        torch_internals.fsdp_group(object())
