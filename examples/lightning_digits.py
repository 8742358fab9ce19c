"""The digits CNN on Lightning, two processes on this machine.

    python examples/lightning_digits.py

Needs: pip install 'gradwire[lightning,bench]'
"""

import argparse

import lightning
import torch
from torch.utils.data import DataLoader

import gradwire
from gradwire.tasks import Digits

BATCH = 32


def batches(rank, ranks):
    """What a rank trains on, one batch after the other: its share of the images, again and again."""
    images, labels = Digits(batch_size=Digits.train_examples // ranks).batch(0, rank, ranks)
    for step in range(given.steps):
        pick = torch.arange(BATCH * step, BATCH * (step + 1)) % len(labels)
        yield images[pick], labels[pick]


class Module(lightning.LightningModule):
    """Any LightningModule: nothing in it knows of gradwire."""

    def __init__(self):
        super().__init__()
        self.task = Digits()
        self.model = self.task.model()

    def training_step(self, batch, number):
        loss = self.task.loss(self.model, *batch)
        if self.global_rank == 0:
            print({"step": number + 1, "loss": round(loss.item(), 6)}, flush=True)
        return loss

    def configure_optimizers(self):
        return self.task.optimizer(self.model)

    def train_dataloader(self):
        return DataLoader(list(batches(self.global_rank, self.trainer.world_size)), batch_size=None)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--codec", default="int8")
given = parser.parse_args()
torch.set_num_threads(1)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
quiet["use_distributed_sampler"] = False  # every rank makes its own batches
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy=gradwire.lightning.Strategy(given.codec), max_steps=given.steps, **quiet
)
trainer.fit(Module())
