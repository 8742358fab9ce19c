"""What runs left in their folders, for people: read (:mod:`~gradwire.dashboard.runs`), served, and as one file."""

from gradwire.dashboard.runs import Coordinator, Rank, Run

__all__ = ["Coordinator", "Rank", "Run"]
