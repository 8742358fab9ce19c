"""A training from its first step on, over a link: its seconds, its bytes, its losses."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from gradwire.benchmarks import courses_worker
from gradwire.benchmarks.courses_worker import BLOCK
from gradwire.benchmarks.training import BATCH_SIZES, Notify
from gradwire.clusters import run_workers
from gradwire.lab import Lab

__all__ = ["BLOCK", "VALIDATE_EVERY", "Course", "run_course", "run_courses"]

_SMOOTHED: Final = 3  # validations that are one loss
VALIDATE_EVERY: Final = 10
"""Steps, unless somebody says otherwise."""


@dataclass
class Course:
    """What was seen.

    >>> course = Course([1.0, 2.0, 3.0, 4.0], [(2, 5.0, 10.0), (4, 3.0, 20.0)])
    >>> course.first_below(4.0), course.loss_after(4), course.seconds_to(4.5)
    ((4, 4.0, 20.0), 4.0, 3.0)
    """

    seconds: list[float] = field(default_factory=list)  # after each step
    validations: list[tuple[int, float, float]] = field(default_factory=list)  # step, loss, bytes of rank 0 so far
    plan: str = ""  # of ``auto``, as text
    events: list[str] = field(default_factory=list)  # what ``auto`` did, and why

    def first_below(self, loss: float) -> tuple[int, float, float] | None:
        """Step, seconds and bytes at the first validation that has reached a loss; None if none has."""
        for step, reached, sent in self.validations:
            if reached <= loss:
                return step, self.seconds[step - 1], sent
        return None

    def loss_after(self, steps: int) -> float:
        """The mean of the last validations of so many steps."""
        losses = [loss for step, loss, _ in self.validations if step <= steps]
        return statistics.mean(losses[-_SMOOTHED:])

    def seconds_to(self, loss: float) -> float | None:
        """Seconds to such a mean, on a straight line between validations; None if it was not reached."""
        before: tuple[float, float] | None = None
        for step, _, _ in self.validations:
            now = self.seconds[step - 1], self.loss_after(step)
            if now[1] <= loss:
                share = (before[1] - loss) / (before[1] - now[1]) if before else 1.0
                return now[0] if before is None else before[0] + share * (now[0] - before[0])
            before = now
        return None


def run_course(
    task: str,
    method: str,
    workers: int,
    steps: int,
    lab: Lab | None,
    notify: Notify,
    *,
    seed: int = 0,
    learning_rate: float | None = None,
    validate_every: int = VALIDATE_EVERY,
    validate_from: int = 0,
) -> Course:
    """Train over the links of a lab, or over loopback. Validations do not count as time."""
    courses = run_courses(
        task,
        {method: steps},
        workers,
        lab,
        notify,
        seed=seed,
        learning_rate=learning_rate,
        validated=(method,),
        validate_every=validate_every,
        validate_from=validate_from,
    )
    return courses[method]


def run_courses(
    task: str,
    steps: Mapping[str, int],
    workers: int,
    lab: Lab | None,
    notify: Notify,
    *,
    seed: int = 0,
    learning_rate: float | None = None,
    validated: Collection[str] = (),
    validate_every: int = VALIDATE_EVERY,
    validate_from: int = 0,
) -> dict[str, Course]:
    """Train by several methods, so many steps each, that take turns in the same processes.

    What follows a validation is slower, so it should be at the end of turns: every ``BLOCK`` steps, or every second.
    """
    asked: dict[str, Any] = {"task": task, "steps": dict(steps), "seed": seed, "batch_size": BATCH_SIZES[task]}
    asked |= {"learning_rate": learning_rate, "validate_from": validate_from}
    asked["interface"] = lab.hosts[0].interface if lab else ""
    asked["validate_every"] = {name: min(validate_every, steps[name]) for name in validated}
    courses = {name: Course() for name in steps}
    for event in run_workers(courses_worker.__name__, asked, workers, lab):
        name = event["method"]
        course = courses[name]
        if event["event"] == "done":
            course.validations = course.validations or [(steps[name], float("nan"), event["wire_bytes"])]
            course.plan, course.events = event["plan"], event["events"]
            continue
        course.seconds.append(event["seconds"])
        if "validation" in event:
            course.validations.append((event["step"], event["validation"], event["wire_bytes"]))
            notify(f"{name}: step {event['step']}, validation {event['validation']:.4f}, {event['seconds']:.0f} s")
        else:
            notify(f"{name}: step {event['step']}, loss {event['loss']:.4f}, {event['seconds']:.0f} s")
    return courses
