"""Which codec where: what a number of bytes allows, what a link asks for, and a training that finds out by itself."""

from gradwire.planner.autopilot import FIRST, Auto, Autopilot, Event
from gradwire.planner.budget import best_codec, relative_error
from gradwire.planner.cost import Cost, Link, Machine, Prediction, predict_step
from gradwire.planner.plan import CANDIDATES, Bucket, Plan, PlannedBucket, Situation, choose
from gradwire.planner.probe import Network, probe_machine, probe_network
from gradwire.planner.trial import Trial, try_method

__all__ = [
    "CANDIDATES",
    "FIRST",
    "Auto",
    "Autopilot",
    "Bucket",
    "Cost",
    "Event",
    "Link",
    "Machine",
    "Network",
    "Plan",
    "PlannedBucket",
    "Prediction",
    "Situation",
    "Trial",
    "best_codec",
    "choose",
    "predict_step",
    "probe_machine",
    "probe_network",
    "relative_error",
    "try_method",
]
