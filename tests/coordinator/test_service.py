"""The coordinator over the network: the same arithmetic, compressed both ways, through restarts."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from importlib.resources import files
from pathlib import Path

import grpc
import pytest
import tomllib
import torch
from safetensors.torch import save_file

import gradwire
import gradwire.tree
from gradwire import (
    ConfigError,
    CoordinatorClient,
    Credentials,
    NonFiniteError,
    PeerError,
    ServeSettings,
    StaleGradientError,
    Staleness,
    serve,
)
from gradwire.coordinator.protocol import HEALTH, messages, method
from gradwire.coordinator.settings import Durability, Limits, ModelRules, Tls, load_settings
from gradwire.coordinator.structure import entries_of
from tests.coordinator.pages import page
from tests.workers.warm import gradwire as run

LOCAL = "127.0.0.1:0"


def start(parameters=None, **settings):
    optimizer = settings.pop("optimizer", None)
    return serve(ServeSettings(address=LOCAL, **settings), parameters=parameters, optimizer=optimizer)


@pytest.mark.parametrize("given", [torch.ones(3), [torch.ones(3), torch.zeros(2, 2)], {"a": torch.ones(3)}])
def test_parameters_keep_their_structure(given):
    with start() as server, CoordinatorClient(server.address, codec="none") as client:
        with pytest.raises(ConfigError, match="there are no parameters"):
            client.read()
        assert client.set_model_parameters(given) == 0
        assert client.set_model_parameters(given, only_if_empty=True) == 0
        client.add_gradients(given, version=0)
        version, found = client.read()
        assert version == client.version == 1
        assert type(found) is type(given)
        entries, _ = entries_of("parameters", found)
        assert all(torch.equal(tensor, torch.zeros_like(tensor)) for tensor in entries.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(dtype):
    with start({"w": torch.ones(4, dtype=dtype)}) as server, CoordinatorClient(server.address, codec="none") as client:
        client.add_gradients({"w": torch.full((4,), 0.5, dtype=dtype)})
        assert torch.equal(client.get_model_parameters()["w"], torch.full((4,), 0.5, dtype=dtype))


def test_modes_and_averages():
    with start({"w": torch.zeros(2)}, model=ModelRules(mode="ascent", average_over=2)) as server:
        with CoordinatorClient(server.address, codec="none") as client:
            client.add_gradients({"w": torch.tensor([1.0, 3.0])})
            assert client.version == 0
            client.add_gradients({"w": torch.tensor([3.0, 1.0])})
            assert torch.equal(client.read()[1]["w"], torch.tensor([2.0, 2.0]))
            client.set_parameters("descent")
            client.add_gradients({"w": torch.ones(2)})
            assert client.clear_gradients() == 1
            for _ in range(2):
                client.add_gradients({"w": torch.ones(2)})
            assert torch.equal(client.read()[1]["w"], torch.ones(2))


def test_a_mode_is_accepted_in_any_case_and_kept_in_lower_case(tmp_path):
    file = tmp_path / "serve.toml"
    file.write_text(f"""address = "{LOCAL}"\nmodel.mode = "Ascent"\ndurability.folder = "{tmp_path / "kept"}"\n""")
    settings = load_settings(file)
    assert settings.model.mode == ModelRules(mode="ASCENT").mode == "ascent"
    with serve(settings, parameters={"w": torch.zeros(2)}) as server:
        with (
            CoordinatorClient(server.address, codec="none") as client,
            grpc.insecure_channel(server.address) as channel,
        ):
            client.add_gradients({"w": torch.ones(2)})
            client.set_parameters("Descent")
            client.add_gradients({"w": torch.full((2,), 3.0)})
            known = messages()
            manage = channel.unary_unary(method("Manage"), lambda request: request.SerializeToString())
            manage(known["ManageRequest"](mode="ASCENT"))  # as a client in another language may write it
            client.add_gradients({"w": torch.full((2,), 10.0)})
            assert client.read()[1]["w"].tolist() == [8.0, 8.0]
            describe = channel.unary_unary(method("Describe"), lambda request: request.SerializeToString())
            assert known["Description"].FromString(describe(known["DescribeRequest"]())).mode == "ascent"
            with pytest.raises(grpc.RpcError, match="`mode` must be 'descent' or 'ascent', in any case; got 'up'"):
                manage(known["ManageRequest"](mode="up"))


def test_an_optimizer_by_name_or_by_function():
    expected = torch.nn.Parameter(torch.zeros(5))
    optimizer = torch.optim.Adam([expected], lr=0.1)
    for _ in range(3):
        expected.grad = torch.linspace(-1, 1, 5)
        optimizer.step()
    named = ModelRules(optimizer="Adam", options={"lr": 0.1})
    for settings in ({"model": named}, {"optimizer": lambda p: torch.optim.Adam(p, lr=0.1)}):
        with start({"w": torch.zeros(5)}, **settings) as server:
            with CoordinatorClient(server.address, codec="none") as client:
                for _ in range(3):
                    client.add_gradients({"w": torch.linspace(-1, 1, 5)})
                assert torch.equal(client.read()[1]["w"], expected.detach())


def test_error_feedback_is_kept_at_the_client():
    """What has been applied and what is left add up to what was given."""
    with start({"w": torch.zeros(1000)}) as server, CoordinatorClient(server.address, codec="topk:0.1") as client:
        generator, total = torch.Generator().manual_seed(0), torch.zeros(1000)
        for _ in range(20):
            given = torch.randn(1000, generator=generator)
            total += given
            client.add_gradients({"w": given})
        left = client._shards[0].states["w"]["residual"]
        assert torch.allclose(-client.read()[1]["w"] + left, total, atol=1e-4)


def test_a_refused_gradient_leaves_the_residual_as_it_was():
    rules = Staleness(bound=1)
    with start({"w": torch.zeros(100)}, staleness=rules) as server:
        with CoordinatorClient(server.address, codec="topk:0.1") as client:
            for version in range(3):
                client.add_gradients({"w": torch.randn(100)}, version=version)
            before = client._shards[0].states["w"]["residual"].clone()
            with pytest.raises(StaleGradientError) as caught:
                client.add_gradients({"w": torch.randn(100)}, version=0)
            assert (caught.value.version, caught.value.current, caught.value.bound) == (0, 3, 1)
            with pytest.raises(NonFiniteError, match=r"`gradients\['w'\]` holds NaN or Inf"):
                client.add_gradients({"w": torch.full((100,), float("nan"))})
            assert torch.equal(client._shards[0].states["w"]["residual"], before)
            client.add_gradients({"w": torch.randn(100)}, version=2)


def test_a_worker_that_starts_again_goes_on_with_its_residuals():
    with start({"w": torch.zeros(100)}) as server:
        with CoordinatorClient(server.address, codec="topk:0.1", worker="a") as client:
            client.add_gradients({"w": torch.randn(100)})
            state = gradwire.tree.from_bytes(gradwire.tree.to_bytes(client.state_dict()))
        with CoordinatorClient(server.address, codec="topk:0.1", worker="a") as client:
            client.load_state_dict(state)
            assert torch.equal(client._shards[0].states["w"]["residual"], state["states"][0]["w"]["residual"])
            client.add_gradients({"w": torch.randn(100)})
        with (
            CoordinatorClient(server.address, codec="int2") as client,
            pytest.raises(ConfigError, match="`state` must be"),
        ):
            client.load_state_dict(state)


def test_workers_that_are_not_heard_of_make_room(monkeypatch):
    with start({"w": torch.zeros(2)}, limits=Limits(workers=2)) as server:
        push = lambda name: CoordinatorClient(server.address, codec="none", worker=name)  # noqa: E731
        for name in ("a", "b"):
            with push(name) as client:
                client.add_gradients({"w": torch.ones(2)})
        with push("c") as client, pytest.raises(ConfigError, match="there are 2 workers already"):
            client.add_gradients({"w": torch.ones(2)})
        monkeypatch.setattr("gradwire.coordinator.receiver._IDLE_S", -1.0)
        with push("c") as client:
            client.add_gradients({"w": torch.ones(2)})
        assert list(server._host.workers) == ["c"]


def test_servers_that_cannot_start(tmp_path):
    with start(metrics=LOCAL) as server:
        with pytest.raises(ConfigError, match="cannot be had"):
            serve(ServeSettings(address=server.address))
        with pytest.raises(ConfigError, match=r"`metrics` .* cannot be had"):
            start(metrics=server.metrics_address)
    with pytest.raises(ConfigError, match="cannot be read"):
        start(tls=Tls(certificate=str(tmp_path / "none"), key=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match=r"`staleness\.rule` must be 'none' or 'weight' on a server"):
        start(staleness=Staleness(rule="compensate"))


def test_nan_is_taken_for_zero_if_asked():
    with start({"w": torch.zeros(2)}) as server:
        with CoordinatorClient(server.address, codec="none", nonfinite="zero") as client:
            client.add_gradients({"w": torch.tensor([1.0, float("inf")])})
            assert torch.equal(client.read()[1]["w"], torch.tensor([-1.0, 0.0]))


@pytest.mark.parametrize("weights", ["int8", "int4", "topk:0.1"])
def test_compressed_parameters_do_not_drift(weights):
    """However many changes a reader has been sent, it has the very copy that the server keeps for it."""
    start_at = {"w": torch.randn(64, 64), "b": torch.randn(64, dtype=torch.float32)}
    with (
        start(start_at) as server,
        CoordinatorClient(server.address, codec="none") as writer,
        CoordinatorClient(server.address, weights=weights) as reader,
        CoordinatorClient(server.address, weights=weights) as seldom,
    ):
        errors = []
        seldom.read()
        for _ in range(40):
            writer.add_gradients({"w": 0.01 * torch.randn(64, 64)})
            _, found = reader.read()
            exact = writer.read()[1]
            errors.append((found["w"] - exact["w"]).abs().max().item())
        assert max(errors[-10:]) <= 2 * max(errors[:10]) + 1e-6
        kept = server._host.readers.copies._copies[reader.worker].values
        assert all(torch.equal(found[name], kept[name]) for name in kept)
        for _ in range(60):  # the parameters rest: what was lost arrives
            _, found = seldom.read()
        assert (found["w"] - exact["w"]).abs().max() < 1e-3


def test_a_reader_whose_copy_was_dropped_is_sent_everything():
    with start({"w": torch.randn(1000)}, limits=Limits(reader_mb=0.006)) as server:  # one copy fits
        with (
            CoordinatorClient(server.address, weights="int8") as one,
            CoordinatorClient(server.address, weights="int8") as other,
        ):
            for _ in range(3):
                assert torch.equal(one.read()[1]["w"], server._host.store.there().parameters["w"])
                assert torch.equal(other.read()[1]["w"], server._host.store.there().parameters["w"])


def test_changes_that_would_be_larger_than_the_parameters_are_not_sent():
    with start({"w": torch.randn(1000)}) as server, CoordinatorClient(server.address, weights="topk:1") as client:
        for _ in range(2):
            assert torch.equal(client.read()[1]["w"], server._host.store.there().parameters["w"])
        assert client.status()[0].bytes_sent < 2 * 4500


def test_several_servers_are_one_model():
    torch.manual_seed(3)
    given = {"w": torch.randn(7, 5), "b": torch.randn(3), "s": torch.randn(())}
    servers = [start() for _ in range(3)]
    addresses = [server.address for server in servers]
    try:
        with CoordinatorClient(addresses, codec="none") as client:
            client.set_model_parameters(given)
            version, found = client.read()
            assert version == (0, 0, 0)
            assert all(torch.equal(found[name], given[name]) for name in given)
            client.add_gradients({"w": torch.ones(7, 5)}, version=version)
            client.add_gradients({"b": torch.ones(3)})
            assert client.version == (1, 1, 2)
            assert torch.equal(client.read()[1]["w"], given["w"] - 1)
            with pytest.raises(ConfigError, match="`version` must be one for each of 3 servers; got 1"):
                client.add_gradients({"w": torch.ones(7, 5)}, version=1)
        with CoordinatorClient(addresses, weights="int8") as another:
            assert torch.equal(another.read()[1]["b"], given["b"] - 1)
        assert [sum(p.numel() for p in s._host.store.there().parameters.values()) for s in servers] == [13, 13, 13]
        with CoordinatorClient(addresses[:2]) as wrong, pytest.raises(PeerError, match="elements of 'w'"):
            wrong.read()
    finally:
        for server in servers:
            server.stop()


def test_a_worker_computes_and_pushes():
    torch.manual_seed(0)
    truth, model = torch.randn(8), torch.nn.Linear(8, 1)
    with start(model.state_dict(), optimizer=lambda p: torch.optim.Adam(p, lr=0.05)) as server:

        def work():
            mine = torch.nn.Linear(8, 1)
            with CoordinatorClient(server.address, codec="int4", weights="int8") as client:
                for _ in range(60):
                    x = torch.randn(32, 8)
                    client.compute_and_push(mine, lambda x=x: (mine(x)[:, 0] - x @ truth).square().mean())

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with CoordinatorClient(server.address) as client:
            assert client.load_into(model) == 240
            assert (model.weight[0] - truth).abs().max() < 0.1


def test_a_gradient_that_is_too_old_is_no_error_of_a_step():
    model = torch.nn.Linear(2, 1)
    with start(model.state_dict(), staleness=Staleness(bound=0)) as server:
        with CoordinatorClient(server.address, codec="none") as client, CoordinatorClient(server.address) as other:

            def loss():
                other.add_gradients({"bias": torch.zeros(1)})
                return model(torch.ones(1, 2)).square().sum()

            pushed = client.compute_and_push(model, loss)
            assert (pushed.version, pushed.accepted) == (0, False)


def test_whole_models_are_averaged():
    """Federated averaging: the change that a model was trained by is pushed, and the mean of two applied."""
    began = {"w": torch.tensor([1.0, 2.0])}
    with start(began, model=ModelRules(average_over=2)) as server:
        with (
            CoordinatorClient(server.address, codec="none") as one,
            CoordinatorClient(server.address, codec="none") as two,
        ):
            one.add_model_parameters({"w": torch.tensor([3.0, 0.0])}, began)
            two.add_model_parameters({"w": torch.tensor([5.0, 4.0])}, began)
            assert torch.equal(one.read()[1]["w"], torch.tensor([4.0, 2.0]))


def test_many_pushes_on_their_way():
    with start({"w": torch.zeros(10)}) as server, CoordinatorClient(server.address, codec="none", window=16) as client:
        for _ in range(500):
            client.add_gradients({"w": torch.ones(10)})
        client.flush()
        assert torch.equal(client.read()[1]["w"], torch.full((10,), -500.0))
        client.add_gradients({"w": torch.ones(11)})
        with pytest.raises(ConfigError, match="must have shape"):
            client.flush()


def test_close_waits_for_every_push_and_says_what_was_wrong_with_one():
    with start({"w": torch.zeros(10)}) as server:
        client = CoordinatorClient(server.address, codec="none", window=16)
        for _ in range(8):
            client.add_gradients({"w": torch.ones(10)})
        client.close()
        assert server.version == 8
        client = CoordinatorClient(server.address, codec="none", window=16)
        client.add_gradients({"w": torch.ones(11)})
        with pytest.raises(ConfigError, match="must have shape"):
            client.close()


def test_threads_share_a_client():
    with start({"w": torch.zeros(10)}) as server, CoordinatorClient(server.address, codec="none") as client:

        def work():
            for _ in range(50):
                client.add_gradients({"w": torch.ones(10)})

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert torch.equal(client.read()[1]["w"], torch.full((10,), -300.0))


def test_two_workers_of_one_name_are_told():
    with (
        start({"w": torch.zeros(2)}) as server,
        CoordinatorClient(server.address, worker="a", codec="none") as old,
        CoordinatorClient(server.address, worker="a", codec="none") as new,
    ):
        old.add_gradients({"w": torch.ones(2)})
        new.add_gradients({"w": torch.ones(2)})
        with pytest.raises(PeerError, match=r"worker 'a' has begun session .* since"):
            old.add_gradients({"w": torch.ones(2)})


def test_a_restart_is_waited_for_and_nothing_is_lost(tmp_path):
    """A rolling restart: SIGTERM, and another server at the same address and folder."""
    kept = Durability(folder=str(tmp_path / "store"))
    first = start({"w": torch.zeros(100)}, durability=kept)
    address, done, pushed = first.address, threading.Event(), [0]

    def work():
        with CoordinatorClient(address, codec="none") as client:
            while not done.is_set():
                client.add_gradients({"w": torch.ones(100)})
                pushed[0] += 1

    worker = threading.Thread(target=work)
    worker.start()
    for _ in range(3):
        time.sleep(0.2)
        before = pushed[0]
        first.stop()
        first = serve(ServeSettings(address=address, durability=kept))
    time.sleep(0.3)
    done.set()
    worker.join()
    with CoordinatorClient(address) as client:
        assert torch.equal(client.read()[1]["w"], torch.full((100,), -float(pushed[0])))
    assert pushed[0] > before > 0
    first.stop()


def test_a_server_that_cannot_be_reached_is_named():
    with CoordinatorClient("127.0.0.1:1", retry_s=0.3) as client:
        with pytest.raises(PeerError, match=r"the coordinator at 127\.0\.0\.1:1 cannot be reached"):
            client.read()
        with pytest.raises(PeerError, match=r"the coordinator at 127\.0\.0\.1:1 cannot be reached"):
            client.add_gradients({"w": torch.ones(2)})


def test_health_readiness_and_metrics():
    with start(metrics=LOCAL) as server:
        metrics = server.metrics_address

        def health():
            known = messages()
            with grpc.insecure_channel(server.address) as channel:
                call = channel.unary_unary(
                    method("Check", HEALTH),
                    request_serializer=known["HealthCheckRequest"].SerializeToString,
                    response_deserializer=known["HealthCheckResponse"].FromString,
                )
                return call(known["HealthCheckRequest"](), timeout=5).status

        assert (health(), *(page(metrics, name)[0] for name in ("ready", "health", "x"))) == (2, 503, 200, 404)
        with CoordinatorClient(server.address, codec="none") as client:
            client.set_model_parameters({"w": torch.zeros(2)})
            for _ in range(3):
                client.add_gradients({"w": torch.ones(2)}, version=0)
            with pytest.raises(ConfigError):
                client.add_gradients({"x": torch.ones(2)})
            client.read()
            status = client.status()[0]
        assert (health(), page(metrics, "ready")[0]) == (1, 200)
        lines = page(metrics, "metrics")[1].splitlines()
        for line in (
            "gradwire_applied_total 3",
            'gradwire_refused_total{reason="INVALID"} 1',
            'gradwire_staleness_bucket{le="1"} 2',
            "gradwire_staleness_count 3",
            "gradwire_pulls_total 1",
            "gradwire_version 3",
        ):
            assert line in lines
        assert (status.applied, dict(status.refused), dict(status.ages)) == (3, {"INVALID": 1}, {0: 1, 1: 1, 2: 1})


def test_snapshots_while_pushes_go_on(tmp_path):
    with start({"w": torch.zeros(50)}, durability=Durability(str(tmp_path), snapshot_every=20)) as server:
        with CoordinatorClient(server.address, codec="none", window=8) as client:
            for number in range(200):
                client.add_gradients({"w": torch.ones(50)})
                if number % 50 == 0:
                    client.snapshot()
            client.flush()
            assert client.status()[0].snapshots >= 4
    with start(durability=Durability(str(tmp_path))) as server, CoordinatorClient(server.address) as client:
        assert torch.equal(client.read()[1]["w"], torch.full((50,), -200.0))


def test_large_models_come_in_parts():
    """Nine million numbers: more than any message may have."""
    given = {"w": torch.randn(3000, 3000), "b": torch.randn(11)}
    with start(given) as server, CoordinatorClient(server.address, codec="none") as client:
        client.add_gradients({"w": torch.ones(3000, 3000)})
        found = client.read()[1]
        assert torch.equal(found["w"], given["w"] - 1)
        assert torch.equal(found["b"], given["b"])


def test_the_descriptor_is_that_of_the_published_file(tmp_path):
    from grpc_tools import protoc

    folder = files("gradwire.coordinator.protocol")
    out = tmp_path / "compiled"
    names = ["coordinator.proto", "health.proto"]
    assert protoc.main(["protoc", f"-I{folder}", f"--descriptor_set_out={out}", *names]) == 0
    assert out.read_bytes() == folder.joinpath("protocol.desc").read_bytes()


def test_classes_of_inner_messages_are_not_collected():
    """protobuf would make them anew for every message; one that was collected meanwhile ended servers with SIGSEGV."""
    program = (
        "import gc, weakref\n"
        "from gradwire.coordinator.protocol import messages\n"
        "inner = [weakref.ref(type(messages()[each]().header)) for each in ('PushPart', 'PullPart', 'ModelPart')]\n"
        "gc.collect()\n"
        "assert all(each() is not None for each in inner)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('adress = "x"', "`adress` is not known; known: address, metrics"),
        ("address = 7", "`address` must be a string; got 7"),
        ('address = "host"', "`address` must be HOST:PORT"),
        ('address = "0.0.0.0:7070"', "others can reach, and nobody would be asked"),
        ('[durability]\nfsync = "never"', "`durability.fsync` must be one of each, interval, off; got 'never'"),
        ("[staleness]\nbound = -1", "`bound` of staleness must be a whole number"),
        ('[model]\nmode = "up"', "`mode` must be 'descent' or 'ascent', in any case; got 'up'"),
        ("[model]\naverage_over = 0", "`average_over` must be a whole number of at least 1; got 0"),
        ("[model]\nlearning_rate = nan", "`learning_rate` must be above 0; got nan"),
        ('[durability]\nfolder = ""', "`folder` must name a folder"),
        ("[durability]\ninterval_s = -1", "`interval_s` must be above 0; got -1.0"),
        ("[limits]\nqueue = 0", "`queue` of limits must be above 0; got 0"),
        ('[tls]\nkey = "k"', "`tls.certificate` is missing"),
        ('[[workers]]\nname = "a"', "worker 'a' has no `token_sha256`"),
        ('[[workers]]\nname = "a"\ntoken_sha256 = "12"', "must be 64 hexadecimal digits"),
        ("x = [", "is not TOML"),
    ],
)
def test_settings_that_are_wrong(tmp_path, text, message):
    file = tmp_path / "serve.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_settings(file)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"parameters": {"w": torch.arange(3)}}, r"`parameters\['w'\]` must be float32, float16 or bfloat16"),
        ({"parameters": {}}, "`parameters` must hold at least one tensor"),
        ({"optimizer": "Adam"}, "`optimizer` must be a function"),
    ],
)
def test_what_cannot_be_served(settings, message):
    with pytest.raises(ConfigError, match=message):
        serve(ServeSettings(address=LOCAL), **settings)


def test_parameters_with_nan_cannot_be_served():
    with pytest.raises(NonFiniteError):
        start({"w": torch.tensor([float("nan")])})


def test_a_module_of_other_shapes_is_left_as_it_was():
    with start({"weight": torch.ones(1, 3), "bias": torch.ones(1)}) as server:
        with CoordinatorClient(server.address) as client:
            wide = torch.nn.Linear(3, 5)
            before = wide.weight.detach().clone()
            with pytest.raises(ConfigError, match=r"the module's 'weight' must have shape \(1, 3\).*got \(5, 3\)"):
                client.load_into(wide)
            assert torch.equal(wide.weight, before)
            for bad in (None, 3.0):
                with pytest.raises(ConfigError, match="`loss` must"):
                    client.compute_and_push(torch.nn.Linear(3, 1), bad)
            for version in (-1, True, "1", 1.0):
                with pytest.raises(ConfigError, match="`version` must be a whole number"):
                    client.add_gradients({"bias": torch.ones(1)}, version=version)
        for call in (client.read, client.status, lambda: client.add_gradients({"bias": torch.ones(1)})):
            with pytest.raises(ConfigError, match="the client is closed"):
                call()


def test_the_settings_of_the_documentation(tmp_path):
    page = (Path(__file__).parent.parent.parent / "docs" / "coordinator.md").read_text()
    text = re.search(r"^```toml\n(.*?)^```", page, re.MULTILINE | re.DOTALL).group(1)
    file = tmp_path / "serve.toml"
    file.write_text(text.replace("64 hexadecimal digits, from gradwire serve token", "0" * 64))
    settings = load_settings(file)
    for section, given in tomllib.loads(text).items():
        known = getattr(settings, section)
        if dataclasses.is_dataclass(known):
            assert set(given) == {field.name for field in dataclasses.fields(known)} - {"strength"}
    assert settings.limits == dataclasses.replace(Limits(), pushes_per_s=100.0, reader_mb=1024.0)


def test_settings_of_a_file(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "serve.toml").write_text(
        f"""
        address = "{LOCAL}"
        [model]
        file = "{tmp_path}/model.safetensors"
        optimizer = "SGD"
        options = {{ lr = 0.5, momentum = 0.9 }}
        [staleness]
        bound = 4
        rule = "weight"
        [limits]
        queue = 8
        """
    )
    settings = load_settings(tmp_path / "serve.toml")
    assert (settings.staleness, settings.limits.queue) == (Staleness(4, "weight"), 8)
    with serve(settings) as server, CoordinatorClient(server.address, codec="none") as client:
        client.add_gradients({"w": torch.ones(2)})
        assert torch.equal(client.read()[1]["w"], torch.full((2,), 0.5))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"codec": "ef21(topk:0.1)"}, "`codec` must be one whose payloads are gradients"),
        ({"worker": 5}, "`worker` must be a name, or None; got 5"),
        ({"credentials": "token"}, "`credentials` must be Credentials, or None; got str"),
        ({"window": 0}, "`window` must be a whole number of at least 1"),
        ({"retry_s": 0}, "`retry_s` must be above 0"),
        ({"nonfinite": "x"}, "`nonfinite` must be 'refuse' or 'zero'"),
        ({"token": "t", "credentials": Credentials(token="t")}, "`token` is part of `credentials`"),
    ],
)
def test_clients_that_are_asked_for_wrongly(settings, message):
    with pytest.raises(ConfigError) as caught:
        CoordinatorClient(LOCAL, **settings)
    assert message in str(caught.value)


@pytest.mark.parametrize("address", [None, 7070, "", "localhost", "h:99999", "http://h:1", [], ["h:1", "h:1"], b"h:1"])
def test_addresses_that_are_none(address):
    with pytest.raises(ConfigError, match="`address` must be HOST:PORT"):
        CoordinatorClient(address)


@pytest.mark.parametrize("token", ["", "with space", "line\n"])
def test_tokens_that_are_none(token):
    with pytest.raises(ConfigError, match="`token` must have no spaces"):
        Credentials(token=token)


@pytest.mark.timeout(120)
def test_the_command(tmp_path):
    """gradwire serve, status, drain; and a journal that is repaired."""
    folder = tmp_path / "store"
    (tmp_path / "serve.toml").write_text(f'address = "{LOCAL}"\nmetrics = "{LOCAL}"\n[durability]\nfolder = "{folder}"')
    serving = [sys.executable, "-m", "gradwire", "serve", "--config", str(tmp_path / "serve.toml")]
    with ExitStack() as stack:
        server = stack.enter_context(subprocess.Popen(serving, stdout=subprocess.PIPE, text=True))
        stack.callback(server.kill)  # whatever happens
        address = server.stdout.readline().split()[2].rstrip(",")
        assert "/metrics" in server.stdout.readline()
        with CoordinatorClient(address, codec="none") as client:
            client.set_model_parameters({"w": torch.zeros(3)})
            for _ in range(5):
                client.add_gradients({"w": torch.ones(3)})
        told = run("serve", "status", address, "--json")
        assert json.loads(told.stdout)["applied"] == 5
        shown = run("serve", "status", address)
        assert "3 numbers, version 5" in shown.stdout
        os.kill(server.pid, signal.SIGTERM)
        assert "saved and ended" in server.stdout.read()
        assert server.wait(30) == 0
    assert "cannot be reached" in run("serve", "status", address, status=1).stderr
    drawn = run("serve", "token", "w1")
    assert gradwire.coordinator.access.token_hash(drawn.stderr.split()[-1]) in drawn.stdout

    with start(durability=Durability(str(folder))) as server, CoordinatorClient(server.address, codec="none") as client:
        for _ in range(3):
            client.add_gradients({"w": torch.ones(3)})
        store = server._host.store
        journal = Path(store._journal.path)
        assert "in use by a server" in run("serve", "repair", str(journal), status=1).stderr
        damaged = bytearray(journal.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (tmp_path / "damaged").write_bytes(damaged)
    assert "1 records kept" in run("serve", "repair", str(tmp_path / "damaged")).stdout
    assert (tmp_path / "damaged.damaged").read_bytes() == damaged


def test_a_server_records_its_queue_and_staleness(tmp_path):
    with start({"w": torch.zeros(4)}, run_dir=str(tmp_path)) as server, CoordinatorClient(server.address) as client:
        for version in range(3):
            client.add_gradients({"w": torch.ones(4)}, version=version)
    told = [json.loads(line) for line in (tmp_path / "coordinator.jsonl").read_text().splitlines()]
    assert [told[0]["event"], told[-1]["event"]] == ["start", "done"]
    last = [each for each in told if each["event"] == "coordinator"][-1]
    assert last["applied"] == 3
    assert last["refused"] == last["queued"] == 0
    assert last["received"] > 0
    assert last["version"] == 3
    assert last["staleness"] == {"0": 3}
