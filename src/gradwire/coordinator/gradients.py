"""The coordinator in one process: workers add gradients whenever they have them, a background loop moves the model."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from gradwire.coordinator.loop import Loop
from gradwire.coordinator.rules import Model, OptimizerFactory, Staleness, check_mode
from gradwire.coordinator.structure import (
    Parameters,
    Structure,
    check_entries,
    entries_of,
    label,
    nonfinite_entry,
    restored,
)
from gradwire.errors import ConfigError, NonFiniteError, QueueFullError, StaleGradientError

__all__ = ["DistributedGradientsCoordinator"]


@dataclass(frozen=True)
class _Push:
    gradients: dict[str, Tensor]
    version: int | None
    worker: str


class DistributedGradientsCoordinator(Loop):
    """Keeps a model's parameters and moves them by the gradients that any number of threads add.

    W <- W - G in ``"descent"`` mode, W + G in ``"ascent"``, one gradient after the other in the order they came; with
    ``learning_rate`` so much of it, with ``average_over=k`` by the mean of k, with ``optimizer``, a function from a
    list of parameters to a ``torch.optim.Optimizer``, as that one steps. Parameters are a tensor, a list of tensors or
    a dict of them, gradients have the same structure; a dict may leave some out.

    A gradient that does not fit is refused to whoever adds it. ``staleness`` says what becomes of those that were
    computed with older parameters; ``nonfinite="zero"`` takes NaN and Inf for 0 instead of refusing them. With
    ``max_queue``, who adds to a full queue waits, or with ``when_full="refuse"`` is refused at once.
    ``on_update(version)`` is called after every change, by the loop.

    >>> import torch
    >>> coordinator = DistributedGradientsCoordinator()
    >>> coordinator.set_model_parameters(torch.tensor([1.0, 2.0]))
    >>> coordinator.start()
    >>> coordinator.add_gradients(torch.tensor([0.5, -1.0]))
    >>> coordinator.stop()
    >>> coordinator.get_model_parameters()
    tensor([0.5000, 3.0000])
    """

    _name = "gradwire-coordinator"

    def __init__(
        self,
        gradient_change_mode: str = "descent",
        *,
        optimizer: OptimizerFactory | None = None,
        learning_rate: float = 1.0,
        average_over: int = 1,
        staleness: Staleness | None = None,
        nonfinite: Literal["refuse", "zero"] = "refuse",
        max_queue: int | None = None,
        when_full: Literal["block", "refuse"] = "block",
        on_update: Callable[[int], Any] | None = None,
    ) -> None:
        number, whole = isinstance(learning_rate, int | float), isinstance(average_over, int)
        room = max_queue is None or (isinstance(max_queue, int) and max_queue >= 1)
        for name, value, right, allowed in (
            ("learning_rate", learning_rate, number and learning_rate > 0, "above 0"),
            ("average_over", average_over, whole and average_over >= 1, "a whole number of at least 1"),
            ("nonfinite", nonfinite, nonfinite in ("refuse", "zero"), "'refuse' or 'zero'"),
            ("when_full", when_full, when_full in ("block", "refuse"), "'block' or 'refuse'"),
            ("max_queue", max_queue, room, "at least 1, or None"),
            ("staleness", staleness, isinstance(staleness, Staleness | None), "a Staleness, or None"),
            (
                "optimizer",
                optimizer,
                optimizer is None or callable(optimizer),
                "a function from parameters to an optimizer",
            ),
        ):
            if not right:
                raise ConfigError(f"`{name}` must be {allowed}; got {value!r}.")
        if optimizer is not None and learning_rate != 1.0:
            raise ConfigError("`learning_rate` is the optimizer's affair if there is an `optimizer`.")
        super().__init__(on_update)
        self._mode = check_mode(gradient_change_mode)
        self._optimizer, self._learning_rate, self._average_over = optimizer, float(learning_rate), average_over
        self._staleness, self._nonfinite = staleness or Staleness(), nonfinite
        self._max_queue, self._when_full = max_queue, when_full
        self._model: Model | None = None
        self._structure: Structure = "tensor"
        self._queue: deque[_Push] = deque()
        self._then: dict[str, tuple[int, dict[str, Tensor]]] = {}  # what workers have read, and its version
        self._counts: Counter[str] = Counter()
        self._ages: Counter[int] = Counter()
        self._started = time.monotonic()

    # Settings and parameters.

    def set_parameters(self, gradient_change_mode: str | None = None) -> None:
        """Change settings; the next gradient that is applied follows them.

        ``gradient_change_mode``: ``"descent"`` or ``"ascent"``, in any case.
        """
        if gradient_change_mode is not None:
            mode = check_mode(gradient_change_mode)
            with self._changed:
                self._mode = mode

    def set_model_parameters(self, parameters: Parameters, do_not_deep_copy: bool = False) -> None:
        """Begin with these, or go on with them: an optimizer begins anew, the version goes on.

        Without a copy the tensors given are the ones that are changed.
        """
        entries, structure = entries_of("parameters", parameters)
        bad = nonfinite_entry(entries)
        if bad is not None:
            raise NonFiniteError(f"{label('parameters', bad)} holds NaN or Inf.")
        kept = {n: each.detach() if do_not_deep_copy else each.detach().clone() for n, each in entries.items()}
        with self._changed:
            version = self._model.version + 1 if self._model is not None else 0
            self._model = Model(
                kept, self._optimizer, self._learning_rate, self._average_over, self._staleness, version
            )
            self._structure = structure
            self._then.clear()

    def get_model_parameters(self, do_not_deep_copy: bool = False, *, worker: str = "") -> Parameters:
        """The present parameters, all of one version; or, without a copy, the very tensors that go on changing.

        A ``worker`` that says its name is remembered to have read these.
        """
        return self.read(do_not_deep_copy, worker=worker)[1]

    def read(self, do_not_deep_copy: bool = False, *, worker: str = "") -> tuple[int, Parameters]:
        """The present version, and the parameters.

        >>> import torch
        >>> coordinator = DistributedGradientsCoordinator()
        >>> coordinator.set_model_parameters(torch.ones(2))
        >>> coordinator.read()
        (0, tensor([1., 1.]))
        """
        with self._changed:
            model = self._there()
            entries = model.parameters
            if not do_not_deep_copy:
                entries = {name: tensor.clone() for name, tensor in entries.items()}
            if worker and self._staleness.rule == "compensate":
                own = {name: tensor.clone() for name, tensor in model.parameters.items()}
                self._then[worker] = (model.version, own)
            return model.version, restored(entries, self._structure)

    def _there(self) -> Model:
        if self._model is None:
            raise ConfigError("there are no parameters: call set_model_parameters first.")
        return self._model

    @property
    def version(self) -> int:
        """How often the parameters have changed."""
        with self._changed:
            return self._there().version

    # Gradients.

    def add_gradients(
        self, gradients: Parameters, *, version: int | None = None, worker: str = "", timeout_s: float | None = None
    ) -> None:
        """Hand over gradients, which must not change any more; they are applied in the order they come.

        ``version`` is that of the parameters they were computed with (:meth:`read`). A full queue is waited for, for
        ``timeout_s`` if that is given.
        """
        entries, structure = entries_of("gradients", gradients)
        entries = {name: tensor.detach() for name, tensor in entries.items()}
        bad = nonfinite_entry(entries)
        with self._changed:
            model = self._there()
            try:
                self._check(model, entries, structure, bad)
                self._staleness.check(version, model.version)
            except (ConfigError, NonFiniteError, StaleGradientError) as error:
                self._counts[f"refused {type(error).__name__}"] += 1
                raise
            if bad is not None:
                entries = {name: tensor.nan_to_num(0.0, 0.0, 0.0) for name, tensor in entries.items()}
            self._wait_for_room(timeout_s)
            self._queue.append(_Push(entries, version, worker))
            self._counts["added"] += 1
            self._changed.notify_all()

    def _check(self, model: Model, entries: dict[str, Tensor], structure: Structure, bad: str | None) -> None:
        if structure != self._structure:
            raise ConfigError(f"`gradients` must be a {self._structure}, as the parameters; got a {structure}.")
        check_entries("gradients", entries, model.parameters)
        if structure != "dict" and len(entries) != len(model.parameters):
            raise ConfigError(f"`gradients` must have {len(model.parameters)} tensors; got {len(entries)}.")
        if bad is not None and self._nonfinite == "refuse":
            raise NonFiniteError(f"{label('gradients', bad)} holds NaN or Inf.")

    def _wait_for_room(self, timeout_s: float | None) -> None:
        if self._max_queue is None:
            return
        room: Callable[[], bool] = lambda: len(self._queue) < self._max_queue  # type: ignore[operator]  # noqa: E731
        if self._when_full == "refuse" or (timeout_s is not None and timeout_s <= 0):
            fits = room()
        else:
            fits = self._changed.wait_for(room, timeout_s)
        if not fits:
            self._counts["refused QueueFullError"] += 1
            raise QueueFullError(f"{len(self._queue)} gradients wait already; at most {self._max_queue} may.")

    def clear_gradients(self) -> int:
        """Drop the gradients that have not been applied; returns how many."""
        with self._changed:
            dropped = len(self._queue) + (self._model.clear() if self._model is not None else 0)
            self._queue.clear()
            self._counts["cleared"] += dropped
            self._changed.notify_all()
            return dropped

    # The loop.

    def _check_ready(self) -> None:
        self._there()

    def _idle(self) -> bool:
        return not self._queue

    def _work(self) -> int | None:
        return self._there().version if self._apply(self._queue.popleft()) else None

    def _apply(self, push: _Push) -> bool:
        model = self._there()
        seen = self._then.get(push.worker)
        then = seen[1] if seen is not None and seen[0] == push.version else None
        try:
            if push.version is not None:
                self._ages[max(0, model.version - push.version)] += 1
            check_entries("gradients", push.gradients, model.parameters)
            changed = model.take(push.gradients, self._mode, version=push.version, then=then)
        except Exception as error:  # parameters of other shapes were set meanwhile, or the optimizer failed
            self.last_error = error
            self._counts["failed"] += 1
            return False
        self._counts["applied"] += 1
        return changed

    def metrics(self) -> dict[str, Any]:
        """Counts so far: gradients added, applied, cleared, refused by reason, failed; the queue; ages of gradients."""
        with self._changed:
            counts = {name: self._counts[name] for name in ("added", "applied", "cleared", "failed")}
            refused = {n.split(" ", 1)[1]: c for n, c in self._counts.items() if n.startswith("refused ")}
            return {
                **counts,
                "refused": refused,
                "queued": len(self._queue),
                "waiting": self._model.waiting if self._model is not None else 0,
                "version": self._model.version if self._model is not None else 0,
                "ages": dict(sorted(self._ages.items())),
                "seconds": time.monotonic() - self._started,
            }
