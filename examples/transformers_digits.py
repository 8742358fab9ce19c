"""The digits CNN on the Trainer of Hugging Face's Transformers.

    torchrun --nproc-per-node 2 examples/transformers_digits.py

Needs: pip install 'gradwire[accelerate,bench]'
"""

import argparse
import tempfile

import torch
from transformers import Trainer, TrainingArguments

import gradwire
from gradwire.tasks import Digits

TASK = Digits()


class Classifier(torch.nn.Module):
    """Any model whose forward returns its loss: nothing in it knows of gradwire."""

    def __init__(self):
        super().__init__()
        self.network = TASK.model()

    def forward(self, images, labels):
        return {"loss": TASK.loss(self.network, images, labels)}


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--codec", default="int8")
given = parser.parse_args()

torch.set_num_threads(1)
images, labels = Digits(batch_size=Digits.train_examples).batch(0, 0, 1)
data = [{"images": image, "labels": label} for image, label in zip(images, labels, strict=True)]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, use_cpu=True, max_steps=given.steps, per_device_train_batch_size=32, logging_steps=1,
        save_strategy="no", report_to="none", disable_tqdm=True, learning_rate=1e-3, remove_unused_columns=False,
    )  # fmt: skip
    trainer = Trainer(Classifier(), arguments, train_dataset=data)
    gradwire.transformers.compress(trainer, given.codec)
    trainer.train()
