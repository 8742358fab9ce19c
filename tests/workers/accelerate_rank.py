"""A rank of an Accelerate training whose state is saved and taken back: FOLDER."""

import sys

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs

import gradwire
from gradwire.tree import equal


def main():
    torch.set_num_threads(1)
    ddp = DistributedDataParallelKwargs(bucket_cap_mb=10)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[ddp], gradient_accumulation_steps=2)
    handler = gradwire.accelerate.compress(accelerator, "topk:0.05")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))

    def steps(number):
        for step in range(number):
            with accelerator.accumulate(model):
                torch.manual_seed(10 * step + accelerator.process_index)
                x = torch.randn(16, 64)
                accelerator.backward((model(x) - x).square().mean())
                optimizer.step()
                optimizer.zero_grad()

    assert model.bucket_bytes_cap == 10 << 20
    (compression,) = handler.compressions
    steps(6)
    kept = compression.state_dict()
    assert any(state["residual"].any() for state in kept["states"].values())
    accelerator.save_state(sys.argv[1])
    steps(4)
    assert not equal(compression.state_dict(), kept)
    accelerator.load_state(sys.argv[1])
    assert equal(compression.state_dict(), kept)
    sums = accelerator.gather(torch.cat([p.detach().flatten() for p in model.parameters()]).double().sum()[None])
    assert sums[0] == sums[1]
    print(f"rank {accelerator.process_index} passed", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
