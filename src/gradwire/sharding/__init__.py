"""Parameters in slices: each is summed, stepped and published where it lives."""

from gradwire.sharding.all_reduce_parameter import AllReduceParameter, FutureResult
from gradwire.sharding.clipping import clip_norm, clip_value, global_norm
from gradwire.sharding.exchange import Exchange, InProcessExchange, ProcessGroupExchange
from gradwire.sharding.ray_exchange import RayExchange
from gradwire.sharding.retry import Retries, with_retries
from gradwire.sharding.shard import Shard, Vector
from gradwire.sharding.stragglers import StragglerPolicy, Stragglers

__all__ = [
    "AllReduceParameter",
    "Exchange",
    "FutureResult",
    "InProcessExchange",
    "ProcessGroupExchange",
    "RayExchange",
    "Retries",
    "Shard",
    "StragglerPolicy",
    "Stragglers",
    "Vector",
    "clip_norm",
    "clip_value",
    "global_norm",
    "with_retries",
]
