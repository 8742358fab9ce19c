"""``RayExchange`` between real Ray tasks: where Ray is installed (``make test-clusters``)."""

import importlib
import os
import subprocess
import sys
import warnings

import pytest
import torch

from gradwire import AllReduceParameter, ConfigError, MissingExtraError, PeerError, RayExchange

ray = importlib.import_module("ray") if os.environ.get("GRADWIRE_TEST_RAY") else None
needs_ray = pytest.mark.skipif(ray is None, reason="needs Ray: make test-clusters")
pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def cluster():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start()
    yield
    ray.shutdown()


def start():
    ray.init(num_cpus=4, include_dashboard=False, _node_ip_address="127.0.0.1", logging_level="ERROR")


def train(mailbox, rank, size, codec, steps):
    exchange = RayExchange.of(mailbox, rank, size, timeout_s=30)
    torch.manual_seed(0)
    parameter = AllReduceParameter(0, size, 5000, compress=codec, exchange=exchange)
    local = torch.randn(5000)
    where = parameter.init(local)
    for step in range(steps):
        torch.manual_seed(100 * step + rank)
        parameter.put_gradients(torch.randn(5000))
        parameter.aggregate_gradient_partition(size)
        parameter.weight_partition.sub_(parameter.gradient_partition, alpha=0.1)
        parameter.send_weight_partition()
        parameter.get_weights(local).result()
    parameter.close()
    return where, local.numpy()


@needs_ray
@pytest.mark.parametrize("codec", ["fp16", "int4", "topk:0.1"])
def test_partitions_that_are_ray_tasks(cluster, codec):
    from gradwire import InProcessExchange

    task, mailbox = ray.remote(train), RayExchange.mailbox()
    found = ray.get([task.remote(mailbox, rank, 3, codec, 4) for rank in range(3)])
    assert [where for where, _ in found] == [(0, 0, 1667), (1, 1667, 1667), (2, 3334, 1666)]
    partitions = [AllReduceParameter(0, 3, 5000, compress=codec, exchange=each) for each in InProcessExchange.group(3)]
    torch.manual_seed(0)
    start = torch.randn(5000)
    for each in partitions:
        each.init(start)
    for step in range(4):
        for rank, each in enumerate(partitions):
            torch.manual_seed(100 * step + rank)
            each.put_gradients(torch.randn(5000))
        for each in partitions:
            each.aggregate_gradient_partition(3)
            each.weight_partition.sub_(each.gradient_partition, alpha=0.1)
            each.send_weight_partition()
        expected = [each.get_weights(torch.zeros(5000)).result() for each in partitions]
    for (_, weights), each in zip(found, expected, strict=True):
        assert torch.equal(torch.from_numpy(weights.copy()), each)


@needs_ray
def test_workers_of_ray_train_need_no_mailbox(tmp_path):
    """In a process of its own: Ray Train's workers warn of what pytest would make errors."""
    program = (
        "import ray, torch\n"
        "from ray.train import RunConfig\n"
        "from gradwire import AllReduceParameter\n"
        "from gradwire.clusters.ray import trainer\n"
        "def train(worker):\n"
        "    parameter = AllReduceParameter(0, worker.size, 5000, compress='fp16', exchange='ray')\n"
        "    weights = torch.zeros(5000)\n"
        "    parameter.init(weights)\n"
        "    for step in range(3):\n"
        "        parameter.put_gradients(torch.full((5000,), float(worker.rank + 1)))\n"
        "        parameter.aggregate_gradient_partition(worker.size)\n"
        "        parameter.weight_partition.sub_(parameter.gradient_partition)\n"
        "        parameter.send_weight_partition()\n"
        "        parameter.get_weights(weights).result()\n"
        "    assert (weights == -4.5).all(), weights\n"
        "    parameter.close()\n"
        "    worker.report(weights=float(weights[0]))\n"
        "ray.init(num_cpus=4, include_dashboard=False)\n"
        f"trainer(train, workers=2, codec='int8', run_config=RunConfig(storage_path={str(tmp_path)!r})).fit()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-3000:]
    assert '{"weights": -4.5}' in done.stdout + done.stderr


@needs_ray
def test_a_partition_that_leaves_is_noticed(cluster):
    mailbox = RayExchange.mailbox()
    one, two = (RayExchange.of(mailbox, rank, 2, timeout_s=20) for rank in range(2))
    one.put(1, 3, torch.ones(4, dtype=torch.uint8))
    one.close()
    assert two.take(0, 3, 4).tolist() == [1, 1, 1, 1]  # what it has left is still there
    with pytest.raises(PeerError, match="partition 0 is gone"):
        two.take(0, 4, 4)
    two.close()


@needs_ray
def test_a_partition_that_is_silent_is_waited_for_for_a_while(cluster):
    alone = RayExchange.of(RayExchange.mailbox(), 1, 2, timeout_s=0.2)
    assert alone.take(0, 1, 4, timeout_s=0.1) is None
    with pytest.raises(PeerError, match=r"partition 0 has left no block for 0\.2 s"):
        alone.take(0, 1, 4)
    alone.close()


def test_other_words_for_an_exchange_are_refused():
    with pytest.raises(ConfigError, match="`exchange` must be 'ray', an Exchange, or None; got 'spark'"):
        AllReduceParameter(0, 1, 10, exchange="spark")


def test_without_ray_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"RayExchange needs 'ray'.*pip install 'gradwire\[ray\]'"):
        RayExchange.mailbox()
