"""Asynchronous training on Ray: the coordinator is two actors, each with half of the model; workers are tasks.

    python examples/ray_coordinator.py                     # a Ray of its own, on this machine
    python examples/ray_coordinator.py --address auto      # the cluster this machine belongs to

Needs: pip install 'gradwire[ray,serve,bench]'
"""

import argparse

import ray
import torch

import gradwire
from gradwire.clusters.ray import coordinator
from gradwire.coordinator.settings import ModelRules
from gradwire.tasks import Digits

BATCH = 32


@ray.remote(num_cpus=1)
def work(addresses, number, workers, pushes):
    """Push gradients of this worker's share of the images, at its own pace."""
    torch.set_num_threads(1)
    task = Digits(batch_size=Digits.train_examples // workers)
    images, labels = task.batch(0, number, workers)
    model = task.model()

    def loss():
        pick = torch.randint(len(labels), (BATCH,))
        return task.loss(model, images[pick], labels[pick])

    with gradwire.CoordinatorClient(addresses, codec="int8", weights="int8", worker=f"worker-{number}") as client:
        return sum(client.compute_and_push(model, loss).accepted for _ in range(pushes))


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--address", help="of a Ray cluster")
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--pushes", type=int, default=60, help="of each worker")
given = parser.parse_args()

ray.init(given.address, **({} if given.address else {"num_cpus": given.workers + 2, "include_dashboard": False}))
rules = ModelRules(optimizer="SGD", options={"lr": 0.01, "momentum": 0.5})
servers = coordinator(gradwire.ServeSettings(model=rules), shards=2)
task = Digits()
model = task.model()
with servers.client() as client:
    client.set_model_parameters(dict(model.named_parameters()))
    tasks = [work.remote(servers.addresses, number, given.workers, given.pushes) for number in range(given.workers)]
    print({"servers": servers.addresses, "accepted": ray.get(tasks)})
    client.load_into(model)
print({"accuracy": round(task.validate(model).accuracy, 4)})
servers.stop()
ray.shutdown()
