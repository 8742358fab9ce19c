"""The gradients of a model become their mean over all ranks, while backward goes on."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final, Literal
from zlib import crc32

import torch
from torch import Tensor, nn

from gradwire.codecs import State, codec
from gradwire.collectives import (
    AllReduce,
    Collective,
    Dense,
    Gather,
    Method,
    Peers,
    Pipeline,
    PowerSGD,
    Reduced,
    Reduction,
    Trace,
    agree,
    method,
)
from gradwire.collectives.base import STAGES, ring_bytes, where
from gradwire.collectives.choose import encoded_nbytes, flat_collective, is_elementwise, rows_and_columns
from gradwire.collectives.low_rank import LowRank
from gradwire.collectives.processes import ProcessPeers
from gradwire.errors import ConfigError, NonFiniteError, PeerError
from gradwire.kernels.memory import empty
from gradwire.wire import Key, TensorSpec

__all__ = ["BucketTimes", "GradientReducer", "StepTimes", "Traffic"]

SMALL: Final = 4096
"""Matrices of a bucket with fewer elements than this in all, and vectors, travel in float32: they cost a message, not
bytes."""

FEW: Final = 1 << 16
"""Small elements of all ranks up to which they are gathered sooner than summed in two rounds."""


_OF_OTHERS: Final = codec("int8")
"""For matrices that low rank does not make smaller."""

_PATIENCE_S: Final = 2.0
"""When a reducer is closed, for what is under way, it may be to a rank that is gone."""


@dataclass(frozen=True)
class Traffic:
    """Bytes this rank sent and received in a step, and what a float32 ring all-reduce would have sent."""

    sent_bytes: int
    received_bytes: int
    dense_sent_bytes: int


@dataclass(frozen=True)
class BucketTimes:
    """When a bucket was handed over, and when its means were there: seconds after the end of the step before.

    The rest is what its reductions took and moved; small tensors of all buckets, which travel last, count to the last.
    """

    names: tuple[str, ...]
    ready_s: float  # NaN if nobody knows when the step before ended
    done_s: float
    method: str = ""  # how its large tensors travelled
    sent_bytes: int = 0
    received_bytes: int = 0
    dense_bytes: int = 0  # that a float32 ring all-reduce sends
    encode_s: float = 0.0
    wire_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True)
class StepTimes:
    """How a step went, for whoever plans the next ones.

    >>> StepTimes(7, (BucketTimes(("b",), 0.2, 0.5), BucketTimes(("a",), 0.4, 0.6))).seconds
    0.6
    """

    step: int
    buckets: tuple[BucketTimes, ...]  # in the order they were handed over

    @property
    def seconds(self) -> float:
        """From the end of the step before, whatever was done meanwhile, to the last mean."""
        return max(bucket.done_s for bucket in self.buckets)


@dataclass
class _Section:
    """Tensors that travel end to end as one."""

    names: list[str]  # in the order of the flat tensor
    shape: tuple[int, ...]
    sizes: list[int]
    number: int  # of the bucket, in keys and errors: the place of its first parameter, so a rebuild keeps it apart
    collective: Collective
    state: State
    elsewhere: frozenset[str] = frozenset()  # names that travel in another section; zeros stand for them in this one
    next_state: State | None = None  # until the step is taken

    def name_in(self, error: BaseException) -> None:
        """Collectives know the number alone, which all ranks share; names are what a person can look up."""
        error.args = (f"{error} {_begins(self.number, self.names[0])}",)

    def states(self) -> dict[str, State]:
        states = zip(self.names, self.collective.by_tensor(self.state, self.sizes), strict=True)
        return {name: state for name, state in states if state and name not in self.elsewhere}


@dataclass
class _Step:
    """What a step has started."""

    sections: list[_Section] = field(default_factory=list)
    results: list[Future[Reduced]] = field(default_factory=list)
    numel: int = 0  # of all gradients
    small: dict[str, Tensor] = field(default_factory=dict)  # gradients, and then their means
    waiting: list[_Countdown] = field(default_factory=list)  # for the small tensors, which go with the last bucket
    carried: dict[str, Tensor] = field(default_factory=dict)  # what was added to gradients
    traces: list[Trace] = field(default_factory=list)  # of the results
    of_bucket: list[int] = field(default_factory=list)  # the bucket that each result is of
    buckets: list[tuple[tuple[str, ...], float]] = field(default_factory=list)  # when each was handed over
    ends: dict[int, float] = field(default_factory=dict)  # and when it was done, by its place

    def traffic(self, ranks: int) -> Traffic:
        done = [future.result() for future in self.results if future.done() and future.exception() is None]
        sent, received = sum(each.sent_bytes for each in done), sum(each.received_bytes for each in done)
        return Traffic(sent, received, ring_bytes(self.numel, ranks))

    @property
    def taken(self) -> bool:
        """Whether all of it arrived."""
        return bool(self.results) and all(future.exception() is None for future in self.results)


@dataclass
class _Moment:
    """When something was done last."""

    at: float = 0.0


class _Countdown:
    """Completes a future when so many parts are done, after a last action, or with an error.

    That of the part which was started first, whichever failed first: so it is the same on all ranks.
    """

    def __init__(self, parts: int, action: Callable[[], None]) -> None:
        self.parts, self.action, self.done, self.lock = parts, action, Future[None](), threading.Lock()
        self.errors: dict[int, BaseException] = {}

    def __call__(self, place: int, error: BaseException | None) -> None:
        with self.lock:
            self.parts -= 1
            if error is not None:
                self.errors[place] = error
            if self.parts:
                return  # also after an error: others still write to the gradients
            if not self.errors:
                try:
                    self.action()
                except BaseException as why:
                    self.errors[place] = why
            if self.errors:
                self.done.set_exception(self.errors[min(self.errors)])
            else:
                self.done.set_result(None)


class GradientReducer:
    """Reduces the gradients of named parameters: matrices in a codec, the small rest together in float32.

    ``what`` is a codec (``"int4"``, ``"topk:0.01"``) or ``"powersgd:16+int8"``. Codecs get error feedback where they
    need it, unless ``feedback`` is false. Work and waiting happen on threads of their own. States are kept by the name
    of the parameter, whatever bucket it is in, and replaced only after every bucket of the step has arrived.

    ``nonfinite`` says what happens if a rank's gradient holds NaN or Inf: ``"raise"`` raises on every rank,
    ``"propagate"`` makes the bucket NaN on every rank, as plain DDP would, for a ``GradScaler`` to skip the step.
    Either way no state changes. With ``scale``, a function that returns the loss scale, residuals follow its changes.
    With ``hosts``, the host of each rank, what travels inside one is dense.

    :meth:`assign` lets parameters travel otherwise from the next step on. ``between`` is called before each step, with
    its number and how the last one went, if that is known; all ranks do so, and it may talk to the others. Those of
    ``on_step`` are called with how a step went, or with None if it was not taken: when the next one begins, or by
    :meth:`settle`. Those of ``on_gradient`` are called with every gradient that is handed over, before it changes, and
    those of ``onlookers`` with those that are handed over anyway. While :attr:`is_plain`, gradients may as well be
    reduced by somebody else, who tells so by :meth:`begin_elsewhere` and :meth:`end_elsewhere`.

    >>> import torch, gradwire
    >>> from gradwire.collectives.loopback import Alone
    >>> model = torch.nn.Linear(128, 64)
    >>> model(torch.ones(1, 128)).sum().backward()
    >>> reducer = GradientReducer(dict(model.named_parameters()), "int4", Alone())
    >>> reducer.reduce()
    Traffic(sent_bytes=0, received_bytes=0, dense_sent_bytes=0)
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        what: str | Method,
        peers: Peers,
        *,
        seed: int = 0,
        feedback: bool = True,
        nonfinite: Literal["raise", "propagate"] = "raise",
        scale: Callable[[], float] | None = None,
        hosts: Sequence[int] = (),
        label: str | None = None,
        pipeline: Pipeline | None = None,
    ) -> None:
        if not isinstance(seed, int) or not 0 <= seed < 1 << 64:
            raise ConfigError(f"`seed` must be a whole number in [0, 2**64); got {seed!r}.")
        if nonfinite not in ("raise", "propagate"):
            raise ConfigError(f"`nonfinite` must be 'raise' or 'propagate'; got {nonfinite!r}.")
        self.parameters = dict(parameters)
        self.method = method(what, feedback=feedback)
        self.label = label or str(self.method)  # what all ranks must agree on
        self.peers, self.seed, self.nonfinite, self.scale = peers, seed, nonfinite, scale
        self.hosts = tuple(hosts)
        # Sizes on the wire follow from codec and shapes: once these agree, no rank can send what another cannot take.
        shapes = {name: (*p.shape, p.dtype) for name, p in parameters.items()}
        checksum = crc32(repr(shapes).encode())
        inside = ", hierarchical" if self.hosts else ""
        what_goes = f"codec {self.label}{inside}, seed {seed}, nonfinite {nonfinite}"
        agree(peers, f"{what_goes}, {len(shapes)} parameters with checksum {checksum:08x}")
        self._places = {name: place for place, name in enumerate(self.parameters, start=1)}
        self._pipeline = pipeline or Pipeline()
        self._tag = STAGES  # tag 0 was the agreement's
        self._plans: dict[tuple[str, ...], list[_Section]] = {}
        self._smalls: _Section | None = None
        self._states: dict[str, State] = {}  # of parameters that no plan has yet
        self._methods: dict[str, Method] = dict.fromkeys(self.parameters, self.method)
        self._carry: dict[str, Tensor] = {}  # what methods before had kept back, for the next gradients
        self._known: dict[tuple[str, ...], tuple[str, int]] = {}  # of buckets
        self._end_of_step = math.nan
        self._all_reduced = _Moment()  # the last one that needed no pipeline
        self._times: StepTimes | None = None  # of the last step
        self.between: Callable[[int, StepTimes | None], None] | None = None
        self.on_step: list[Callable[[int, StepTimes | None], None]] = []
        self.on_gradient: list[Callable[[str, Tensor], None]] = []
        self.onlookers: list[Callable[[str, Tensor], None]] = []
        self._untold: list[tuple[int, StepTimes | None]] = []  # steps that nobody was told of
        self._prepared = False  # whether ``between`` was called for the next step
        self._scale = scale() if scale else 1.0
        self._step = 0
        self._open = False  # whether a bucket of the step is still to come
        self._now = _Step()
        self._traffic = Traffic(0, 0, 0)

    @property
    def step(self) -> int:
        """Steps that have been taken."""
        return self._step + bool(self._now.results and not self._open)

    @property
    def is_between_steps(self) -> bool:
        """Whether the next bucket begins a step."""
        return not self._open

    @property
    def traffic(self) -> Traffic:
        """Of the last step."""
        return self._now.traffic(self.peers.size) if self._now.results else self._traffic

    def settle(self) -> None:
        """Count the last step as taken now, not when the next one begins; nothing may be under way."""
        if not self._open and all(future.done() for future in self._now.results):
            self._take_step()
            self._tell()

    def unhook(self) -> None:
        """Call nothing more: without the listeners, which know the reducer, both are freed as soon as unused."""
        self.between = None
        for listeners in (self.on_step, self.on_gradient, self.onlookers):
            listeners.clear()

    def close(self) -> None:
        """End the threads, and the connections to other ranks if nothing is under way.

        What is kept from step to step stays until the reducer goes; of parameters and gradients only the sizes do.
        """
        self._pipeline.close()
        wait(self._now.results, timeout=_PATIENCE_S)  # for those that the pipeline only follows
        if not all(future.done() for future in self._now.results):
            return
        if isinstance(self.peers, ProcessPeers):
            self.peers.close()
        self.settle()
        self.parameters = {name: nn.Parameter(p.detach().to("meta")) for name, p in self.parameters.items()}

    # A whole model at once.

    def reduce(self) -> Traffic:
        """Replace every gradient by the mean over all ranks. A missing gradient counts as zeros."""
        gradients = []
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        self.start(list(self.parameters), gradients, last=True).result()
        return self.traffic

    # Bucket by bucket.

    def start(
        self,
        names: Sequence[str],
        gradients: Sequence[Tensor] | Callable[[], Sequence[Tensor]],
        *,
        last: bool,
        flat: Tensor | None = None,
    ) -> Future[None]:
        """Start to replace the gradients of a bucket of parameters by their means; the future is done when they are.

        Every rank starts the same buckets in the same order. ``last`` ends the step: vectors and small tensors of all
        buckets travel then, so no bucket that has any is done before. ``flat`` is the memory of the gradients, if they
        lie end to end: it saves copies, and where all of it is reduced as it is nobody asks for the gradients.

        After an error that only this rank knows of, here or in the future, the other ranks are told that it failed.
        """
        try:
            done = self._start(names, gradients, last, flat)
        except BaseException as error:
            self.give_up(error)
            waiting, self._now.waiting, self._now.small = self._now.waiting, [], {}
            for countdown in waiting:  # for small tensors, which may never be sent now
                countdown(len(self._now.results), error)
            raise
        weak = weakref.ref(self)  # futures must not know the reducer, which knows them

        def finished(future: Future[None]) -> None:
            if (reducer := weak()) is not None:
                reducer.give_up(future.exception())

        done.add_done_callback(finished)
        return done

    def give_up(self, error: BaseException | None) -> None:
        """Reduce nothing more after an error that the other ranks cannot know of, and tell them."""
        if error is None or isinstance(error, NonFiniteError | PeerError):  # which all ranks have
            return
        failed = Future[Reduced]()
        failed.set_exception(error)
        self._now.results.append(failed)  # no state of this step counts
        self._pipeline.fail(error)
        if isinstance(self.peers, ProcessPeers):
            self.peers.give_up(error)

    def _start(
        self,
        names: Sequence[str],
        gradients: Sequence[Tensor] | Callable[[], Sequence[Tensor]],
        last: bool,
        flat: Tensor | None,
    ) -> Future[None]:
        if not self._open:
            self._begin_step()
        self._open = not last
        now, number = self._now, len(self._now.buckets)
        now.buckets.append((tuple(names), time.perf_counter()))
        ends = now.ends  # not the step itself: it would hold on to its own tensors until Python looks for cycles

        def end() -> None:
            ends[number] = time.perf_counter()

        if listeners := [*self.on_gradient, *self.onlookers]:  # they see states as they were before this step
            gradients = gradients() if callable(gradients) else gradients
            for listener in listeners:
                for name, gradient in zip(names, gradients, strict=True):
                    listener(name, gradient)
        sections = self._plan(tuple(names))
        if flat is not None and flat.dtype == torch.float32 and self._reduces_as_it_is(sections):
            now.numel += flat.numel()
            finish = _Countdown(1, end)
            self._submit(now, sections[0], [flat], [finish], flat)
        else:
            gradients = gradients() if callable(gradients) else gradients
            now.numel += sum(gradient.numel() for gradient in gradients)
            finish = self._start_sections(dict(zip(names, gradients, strict=True)), sections, flat, end)
        if last and now.small:
            self._submit(now, self._small(tuple(now.small)), list(now.small.values()), now.waiting)
        return finish.done

    def _reduces_as_it_is(self, sections: Sequence[_Section]) -> bool:
        """Whether a bucket is one all-reduce, and nobody has to do with a gradient by itself."""
        dense = len(sections) == 1 and isinstance(sections[0].collective, Dense) and not sections[0].elsewhere
        return dense and not self._carry and not self.on_gradient and not self.onlookers

    def _start_sections(
        self, by_name: Mapping[str, Tensor], sections: Sequence[_Section], flat: Tensor | None, end: Callable[[], None]
    ) -> _Countdown:
        now, names = self._now, list(by_name)
        for name in self._carry.keys() & by_name.keys():
            now.carried[name] = self._carry.pop(name)
            by_name[name].add_(now.carried[name].view(by_name[name].shape).to(by_name[name]))
        main, others = (sections[0] if sections else None), sections[1:]
        # What travels apart from the main section is copied, and zeros stand for it there.
        apart = {name: by_name[name].clone() for name in names if main is None or name in main.elsewhere}
        small = [name for name in apart if not any(name in section.names for section in others)]

        def put_back() -> None:
            for name, mean in apart.items():
                by_name[name].copy_(mean)
            end()

        finish = _Countdown((main is not None) + len(others) + bool(small), put_back)
        if main is not None:
            for name in main.elsewhere:
                by_name[name].zero_()
            in_place = flat if len(main.names) == len(names) and main.shape == (sum(main.sizes),) else None
            self._submit(now, main, [by_name[name] for name in main.names], [finish], in_place)
        for section in others:
            self._submit(now, section, [apart.get(n, by_name[n]) for n in section.names], [finish])
        if small:
            now.small |= {name: apart[name] for name in small}
            now.waiting.append(finish)
        return finish

    def _submit(
        self,
        now: _Step,
        section: _Section,
        gradients: list[Tensor],
        then: list[_Countdown],
        flat: Tensor | None = None,
    ) -> None:
        """Start to reduce a section. Its means end in the gradients; with ``flat``, their memory, without a copy."""
        key, tag, place = Key(self.seed, self._step, section.number), self.next_tags(), len(now.results)
        propagates = self.nonfinite == "propagate"  # futures must not know the reducer, which knows them
        computed = _computed(gradients[0].device)
        can = flat is not None and flat.dtype == torch.float32
        in_place = (
            flat if can and (gradients[0].device.type == "cpu" or isinstance(section.collective, Dense)) else None
        )

        def reduction() -> Reduction:
            computed()
            x = in_place
            if x is None:
                pieces = [gradient.reshape(-1).to(torch.float32) for gradient in gradients]
                x = torch.cat(pieces, out=empty(sum(section.sizes), torch.float32, pieces[0].device))
            try:
                return (yield from section.collective.reduce(x.view(section.shape), section.state, key, tag, in_place))
            except (NonFiniteError, PeerError) as error:
                section.name_in(error)
                raise

        def arrived(future: Future[Reduced]) -> None:
            error = future.exception()
            try:
                if error is None:
                    section.next_state = future.result().state
                    if in_place is None:
                        for piece, gradient in zip(
                            torch.split(future.result().mean.view(-1), section.sizes), gradients, strict=True
                        ):
                            gradient.copy_(piece.view(gradient.shape))
                elif isinstance(error, NonFiniteError) and propagates:
                    for gradient in gradients:
                        gradient.fill_(torch.nan)
                    error = None
            except BaseException as why:  # or the countdown would never end
                error = why
            for countdown in then:
                countdown(place, error)

        now.sections.append(section)
        now.traces.append(trace := Trace())
        now.of_bucket.append(len(now.buckets) - 1)
        future = self._all_reduce(section, in_place, key, tag, trace)
        if future is None:
            dense = isinstance(section.collective, Dense)
            future = self._pipeline.submit(reduction(), here=dense, trace=trace)
        now.results.append(future)
        future.add_done_callback(arrived)

    def _all_reduce(
        self, section: _Section, flat: Tensor | None, key: Key, tag: int, trace: Trace
    ) -> Future[Reduced] | None:
        """Started where none of our threads has to wait for it; None if that cannot be."""
        collective = section.collective
        if flat is None or not isinstance(collective, Dense):
            return None
        began = sent = time.perf_counter()
        last = self._all_reduced

        def arrived(future: Future[Reduced]) -> None:
            now = time.perf_counter()
            trace.wire_s, last.at = now - max(sent, last.at), now
            if isinstance(error := future.exception(), NonFiniteError | PeerError):
                section.name_in(error)

        def start() -> Future[Reduced] | None:
            nonlocal sent
            future = collective.start(flat, key, tag)
            trace.encode_s = (sent := time.perf_counter()) - began
            if future is not None:
                future.add_done_callback(arrived)
            return future

        return self._pipeline.follow(start)

    # Or by somebody else, as they are.

    @property
    def is_plain(self) -> bool:
        """Whether all gradients are to be all-reduced as they are, and nobody has to see them."""
        owed = self._carry or self._states or self.on_gradient
        return not owed and all(isinstance(how, AllReduce) for how in self._methods.values())

    def begin_elsewhere(self) -> int:
        """Somebody else has begun to reduce the gradients of a step. Tags for an exchange, if any of it fails."""
        self._pipeline.check()
        self._take_step()
        self._tell()
        self._open = True
        return self.next_tags()

    def end_elsewhere(
        self,
        buckets: Sequence[tuple[str, ...]],
        ready: Sequence[float],
        done: Sequence[float],
        nonfinite: int | None = None,
    ) -> NonFiniteError | None:
        """All of it has arrived, and the step counts: parameters, when they were handed over, and when they were there.

        ``nonfinite`` is the bucket whose mean holds NaN or Inf, if any does: the step is not taken then, and the error
        is to be raised.
        """
        error, times = None, None
        known = [self._known_of(names) for names in buckets]
        total = sum(moved for _, moved in known)
        self._traffic = Traffic(total, total, total)
        if nonfinite is None:
            after, last, rows = self._end_of_step, 0.0, []
            for names, (label, moved), began, ended in zip(buckets, known, ready, done, strict=True):
                waited = ended - max(last, began)
                rows.append(BucketTimes(names, began - after, ended - after, label, moved, moved, moved, wire_s=waited))
                last = ended
            times = StepTimes(self._step, tuple(rows))
        else:
            first = buckets[nonfinite][0]
            number = self._places[first]
            where_it_is = where(Key(self.seed, self._step, number))
            error = NonFiniteError(f"{where_it_is}: a rank's gradient holds NaN or Inf. {_begins(number, first)}")
        self._open = False
        self._count_step(times, math.nan if times is None else last)
        return error

    def prepare(self) -> None:
        """Have ``between`` called for the next step now, rather than when it begins."""
        self._take_step()
        times, self._times, self._prepared = self._times, None, True
        if self.between is not None:
            self.between(self._step, times)

    def _begin_step(self) -> None:
        self._pipeline.check()
        self._take_step()
        self._rescale()
        self._tell()
        if not self._prepared:
            self.prepare()
        self._prepared = False

    def _tell(self) -> None:
        """Tell of steps that were taken: not before the next one begins, for there may be more to say of them."""
        untold, self._untold = self._untold, []
        for step, times in untold:
            for listener in self.on_step:
                listener(step, times)

    def _take_step(self) -> None:
        """Commit the states of the step before, now that it has been taken; not if any of it failed."""
        before, self._now = self._now, _Step()
        if not before.results:
            return
        self._traffic, taken = before.traffic(self.peers.size), before.taken
        for section in before.sections:
            if taken and section.next_state is not None:
                section.state = section.next_state
            section.next_state = None
        if not taken:
            self._carry |= before.carried
        times = self._times_of(before) if taken else None
        self._count_step(times, max(before.ends.values()) if times is not None else math.nan)

    def _count_step(self, times: StepTimes | None, end: float) -> None:
        self._end_of_step = end
        self._times = times if times is not None and not math.isnan(times.seconds) else None
        self._step += 1
        self._untold.append((self._step, times))

    def _times_of(self, before: _Step) -> StepTimes | None:
        """Of a step that was taken; None if nobody knows."""
        if len(before.ends) < len(before.buckets):
            return None
        after = self._end_of_step
        sums = [[0, 0, 0.0, 0.0, 0.0] for _ in before.buckets]  # this is done between steps, where others wait
        for bucket, future, trace in zip(before.of_bucket, before.results, before.traces, strict=True):
            reduced, of_bucket = future.result(), sums[bucket]
            of_bucket[0] += reduced.sent_bytes
            of_bucket[1] += reduced.received_bytes
            of_bucket[2] += trace.encode_s
            of_bucket[3] += trace.wire_s
            of_bucket[4] += trace.decode_s
        buckets = []
        for number, (names, ready) in enumerate(before.buckets):
            (label, dense_bytes), (sent, received, *seconds) = self._known_of(names), sums[number]
            done = before.ends[number] - after
            buckets.append(
                BucketTimes(names, ready - after, done, label, int(sent), int(received), dense_bytes, *seconds)
            )
        return StepTimes(self._step, tuple(buckets))

    def _known_of(self, names: tuple[str, ...]) -> tuple[str, int]:
        """How the large tensors of a bucket travel, and its bytes if it were dense; remembered until that changes."""
        if names not in self._known:
            label = ", ".join(str(how) for how, _ in encoded(names, self.parameters, self._methods)) or "float32"
            numel = sum(self.parameters[name].numel() for name in names)
            self._known[names] = label, ring_bytes(numel, self.peers.size)
        return self._known[names]

    def _rescale(self) -> None:
        """Residuals are in units of the loss scale: they follow it."""
        if self.scale is None or (scale := self.scale()) == self._scale:
            return
        factor = scale / self._scale
        for section in (section for plan in self._plans.values() for section in plan):
            section.state = _scaled(section.state, factor)
        self._states = {name: _scaled(state, factor) for name, state in self._states.items()}
        self._carry = {name: owed * factor for name, owed in self._carry.items()}
        self._scale = scale

    # Which parameters travel together, and how.

    @property
    def methods(self) -> dict[str, str]:
        """How each parameter travels, unless it is so small that it goes with others in float32."""
        return {name: str(how) for name, how in self._methods.items()}

    @property
    def composition(self) -> str:
        """How many bytes of a step travel in what, as a rank encodes them: in words, and as if all were one bucket."""
        groups = encoded(self.parameters, self.parameters, self._methods)
        if all(isinstance(how, AllReduce) for how in self._methods.values()):
            groups = [(AllReduce(), list(self.parameters))]
        rest = set(self.parameters).difference(*(names for _, names in groups))
        rows: list[tuple[str, Method, Collection[str]]] = []
        for how, names in groups:
            thin, others = _thin(how, names, self.parameters) if isinstance(how, PowerSGD) else (names, [])
            rows += [(str(how), how, thin), (str(_OF_OTHERS), _OF_OTHERS, others)]
        rows.append(("float32 (vectors and small matrices)", AllReduce(), rest))
        every, words = sum(each.numel() for each in self.parameters.values()), list[str]()
        for label, how, some in rows:
            shapes = [tuple(self.parameters[name].shape) for name in some]
            if numel := sum(map(math.prod, shapes)):
                words.append(f"{label}: {encoded_nbytes(how, shapes):,} bytes, {numel / every:.0%} of the elements")
        return "; ".join(words)

    def travels_as(self, name: str) -> str:
        """How a parameter travels, by its method alone."""
        return str(self._methods[name])

    def residual_norm(self, name: str) -> float | None:
        """The norm of what error feedback keeps back of a parameter on this rank; None if nothing is."""
        for section in (section for plan in self._plans.values() for section in plan if name in section.names):
            state = section.states().get(name)
            if state and (state.keys() & {"residual", "unsent"}):
                return float(_owed(state, self.parameters[name].numel(), 1).norm())
        return None

    def assign(self, methods: Mapping[str, str | Method]) -> None:
        """Let parameters travel by other methods from the next step on; every rank does so before the same step.

        What error feedback had kept back of their buckets is added to the next gradients: nothing is lost.
        """
        unknown = sorted(set(methods) - set(self.parameters))
        if unknown:
            raise ConfigError(f"`methods` must be of the reducer's parameters; got {unknown}.")
        if self._open:
            raise ConfigError("assign() must be called between steps, not during backward.")
        self._take_step()
        wanted = {name: method(what) for name, what in methods.items()}
        changed = {name for name, how in wanted.items() if str(how) != str(self._methods[name])}
        if not changed:
            return
        self._methods |= {name: wanted[name] for name in changed}
        self._known = {}
        for names in [names for names in self._plans if not changed.isdisjoint(names)]:
            changed |= set(names)
            for section in self._plans.pop(names):
                self._states |= section.states()
        self._carry_on(sorted(changed & self._states.keys()))

    def _carry_on(self, names: Iterable[str]) -> None:
        """Add what was kept back of some parameters to their next gradients."""
        for name in names:
            owed = _owed(self._states.pop(name), self.parameters[name].numel(), self.peers.size)
            self._carry[name] = owed + self._carry[name] if name in self._carry else owed

    def next_tags(self) -> int:
        """Tags for a reduction, or another exchange of the same kind, between steps."""
        tag, self._tag = self._tag, (self._tag + STAGES) % (1 << 30)
        return tag

    def _plan(self, names: tuple[str, ...]) -> list[_Section]:
        """Sections of a bucket's large tensors."""
        if names not in self._plans:
            # Parameters that were in other buckets, before DDP rebuilt them, bring their states.
            for old in [old for old in self._plans if not set(old).isdisjoint(names)]:
                for section in self._plans.pop(old):
                    self._states |= section.states()
            self._plans[names] = self._sections(list(names))
            self._carry_on(name for name in names if name in self._states)  # which travels in float32 from now on
        return self._plans[names]

    def _small(self, names: tuple[str, ...]) -> _Section:
        """The section of the small tensors of all buckets, which has no state."""
        if self._smalls is None or tuple(self._smalls.names) != names:
            self._smalls = self._section(list(names), self._small_collective(list(names)))
        return self._smalls

    def _sections(self, names: list[str]) -> list[_Section]:
        """The section of the bucket's own memory first, if there is one."""
        if all(isinstance(self._methods[n], AllReduce) for n in names):
            return [self._section(names, Dense(self.peers))]
        sections: list[_Section] = []
        for how, large in encoded(names, self.parameters, self._methods):
            sections += self._sections_of(how, large if sections else names, large)
        return sections

    def _sections_of(self, how: Method, names: list[str], large: list[str]) -> list[_Section]:
        """Sections of the large tensors of some names, which travel by one method."""
        if isinstance(how, PowerSGD):
            return self._low_rank_sections(how, names, large)
        if isinstance(how, AllReduce):
            return [self._section(names, Dense(self.peers), elsewhere=set(names) - set(large))]
        if is_elementwise(how):
            # Zeros that do not stay zeros would make noise of the places of small tensors.
            keeps_zeros = how.laws(TensorSpec((1 << 20,))).keeps_zeros
            together = names if keeps_zeros else large
            collective = flat_collective(self.peers, how, self.hosts)
            return [self._section(together, collective, elsewhere=set(names) - set(large))]
        sections = [self._section([n], Gather(self.peers, how), self.parameters[n].shape) for n in large]
        sections[0].elsewhere = frozenset(set(names) - {large[0]})
        return sections

    def _low_rank_sections(self, how: PowerSGD, names: list[str], large: list[str]) -> list[_Section]:
        sizes = [self.parameters[n].numel() for n in names]
        starts = dict(zip(names, accumulate(sizes, initial=0), strict=False))
        shapes = {n: rows_and_columns(self.parameters[n].shape) for n in large}
        thin, others = _thin(how, large, self.parameters)
        sections = []
        if thin:
            collective = LowRank(
                self.peers,
                tuple(shapes[n] for n in thin),
                tuple(starts[n] for n in thin),
                how.rank,
                how.factors,
                how.start,
                alternate=how.alternate,
                hosts=self.hosts,
            )
            sections.append(self._section(names, collective, elsewhere=set(names) - set(thin)))
        if others:
            elsewhere = set(names) - set(others) if not thin else set()
            collective_of_others = flat_collective(self.peers, _OF_OTHERS, self.hosts)
            sections.append(self._section(others, collective_of_others, elsewhere=elsewhere))
        return sections

    def _small_collective(self, names: list[str]) -> Collective:
        """One round instead of two where bytes are so few that only rounds count."""
        few = sum(self.parameters[n].numel() for n in names) * self.peers.size <= FEW
        return Gather(self.peers, codec("none")) if few else flat_collective(self.peers, codec("none"), self.hosts)

    def _section(
        self,
        names: list[str],
        collective: Collective,
        shape: Sequence[int] | None = None,
        elsewhere: Collection[str] = (),
    ) -> _Section:
        sizes = [self.parameters[name].numel() for name in names]
        spec = TensorSpec(tuple(shape) if shape is not None else (sum(sizes),))
        device = self.parameters[names[0]].device if isinstance(collective, Gather) else torch.device("cpu")
        known = {name: self._states.pop(name) for name in names if name in self._states and name not in elsewhere}
        missing = [name for name in names if name not in known and name not in elsewhere]
        if known and any(is_large(self.parameters[name]) for name in missing):  # small ones may have been in float32
            raise ConfigError(
                f"the states of the parameters {missing} are missing; those of {sorted(known)} are there."
            )
        if known:
            # Zeros travel for tensors that are elsewhere, so that is what remains of them; of float32 nothing does.
            states = [known.get(name) or _nothing_left(size, device) for name, size in zip(names, sizes, strict=True)]
            state = collective.from_tensors(states, sizes)
        else:
            state = collective.init(spec, device)
        place = self._places[names[0]]
        return _Section(names, spec.shape, sizes, place, collective, state, frozenset(elsewhere))

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Everything that goes from step to step: tensors and numbers, by parameter."""
        if self._open:
            raise ConfigError("state_dict() must be called between steps, not during backward.")
        self._take_step()
        states = {name: dict(state) for name, state in self._states.items()}
        for section in (section for plan in self._plans.values() for section in plan):
            states |= {name: dict(state) for name, state in section.states().items()}
        cloned = {
            name: {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
            for name, state in states.items()
            if state
        }
        place = {"rank": self.peers.rank, "ranks": self.peers.size}
        assigned = {name: str(how) for name, how in self._methods.items() if how is not self.method}
        carried = {name: owed.clone() for name, owed in self._carry.items()}
        moving = {"assigned": assigned, "carried": carried}
        return {"method": self.label, "step": self._step, "scale": self._scale, **place, "states": cloned, **moving}

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on from a state that :meth:`state_dict` returned on this rank, or from those of all ranks that were saved.

        By another number of ranks than before, what each had kept back is added to the next gradients of all, once.
        """
        if isinstance(state, Mapping) and state.get("ranks") == 1 != self.peers.size:
            state = [state]  # there was one rank: this is what all had
        if isinstance(state, Sequence):
            state = self._divided(state)
        self._check_state(state)
        self.settle()
        self._now, self._plans, self._known = _Step(), {}, {}
        self._end_of_step, self._times, self._prepared = math.nan, None, False
        assigned = {name: method(what) for name, what in state.get("assigned", {}).items()}
        self._methods = {**dict.fromkeys(self.parameters, self.method), **assigned}
        self._carry = {name: owed.clone() for name, owed in state.get("carried", {}).items()}
        self._step, self._scale = int(state["step"]), float(state["scale"])
        self._states = {
            name: {key: value.clone() if isinstance(value, Tensor) else value for key, value in each.items()}
            for name, each in state["states"].items()
        }

    def _divided(self, states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """The states of all ranks as one for this rank, of as many or of others."""
        ranks = [each.get("rank") for each in states if isinstance(each, Mapping)]
        if not states or ranks != list(range(len(states))) or any(s.get("ranks") != len(states) for s in states):
            raise ConfigError(
                f"`state` must have the states of all ranks that were saved, in order; got ranks {ranks}."
            )
        if len(states) == self.peers.size:
            return states[self.peers.rank]
        for each in states:
            self._check_state({**each, "rank": self.peers.rank, "ranks": self.peers.size})
        carried: dict[str, Tensor] = {}
        for each in states:
            owed = [
                (name, _owed(kept, self.parameters[name].numel(), len(states))) for name, kept in each["states"].items()
            ]
            for name, tensor in [*owed, *each.get("carried", {}).items()]:
                share = tensor.reshape(-1) / len(states)
                carried[name] = carried[name] + share if name in carried else share
        place = {"rank": self.peers.rank, "ranks": self.peers.size}
        return {**states[0], **place, "states": {}, "carried": carried}

    def _check_state(self, state: Mapping[str, Any]) -> None:
        mine = {"method": self.label, "rank": self.peers.rank, "ranks": self.peers.size}
        expected = {*mine, "step", "scale", "states"}
        if not isinstance(state, Mapping) or not expected <= set(state):
            got = sorted(state) if isinstance(state, Mapping) else type(state).__name__
            raise ConfigError(f"`state` must come from state_dict(), with {sorted(expected)}; got {got}.")
        for name, value in mine.items():
            if state[name] != value:
                hint = (
                    " To change it, go on without that state: what it had kept back is lost."
                    if name == "method"
                    else ""
                )
                raise ConfigError(f"`state` has {name} {state[name]!r}; this reducer has {value!r}.{hint}")
        step, scale, states = state["step"], state["scale"], state["states"]
        if not isinstance(step, int) or step < 0:
            raise ConfigError(f"`state` must have a step of 0 or more; got {step!r}.")
        if not isinstance(scale, float | int) or not 0 < scale < math.inf:
            raise ConfigError(f"`state` must have a scale above 0; got {scale!r}.")
        if not isinstance(states, Mapping) or not all(map(_is_state, states.values())):
            raise ConfigError("`state` must have 'states' of tensors and whole numbers, by parameter.")
        assigned, carried = state.get("assigned", {}), state.get("carried", {})
        if not all(isinstance(each, Mapping) for each in (assigned, carried)):
            raise ConfigError("`state` must have 'assigned' and 'carried' by parameter.")
        unknown = sorted({*states, *assigned, *carried} - set(self.parameters))
        if unknown:
            raise ConfigError(f"`state` has parameters that the model has not: {unknown}.")
        kept = {name: each.get("residual") for name, each in states.items()}
        for name, residual in [*kept.items(), *carried.items()]:
            size = self.parameters[name].numel()
            if isinstance(residual, Tensor) and residual.numel() != size:
                raise ConfigError(
                    f"`state` has a residual of {residual.numel()} elements for {name!r}; the parameter has {size}."
                )


def _begins(number: int, name: str) -> str:
    return f"Bucket {number} begins with parameter {name!r}."


def _is_state(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(each, Tensor | int) for each in value.values())


def _computed(device: torch.device) -> Callable[[], None]:
    """A function that makes another thread wait for what this one has started on a device so far."""
    if device.type != "cuda":
        return lambda: None
    event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event.synchronize


def _scaled(state: State, factor: float) -> State:
    """A state for gradients that are so much larger. Factors of matrices are directions."""
    return {
        name: value * factor if isinstance(value, Tensor) and name not in ("p", "q") else value
        for name, value in state.items()
    }


def encoded(
    names: Iterable[str], parameters: Mapping[str, Tensor], methods: Mapping[str, Method]
) -> list[tuple[Method, list[str]]]:
    """Return the methods of a bucket, and what travels by each; the rest travels in float32, with that of all buckets.

    >>> adapters = {"down": torch.empty(8, 256), "up": torch.empty(256, 8), "bias": torch.empty(256)}
    >>> [(str(how), names) for how, names in encoded(adapters, adapters, dict.fromkeys(adapters, method("int4")))]
    [('int4', ['down', 'up'])]
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        if is_large(parameters[name]) or _is_matrix(parameters[name]):
            groups.setdefault(str(methods[name]), []).append(name)
    found = [(how := methods[group[0]], worth_encoding(group, parameters, how)) for group in groups.values()]
    return [(how, group) for how, group in found if group]


def worth_encoding(names: Collection[str], parameters: Mapping[str, Tensor], how: Method | None = None) -> list[str]:
    """Return the parameters of a bucket that are worth a codec: matrices, however small where they travel as one.

    They do unless the method is one of whole matrices, to which each is a message: these must be large.

    >>> layers = {"first": torch.empty(64, 64), "last": torch.empty(10, 64), "norm": torch.empty(1, 8192)}
    >>> worth_encoding(layers, layers), worth_encoding(layers, layers, method("powersgd:4"))
    (['first', 'last', 'norm'], ['first', 'norm'])
    """
    large = [name for name in names if is_large(parameters[name])]
    if how is not None and not (isinstance(how, AllReduce) or (not isinstance(how, PowerSGD) and is_elementwise(how))):
        return large
    matrices = [name for name in names if name in large or _is_matrix(parameters[name])]
    return matrices if sum(parameters[name].numel() for name in matrices) >= SMALL else []


def _thin(how: PowerSGD, names: Iterable[str], parameters: Mapping[str, Tensor]) -> tuple[list[str], list[str]]:
    """Return the matrices that low rank makes smaller, and the others."""
    thin, others = list[str](), list[str]()
    for name in names:
        (thin if how.pays(*rows_and_columns(parameters[name].shape)) else others).append(name)
    return thin, others


def is_large(parameter: Tensor) -> bool:
    """Whether a parameter is worth a codec by itself.

    >>> is_large(torch.empty(256, 256)), is_large(torch.empty(65536)), is_large(torch.empty(8, 8))
    (True, False, False)
    """
    return parameter.dim() > 1 and parameter.numel() >= SMALL


def _is_matrix(parameter: Tensor) -> bool:
    """Whether it has several rows and columns: a vector, of whatever shape, may need all of its bits."""
    return sum(size > 1 for size in parameter.shape) > 1


def _owed(state: State, size: int, ranks: int) -> Tensor:
    """What a rank has kept back of a tensor, as a summand of its gradient."""
    residual = state.get("residual", state.get("unsent"))
    owed = residual.reshape(-1).clone() if isinstance(residual, Tensor) else torch.zeros(size)
    if isinstance(owned := state.get("owned"), Tensor):
        start = int(state["owned_from"])
        owed[start : start + owned.numel()] += owned.to(owed) * ranks  # a mean's loss counts once for all ranks
    return owed


def _nothing_left(size: int, device: torch.device) -> State:
    return {"residual": torch.zeros(size, device=device), "owned": torch.zeros(0, device=device), "owned_from": 0}
