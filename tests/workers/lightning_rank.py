"""A Lightning training of two processes: python -m tests.workers.lightning_rank FOLDER CODEC PRECISION STEPS RESUME."""

import json
import sys
from pathlib import Path

import lightning
import torch
from torch.utils.data import DataLoader

import gradwire


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))

    def training_step(self, batch, number):
        return (self.layers(batch) - batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(1 + self.global_rank)
        return DataLoader([torch.randn(16, 64, generator=generator) for _ in range(64)], batch_size=None)


def main():
    folder, codec, precision, steps, resume = sys.argv[1:]
    torch.set_num_threads(1)
    strategy = gradwire.lightning.Strategy(codec)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, precision=precision, max_steps=int(steps),
        accumulate_grad_batches=2, gradient_clip_val=1.0, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, callbacks=[gradwire.lightning.Monitor()],
    )  # fmt: skip
    module = Module()
    file = Path(folder) / "last.ckpt"
    told = {}

    class Look(lightning.Callback):
        def on_train_start(self, trainer, module):
            told["kept"] = residual(strategy)

        def on_train_end(self, trainer, module):
            told["residual"] = residual(strategy)
            trainer.save_checkpoint(file)

    trainer.callbacks.append(Look())
    trainer.fit(module, ckpt_path=str(file) if resume == "yes" else None)
    weights = torch.cat([p.detach().flatten() for p in module.parameters()])
    (Path(folder) / f"rank-{trainer.global_rank}.json").write_text(
        json.dumps({**told, "sum": weights.double().sum().item(), "steps": trainer.global_step,
                    "logged": {name: float(value) for name, value in trainer.callback_metrics.items()}})
    )  # fmt: skip


def residual(strategy):
    """The sum of what this rank has kept back."""
    states = strategy.compression.state_dict()["states"]
    return sum(state["residual"].double().sum().item() for state in states.values() if "residual" in state)


if __name__ == "__main__":
    main()
