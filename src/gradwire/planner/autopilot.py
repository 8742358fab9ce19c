"""``auto``: a training plans how its gradients travel, checks the plan against the clock, and plans again."""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

from torch import Tensor

from gradwire.collectives import agree, method
from gradwire.collectives.base import ring_bytes
from gradwire.collectives.peers import post, share
from gradwire.errors import ConfigError, NonFiniteError
from gradwire.planner.cache import PlanCache
from gradwire.planner.cost import Cost, Machine
from gradwire.planner.plan import CANDIDATES, DENSE, DOUBT, QUALITY, Bucket, Plan, Situation, choose, plan_of, safer
from gradwire.planner.probe import Network, glance_at_network, probe_machine, probe_network, seconds_per_byte
from gradwire.planner.trial import Trial, caches_full, dense_trial, trial_work, try_method
from gradwire.reducer import GradientReducer, StepTimes

__all__ = ["FIRST", "Auto", "Autopilot", "Event"]

FIRST: Final = "int8"
"""How gradients travel until there is a plan: it suits the first steps of a training anyway."""

_FIRST_PLAN: Final = "the first plan"
_RESUMED: Final = "the first plan after a checkpoint"
_log: Final = logging.getLogger(__name__)
_composition_log: Final = logging.getLogger("gradwire")  # where ``compress`` logs it

_PROFILE_STEPS: Final = 6  # before the first plan; DDP makes its buckets anew after the first
_LOOK_STEPS: Final = 2  # before a first look at the link
_CHEAP_S: Final = 0.05  # what a dense step may send for, as the link looks before the first: more begins in int8
_FAST: Final = 0.15  # of a step: what sending everything dense may take on a link that is fast enough to begin so
_SLOW: Final = 0.3  # of a step: what dense steps may wait, at most, to go on so until there is a plan
_TRIED_STEPS: Final = 2  # whose gradients the methods are tried on
_CLOSE: Final = 1.25  # a plan's rivals: those that are expected to take at most so much longer
_GAIN: Final = 1 - 1 / DOUBT  # of a dense step: no plan saves more than a step waits, and less than this saves nothing
_CLOSE_BEFORE: Final = 1.15  # the same, for those that were timed in an earlier training
_CONTEST_STEPS: Final = 4  # of each; the first is to warm up
_RUN_OFF: Final = 1.12  # the best two plans are timed once more if the second takes at most so much longer
_SAVED: Final = 0.5  # of what dense steps wait: what other plans may save of it, in the mean
_UNSAVED: Final = 0.03  # of a step: what they take of the processor instead
_PROCESSOR_PATIENCE: Final = (
    5  # times longer, where the processor is no faster than the link: methods differ little there
)
_PROCESSOR_BOUND: Final = 3  # times what a rank itself takes of a processor; the kernel takes as much, uncounted
_HOPELESS: Final = 0.3  # of the best plan's step: one whose second step waits so much longer is given up
_AFTER_PLANNING_STEPS: Final = 3  # slower ones: what was measured has emptied caches
_WINDOW: Final = 5  # steps whose median is a step time
_DRIFT: Final = 0.25  # of a step: what it waits more or less than it did, in two reviews, when something has changed
_SURE_DRIFT: Final = 1.0  # the same, in one review: less may be another program that wanted the processor for a moment
_LINK_DRIFT: Final = 1.5  # of a link, or of steps that are few
_MATTERS: Final = 0.2  # of a step: what a change of the link is to add or to take, if all were dense
_PROBE_S: Final = 60.0  # between looks at the link while nothing seems to change
_QUALITY_STEPS: Final = 100  # between looks at what is lost
_LOSS_BAND: Final = 1.1  # times the best loss so far
_LOSS_REVIEWS: Final = 3  # in a row outside it
_AFTER_GUARD_STEPS: Final = 200  # until what the guard has forbidden is considered again


