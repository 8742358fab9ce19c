"""The digits CNN on Ray Train, and it goes on when a worker is lost.

    python examples/ray_digits.py                     # a Ray of its own, on this machine
    python examples/ray_digits.py --address auto      # the cluster this machine belongs to

Needs: pip install 'gradwire[ray,bench]'
"""

import argparse

import ray
import torch
from ray.train import FailureConfig, RunConfig

from gradwire.clusters.ray import trainer
from gradwire.tasks import Digits

BATCH = 32


def training(steps, save_every):
    """The function that every worker calls, with what it must know."""

    def train(worker):
        torch.set_num_threads(1)
        task = Digits(batch_size=Digits.train_examples // worker.size)
        images, labels = task.batch(0, worker.rank, worker.size)
        model = task.model()
        replica = worker.prepare(model, task.optimizer(model))
        worker.report(began=replica.steps)
        while replica.steps < steps:
            pick = torch.arange(BATCH * replica.steps, BATCH * (replica.steps + 1)) % len(labels)
            loss = replica.learn(task.loss(replica.model, images[pick], labels[pick]))
            worker.report(step=replica.steps, loss=round(loss, 6), ranks=worker.size)
            if replica.steps % save_every == 0:
                worker.save(replica)
        worker.report(accuracy=round(task.validate(model).accuracy, 4))

    return train


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--address", help="of a Ray cluster")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--codec", default="int8")
parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
parser.add_argument("--storage", metavar="FOLDER", help="where Ray keeps checkpoints; on a cluster, a shared one")
given = parser.parse_args()

ray.init(given.address, **({} if given.address else {"num_cpus": given.workers + 2, "include_dashboard": False}))
config = RunConfig(storage_path=given.storage, failure_config=FailureConfig(max_failures=3))
trainer(training(given.steps, given.save_every), workers=given.workers, codec=given.codec, run_config=config).fit()
ray.shutdown()
