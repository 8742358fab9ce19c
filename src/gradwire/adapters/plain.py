"""DDP's own all-reduce, watched but not touched: how gradients travel while nothing else pays."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradwire.collectives.processes import ProcessPeers
from gradwire.errors import NonFiniteError
from gradwire.kernels import ops
from gradwire.kernels.select import native
from gradwire.reducer import GradientReducer
from gradwire.torch_internals import backward_queue, can_replace_group, delays_parameters, replace_group

__all__ = ["PlainExchange"]


class PlainExchange(dist.ProcessGroup):
    """Stands in for the process group of a DDP model's reducer: passes everything on, and notes when.

    A hook takes two or three percent of a short step over a fast link: DDP divides gradients while it copies them to a
    bucket, a hook must do so in a pass of its own, and Python is called when a bucket is there. This one is called when
    a bucket is handed over, and waits for them at the end of backward, right before DDP would. So a rank that is gone
    is named, NaN and Inf are found, and steps are timed, all as with a hook.

    ``after``, a method, is called when DDP is done with a step and the reducer was told. Neither its object nor the
    model is kept alive.
    """

    def __init__(self, model: DistributedDataParallel, reducer: GradientReducer, after: Callable[[], None]) -> None:
        group: Any = model.process_group
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        assert isinstance(reducer.peers, ProcessPeers)  # as it can be watched
        self._group, self._model, self._reducer = group, weakref.ref(model), reducer
        self._after, self._peers = weakref.WeakMethod(after), reducer.peers
        self._looks = reducer.nonfinite == "raise"
        self._numel = self._left = sum(parameter.numel() for parameter in reducer.parameters.values())
        self._ends = False  # whether the end of the step is awaited
        # Caches are full of the model: the fewer objects these are the better.
        self._buckets: list[Tensor] = []  # of the step so far
        self._works: list[dist.Work] = []
        self._ready: list[float] = []
        self._layouts: dict[tuple[int, ...], list[tuple[str, ...]]] = {}
        self._error: BaseException | None = None  # that ended it
        self._nonfinite: NonFiniteError | None = None  # of this step
        self._queue = backward_queue()
        replace_group(model, self)

    @staticmethod
    def can_watch(model: DistributedDataParallel, reducer: GradientReducer) -> bool:
        """Whether a model's all-reduces can be watched: not where devices work while Python goes on."""
        here = all(parameter.device.type == "cpu" for parameter in reducer.parameters.values())
        known = can_replace_group(model) and isinstance(reducer.peers, ProcessPeers)
        return here and known and not delays_parameters(model)

    def leave(self) -> None:
        """Give the model its own group back."""
        if (model := self._model()) is not None:
            replace_group(model, self._group)

    # As DDP's reducer calls it.

    def getBackendName(self) -> str:  # noqa: D102, N802
        return "gradwire"

    def broadcast(self, *arguments: Any) -> Any:  # noqa: D102
        return self._group.broadcast(*arguments)

    def allreduce(self, tensors: list[Tensor], *options: Any) -> Any:  # type: ignore[override]  # noqa: D102
        bucket = tensors[0]
        if len(tensors) != 1 or not bucket.is_floating_point():
            return self._group.allreduce(tensors, *options)  # which parameters were used at all
        if self._error is not None:
            raise self._error
        if not self._works:
            self._reducer.begin_elsewhere()
        ready = time.perf_counter()
        try:
            work = self._group.allreduce(tensors, *options)
        except RuntimeError as error:
            raise self._failed(error) from error
        self._works.append(work)
        self._ready.append(ready)
        self._buckets.append(bucket)
        self._left -= bucket.numel()
        if self._left <= 0 and not self._ends:
            self._ends = True
            self._when_backward_ends()
        return work

    def _failed(self, error: RuntimeError) -> BaseException:
        self._error = self._peers.failed(error)
        return self._error

    def _when_backward_ends(self) -> None:
        def last() -> None:
            self._wait()
            self._queue(self._end)  # DDP's own callback is queued by then

        try:
            self._queue(last)
        except RuntimeError:  # this is no backward, as in ``Join``
            self._wait()
            self._end()

    def _wait(self) -> None:
        nonfinite, done = None, list[float]()
        for place, (work, bucket) in enumerate(zip(self._works, self._buckets, strict=True)):
            try:
                self._peers.wait_for(work)
            except BaseException as error:  # a PeerError, or Ctrl-C: the step is lost
                self._error = error
                raise
            done.append(time.perf_counter())
            # While others are still on their way.
            if self._looks and nonfinite is None and not _is_finite(bucket):
                nonfinite = place
        names, ready = self._layout(tuple([bucket.numel() for bucket in self._buckets])), self._ready
        self._works, self._buckets, self._ready, self._left, self._ends = [], [], [], self._numel, False
        if len(names) < len(done):  # nobody knows which is which
            ready, done, nonfinite = ready[-1:], done[-1:], nonfinite and 0
        self._nonfinite = self._reducer.end_elsewhere(names, ready, done, nonfinite)

    def _end(self) -> None:
        error, self._nonfinite = self._nonfinite, None
        self._reducer.prepare()
        if (after := self._after()) is not None:
            after()
        if error is not None:
            raise error

    def _layout(self, numels: tuple[int, ...]) -> list[tuple[str, ...]]:
        """The parameters of each bucket, as far as they can be told from its size; or all of them as one."""
        if numels not in self._layouts:
            sizes = {name: each.numel() for name, each in self._reducer.parameters.items()}
            found = list(_matched(list(reversed(sizes.items())), numels))
            self._layouts[numels] = found if len(found) == len(numels) else [tuple(reversed(sizes))]
        return self._layouts[numels]


def _matched(sizes: Sequence[tuple[str, int]], numels: Sequence[int]) -> Iterator[tuple[str, ...]]:
    """Names one after another, whose sizes sum up to the numbers.

    >>> list(_matched([("c", 2), ("b", 3), ("a", 4)], [5, 4]))
    [('c', 'b'), ('a',)]
    >>> list(_matched([("c", 2), ("b", 3), ("a", 4)], [4, 5]))
    []
    """
    rest = list(sizes)
    for numel in numels:
        names = list[str]()
        while rest and numel > 0:
            name, size = rest.pop(0)
            names.append(name)
            numel -= size
        if numel:
            return
        yield tuple(names)


def _is_finite(flat: Tensor) -> bool:
    core = native()
    if core is not None and flat.dtype == torch.float32:
        return bool(core.is_finite(flat))
    return not int(ops.count_nonfinite(flat.float()))
