"""Built-in trainings on real data that needs no download."""

from gradwire.tasks.base import Task, Validation
from gradwire.tasks.charlm import CharLM
from gradwire.tasks.digits import Digits

__all__ = ["TASKS", "CharLM", "Digits", "Task", "Validation"]

TASKS: dict[str, type[Task]] = {task.name: task for task in (Digits, CharLM)}
"""Tasks by name."""
