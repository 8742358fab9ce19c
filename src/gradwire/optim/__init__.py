"""Optimizers whose state is divided among ranks, and whose traffic is compressed."""

from gradwire.optim.configuration import ShardingConfiguration
from gradwire.optim.gradient_compression_optimizer import GradientCompressionOptimizer
from gradwire.optim.run import OptimizationData, OptimizationResult
from gradwire.optim.sharded_optimizer import ShardedOptimizerBase, ShardTraffic

__all__ = [
    "GradientCompressionOptimizer",
    "OptimizationData",
    "OptimizationResult",
    "ShardTraffic",
    "ShardedOptimizerBase",
    "ShardingConfiguration",
]
