"""A rank that trains small models by FSDP2, with codecs and without: python -m tests.workers.fsdp2 cpu|cuda.

On a GPU, which ranks may share, it is compared with plain FSDP2 on the CPU: gloo carries nothing of it there.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from gradwire.adapters import fsdp2
from gradwire.clusters import torchrun
from gradwire.tree import equal, from_bytes, to_bytes


def made(device, policy=None):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 64)]
    model = torch.nn.Sequential(*layers).to(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    options = {"mp_policy": policy} if policy else {}
    for layer in layers[::2]:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def trained(device, policy=None, **codecs):
    """The shards of all ranks after some steps, and the compression's state."""
    model = made(device, policy)
    compression = fsdp2.compress(model, **codecs) if codecs else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(6):
        torch.manual_seed(100 * step + dist.get_rank())
        x = torch.randn(16, 64).to(device)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    own = torch.cat([p.to_local().detach().cpu().flatten() for p in model.parameters()])
    shards = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, own)
    whole = torch.cat(shards)
    kept = None if compression is None else compression.state_dict()
    if compression is not None:
        assert compression.sent_bytes > 0
        compression.close()
    return whole, kept


def main():
    device = sys.argv[1]
    torchrun.join()
    torch.set_num_threads(1)
    plain, _ = trained("cpu")
    exact, _ = trained(device, gradients="none", weights="none")
    if device == "cpu":
        assert torch.equal(plain, exact), (plain - exact).abs().max()
    for gradients, weights, most in (
        ("none", "none", 1e-4),
        ("int8", "int8", 0.01),
        ("int4", "none", 0.03),
        ("bf16", "bf16", 0.01),
        ("topk:0.1", "int8", 0.5),
        ("sign", "none", 0.5),
    ):
        found, kept = trained(device, gradients=gradients, weights=weights)
        error = ((found - plain).norm() / plain.norm()).item()
        assert error < most, (gradients, weights, error)
        taken_up = fsdp2.compress(made(device), gradients=gradients, weights=weights)
        taken_up.load_state_dict(from_bytes(to_bytes(kept)))
        assert equal(taken_up.state_dict(), from_bytes(to_bytes(kept)))
        taken_up.close()
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mixed, _ = trained("cpu", policy=half)
    found, _ = trained(device, policy=half, gradients="int8", weights="int8")
    assert ((found - mixed).norm() / mixed.norm()).item() < 0.02
    print(f"rank {dist.get_rank()} on {device}: passed", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
