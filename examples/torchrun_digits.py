"""The digits CNN on torchrun: on one machine or several, and it goes on when a worker or a machine is lost.

    torchrun --nproc-per-node 2 examples/torchrun_digits.py
    torchrun --nnodes 1:2 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint HOST:29400 examples/torchrun_digits.py

Needs: pip install 'gradwire[demo]'
"""

import argparse

import torch

from gradwire.clusters import torchrun
from gradwire.tasks import Digits

BATCH = 32


def train(worker):
    """Train on this rank's share of the images; a restarted training begins at the step that was saved."""
    torch.set_num_threads(1)
    task = Digits(batch_size=Digits.train_examples // worker.size)
    images, labels = task.batch(0, worker.rank, worker.size)
    model = task.model()
    replica = worker.prepare(model, task.optimizer(model))
    worker.report(began=replica.steps)
    while replica.steps < given.steps:
        pick = torch.arange(BATCH * replica.steps, BATCH * (replica.steps + 1)) % len(labels)
        loss = replica.learn(task.loss(replica.model, images[pick], labels[pick]))
        worker.report(step=replica.steps, loss=round(loss, 6), ranks=worker.size)
        if replica.steps % given.save_every == 0:
            worker.save(replica)
    worker.report(accuracy=round(task.validate(model).accuracy, 4))


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--codec", default="int8")
parser.add_argument("--checkpoints", metavar="FOLDER", help="one that all machines share; without it, none are saved")
parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
given = parser.parse_args()

torchrun.run(train, codec=given.codec, checkpoints=given.checkpoints)
