"""The optimizer wrapper that keeps a promise about bytes."""

from __future__ import annotations

from torch.optim import Optimizer

from gradwire.errors import ConfigError
from gradwire.optim.configuration import ShardingConfiguration
from gradwire.optim.plan import Plan
from gradwire.optim.sharded_optimizer import ShardedOptimizerBase

__all__ = ["GradientCompressionOptimizer"]


class GradientCompressionOptimizer(ShardedOptimizerBase):
    """Any gradient-based torch optimizer, with its state sharded and what it sends compressed.

    ``compression_ratio`` is a promise about the wire: the bytes a rank sends in a step, headers, scales and indices
    included, are at most that part of what float32 gradients and weights would take. ``use_quantization`` allows fewer
    bits a value, ``use_sparsification`` fewer values, both together both; with neither nothing is compressed. Below
    about one bit a value some values must stay behind, whatever is allowed. What is left behind is sent later.

    >>> import torch, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = torch.nn.Linear(300, 100)
    >>> optimizer = GradientCompressionOptimizer(torch.optim.AdamW(model.parameters()), compression_ratio=0.15)
    >>> model(torch.ones(2, 300)).square().mean().backward()
    >>> optimizer.step()
    >>> optimizer.close()
    >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        wrapped_optimizer: Optimizer,
        config: ShardingConfiguration | None = None,
        compression_ratio: float = 0.1,
        use_quantization: bool = True,
        use_sparsification: bool = False,
    ) -> None:
        number = isinstance(compression_ratio, int | float) and not isinstance(compression_ratio, bool)
        if not number or not 0 < compression_ratio <= 1:
            raise ConfigError(f"`compression_ratio` must be in (0, 1]; got {compression_ratio!r}.")
        for name, flag in (("use_quantization", use_quantization), ("use_sparsification", use_sparsification)):
            if not isinstance(flag, bool):
                raise ConfigError(f"`{name}` must be True or False; got {flag!r}.")
        self.compression_ratio = float(compression_ratio)
        self.use_quantization, self.use_sparsification = use_quantization, use_sparsification
        super().__init__(wrapped_optimizer, config)

    def _what_travels(self) -> str:
        families = f"use_quantization {self.use_quantization}, use_sparsification {self.use_sparsification}"
        return f"compression_ratio {self.compression_ratio:g}, {families}, {super()._what_travels()}"

    def _make_plan(self) -> Plan:
        return self._planned(
            ratio=self.compression_ratio, quantize=self.use_quantization, sparsify=self.use_sparsification
        )
