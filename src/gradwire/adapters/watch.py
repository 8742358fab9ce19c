"""What a reducer does, as records: steps, buckets, plans, and what is lost of each layer."""

from __future__ import annotations

import json
import math
import platform
import socket
import time
from collections.abc import Mapping
from importlib.metadata import version
from itertools import islice
from typing import Any, Final

import torch
from torch import Tensor

from gradwire.collectives import AllReduce, PowerSGD, method
from gradwire.planner import Autopilot
from gradwire.planner.trial import try_method
from gradwire.reducer import BucketTimes, GradientReducer, StepTimes, is_large
from gradwire.telemetry import Telemetry
from gradwire.telemetry.base import Record
from gradwire.wire import TensorSpec

__all__ = ["Watch", "facts"]

_LOOK: Final = 1 << 18  # elements whose loss is looked at in one go
_MOST: Final = 1 << 22  # of a tensor: larger ones are not looked at
_SHARE: Final = 0.005  # of the time that may go into looking
_RANKS: Final = 2  # that are played: an error does not depend on more


def facts(parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """What the record of a start says of a model and of the machine.

    >>> facts({"w": torch.zeros(3, 4)})["parameters"]
    12
    """
    return {
        "parameters": sum(each.numel() for each in parameters.values()),
        "gradwire": version("gradwire"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "host": socket.gethostname(),
    }


class Watch:
    """Tells a :class:`~gradwire.Telemetry` what a reducer and its autopilot do. Every rank may have one or not.

    >>> from gradwire.collectives.loopback import Alone
    >>> from gradwire.telemetry import Memory
    >>> layer, memory = torch.nn.Linear(128, 64), Memory()
    >>> reducer = GradientReducer(dict(layer.named_parameters()), "int4", Alone())
    >>> telemetry = Telemetry(memory)
    >>> watch = Watch(reducer, telemetry)
    >>> for _ in range(2):
    ...     layer(torch.ones(1, 128)).sum().backward()
    ...     traffic = reducer.reduce()
    ...     watch.loss = 0.5
    >>> watch.settle(); telemetry.close()
    >>> [record["event"] for record in memory.records]
    ['start', 'layout', 'step', 'step', 'done']
    """

    def __init__(
        self,
        reducer: GradientReducer,
        telemetry: Telemetry,
        autopilot: Autopilot | None = None,
    ) -> None:
        self._reducer, self._telemetry, self._autopilot = reducer, telemetry, autopilot
        self.loss: float | None = None  # of the step that is under way, once somebody tells it
        self._layout: tuple[tuple[str, ...], ...] = ()
        self._told = 0  # of what the autopilot did
        self._flown = ""  # the plan that was told last
        self._turn = [name for name, each in reducer.parameters.items() if is_large(each) and each.numel() <= _MOST]
        self._next_look, self._looking, self._looked_s = 1, False, 0.0
        self._due = True  # whether the step under way is looked at
        self._kept: dict[str, tuple[str, Tensor, float | None]] = {}  # how it travels, a gradient, what is kept back
        if not telemetry.started:
            peers = reducer.peers
            telemetry.start(rank=peers.rank, ranks=peers.size, codec=reducer.label, **facts(reducer.parameters))
        reducer.on_step.append(self._step)
        # One rank alone loses nothing, and what one of many finds is about what all would.
        self._looks = bool(telemetry.quality_every and self._turn and reducer.peers.size > 1 and not reducer.peers.rank)
        if self._looks:
            reducer.onlookers.append(self._gradient)

    def settle(self) -> None:
        """Tell of the last step, which nothing follows."""
        self._reducer.settle()

    def _step(self, step: int, times: StepTimes | None) -> None:
        loss, self.loss = self.loss, None
        if self._looks:
            self._due = step + 1 >= self._next_look and not self._looking
        if times is None:
            self._telemetry.record("note", step=step, what="the step was not taken: a rank's gradient held NaN or Inf")
            return
        layout = tuple(bucket.names for bucket in times.buckets)
        if layout != self._layout:
            self._layout = layout
            sizes = [sum(self._reducer.parameters[name].numel() for name in names) for names in layout]
            buckets = [{"names": list(names), "numel": size} for names, size in zip(layout, sizes, strict=True)]
            self._telemetry.record("layout", step=step, buckets=buckets)
        self._telemetry.record("step", step=step, loss=loss, **_of_step(times))
        self._tell_plans(step)
        self._plan_look(step, times.seconds)

    def _tell_plans(self, step: int) -> None:
        """A plan is told when it is taken, and again when it is known how long its buckets take."""
        if self._autopilot is None or self._reducer.peers.rank:
            return
        for each in islice(self._autopilot.events, self._told, None):
            self._telemetry.record("note", step=each.step, what=each.what)
        self._told = len(self._autopilot.events)
        plan = self._autopilot.plan
        if plan is None or not self._autopilot.settled:
            return
        known = all(bucket.measured_s is not None for bucket in plan.buckets)
        if (which := f"{plan.reason} {plan.measured_s} {plan.methods} {known}") != self._flown:
            self._flown = which
            told: dict[str, Any] = json.loads(plan.to_json())
            names = ("reason", "predicted_s", "measured_s", "computing_s", "alternatives", "buckets")
            self._telemetry.record("plan", step=step, name=plan.name, **{name: told.get(name) for name in names})

    # What is lost of each layer: a few layers at a time, on the thread of the telemetry.

    def _plan_look(self, step: int, seconds: float) -> None:
        if self._kept and not self._looking:
            kept, self._kept, self._looking = self._kept, {}, True
            self._telemetry.later(lambda: self._look(step, kept))
            every = self._telemetry.quality_every
            rest = math.ceil(self._looked_s / (_SHARE * seconds)) if seconds > 0 else 0  # NaN: of the first step
            self._next_look = step + max(every, rest)
            self._due = False

    def _gradient(self, name: str, gradient: Tensor) -> None:
        """Keep a copy of those whose turn it is."""
        if not self._due:
            return
        if name != self._turn[0] and not (self._kept and name in self._turn):
            return
        if sum(each.numel() for _, each, _ in self._kept.values()) + gradient.numel() > _LOOK and self._kept:
            return
        how = self._reducer.travels_as(name)
        self._turn.remove(name)
        self._turn.append(name)
        residual = self._reducer.residual_norm(name)
        kept_back = None if residual is None else residual / max(float(gradient.norm()), 1e-30)
        self._kept[name] = (how, gradient.detach().to("cpu").float().clone(), kept_back)

    def _look(self, step: int, kept: Mapping[str, tuple[str, Tensor, float | None]]) -> Record | None:
        started, layers = time.perf_counter(), dict[str, dict[str, Any]]()
        try:
            for name, (how, gradient, residual) in kept.items():
                layers[name] = {"codec": how, "error": _error(how, gradient), "residual": residual}
        finally:
            self._looked_s, self._looking = time.perf_counter() - started, False
        return {"event": "quality", "step": step, "layers": layers}


def _error(how: str, gradient: Tensor) -> float | None:
    """The part of a gradient's square that is lost of what a rank sends; error feedback sends it later."""
    what = method(how)
    if isinstance(what, AllReduce):
        return 0.0
    if not math.isfinite(float(gradient.sum())):
        return None
    if isinstance(what, PowerSGD):
        begun = PowerSGD(what.rank, what.factors, 0, what.alternate)
        return try_method(begun, [{"": gradient}], gradient.numel(), _RANKS, known_processor_s=0.0).errors[""]
    payload, _ = what.encode(gradient, what.init(TensorSpec.of(gradient)))
    norm = float(gradient.square().sum())
    return float((what.decode(payload) - gradient).square().sum()) / norm if norm > 0 else 0.0


def _of_step(times: StepTimes) -> dict[str, Any]:
    """The fields of a step's record; those of the first step have no times."""
    buckets = times.buckets
    computed = max(bucket.ready_s for bucket in buckets)
    totals = {
        short: sum(getattr(bucket, name) for bucket in buckets)
        for short, name in (("sent", "sent_bytes"), ("received", "received_bytes"), ("dense", "dense_bytes"))
    }
    took = {name: _s(sum(getattr(b, name) for b in buckets)) for name in ("encode_s", "wire_s", "decode_s")}
    whole = {"seconds": times.seconds, "compute_s": computed, "exposed_s": times.seconds - computed}
    known = {name: _s(value) for name, value in whole.items()}
    return {**known, **took, **totals, "buckets": [_of_bucket(bucket) for bucket in buckets]}


def _of_bucket(bucket: BucketTimes) -> dict[str, Any]:
    return {
        "codec": bucket.method,
        "sent": bucket.sent_bytes,
        "received": bucket.received_bytes,
        "dense": bucket.dense_bytes,
        "encode_s": _s(bucket.encode_s),
        "wire_s": _s(bucket.wire_s),
        "decode_s": _s(bucket.decode_s),
        "ready_s": _s(bucket.ready_s),
        "done_s": _s(bucket.done_s),
    }


def _s(seconds: float) -> float | None:
    """Microseconds are exact enough."""
    return None if math.isnan(seconds) else round(seconds, 6)
