"""Optimizers of many ranks: state divided among them, traffic compressed, or talk less often."""

from gradwire.optim.configuration import ShardingConfiguration
from gradwire.optim.decoupled_momentum import DeMo
from gradwire.optim.gradient_compression_optimizer import GradientCompressionOptimizer
from gradwire.optim.local_accumulation import LocalAccumulation
from gradwire.optim.local_update import DiLoCo, LocalSGD
from gradwire.optim.rounds import RoundTraffic
from gradwire.optim.run import OptimizationData, OptimizationResult
from gradwire.optim.sharded_optimizer import ShardedOptimizerBase, ShardTraffic

__all__ = [
    "DeMo",
    "DiLoCo",
    "GradientCompressionOptimizer",
    "LocalAccumulation",
    "LocalSGD",
    "OptimizationData",
    "OptimizationResult",
    "RoundTraffic",
    "ShardTraffic",
    "ShardedOptimizerBase",
    "ShardingConfiguration",
]
