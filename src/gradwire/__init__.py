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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

# What is below is imported when somebody asks for it: torch takes seconds, which a shell that completes a word does not
# have, and some modules need an extra.
_HOMES = (
    "adapters",
    "api",
    "checkpoint",
    "codecs",
    "coordinator",
    "errors",
    "optim",
    "planner",
    "sharding",
    "telemetry",
    "transforms",
    "wire",
)  # where the public names are
_LATER = {
    "accelerate": "adapters.accelerate",
    "fsdp2": "adapters.fsdp2",
    "lightning": "adapters.lightning",
    "transformers": "adapters.transformers",
}  # modules under shorter names


def __getattr__(name: str) -> Any:
    if name in __all__:
        for home in _HOMES:
            module = import_module(f"gradwire.{home}")
            globals().update({each: getattr(module, each) for each in module.__all__ if each in __all__})
        return globals()[name]
    if not name.startswith("_"):
        path = f"gradwire.{_LATER.get(name, name)}"
        try:
            return import_module(path)
        except ModuleNotFoundError as error:
            if error.name != path:
                raise
    raise AttributeError(f"module 'gradwire' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_LATER})