@dataclass(frozen=True)
class Auto:
    """How to plan: ``gradwire.compress(model, Auto(...))``; ``"auto"`` is this one.

    ``quality`` is the relative squared error, of all that was sent of a layer, up to which a method may be used for
    it: 0 means dense always. Over links that are fast everything stays dense until other plans could have saved
    ``patience_s``: measuring and trying takes about a second, which must pay in short trainings too. With 0 everything
    is tried at once.

    >>> Auto(candidates=("int8", "topk:0.01")).candidates
    ('dense', 'int8', 'ef(topk:0.01)')
    """

    candidates: tuple[str, ...] = CANDIDATES
    quality: float = QUALITY
    review_every: int = 8  # steps
    patience_s: float = 1.0

    def __post_init__(self) -> None:
        several = isinstance(self.candidates, Sequence) and not isinstance(self.candidates, str)
        if not several or not all(isinstance(each, str) for each in self.candidates):
            raise ConfigError(f"`candidates` must be a tuple of strings such as 'int4'; got {self.candidates!r}.")
        everything = dict.fromkeys([DENSE, *(str(method(each)) for each in self.candidates)])
        if not isinstance(self.quality, int | float) or not 0 <= self.quality <= 1:
            raise ConfigError(f"`quality` must be from 0 to 1; got {self.quality!r}.")
        object.__setattr__(self, "candidates", tuple(everything) if self.quality > 0 else (DENSE,))
        if not isinstance(self.review_every, int) or self.review_every < _WINDOW:
            raise ConfigError(
                f"`review_every` must be a whole number of at least {_WINDOW}; got {self.review_every!r}."
            )
        if not isinstance(self.patience_s, int | float) or not 0 <= self.patience_s < math.inf:
            raise ConfigError(f"`patience_s` must be 0 or more, and finite; got {self.patience_s!r}.")

    @property
    def first(self) -> str:
        """How gradients travel until more is known.

        >>> Auto().first, Auto(quality=0).first
        ('int8', 'dense')
        """
        return FIRST if len(self.candidates) > 1 else DENSE


@dataclass(frozen=True)
class Event:
    """Something the autopilot did, and why.

    >>> print(Event(12, "the first plan: int4 expected at 80 ms a step"))
    step 12: the first plan: int4 expected at 80 ms a step
    """

    step: int
    what: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.what}"


@dataclass(frozen=True)
class _Pace:
    """Of some steps."""

    seconds: float  # a step, as the ranks saw it in the mean
    waiting_s: float  # for means after the last gradient, by the rank that waits least: others wait for that one too
    waited_s: float  # in all steps since there was something to gain
    steps: float  # since then

    @property
    def gains_nothing(self) -> bool:
        """Whether no other plan can be enough faster, if all of this was dense."""
        return self.waiting_s < _GAIN * self.seconds

    def gains_something(self, patience_s: float) -> bool:
        """Whether it is time to try other plans: if as many steps follow, these should save what trying costs."""
        saved_s = _SAVED * self.waited_s - _UNSAVED * self.steps * self.seconds
        return not self.gains_nothing and saved_s > patience_s

    def drifts(self, now: _Pace, by: float) -> bool:
        """Whether something has changed that plans are made of; computing by itself is none of that."""
        return abs(now.waiting_s - self.waiting_s) > by * min(now.seconds, self.seconds)


class _Phase(Enum):
    PROFILING = "profiling"
    CONTEST = "contest"
    CRUISING = "cruising"


