"""How payloads become a mean on every rank."""

from gradwire.collectives.base import Collective, Reduced, Reduction, run
from gradwire.collectives.choose import AllReduce, Method, PowerSGD, method
from gradwire.collectives.connect import connect
from gradwire.collectives.dense import Dense
from gradwire.collectives.gather import Gather
from gradwire.collectives.hierarchical import Hierarchical, find_hosts
from gradwire.collectives.low_rank import LowRank
from gradwire.collectives.peers import Peers, agree
from gradwire.collectives.pipeline import Pipeline, Trace
from gradwire.collectives.two_stage import TwoStage

__all__ = [
    "AllReduce",
    "Collective",
    "Dense",
    "Gather",
    "Hierarchical",
    "LowRank",
    "Method",
    "Peers",
    "Pipeline",
    "PowerSGD",
    "Reduced",
    "Reduction",
    "Trace",
    "TwoStage",
    "agree",
    "connect",
    "find_hosts",
    "method",
    "run",
]
