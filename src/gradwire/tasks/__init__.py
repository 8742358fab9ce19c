"""Built-in trainings on real data that needs no download."""

from gradwire.tasks.digits import Digits

__all__ = ["TASKS", "Digits"]

TASKS = {"digits": Digits}
"""Tasks by name."""
