"""DistributedDataParallel with compressed gradients."""
# No postponed annotations: DDP reads those of a hook.

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradwire.adapters.models import parameters_to_reduce
from gradwire.adapters.plain import PlainExchange
from gradwire.adapters.watch import Watch
from gradwire.collectives import Method, Peers, connect, find_hosts
from gradwire.collectives.peers import tell
from gradwire.collectives.processes import ProcessPeers
from gradwire.errors import ConfigError
from gradwire.planner import FIRST, Auto, Autopilot, Event, Plan
from gradwire.reducer import GradientReducer, Traffic
from gradwire.telemetry import Telemetry
from gradwire.telemetry.base import as_number
from gradwire.torch_internals import (
    GradBucket,
    backward_queue,
    divides_by_all_ranks,
    forget_hook,
    has_hook,
    uncompiled,
)

__all__ = ["Compression", "compress", "compression_of"]

_log: Final = logging.getLogger("gradwire")
_NO_PLAN: Final = {"plan": "", "settled": False}
_KEEPER: Final = "_gradwire"  # of a model, which keeps its compression: DDP's reducer knows it only weakly


class _Scaler(Protocol):
    def get_scale(self) -> float: ...


def compress(
    model: DistributedDataParallel,
    codec: str | Method | Auto = "int4",
    *,
    feedback: bool = True,
    seed: int = 0,
    nonfinite: Literal["raise", "propagate"] | None = None,
    scaler: _Scaler | None = None,
    timeout_s: float = 300.0,
    hierarchical: bool = False,
    telemetry: Telemetry | str | Path | None = None,
) -> "Compression":
    """Let a DDP model exchange its gradients in a codec. The training loop stays as it is.

    ``codec`` is ``"int8"``, ``"int4"``, ``"topk:0.01+int8"`` or any other, or ``"powersgd:16+int8"``. Biased codecs
    below 4 bits get error feedback unless ``feedback`` is false. Give the ``scaler`` if there is one: a step it must
    skip is skipped on all ranks, and residuals follow its scale. ``nonfinite`` says what happens when a rank's gradient
    holds NaN or Inf: ``"raise"`` on every rank (the default without a scaler), or ``"propagate"`` NaN to all.

    ``codec="auto"`` measures the link, the machine and the gradients in the first steps and chooses for every bucket;
    it looks again when steps take longer or shorter (:class:`~gradwire.Auto` has its settings). ``codec="dense"`` is
    DDP's own all-reduce. With ``hierarchical`` ranks of one host sum their gradients in float32
    first, and only what travels between hosts is compressed.

    ``telemetry`` is the folder of a run, to which every rank writes what it does (``gradwire dash`` shows it), or a
    :class:`~gradwire.Telemetry` with sinks of your choice; tell it losses by ``compression.observe_loss``.

    A copy of the model (``copy.deepcopy``, ``AveragedModel``, ``torch.save``) is a plain DDP model: not compressed.

    Every rank must call it, after wrapping the model. A rank that is gone or stuck for ``timeout_s`` is named by an
    error on all others, out of ``backward``. The result has the residuals' ``state_dict()``; save it with the model's.

    >>> import gradwire, torch, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(128, 64))
    >>> compression = gradwire.compress(model, "int4")
    >>> model(torch.ones(1, 128)).sum().backward()
    >>> compression.traffic.sent_bytes  # one rank sends nothing
    0
    >>> compression.close(); dist.destroy_process_group()
    """
    model = uncompiled(model)
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(
            f"`model` must be a torch.nn.parallel.DistributedDataParallel; got {type(model).__name__}. "
            "Wrap the model first."
        )
    parameters = parameters_to_reduce(model, str(codec))
    if has_hook(model) or compression_of(model) is not None:
        raise ConfigError("`model` has a communication hook already: wrap the module in DistributedDataParallel anew.")
    for name, flag in (("feedback", feedback), ("hierarchical", hierarchical)):
        if not isinstance(flag, bool):
            raise ConfigError(f"`{name}` must be True or False; got {flag!r}.")
    if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
        raise ConfigError(f"`scaler` must be a torch.amp.GradScaler; got {type(scaler).__name__}.")
    watched = Telemetry.of(telemetry)
    peers = connect(model.process_group, timeout_s=timeout_s)
    hosts = find_hosts(peers, tag=1)  # asked by all, so that ranks that want it differently learn so
    auto = Auto() if codec == "auto" else codec if isinstance(codec, Auto) else None
    reducer = GradientReducer(
        parameters,
        codec if not isinstance(codec, Auto) and auto is None else FIRST,
        peers,
        seed=seed,
        feedback=feedback,
        nonfinite=nonfinite or ("raise" if scaler is None else "propagate"),
        scale=scaler.get_scale if scaler is not None else None,
        hosts=hosts if hierarchical else (),
        label="auto" if auto is not None else None,
    )
    compression = Compression(model, reducer, Autopilot(reducer, auto, reducer.hosts) if auto is not None else None)
    if watched is not None:
        compression.watch(watched)
    setattr(model, _KEEPER, _Kept(compression))
    if not peers.rank and compression.plan is None:  # a plan that was remembered is logged as it is taken up
        until = " until the first plan" if auto is not None else ""
        _log.info("gradients of a step%s: %s", until, reducer.composition)
    return compression


