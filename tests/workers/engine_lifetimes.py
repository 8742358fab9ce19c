"""A rank that trains by an engine and lets go of everything: python -m tests.workers.engine_lifetimes ENGINE FOLDER."""

import gc
import os
import sys
import threading
import time
import weakref

import torch
from torch.nn.parallel import DistributedDataParallel

import gradwire

PATIENCE_S = 20


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))

    def forward(self, x):
        return {"loss": (self.layers(x) - x).square().mean()}


def accelerate(folder, state):
    """An accelerator outlives its models."""
    from accelerate import Accelerator

    if not state:
        state["accelerator"] = Accelerator(cpu=True)
        state["handler"] = gradwire.accelerate.compress(state["accelerator"], "topk:0.05")
    accelerator, handler = state["accelerator"], state["handler"]
    model = Model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    for _ in range(3):
        accelerator.backward(model(torch.randn(16, 64))["loss"])
        optimizer.step()
        optimizer.zero_grad()
    (compression,) = handler.compressions
    known = weakref.ref(model), weakref.ref(compression)
    accelerator.free_memory()
    return known


def transformers(folder, state):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        folder, use_cpu=True, max_steps=3, per_device_train_batch_size=8, save_strategy="no", report_to="none",
        disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    trainer = Trainer(Model(), arguments, train_dataset=[{"x": torch.randn(64)} for _ in range(128)])
    callback = gradwire.transformers.compress(trainer, "topk:0.05")
    trainer.train()
    return weakref.ref(trainer.model_wrapped), weakref.ref(callback.compression)


def lightning(folder, state):
    import lightning as engine
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    class Module(engine.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model()

        def training_step(self, batch, number):
            return self.model(batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05)

        def train_dataloader(self):
            return torch.utils.data.DataLoader([torch.randn(16, 64) for _ in range(8)], batch_size=None)

    known = []

    class Look(engine.Callback):
        def on_train_end(self, trainer, module):
            known.extend([weakref.ref(trainer.strategy.model), weakref.ref(trainer.strategy.compression)])

    strategy = gradwire.lightning.Strategy("topk:0.05", cluster_environment=TorchElasticEnvironment())
    trainer = engine.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_steps=3, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, callbacks=[Look()],
    )  # fmt: skip
    trainer.fit(Module())
    return tuple(known)


def there():
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": sum(each.name.startswith("gradwire") for each in threading.enumerate()),
        "native threads": len(os.listdir("/proc/self/task")),
    }


def main():
    torch.set_num_threads(1)
    engine, folder = {each.__name__: each for each in (accelerate, transformers, lightning)}[sys.argv[1]], sys.argv[2]
    state = {}
    engine(folder, state)  # engines and torch make some things once, and keep them
    gc.collect()
    before, known = there(), [engine(folder, state) for _ in range(3)]
    end = time.monotonic() + PATIENCE_S
    while True:
        gc.collect()
        alive = [type(each()).__name__ for pair in known for each in pair if each() is not None]
        now = there()
        if not alive and all(now[name] <= before[name] for name in now):
            break
        assert time.monotonic() < end, f"alive: {alive}; before: {before}; now: {now}"
        time.sleep(0.05)
    assert all(len(pair) == 2 for pair in known)
    assert not any(isinstance(each, DistributedDataParallel) for each in gc.get_objects())
    sys.stdout.write(f"rank {os.environ['RANK']} passed\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
