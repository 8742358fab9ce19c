"""The digits CNN on Hugging Face Accelerate.

    torchrun --nproc-per-node 2 examples/accelerate_digits.py

Needs: pip install 'gradwire[accelerate,bench]'
"""

import argparse

import torch
from accelerate import Accelerator

import gradwire
from gradwire.tasks import Digits

BATCH = 32

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--codec", default="int8")
given = parser.parse_args()

torch.set_num_threads(1)
accelerator = Accelerator(cpu=True)
gradwire.accelerate.compress(accelerator, given.codec)
task = Digits(batch_size=Digits.train_examples // accelerator.num_processes)
images, labels = task.batch(0, accelerator.process_index, accelerator.num_processes)
model = task.model()
model, optimizer = accelerator.prepare(model, task.optimizer(model))
for step in range(given.steps):
    pick = torch.arange(BATCH * step, BATCH * (step + 1)) % len(labels)
    loss = task.loss(model, images[pick], labels[pick])
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print({"step": step + 1, "loss": round(loss.item(), 6)}, flush=True)
accelerator.print({"accuracy": round(task.validate(accelerator.unwrap_model(model)).accuracy, 4)})
accelerator.end_training()