class _Kept:
    """A model's hold on its compression. A copy of the model is another one, without compression: it has ``()``."""

    def __init__(self, compression: "Compression") -> None:
        self.compression = compression

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return tuple, ()


def compression_of(model: DistributedDataParallel) -> "Compression | None":
    """Return what :func:`compress` put into a model; None if it was not called with it.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> compression_of(DistributedDataParallel(torch.nn.Linear(3, 2))) is None
    True
    >>> dist.destroy_process_group()
    """
    kept = getattr(model, _KEEPER, None)
    return kept.compression if kept else None


class _Failures:
    """Errors of a step, which are raised when backward ends, once DDP has finished its bookkeeping.

    DDP makes of a failed future an error of another type, and is in disorder then.
    """

    def __init__(self) -> None:
        self.by_bucket: dict[int, BaseException] = {}  # by the parameters that were handed over before the bucket
        self.wait = False  # whether the backward under way raises them
        self._queue = backward_queue()

    def begin(self) -> None:
        """Have errors raised when the backward under way ends; not if there is none, as in ``Join``."""
        queue = self._queue
        try:
            queue(lambda: queue(self._raise))  # DDP's own callback is queued by then
        except RuntimeError:
            self.wait = False
        else:
            self.wait = True

    def _raise(self) -> None:
        """The first bucket's, whichever failed first: so it is the same on all ranks."""
        errors, self.by_bucket = self.by_bucket, {}
        if errors:
            raise errors[min(errors)]


