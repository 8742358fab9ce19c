"""Distributed PyTorch training that is fast on the networks people really have.

Three names are enough to begin with: :func:`codec`, :func:`encode`, :func:`decode`.

>>> import torch, gradwire
>>> gradient = torch.randn(10_000)
>>> data = gradwire.encode(gradient, "int4")
>>> len(data) / (4 * gradient.numel())  # bytes on the wire over bytes of float32
0.13095
>>> gradwire.decode(data).shape
torch.Size([10000])
"""

from importlib import import_module
from typing import Any

from gradwire.adapters import Compression, Replica, compress
from gradwire.api import decode, encode
from gradwire.checkpoint import (
    latest_checkpoint,
    load_checkpoint,
    load_distributed_checkpoint,
    save_checkpoint,
    save_distributed_checkpoint,
)
from gradwire.codecs import Codec, Laws, Layout, Part, codec, register, registered
from gradwire.coordinator import (
    CoordinatorClient,
    Credentials,
    DistributedGradientsCoordinator,
    DistributedModelParametersCoordinator,
    ServeSettings,
    Staleness,
    serve,
)
from gradwire.errors import (
    AccessError,
    CheckpointError,
    ConfigError,
    GradwireError,
    JournalError,
    LabError,
    MissingExtraError,
    NonFiniteError,
    PeerError,
    QueueFullError,
    StaleGradientError,
    WireError,
)
from gradwire.optim import (
    DeMo,
    DiLoCo,
    GradientCompressionOptimizer,
    LocalAccumulation,
    LocalSGD,
    OptimizationData,
    OptimizationResult,
    RoundTraffic,
    ShardedOptimizerBase,
    ShardingConfiguration,
    ShardTraffic,
)
from gradwire.planner import Auto, Plan, best_codec
from gradwire.sharding import (
    AllReduceParameter,
    FutureResult,
    InProcessExchange,
    ProcessGroupExchange,
    RayExchange,
    StragglerPolicy,
    with_retries,
)
from gradwire.telemetry import Telemetry
from gradwire.transforms import for_training
from gradwire.wire import Key, Payload, TensorSpec

__version__ = "0.1.0"

_LATER = {
    "accelerate": "adapters.accelerate",
    "clusters": "clusters",
    "fsdp2": "adapters.fsdp2",
    "lightning": "adapters.lightning",
    "transformers": "adapters.transformers",
}  # modules that are imported when somebody asks for them: most need an extra


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return import_module(f"gradwire.{_LATER[name]}")
    raise AttributeError(f"module 'gradwire' has no attribute {name!r}")


__all__ = [
    "AccessError",
    "AllReduceParameter",
    "Auto",
    "CheckpointError",
    "Codec",
    "Compression",
    "ConfigError",
    "CoordinatorClient",
    "Credentials",
    "DeMo",
    "DiLoCo",
    "DistributedGradientsCoordinator",
    "DistributedModelParametersCoordinator",
    "FutureResult",
    "GradientCompressionOptimizer",
    "GradwireError",
    "InProcessExchange",
    "JournalError",
    "Key",
    "LabError",
    "Laws",
    "Layout",
    "LocalAccumulation",
    "LocalSGD",
    "MissingExtraError",
    "NonFiniteError",
    "OptimizationData",
    "OptimizationResult",
    "Part",
    "Payload",
    "PeerError",
    "Plan",
    "ProcessGroupExchange",
    "QueueFullError",
    "RayExchange",
    "Replica",
    "RoundTraffic",
    "ServeSettings",
    "ShardTraffic",
    "ShardedOptimizerBase",
    "ShardingConfiguration",
    "StaleGradientError",
    "Staleness",
    "StragglerPolicy",
    "Telemetry",
    "TensorSpec",
    "WireError",
    "best_codec",
    "codec",
    "compress",
    "decode",
    "encode",
    "for_training",
    "latest_checkpoint",
    "load_checkpoint",
    "load_distributed_checkpoint",
    "register",
    "registered",
    "save_checkpoint",
    "save_distributed_checkpoint",
    "serve",
    "with_retries",
]
