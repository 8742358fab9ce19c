"""How payloads become a mean on every rank."""

from gradwire.collectives.base import Collective, Reduced, Reduction, run
from gradwire.collectives.choose import PowerSGD, method
from gradwire.collectives.connect import connect
from gradwire.collectives.gather import Gather
from gradwire.collectives.low_rank import LowRank
from gradwire.collectives.peers import Peers, agree
from gradwire.collectives.pipeline import Pipeline
from gradwire.collectives.two_stage import TwoStage

__all__ = [
    "Collective",
    "Gather",
    "LowRank",
    "Peers",
    "Pipeline",
    "PowerSGD",
    "Reduced",
    "Reduction",
    "TwoStage",
    "agree",
    "connect",
    "method",
    "run",
]