class Autopilot:
    """Plans for a reducer, between its steps; every rank has one, and they agree.

    >>> import torch
    >>> from gradwire.collectives.loopback import Alone
    >>> model = torch.nn.Linear(128, 64)
    >>> reducer = GradientReducer(dict(model.named_parameters()), FIRST, Alone(), label="auto")
    >>> pilot = Autopilot(reducer, Auto())
    >>> for _ in range(20):
    ...     model(torch.ones(1, 128)).sum().backward()
    ...     traffic = reducer.reduce()
    >>> pilot.plan.name  # one rank sends nothing
    'dense'
    """

    def __init__(self, reducer: GradientReducer, settings: Auto, hosts: tuple[int, ...] = ()) -> None:
        words = ", ".join(f"{name} {value!r}" for name, value in vars(settings).items())
        agree(reducer.peers, f"auto with {words}", reducer.next_tags())
        self.reducer, self.settings, self.hosts = reducer, settings, hosts
        self.plan: Plan | None = None
        self.events: list[Event] = []
        self._phase, self._since = _Phase.PROFILING, reducer.step
        self._times: deque[StepTimes] = deque(maxlen=max(_WINDOW, _PROFILE_STEPS))
        self._situation: Situation | None = None
        self._rivals: list[Plan] = []
        self._measured: list[_Pace] = []  # of each of them, one after another
        self._ran_off = False  # whether the last two of them are there for the second time
        self._pace: _Pace | None = None  # of the plan that flies
        self._drifted = False  # whether the last review found another pace
        self._recalled = False  # whether the rivals are those of an earlier training
        self._resting: list[Plan] = []  # of those, what was too slow to be tried again
        self._incumbent: tuple[Plan, _Pace] | None = None  # with how its last steps went: a new plan must beat it
        self._reason = _FIRST_PLAN  # for the plan that is being made
        self._noted: Callable[[], tuple[_Pace, float]] | None = None  # for the review of the next step
        self._waited, self._stepped = 0.0, 0  # seconds of this rank for the network, and in how many steps
        self._captured: list[dict[str, Tensor]] = []
        self._sample: frozenset[str] = frozenset()
        self._probed = self._tried = self._sampled = 0  # steps at which link and gradients were looked at, and kept
        self._forbidden: dict[str, int] = {}  # methods, until a step
        self._cache = PlanCache(reducer.parameters, reducer.peers.size)
        self._loss, self._best_loss, self._bad_losses = math.nan, math.inf, 0
        self._composition = ""  # that was logged last
        reducer.assign(dict.fromkeys(reducer.parameters, settings.first))
        reducer.between = self._between

    @property
    def settled(self) -> bool:
        """Whether it has a plan, and knows how long its steps take."""
        return self._phase is _Phase.CRUISING and self.plan is not None and self.plan.measured_s is not None

    def observe_loss(self, loss: float) -> None:
        """Tell the loss of a step, for the guard."""
        self._loss = loss if math.isnan(self._loss) else 0.9 * self._loss + 0.1 * loss

    def hold(self, what: str) -> None:
        """Plan no more; from the next step on everything travels by one method. Every rank calls it."""
        self.reducer.between, self.plan = None, None
        self._stop_capture()
        self.reducer.assign(dict.fromkeys(self.reducer.parameters, what))
        self._say(f"held: everything travels as {what} from now on")

    # Between steps. Whatever is decided here follows from the number of steps, and from what all ranks were told.

    def _between(self, step: int, times: StepTimes | None) -> None:
        if times is not None:
            self._times.append(times)
            self._waited += _waiting(times)
            self._stepped += 1
        age = step - self._since
        if self._phase is _Phase.PROFILING:
            if self.plan is None and age == 0:
                if not self._recall() and self.settings.patience_s > 0 and self._dense_s() < _CHEAP_S:
                    self._begin_in(DENSE)
            elif self.plan is None and age == _LOOK_STEPS and self.settings.patience_s > 0:
                self._think_again()
            elif self._sample:
                if step - self._sampled >= _TRIED_STEPS and self._steady():
                    self._plan_anew(self._reason)
            elif age >= _PROFILE_STEPS - _TRIED_STEPS and not self._all_dense():
                self._start_capture()
            elif age >= _PROFILE_STEPS and self._steady():
                self._stay_dense_or_try()
        elif self._phase is _Phase.CONTEST:
            enough = _CONTEST_STEPS + (0 if self._measured else _AFTER_PLANNING_STEPS)
            halfway = self._measured and age == _CONTEST_STEPS // 2
            if age >= enough or (halfway and self._is_hopeless()):
                self._next_rival()
        elif self._captured or self._sample:
            if age >= _TRIED_STEPS:
                self._look_at_quality()
        elif age >= self.settings.review_every:
            self._review()
        elif age == self.settings.review_every - 1:
            self._noted = self._note()

    def _steady(self) -> bool:
        """Whether enough steps in a row had the same buckets."""
        recent = list(self._times)[-_TRIED_STEPS:]
        return len(recent) == _TRIED_STEPS and len({tuple(b.names for b in each.buckets) for each in recent}) == 1

    def _enter(self, phase: _Phase) -> None:
        self._phase, self._since = phase, self.reducer.step
        self._times.clear()
        self._noted, self._drifted = None, False

    def _say(self, what: str) -> None:
        self.events.append(event := Event(self.reducer.step, what))
        if self.reducer.peers.rank == 0:
            _log.info("%s", event)

    def _log_composition(self) -> None:
        """Log what travels in what, as ``compress`` does, if a plan that is taken up has changed it."""
        if self.reducer.peers.rank == 0 and _composition_log.isEnabledFor(logging.INFO):
            before, self._composition = self._composition, self.reducer.composition
            if self._composition != before:
                _composition_log.info("gradients of a step: %s", self._composition)

    def _recall(self) -> bool:
        """Take up the plans of the last training, if the link is what it was; their steps are timed again."""
        peers, tags = self.reducer.peers, self.reducer.next_tags
        text = share(peers, json.dumps(self._cache.plans), tags(), "the last plans")[0]
        try:
            plans = [Plan.from_json(each) for each in json.loads(text)]
        except ConfigError:
            return False
        known = all(set(plan.methods) == set(self.reducer.parameters) and plan.measured_s for plan in plans)
        if not plans or not known or self.settings != Auto() or self._link_has_changed(plans[0]):
            return False
        took = 1000 * (plans[0].measured_s or 0)
        self._say(f"{plans[0].name} as in the last training: expected at {took:.0f} ms a step")
        best = _to_beat(plans[0])
        self._rivals = [plan for plan in plans if _to_beat(plan) <= _CLOSE_BEFORE * best]
        self._resting = [plan for plan in plans if plan not in self._rivals]
        self._measured, self._recalled = [], True
        self._fly(replace(plans[0], measured_s=None, reason="the last training"))
        self._log_composition()
        self._enter(_Phase.CONTEST)
        return True

    def _dense_s(self) -> float:
        """What the link takes to send all gradients in float32, after a short look at it."""
        per_byte = seconds_per_byte(self.reducer.peers, self.reducer.next_tags, None, self.hosts)
        numel = sum(parameter.numel() for parameter in self.reducer.parameters.values())
        return ring_bytes(numel, self.reducer.peers.size) * per_byte

    def _think_again(self) -> None:
        """Whether to go on in float32, or not, now that steps are known."""
        pace = self._paced()
        if self._all_dense():
            if pace.waiting_s > _SLOW * pace.seconds:
                self._begin_in(self.settings.first)
        elif self._dense_s() < _FAST * pace.seconds:
            self._begin_in(DENSE)

    def _begin_in(self, what: str) -> None:
        self.reducer.assign(dict.fromkeys(self.reducer.parameters, what))
        self._times.clear()

    def _all_dense(self) -> bool:
        return set(self.reducer.methods.values()) == {DENSE}

    def _stay_dense_or_try(self) -> None:
        """A plan without any trials, as long as there is nothing to be gained by them."""
        pace = self._paced()
        if self.settings.first != DENSE and pace.gains_something(self.settings.patience_s):
            self._start_capture()
            return
        share = f"{pace.waiting_s / pace.seconds:.0%} of a step waits for the network"
        self._plan_anew(f"{self._reason} ({share}, {pace.waited_s:.1f} s so far)", (DENSE,))

    # What is measured.

    @property
    def _patience_s(self) -> float:
        """What other plans than a dense one should save before they are tried."""
        link = self.plan.network.between if self.plan is not None else None
        bound = link is not None and link.seconds_per_byte < _PROCESSOR_BOUND * link.processor_per_byte
        return self.settings.patience_s * (_PROCESSOR_PATIENCE if bound else 1)

    def _start_capture(self) -> None:
        """Keep some of the next gradients of this rank, to try methods on."""
        self._sample, self._captured = frozenset(name for bucket in self._layout() for name in bucket.sample), []
        self._sampled = self.reducer.step
        self._stop_capture()
        if self._sample:
            self.reducer.on_gradient.append(self._keep)
        elif self._steady():
            self._plan_anew(f"{self._reason} (nothing is large enough to be compressed)", (DENSE,))

    def _stop_capture(self) -> None:
        if self._keep in self.reducer.on_gradient:
            self.reducer.on_gradient.remove(self._keep)

    def _keep(self, name: str, gradient: Tensor) -> None:
        if name in self._sample:
            if not self._captured or name in self._captured[-1]:
                self._captured = [*self._captured[1 - _TRIED_STEPS :], {}]
            self._captured[-1][name] = gradient.detach().to("cpu").float().clone()

    def _layout(self) -> list[Bucket]:
        buckets = self._times[-1].buckets if self._times else ()
        return [Bucket.of(bucket.names, self.reducer.parameters) for bucket in buckets]

    def _try(self, methods: Sequence[str]) -> list[dict[str, Trial]] | None:
        """Methods on the gradients kept, and dense. Ranks share the work; all get all that was found.

        None if something was not: a gradient that held NaN or Inf, or that nobody computed.
        """
        peers, buckets = self.reducer.peers, self._layout()
        self._stop_capture()
        captured = self._captured
        self._captured, self._sample = [], frozenset()
        pairs = [(place, what) for what in methods if what != DENSE for place in range(len(buckets))]
        found: dict[str, Any] = {}
        caches = caches_full() if pairs else None
        for number in _shares([trial_work(what, buckets[place].numels) for place, what in pairs], peers.size)[
            peers.rank
        ]:
            place, what = pairs[number]
            there = [name for name in buckets[place].names if all(name in each for each in captured)]
            steps = [{name: each[name] for name in there} for each in captured]
            with suppress(NonFiniteError):
                if there and steps:
                    known = self._cache.get(what, steps, buckets[place].numel)
                    trial = try_method(
                        what, steps, buckets[place].numel, peers.size, known_processor_s=known, caches=caches
                    )
                    cost = trial.cost
                    found[str(number)] = [cost.processor_s, cost.sent_bytes, cost.rounds, trial.errors]
        told = share(peers, json.dumps(found), self.reducer.next_tags(), "the trials")
        trials = [{DENSE: dense_trial(bucket.names, bucket.numel, peers.size)} for bucket in buckets]
        for number, (processor, sent, rounds, errors) in sorted(
            (int(number), each) for line in told for number, each in json.loads(line).items()
        ):
            place, what = pairs[number]
            trials[place][what] = Trial(Cost(processor, sent, rounds), errors)
            self._cache.put(what, errors, buckets[place].numel, processor)
        self._cache.save()
        every = {DENSE, *methods}
        complete = all(set(tried) == every for tried, bucket in zip(trials, buckets, strict=True) if bucket.names)
        return trials if complete else None

    def _seen(self) -> tuple[tuple[float, ...], float]:
        """When each bucket was handed over, and when the last was done: the median of steps, the mean over ranks."""
        steps = [[*(bucket.ready_s for bucket in each.buckets), each.seconds] for each in self._times]
        steps = [each for each in steps if len(each) == len(steps[-1])]
        mine = json.dumps([statistics.median_low(each) for each in zip(*steps, strict=True)])
        told = share(self.reducer.peers, mine, self.reducer.next_tags(), "the times of buckets")
        *means, done = [statistics.mean(each) for each in zip(*map(json.loads, told), strict=True)]
        return tuple(max(means[: place + 1]) for place in range(len(means))), done

    def _note(self) -> Callable[[], tuple[_Pace, float]]:
        """Tell the others the medians of this rank's last steps, NaN if there are none, and its loss.

        What all have told, put together, is to be called for: at once, or later, when nobody has to wait for it.
        """
        took = statistics.median(each.seconds for each in self._times) if self._times else math.nan
        waits = statistics.median(map(_waiting, self._times)) if self._times else math.nan
        mine = f"{took} {waits} {self._waited} {self._stepped} {self._loss}"
        told = post(self.reducer.peers, mine, self.reducer.next_tags(), "the time of a step")

        def read() -> tuple[_Pace, float]:
            numbers = [[float(word) for word in line.split()] for line in told()]
            seconds, waiting, waited, steps, losses = zip(*numbers, strict=True)
            known = [loss for loss in losses if not math.isnan(loss)]
            pace = _Pace(statistics.mean(seconds), min(waiting), min(waited), max(steps))
            return pace, statistics.mean(known) if known else math.nan

        return read

    def _paced(self) -> _Pace:
        return self._note()()[0]

    # Plans.

    def _plan_anew(self, reason: str, candidates: Sequence[str] | None = None) -> None:
        """Measure, and plan; rivals that come close are tried in the next steps."""
        peers, tags = self.reducer.peers, self.reducer.next_tags
        buckets, seen = self._layout(), self._seen()
        candidates = self.settings.candidates if candidates is None else candidates
        if len(candidates) > 1:
            machine = probe_machine(peers, tags)
            network = probe_network(peers, tags, machine, self.hosts)
        else:
            machine, network = Machine(), glance_at_network(peers, tags, self.hosts)
        trials = self._try(candidates) if self._sample or len(candidates) == 1 else self._known_trials(buckets)
        if trials is None:  # buckets have changed, or gradients could not be tried: look at others first
            self._reason = reason
            if not self._tested:
                self._start_capture()
            self._enter(_Phase.PROFILING)
            return
        self._reason = _FIRST_PLAN
        self._situation = self._situated(buckets, seen, trials, network, machine)
        self._probed = self.reducer.step
        self._choose(reason)

    @property
    def _tested(self) -> bool:
        """Whether all candidates were tried, or nothing is large enough for them; not if there was nothing to gain."""
        now = self._situation
        if now is None:
            return False
        return set(self.settings.candidates) <= _tried(now) or not any(bucket.names for bucket in now.buckets)

    def _known_trials(self, buckets: Sequence[Bucket]) -> Sequence[Mapping[str, Trial]] | None:
        before = self._situation
        return before.trials if before is not None and self._tested and before.buckets == tuple(buckets) else None

    def _situated(
        self,
        buckets: Sequence[Bucket],
        seen: tuple[tuple[float, ...], float],
        trials: Sequence[Mapping[str, Trial]],
        network: Network,
        machine: Machine,
    ) -> Situation:
        """All of it, with what the last steps say of it."""
        peers, methods = self.reducer.peers, self.reducer.methods
        ready, done = seen
        now = Situation(peers.size, tuple(buckets), ready, tuple(trials), network, machine, self.settings.quality)
        current = [{name: methods[name] for name in bucket.names} for bucket in buckets]
        if not all(what in trials[place] for place, how in enumerate(current) for what in how.values()):
            return now
        return now.calibrated(current, done)

    def _choose(self, reason: str) -> None:
        if self._situation is None:  # the plan came from a checkpoint or an earlier training
            self._enter(_Phase.PROFILING)
            return
        tried = [each for each in self.settings.candidates if each in _tried(self._situation)]
        allowed = [each for each in tried if self._forbidden.get(each, -1) < self.reducer.step]
        best = choose(self._situation, allowed, reason)
        score = best.predicted_s * (1 + best.extra_steps)
        self._rivals, self._measured, self._resting, self._ran_off = [best], [], [], False
        every = range(len(self._situation.buckets))
        for what in allowed:
            rival = [self._situation.allowed(place, what) for place in every]
            plan = plan_of(self._situation, rival, best.alternatives, reason)
            close = plan.predicted_s * (1 + plan.extra_steps) <= _CLOSE * score
            if close and all(plan.methods != each.methods for each in self._rivals):
                self._rivals.append(plan)
        self._say(f"{reason}: {best.name} expected at {1000 * best.predicted_s:.0f} ms a step{_beside(self._rivals)}")
        self._fly(self._rivals[0])
        self._enter(_Phase.CONTEST)

    def _fly(self, plan: Plan) -> None:
        agree(self.reducer.peers, f"plan {plan.methods}", self.reducer.next_tags())
        self.plan = plan
        self.reducer.assign(plan.methods)

    def _is_hopeless(self) -> bool:
        """Whether the plan that is tried is so slow that another step of it would be a waste."""
        self._forget_all_but(1)
        best = min(self._measured, key=lambda each: each.seconds)
        # What it waits, not what it takes: between two steps a program may do something else, such as a validation.
        return self._paced().waiting_s > best.waiting_s + _HOPELESS * best.seconds

    def _forget_all_but(self, last: int) -> None:
        while len(self._times) > last:
            self._times.popleft()

    def _next_rival(self) -> None:
        """Note how long the steps of a plan took; after the last of them, take the best."""
        self._forget_all_but(_CONTEST_STEPS - 1)
        self._measured.append(pace := self._paced())
        done, over = len(self._measured), pace.gains_nothing and self._all_dense()
        if done == len(self._rivals) and not over and not self._ran_off and not self._recalled:
            self._rivals += self._run_off()
            self._ran_off = True
        if done < len(self._rivals) and not over:
            self._fly(replace(self._rivals[done], measured_s=None))
            self._enter(_Phase.CONTEST)
            return
        recalled, self._recalled = self._recalled, False
        before, now = self._rivals[0].measured_s or math.inf, self._measured[0].seconds
        if recalled and not over and now > _LINK_DRIFT * before:
            self._say(f"steps took {1000 * now:.0f} ms instead of {1000 * before:.0f}")
            self._enter(_Phase.PROFILING)
            return
        timed = [] if self._incumbent is None else [self._incumbent]
        timed += self._timed(recalled)
        timed.sort(key=lambda each: _to_beat(each[0]))
        (best, self._pace), self._incumbent = timed[0], None
        if len(timed) > 1:
            took = "; ".join(f"{plan.name} took {1000 * (plan.measured_s or 0):.0f} ms" for plan, _ in timed)
            self._say(f"{took}: {best.name} it is")
        self._fly(best)
        self._log_composition()
        others = [plan for plan in [*self._rivals[done:], *self._resting] if plan.measured_s]
        every = [*(plan for plan, _ in timed), *others]
        different = {str(sorted(plan.methods.items())): plan.to_json() for plan in reversed(every)}
        self._cache.keep_plans(list(reversed(different.values())))
        self._tried = self.reducer.step
        self._enter(_Phase.CRUISING)

    def _timed(self, recalled: bool = False) -> list[tuple[Plan, _Pace]]:
        """Each rival with the mean of what it took, and how it went the last time.

        A few steps tell little: those of an earlier training count as much.
        """
        paces = dict[int, list[_Pace]]()
        for plan, pace in zip(self._rivals, self._measured, strict=False):
            paces.setdefault(id(plan), []).append(pace)
        timed = []
        for plan in self._rivals[: len(self._measured)]:
            went = paces.pop(id(plan), [])
            if went:
                seconds = [each.seconds for each in went]
                seconds += [plan.measured_s] if recalled and plan.measured_s else []
                timed.append((replace(plan, measured_s=statistics.mean(seconds)), went[-1]))
        return timed

    def _run_off(self) -> list[Plan]:
        """The two best rivals, if they are close; first the one that flies, if it is one of them."""
        timed = sorted(zip(self._rivals, self._timed(), strict=True), key=lambda each: _to_beat(each[1][0]))[:2]
        if len(timed) < 2 or _to_beat(timed[1][1][0]) > _RUN_OFF * _to_beat(timed[0][1][0]):
            return []
        return sorted((plan for plan, _ in timed), key=lambda plan: plan is not self._rivals[-1])

    # Reviews.

    def _review(self) -> None:
        assert self.plan is not None
        (now, loss), step = (self._noted or self._note())(), self.reducer.step
        self._noted = None
        before = self._pace or now
        self._pace = before if before.seconds > 0 else None  # not NaN
        self.plan = replace(self.plan, buckets=self._with_measured_times(self.plan))
        self._since = step
        if now.gains_nothing:
            self._waited, self._stepped = (
                0.0,
                0,
            )  # long ago nothing was to gain: what there is now must not pay for that
        drifted, self._drifted = self._drifted, before.drifts(now, _DRIFT)
        if before.drifts(now, _DRIFT if drifted else _SURE_DRIFT):
            self._incumbent = replace(self.plan, measured_s=now.seconds), now
            waits = f"steps wait {1000 * now.waiting_s:.0f} ms for the network"
            self._plan_anew(f"{waits} instead of {1000 * before.waiting_s:.0f}")
        elif self._guard(loss):
            self._choose("the loss has left its band")
        elif (step - self._probed) * now.seconds > _PROBE_S and self._link_has_changed(self.plan):
            self._plan_anew("the link has changed")
        elif not self._tested and self._all_dense() and now.gains_something(self._patience_s):
            self._start_capture()
            self._enter(_Phase.PROFILING)
        elif step - self._tried >= _QUALITY_STEPS and self._times and not self._all_dense():
            self._tried = step
            self._start_capture()

    def _with_measured_times(self, plan: Plan) -> tuple[Any, ...]:
        last = [[b.done_s - b.ready_s for b in each.buckets] for each in self._times]
        last = [each for each in last if len(each) == len(plan.buckets)]
        if not last:
            return plan.buckets
        medians = [statistics.median(each) for each in zip(*last, strict=True)]
        return tuple(replace(b, measured_s=took) for b, took in zip(plan.buckets, medians, strict=True))

    def _guard(self, loss: float) -> bool:
        """Whether the loss has been outside its band for long; then what is boldest in the plan is forbidden."""
        if math.isnan(loss) or self.plan is None:
            return False
        self._best_loss = min(self._best_loss, loss)
        self._bad_losses = self._bad_losses + 1 if loss > _LOSS_BAND * self._best_loss else 0
        if self._bad_losses < _LOSS_REVIEWS:
            return False
        self._bad_losses = 0
        candidates = self.settings.candidates
        ladder = [each for each in self.plan.methods.values() if each in candidates and each != DENSE]
        boldest = max(ladder, key=lambda each: _height(each, candidates), default=None)
        if boldest is None:
            return False
        for each in candidates:
            if _height(each, candidates) >= _height(boldest, candidates):
                self._forbidden[each] = self.reducer.step + _AFTER_GUARD_STEPS
        self._say(f"loss {loss:.4g}, best {self._best_loss:.4g}: stepping back from {boldest} toward dense")
        self._best_loss = loss
        return True

    def _link_has_changed(self, plan: Plan) -> bool:
        link, self._probed = plan.network.between, self.reducer.step
        now = seconds_per_byte(self.reducer.peers, self.reducer.next_tags, link, self.hosts)
        before, dense_bytes = 8 / link.bits_per_s, sum(bucket.dense_bytes for bucket in plan.buckets)
        matters = dense_bytes * abs(now - before) > _MATTERS * (plan.measured_s or plan.predicted_s)
        return matters and not before / _LINK_DRIFT < now < before * _LINK_DRIFT

    def _look_at_quality(self) -> None:
        """Try the methods in use again, on gradients of now; layers of which too much is lost step back."""
        now, buckets, before = self._situation, self._layout(), self.plan
        if now is not None and now.buckets != tuple(buckets):
            self._enter(_Phase.PROFILING)
            return
        assert before is not None
        used = [what for what in self.settings.candidates if what in before.methods.values()]
        trials = self._try(used)
        self._since = self.reducer.step
        if trials is None:
            return
        if now is not None:  # else the plan came from a checkpoint or an earlier training, and may well do
            known = [{**old, **new} for old, new in zip(now.trials, trials, strict=True)]
            self._situation = replace(now, trials=tuple(known))
        losing = [
            name
            for place, bucket in enumerate(buckets)
            for name in bucket.names
            if (what := before.methods[name]) in trials[place]
            and trials[place][what].errors.get(name, 0.0) > self.settings.quality
        ]
        if losing:
            self._say(f"{len(losing)} layers lose more than {self.settings.quality:g} of their gradients: {losing[:3]}")
            self._choose("gradients have changed")

    # State.

    def state_dict(self) -> dict[str, Any]:
        """The plan, as text."""
        return {"plan": self.plan.to_json() if self.plan is not None else "", "settled": self.settled}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a plan, if it was settled; the reducer's state has how parameters travel."""
        if not isinstance(state, Mapping) or not {"plan", "settled"} <= set(state):
            raise ConfigError(f"`state` must come from state_dict(), with a plan; got {state!r:.80}.")
        self.plan = Plan.from_json(state["plan"]) if state["plan"] else None
        self._situation = self._pace = self._incumbent = None
        self._recalled, self._reason = False, _RESUMED
        if state["settled"] and self.plan is not None:
            self._log_composition()
            self._enter(_Phase.CRUISING)
            self._probed = self._tried = self.reducer.step
        else:
            self.reducer.assign(dict.fromkeys(self.reducer.parameters, self.settings.first))
            self._enter(_Phase.PROFILING)