class Compression:
    """What :func:`compress` put into a model: its state, and what it moved.

    >>> sorted(name for name in dir(Compression) if name.endswith("_dict") or name.endswith("_bytes"))
    ['load_state_dict', 'state_dict', 'wire_bytes']
    """

    def __init__(
        self, model: DistributedDataParallel, reducer: GradientReducer, autopilot: Autopilot | None = None
    ) -> None:
        # The model keeps this, and not the other way round. DDP's C++ reducer has a weak reference: what it held would
        # never be freed if it knew the model, be it by an error's traceback, for Python's collector cannot look there.
        self._model, self._reducer, self._autopilot = weakref.ref(model), reducer, autopilot
        self._names = {id(parameter): name for name, parameter in model.module.named_parameters()}
        self._failures = _Failures()
        self._handed_over = 0  # parameters of the step so far
        self._share = 1.0  # of the ranks of this step, by which its means are too small
        self._watch: Watch | None = None
        self.telemetry: Telemetry | None = None
        """Where records go, for more of them: ``compression.telemetry.record("validation", step=100, loss=0.3)``."""
        self._plain: PlainExchange | None = None
        if PlainExchange.can_watch(model, reducer):
            reducer.prepare()  # which may find that nothing is to be compressed
            self._plain = PlainExchange(model, reducer, self._attach) if reducer.is_plain else None
        if self._plain is None:
            self._register(model)

    def __del__(self) -> None:
        self._reducer.unhook()

    def __reduce__(self) -> Any:
        """Refuse copies, deep or not: a copy that is deleted would unhook the reducer of the original."""
        raise ConfigError(
            "a Compression cannot be copied or pickled: it has the connections and threads of this rank. Save its "
            "state_dict(). To train a copy of the model, call compress() for that copy."
        )

    def _register(self, model: DistributedDataParallel) -> None:
        model.register_comm_hook(weakref.ref(self), _hook)
        forget_hook(model)  # copies are to have none

    def _attach(self) -> None:
        """Take over from DDP's own all-reduce, if gradients are to travel otherwise. DDP keeps a hook for good."""
        model = self._model()
        if model is not None and self._plain is not None and not self._reducer.is_plain:
            self._plain.leave()
            self._plain = None
            self._register(model)

    def watch(self, telemetry: Telemetry) -> None:
        """Tell a telemetry what happens from now on; :meth:`close` closes it too."""
        self._watch, self.telemetry = Watch(self._reducer, telemetry, self._autopilot), telemetry

    @property
    def method(self) -> str:
        """How gradients travel, as a string that :func:`compress` takes."""
        return self._reducer.label

    @property
    def plan(self) -> Plan | None:
        """What ``auto`` has decided; None before the first plan, after :meth:`hold`, and without ``auto``."""
        return self._autopilot.plan if self._autopilot is not None else None

    @property
    def events(self) -> list[Event]:
        """What ``auto`` has done so far, and why; also in the log of ``gradwire.planner``."""
        return self._autopilot.events if self._autopilot is not None else []

    def observe_loss(self, loss: float) -> None:
        """Tell ``auto`` the loss of a step, and the telemetry: if it rises, gradients travel more exactly."""
        loss = as_number("loss", loss)
        if self._watch is not None:
            self._watch.loss = loss
        if self._autopilot is not None:
            self._autopilot.observe_loss(loss)

    @property
    def traffic(self) -> Traffic:
        """Bytes of the last step."""
        return self._reducer.traffic

    @property
    def wire_bytes(self) -> int | None:
        """Bytes this rank has sent since :func:`compress`, with TCP/IP and Ethernet headers, acknowledgements too.

        The kernel counts them; None where it does not.
        """
        peers = self._reducer.peers
        return peers.wire_bytes if isinstance(peers, ProcessPeers) else None

    def hold(self, what: str) -> None:
        """End ``auto``: from the next step on all gradients travel by one method. Every rank must call it."""
        if self._autopilot is None:
            raise ConfigError(f"hold() needs codec 'auto'; this one is {self.method!r}.")
        self._autopilot.hold(what)
        self._attach()

    def state_dict(self) -> dict[str, Any]:
        """Residuals and factors of this rank, by parameter; tensors and numbers only."""
        state = self._reducer.state_dict()
        return state if self._autopilot is None else state | {"autopilot": self._autopilot.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on from a :meth:`state_dict` of the same rank and codec, or from those of all ranks that were saved.

        There may be more ranks now, or fewer: what all had kept back goes into the next gradients, and ``auto`` makes a
        new plan.
        """
        self._reducer.load_state_dict(state)
        if self._autopilot is not None:
            saved = [state] if isinstance(state, Mapping) else state
            own = next((each for each in saved if each["rank"] == self.peers.rank), {})
            same = bool(own) and self.fits(own)
            self._autopilot.load_state_dict(own.get("autopilot", {}) if same else _NO_PLAN)
        if self._plain is not None:
            self._reducer.prepare()  # before the next step nobody asks
        self._attach()

    # As gradwire.save_checkpoint takes it.

    @property
    def peers(self) -> Peers:
        """The ranks of the model's group."""
        return self._reducer.peers

    @property
    def rounds(self) -> int:
        """Steps so far."""
        return self._reducer.step

    def fits(self, *states: Mapping[str, Any]) -> bool:
        """Whether what this rank kept is enough for it: yes, if there are as many ranks as there were."""
        return bool(states[0].get("ranks") == self.peers.size)

    def _count(self, parameters: int) -> tuple[int, bool]:
        """Return how many parameters of the step came before those of a bucket, and whether the bucket is the last.

        In the first step of a static graph DDP numbers all buckets 0, so that none of several is the last.
        """
        before = self._handed_over
        now = before + parameters
        last = now == len(self._reducer.parameters)
        self._handed_over = 0 if last else now
        return before, last

    def _gradients(self, bucket: GradBucket, first: Tensor, names: Sequence[str]) -> Callable[[], Sequence[Tensor]]:
        """Return what gives the gradients of a bucket, in its memory; ``first`` is the first of its parameters."""
        parameters = [self._reducer.parameters[name] for name in names]
        if parameters[0].numel() == first.numel():
            return bucket.gradients
        # DDP cuts the pairs of complex numbers as if they were single ones.
        pieces = torch.split(bucket.buffer(), [each.numel() for each in parameters])
        return lambda: [piece.view(each.shape) for piece, each in zip(pieces, parameters, strict=True)]

    def _begin_step(self) -> None:
        """Count the ranks that still have inputs, where ``join`` has means divided by their number only."""
        model, self._share = self._model(), 1.0
        assert model is not None  # it is in a backward, or in ``join``
        if not divides_by_all_ranks(model):
            mine = "inputs" if self._failures.wait else "none left"  # who has none left is in no backward
            found = tell(self.peers, mine, self._reducer.next_tags(), "the count of ranks that have inputs")
            self._share = found.count("inputs") / len(found)

    def settle(self) -> None:
        """Tell the telemetry of the last step, which nothing follows; :meth:`close` does so too."""
        if self._watch is not None:
            self._watch.settle()

    def close(self) -> None:
        """End the threads and connections; the model can no longer be trained.

        Residuals stay, for :meth:`state_dict`; the model is not kept, nor its parameters.
        """
        self.settle()
        self._reducer.close()
        if self.telemetry is not None:
            self.telemetry.close()


def _hook(state: "weakref.ref[Compression]", bucket: GradBucket) -> torch.futures.Future[Tensor]:
    compression, buffer, parameters = state(), bucket.buffer(), bucket.parameters()
    assert compression is not None  # the model keeps it
    place, last = compression._count(len(parameters))
    result: torch.futures.Future[Tensor] = torch.futures.Future(
        devices=[buffer.device] if buffer.device.type == "cuda" else None
    )
    reducer, failures, share = compression._reducer, compression._failures, 1.0

    def complete(error: BaseException | None) -> None:
        """Complete DDP's future, whatever happens: DDP waits for it, and for nothing else."""
        try:
            if error is None and share != 1:
                buffer.div_(share)
            elif error is not None and failures.wait:
                failures.by_bucket[place], error = error, None
                buffer.fill_(torch.nan)
        except Exception as why:
            error = why
        if error is None:
            result.set_result(buffer)
        else:
            result.set_exception(error)  # type: ignore[arg-type]

    try:
        # Callbacks are those of the backward that runs: the first bucket's may be one inside another (checkpointing).
        if (first := reducer.is_between_steps) or last:
            failures.begin()
        if first:
            compression._begin_step()
        share = compression._share
        names = [compression._names[id(parameter)] for parameter in parameters]
        reducing = reducer.start(names, compression._gradients(bucket, parameters[0], names), last=last, flat=buffer)
    except BaseException as error:
        reducer.give_up(error)
        complete(error)
    else:
        reducing.add_done_callback(lambda done: complete(done.exception()))
    return result
