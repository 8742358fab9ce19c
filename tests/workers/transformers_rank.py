"""A rank of a Transformers training, resumed from the checkpoint of an earlier one: FOLDER."""

import shutil
import sys
import warnings
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments

import gradwire
from gradwire.tree import equal


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))

    def forward(self, x):
        return {"loss": (self.layers(x) - x).square().mean()}


def trainer(folder, steps):
    arguments = TrainingArguments(
        folder, use_cpu=True, max_steps=steps, per_device_train_batch_size=8, gradient_accumulation_steps=2,
        save_steps=4, report_to="none", disable_tqdm=True, logging_steps=1, remove_unused_columns=False,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    data = [{"x": torch.randn(64, generator=generator)} for _ in range(512)]
    made = Trainer(Model(), arguments, train_dataset=data)
    return made, gradwire.transformers.compress(made, "topk:0.05")


def main():
    torch.set_num_threads(1)
    first, callback = trainer(sys.argv[1], steps=4)
    first.train()
    kept = callback.compression.state_dict()
    assert kept["step"] == 4
    assert any(state["residual"].any() for state in kept["states"].values())
    assert (Path(sys.argv[1]) / "checkpoint-4" / "gradwire").is_dir()
    callback.compression.close()
    second, callback = trainer(sys.argv[1], steps=6)
    begin, seen = type(callback).on_train_begin, {}

    def on_train_begin(self, *arguments, **more):
        begin(self, *arguments, **more)
        seen["state"] = self.compression.state_dict()

    type(callback).on_train_begin = on_train_begin
    second.train(resume_from_checkpoint=True)
    assert equal(seen["state"], kept)
    assert second.state.global_step == 6
    callback.compression.close()

    saved = Path(sys.argv[1]) / "checkpoint-4"
    third, callback = trainer(sys.argv[1] + "-elsewhere", steps=6)
    third.train(resume_from_checkpoint=str(saved))
    assert equal(seen["state"], kept)
    assert third.state.global_step == 6
    callback.compression.close()

    third.accelerator.wait_for_everyone()
    if second.args.process_index == 0:
        shutil.rmtree(saved / "gradwire")
    third.accelerator.wait_for_everyone()
    fourth, callback = trainer(sys.argv[1] + "-without", steps=5)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        fourth.train(resume_from_checkpoint=str(saved))
    assert [each for each in warned if "has no residuals of gradwire" in str(each.message)]
    assert seen["state"]["states"] == {}
    print(f"rank {second.args.process_index} passed", flush=True)


if __name__ == "__main__":
    main()