def _waiting(times: StepTimes) -> float:
    """Seconds of a step after the last gradient was computed."""
    return times.seconds - max(bucket.ready_s for bucket in times.buckets)


def _tried(situation: Situation) -> set[str]:
    return {what for trials in situation.trials for what in trials}


def _to_beat(plan: Plan) -> float:
    """Seconds of a step, and of the steps that a plan needs more; where it is close, dense is to be had."""
    doubt = 1.0 if set(plan.methods.values()) == {DENSE} else DOUBT
    return (plan.measured_s or math.inf) * (1 + plan.extra_steps) * doubt


def _shares(works: Sequence[float], ranks: int) -> list[list[int]]:
    """Which of some works each rank does, so that all are done soon: the largest first, to who has the least.

    >>> _shares([3.0, 1.0, 1.0, 2.0], 2)
    [[0, 2], [3, 1]]
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for number in sorted(range(len(works)), key=lambda each: -works[each]):
        min(shares, key=lambda share: sum(works[each] for each in share)).append(number)
    return shares


def _height(what: str, candidates: Sequence[str]) -> int:
    """Steps from a method down to dense."""
    height = 0
    while what != DENSE:
        what, height = safer(what, candidates), height + 1
    return height


def _beside(rivals: Sequence[Plan]) -> str:
    others = [f"{plan.name} at {1000 * plan.predicted_s:.0f} ms" for plan in rivals[1:]]
    return f"; beside it {', '.join(others)}" if others else ""
