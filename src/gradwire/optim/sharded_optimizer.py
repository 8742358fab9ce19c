"""An optimizer whose work is divided among ranks."""

from __future__ import annotations

import json
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Final
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradwire.codecs import State
from gradwire.collectives import agree
from gradwire.collectives.peers import share, tell, together
from gradwire.collectives.processes import ProcessPeers
from gradwire.errors import ConfigError, NonFiniteError
from gradwire.optim.bucket import Bucket
from gradwire.optim.configuration import ShardingConfiguration
from gradwire.optim.elementwise import fractions_of, scope_of, why_untried
from gradwire.optim.plan import Plan, make_plan
from gradwire.optim.run import OptimizationData, OptimizationResult, optimize
from gradwire.optim.sharded_state import Piece, check_state, cut, in_shape, joined
from gradwire.optim.wrapping import (
    check_parameters,
    check_wrapped,
    has_other_groups,
    load_groups,
    loadable_groups,
    packed,
    parameters_of,
    unpacked,
)
from gradwire.sharding import ProcessGroupExchange, Stragglers, clip_norm, clip_value, global_norm
from gradwire.sharding.shard import NONFINITE, STOP, norm_tag, whole_tag
from gradwire.torch_internals import is_unscaled, set_found_inf
from gradwire.tree import from_bytes, to_bytes

__all__ = ["ShardTraffic", "ShardedOptimizerBase"]

_STATES: Final = 1 << 16  # beyond the places of parameters
_INNER: Final = "params"
_MEASURED: Final = 6  # a tag below those of steps; the next one is used as well
_COMPARISON: Final = "the comparison of parameter groups"
_SWITCHED: Final = 5
_WHOLE_MODEL: Final = (
    "looks at the gradients of the whole model at once, and above stage 0 each rank has only a part of them: "
    "use ShardingConfiguration(stage=0)."
)


@dataclass(frozen=True)
class ShardTraffic:
    """What one step moved.

    >>> ShardTraffic(10, 20, 100, 100).ratio
    0.15
    """

    gradient_bytes: int  # sent by this rank
    weight_bytes: int
    dense_gradient_bytes: int  # float32's, by the same collectives
    dense_weight_bytes: int

    @property
    def ratio(self) -> float:
        """Bytes sent over float32's; 0 if nothing has to be."""
        dense = self.dense_gradient_bytes + self.dense_weight_bytes
        return (self.gradient_bytes + self.weight_bytes) / dense if dense else 0.0


@dataclass(frozen=True)
class _Chosen:
    """What a rank is to take of the states it was given."""

    settings: Mapping[str, Any]  # the state whose groups it takes
    pieces: list[Piece]  # as :meth:`ShardedOptimizerBase._places_to_fill` has them
    residuals: list[tuple[Tensor | None, list[State]]]  # by bucket: its owner's, and what the codec keeps


class ShardedOptimizerBase(Optimizer):
    """A :class:`torch.optim.Optimizer` around another one, whose state and steps are divided among ranks.

    Each rank owns a slice of all parameters. ``step`` sums every slice's gradients at its owner, lets the wrapped
    optimizer step the slice there, and brings the new weights to everybody. Hyperparameters are those of
    ``param_groups``, as ever: learning rate schedulers work on this optimizer. Nothing is compressed here.

    >>> import torch.distributed as dist
    >>> model = nn.Linear(3, 2)
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> optimizer = ShardedOptimizerBase(torch.optim.SGD(model.parameters(), lr=0.1))
    >>> model(torch.ones(1, 3)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.steps
    1
    >>> dist.destroy_process_group()
    """

    _step_supports_amp_scaling: ClassVar[bool] = True  # ranks agree on a skipped step here, not in the scaler

    def __init__(self, wrapped_optimizer: Optimizer, config: ShardingConfiguration | None = None) -> None:
        if isinstance(wrapped_optimizer, ShardedOptimizerBase):
            raise ConfigError("`wrapped_optimizer` is sharded already: wrap it once.")
        check_wrapped("wrapped_optimizer", wrapped_optimizer)
        if isinstance(wrapped_optimizer, torch.optim.SparseAdam):
            raise ConfigError("`wrapped_optimizer` must take dense gradients; got SparseAdam.")
        config = config if config is not None else ShardingConfiguration()
        if not isinstance(config, ShardingConfiguration):
            raise ConfigError(f"`config` must be a ShardingConfiguration; got {type(config).__name__}.")
        self.wrapped, self.config = wrapped_optimizer, config
        everything = [p for group in wrapped_optimizer.param_groups for p in group[_INNER]]
        parameters = parameters_of(wrapped_optimizer.param_groups)
        check_parameters("wrapped_optimizer", parameters)
        if any(parameter.dtype == torch.float64 for parameter in parameters):
            raise ConfigError(
                "`wrapped_optimizer` has parameters of float64, and gradients and weights travel in at most 32 bits. "
                "Convert the module with `model.float()` before you make the optimizer."
            )
        self._parameters = parameters
        self._places = {id(p): place for place, p in enumerate(everything)}  # as torch counts them
        self._ready = False
        super().__init__(
            [{**group, _INNER: list(group[_INNER])} for group in wrapped_optimizer.param_groups],
            dict(wrapped_optimizer.defaults),
        )
        self._share_groups()
        scope = scope_of(wrapped_optimizer) if config.stage > 0 else "model"
        if config.stage > 0 and scope == "model":
            raise ConfigError(f"`wrapped_optimizer`, {self._kind}, {_WHOLE_MODEL}")
        if config.stage > 0 and has_other_groups(wrapped_optimizer):
            raise ConfigError(
                f"`wrapped_optimizer`, {self._kind}, steps other optimizers, which have parameter groups of their own: "
                "above stage 0 they would not get what a rank owns. Use ShardingConfiguration(stage=0)."
            )
        if scope is None and config.partition != "tensors":
            why = why_untried(wrapped_optimizer)
            raise ConfigError(
                f"`wrapped_optimizer`, {self._kind}, cannot be tried on other tensors: {why}. "
                "Without a trial nothing shows whether it looks at the gradients of the whole model. If it steps every "
                "tensor by itself, use ShardingConfiguration(partition='tensors'); if not, "
                "ShardingConfiguration(stage=0)."
            )
        self.whole = config.stage > 0 and (
            config.partition == "tensors" or (config.partition == "auto" and scope == "tensors")
        )
        self.exchange = ProcessGroupExchange.of(config.process_group, timeout_s=config.timeout_s)
        self.plan = self._make_plan()
        self._agree()
        self.stragglers = Stragglers(config.stragglers)
        self.buckets = [
            Bucket(each, parameters, self.exchange, number, config, self.stragglers, whole=self.whole)
            for number, each in enumerate(self.plan.buckets)
        ]
        self._bucket_of = {id(p): bucket for bucket in self.buckets for p in bucket.parameters}
        self._move_states()
        self._made_with, self._more_made_with = self._settings(), self._more()
        self.steps = 0  # that all ranks have taken
        self.skipped = 0  # because of NaN or Inf
        self._syncing, self._flags, self._gathered = True, 0, False
        self._norm: float | None = None
        self._stop = False
        self.stop_agreed = False
        self._traffic = ShardTraffic(0, 0, 0, 0)
        arrived = _without_keeping(self)  # parameters outlive the optimizer
        hooks = (
            [p.register_post_accumulate_grad_hook(arrived) for p in parameters]  # type: ignore[no-untyped-call]
            if config.auto_sync_gradients
            else []
        )
        self._unhook = weakref.finalize(self, _remove, hooks)
        self._unhook.atexit = False
        self._closed = False
        self._note_weights()
        self._begin()
        self._ready = True

    # Both optimizers have the same groups and the same state: what a step, a scheduler or a user changes in the groups
    # of one is changed in the other's, and nothing has to be carried over.

    def _share_groups(self) -> None:
        self.param_groups, self.state = self.wrapped.param_groups, self.wrapped.state

    def _check_shared(self) -> None:
        """Raise if the wrapped optimizer was given other groups, another state or other parameters meanwhile."""
        wrapped, where = self.wrapped, f"`wrapped_optimizer`, {self._kind},"
        for name, mine, its in (
            ("param_groups", self.param_groups, wrapped.param_groups),
            ("state", self.state, wrapped.state),
        ):
            if mine is not its:
                raise ConfigError(
                    f"{where} has another `{name}` than when it was wrapped, as after its load_state_dict(): this "
                    "optimizer would go on without it. Call load_state_dict() or deserialize() of this optimizer; "
                    "a state of the wrapped one is loaded before it is wrapped."
                )
        counts = [len(group[_INNER]) for group in wrapped.param_groups]
        if counts != self._counts:
            raise ConfigError(
                f"parameters were added to a sharded optimizer, or taken from it: the groups of {where} have {counts} "
                f"of them, and had {self._counts}. Wrap it after you have added them."
            )

    @contextmanager
    def _inside(self) -> Iterator[Optimizer]:
        """The wrapped optimizer, with what lives here in its groups in place of whole parameters."""
        self._check_shared()
        whole = [group[_INNER] for group in self.wrapped.param_groups]
        if self.config.stage == 0:
            yield self.wrapped
            return
        for group, pieces in zip(self.wrapped.param_groups, self._pieces_of_groups, strict=True):
            group[_INNER] = pieces
        try:
            yield self.wrapped
        finally:
            for group, parameters in zip(self.wrapped.param_groups, whole, strict=True):
                group[_INNER] = parameters

    @property
    def _kind(self) -> str:
        return type(self.wrapped).__name__

    def _settings(self) -> list[dict[str, Any]]:
        """Of every group."""
        return [{name: value for name, value in group.items() if name != _INNER} for group in self.param_groups]

    def _more(self) -> dict[str, Any]:
        """What the wrapped optimizer saves beside its groups and the state of parameters."""
        with self._inside() as wrapped:
            return {
                name: value for name, value in wrapped.state_dict().items() if name not in ("state", "param_groups")
            }

    # Setting up.

    def _make_plan(self) -> Plan:
        """Which parameters travel together, in which codec."""
        return self._planned(ratio=None)

    def _planned(self, **how: Any) -> Plan:
        config = self.config
        return make_plan(
            [tuple(p.shape) for p in self._parameters],
            self.exchange.size,
            gradients=config.gradients,
            weights=config.weights,
            feedback=config.feedback,
            whole=self.whole,
            bucket_bytes=config.bucket_bytes,
            **how,
        )

    def _what_travels(self) -> str:
        """For people, where ranks differ."""
        return f"gradients {self.config.gradients}, weights {self.config.weights}, feedback {self.config.feedback}"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once slices are shared out: add parameters to the optimizer before it is wrapped."""
        if getattr(self, "_ready", False):
            raise ConfigError("parameters cannot be added to a sharded optimizer: wrap it after you have added them.")
        super().add_param_group(param_group)

    def __deepcopy__(self, memo: object) -> ShardedOptimizerBase:
        raise ConfigError("a sharded optimizer cannot be copied: it is one of several ranks. Save it by serialize().")

    def __reduce__(self) -> Any:
        raise ConfigError("a sharded optimizer cannot be pickled: save it by serialize() or state_dict().")

    def _agree(self) -> None:
        """On everything sizes depend on; and begin with the same weights, which are the first rank's."""
        shapes = [(*p.shape, p.dtype) for p in self._parameters]
        groups, config = self._settings(), self.config
        line = (
            f"{self._kind}, {self._what_travels()}, stage {config.stage}, seed {config.seed}, "
            f"nonfinite {config.nonfinite}, clip_norm {config.clip_norm}, clip_value {config.clip_value}, "
            f"{len(shapes)} parameters with checksum {crc32(repr((shapes, groups)).encode()):08x}, "
            f"plan with checksum {crc32(repr(self.plan).encode()):08x}"
        )
        peers = self.exchange.peers
        agree(peers, line)
        checksum = 0
        for parameter in self._parameters:
            flat = parameter.detach().to("cpu").reshape(-1)
            checksum = crc32(flat.view(torch.uint8).numpy().tobytes(), checksum)
        if len(set(tell(peers, f"{checksum:08x}", 1, "the comparison of weights"))) > 1:
            self._take_first_ranks_weights()

    def _take_first_ranks_weights(self) -> None:
        first = 0
        for place, parameter in enumerate(self._parameters):
            data = parameter.detach().to("cpu").contiguous()
            if self.exchange.rank == first:
                for rank in range(1, self.exchange.size):
                    self.exchange.put(rank, whole_tag(place), data.view(-1).view(torch.uint8).clone())
            else:
                block = self.exchange.take(first, whole_tag(place), data.numel() * data.element_size())
                assert block is not None
                parameter.detach().copy_(block.view(data.dtype).view(parameter.shape))

    def _move_states(self) -> None:
        """Give the wrapped optimizer the pieces that live here instead of parameters, and what it knows of them."""
        pieces = self._pieces()
        self._counts = [len(group[_INNER]) for group in self.param_groups]
        self._pieces_of_groups = [
            [piece for p in group[_INNER] for piece, _, _ in pieces.get(id(p), [])] for group in self.param_groups
        ]
        if self.config.stage == 0:
            return
        old = dict(self.wrapped.state)
        self.wrapped.state.clear()
        for p in self._parameters:
            whole = {"shape": list(p.shape), "weights": p.detach().view(-1), "master": None, "state": old.get(p, {}),
                     "undivided": True}  # fmt: skip
            for piece, first, last in pieces.get(id(p), []):
                if p in old:
                    self.wrapped.state[piece] = cut(whole, first, last, piece.shape)["state"]

    def _pieces(self) -> dict[int, list[tuple[nn.Parameter, int, int]]]:
        """By the id of a parameter: what lives here of it, from where to where."""
        found: dict[int, list[tuple[nn.Parameter, int, int]]] = {}
        for bucket in self.buckets:
            for (place, part), piece in zip(bucket.own, bucket.pieces, strict=not bucket.replicated):
                found.setdefault(id(bucket.parameters[place]), []).append((piece, part.start, part.stop))
        return found

    # Gradients, while backward runs.

    def _begin(self) -> None:
        for bucket in self.buckets:
            bucket.begin()
        self._flags, self._gathered, self._norm, self._early = 0, False, None, False
        self._seen: dict[int, tuple[int, int]] = {}  # gradients as backward left them
        self._bad_ranks: set[int] = set()

    def _arrived(self, parameter: Tensor) -> None:
        if not self._syncing:
            return
        bucket = self._bucket_of[id(parameter)]
        if bucket.sent:
            raise ConfigError(
                "backward ran again after the gradients of this step were sent: accumulate under "
                "`with optimizer.no_sync():`, or set auto_sync_gradients=False."
            )
        bucket.missing -= 1
        gradient = parameter.grad
        self._seen[id(parameter)] = (id(gradient), gradient._version if gradient is not None else 0)
        if bucket.missing <= 0:
            self._put_ready()

    def _put_ready(self) -> None:
        """Send full buckets, in the order all ranks share; the last one is sent by ``step``."""
        for bucket in self.buckets[:-1]:
            if bucket.sent:
                continue
            if bucket.missing > 0:
                return
            self._put(bucket, self._scaler_scale())
            self._early = True

    def _put(self, bucket: Bucket, scale: float) -> None:
        stop = STOP if self._stop and bucket is self.buckets[-1] else 0
        # With NaN or Inf in any bucket so far: the last one tells all owners of all.
        flags = bucket.put(self._flags & NONFINITE | stop, 1.0 / scale, free=self.config.stage == 2)
        self._flags |= flags

    def _scaler_scale(self) -> float:
        return float(self.config.scaler.get_scale()) if self.config.scaler is not None else 1.0

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank: nothing is sent in here.

        >>> hasattr(ShardedOptimizerBase, "no_sync")
        True
        """
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def synchronize_gradients(self) -> None:
        """Send what has not been sent, and sum up what lives here; ``step`` does it if nobody else has."""
        self._check_open()
        if self._gathered:
            return
        self._check_gradients()
        self._follow_weights()
        for bucket in self.buckets:
            if not bucket.sent:
                self._put(bucket, self._present_scale())
        for bucket in self.buckets:
            self._flags |= bucket.receive()
            self._bad_ranks.update(bucket.bad_ranks)
        self._gathered = True

    def _check_gradients(self) -> None:
        """What was changed after it was sent would count for some parameters, and not for others."""
        if not self._early or self.config.scaler is not None:
            return
        if "grad_scale" in self.__dict__:
            raise ConfigError(
                "gradients were sent while they were scaled: give the GradScaler to ShardingConfiguration(scaler=...)."
            )
        for parameter in self._parameters:
            seen, gradient = self._seen.get(id(parameter)), parameter.grad
            freed = gradient is None and self._bucket_of[id(parameter)].sent and self.config.stage == 2
            now = (id(gradient), gradient._version if gradient is not None else 0)
            if seen is not None and not freed and seen != now:
                raise ConfigError(
                    "gradients were changed after backward, when some had been sent already. To clip, use "
                    "optimizer.clip_grad_norm_; for a GradScaler, ShardingConfiguration(scaler=...); for anything "
                    "else, auto_sync_gradients=False."
                )

    def _present_scale(self) -> float:
        """What the gradients here are multiplied by."""
        scale = getattr(self, "grad_scale", None)
        if scale is not None:
            return float(scale)
        if self.config.scaler is None or "grad_scale" in self.__dict__:
            return 1.0
        return 1.0 if is_unscaled(self.config.scaler, self) else self._scaler_scale()

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("close() was called: this optimizer can no longer be used.")

    def _note_weights(self) -> None:
        """Remember the weights as this optimizer left them."""
        self._versions = [p._version for p in self._parameters]

    def _follow_weights(self) -> None:
        """Weights that somebody else has changed since, ``model.load_state_dict`` for example, are the truth."""
        changed = {id(p) for p, version in zip(self._parameters, self._versions, strict=True) if p._version != version}
        if not changed:
            return
        for bucket in self.buckets:
            at = 0
            for place, part in bucket.own:
                length = part.stop - part.start
                if bucket.master is not None and id(bucket.parameters[place]) in changed:
                    bucket.master[at : at + length] = bucket.held.flats[place][part]
                at += length

    # Clipping, on what lives here.

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale the mean gradient down to that L2 norm over all ranks, which must all call it, before ``step``.

        Returns the norm it had; NaN if the step is going to be skipped.
        """
        if not isinstance(max_norm, int | float) or not 0 < max_norm < math.inf:
            raise ConfigError(f"`max_norm` must be above 0 and finite; got {max_norm!r}.")
        self.synchronize_gradients()
        if self._bad():
            return math.nan
        norm = global_norm(self._means(), self.exchange, norm_tag(self.rounds), self.stragglers)
        clip_norm(self._means(), norm, max_norm)
        self._norm = norm
        return norm

    def _means(self) -> list[Tensor]:
        return [bucket.gradient for bucket in self.buckets if bucket.gradient is not None]

    def _bad(self) -> bool:
        return bool(self._flags & NONFINITE)

    # A step.

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step with the mean of all ranks' gradients. Every rank must call it."""
        self._check_open()
        self._check_shared()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if "grad_scale" in self.__dict__ and self._early and self.config.scaler is None:
            self._check_gradients()
        self.synchronize_gradients()
        self._take()
        self._catch_up()
        return loss

    def _take(self) -> None:
        """From the sums to the weights."""
        self.stop_agreed = bool(self._flags & STOP)
        bad = self._bad()
        self._tell_scaler(bad)
        step = self.buckets[0].shard.step
        if bad:
            for bucket in self.buckets:
                bucket.shard.abort()
            self.skipped += 1
            self._count(published=False)
            who = sorted(self._bad_ranks)
            self._begin()
            if self.config.scaler is None and not hasattr(self, "found_inf") and self.config.nonfinite == "raise":
                raise NonFiniteError(f"step {step}: NaN or Inf in the gradients of ranks {who}.")
            return
        abandoned = any(bucket.gradient is None for bucket in self.buckets)
        if abandoned:
            self.stragglers.abandoned += 1
            for bucket in self.buckets:
                bucket.shard.abort()
        else:
            self._clip()
            for bucket in self.buckets:
                bucket.shard.commit()
            if self.config.stage > 0:
                self._step_pieces()
        if self.config.stage > 0 or not abandoned:
            for bucket in self.buckets:
                bucket.publish()
            for bucket in self.buckets:
                bucket.fetch()
        if self.config.stage == 0 and not abandoned:
            self._step_replicated()
        self.steps += 1
        self._count(published=True)
        self._note_weights()
        self._begin()
        if self.steps == 1:
            self._warn_of_what_cannot_be_saved()

    def _clip(self) -> None:
        if self.config.clip_value is not None:
            clip_value(self._means(), -self.config.clip_value, self.config.clip_value)
        if self.config.clip_norm is not None and self._norm is None:
            self.clip_grad_norm_(self.config.clip_norm)

    def _step_pieces(self) -> None:
        for bucket in self.buckets:
            bucket.give_gradients()
        # In steps 1, 2, 4 and so on; late ranks would keep the others waiting.
        checked = not self.steps & (self.steps + 1) and self.stragglers.policy is None
        before = [fractions_of(group) for group in self.param_groups] if checked else []
        with self._inside() as wrapped:
            wrapped.step()
        for bucket in self.buckets:
            for piece in bucket.pieces:
                piece.grad = None
        if checked:
            self._check_measured(before)

    def _check_measured(self, before: Sequence[Mapping[str, float]]) -> None:
        """Raise if a step has measured something of the parameters that live here, and keeps it in its groups.

        All ranks would need the same number. That the wrapped optimizer is one of those was not seen when it was tried.
        """
        mine = {
            f"{name!r} of group {number}": value
            for number, (group, old) in enumerate(zip(self.param_groups, before, strict=True))
            for name, value in fractions_of(group).items()
            if name not in old or (value != old[name] and not math.isnan(value))
        }
        everyones = [json.loads(text) for text in share(self.peers, json.dumps(mine), _MEASURED, _COMPARISON)]
        for name in dict.fromkeys(name for each in everyones for name in each):
            values = {rank: each[name] for rank, each in enumerate(everyones) if name in each}
            if len(set(values.values())) > 1:
                said = ", ".join(f"{value:g} on rank {rank}" for rank, value in values.items())
                raise ConfigError(f"step {self.rounds}: {self._kind} has set {name} to {said}. It {_WHOLE_MODEL}")

    def _step_replicated(self) -> None:
        for bucket in self.buckets:
            for bit, parameter in enumerate(bucket.parameters):
                if not bucket.note >> bit & 1:
                    parameter.grad = None
        with self._inside() as wrapped:
            wrapped.step()

    def _tell_scaler(self, bad: bool) -> None:
        """What one rank found all scalers must know, or their scales drift apart."""
        if hasattr(self, "found_inf"):
            device = torch.device("cpu") if not isinstance(self.found_inf, Tensor) else self.found_inf.device
            set_found_inf(self.config.scaler, self, torch.tensor(float(bad), device=device))

    def _count(self, *, published: bool) -> None:
        shards = [bucket.shard for bucket in self.buckets]
        own = sum(shard.own.stop - shard.own.start for shard in shards)
        self._traffic = ShardTraffic(
            sum(shard.sent_gradients for shard in shards),
            sum(shard.sent_weights for shard in shards) if published else 0,
            sum(shard.dense_bytes() for shard in shards),
            4 * own * (self.exchange.size - 1) if published else 0,
        )

    def _catch_up(self) -> None:
        """If the others have gone on without this rank, follow them: step what lives here with their gradients."""
        while self.stragglers.policy is not None and self.buckets[-1].shard.ahead(self.buckets[-1].shard.step + 2):
            for bucket in self.buckets:
                bucket.shard.skip()
            for bucket in self.buckets:
                self._flags |= bucket.receive()
                self._bad_ranks.update(bucket.bad_ranks)
            self._take()

    def optimize(self, data: OptimizationData) -> OptimizationResult:
        """Train a model: every rank calls it with batches of its own.

        >>> import torch.distributed as dist
        >>> model = nn.Linear(2, 1)
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> optimizer = ShardedOptimizerBase(torch.optim.SGD(model.parameters(), lr=0.1))
        >>> data = OptimizationData(model, lambda m, x: m(x).square().mean(), lambda step: torch.ones(4, 2), steps=50)
        >>> optimizer.optimize(data).losses[-1] < 1e-3
        True
        >>> dist.destroy_process_group()
        """
        return optimize(self, data)

    def settle(self) -> None:
        """Wait for weights that were late, so that all ranks hold the same. Every rank must call it."""
        for bucket in self.buckets:
            bucket.shard.fetch_late(bucket.held)

    # Training and evaluation, of optimizers that train with other weights than they evaluate.

    def train(self, mode: bool = True) -> None:
        """Let the wrapped optimizer put its weights for training into the model, if it has a method ``train``.

        Every rank must call it, between steps. The same holds for :meth:`eval`.
        """
        self._switch("train" if mode else "eval")

    def eval(self) -> None:
        """Let the wrapped optimizer put its weights for evaluation into the model, if it has a method ``eval``."""
        self._switch("eval")

    @torch.no_grad()
    def _switch(self, mode: str) -> None:
        self._check_open()
        switch = getattr(self.wrapped, mode, None)
        if not callable(switch):
            return
        self._follow_weights()
        settings, versions = repr(self._settings()), self._inner_versions()
        with self._inside():
            switch()
        changed = settings != repr(self._settings()) or versions != self._inner_versions()
        if self.config.stage > 0 and "1" in tell(self.peers, str(int(changed)), _SWITCHED, f"the call of {mode}()"):
            self._share_exact_weights()
        self._note_weights()

    def _inner_versions(self) -> list[int]:
        with self._inside() as wrapped:
            return [p._version for group in wrapped.param_groups for p in group[_INNER]]

    # Its state, which goes out and comes in.

    def state_dict(self) -> dict[str, Any]:
        """What this rank keeps: its pieces of the wrapped optimizer's state and of the weights, residuals, counters.

        Save it between steps, on every rank. It holds dicts, lists, tensors, numbers and strings only.
        """
        self._check_open()
        self._check_shared()
        if any(bucket.sent for bucket in self.buckets):
            raise ConfigError("save the state between steps: gradients of this one have been sent.")
        places = {key: str(place) for key, place in self._places.items()}
        groups, at = [], 0
        for group, settings in zip(self.param_groups, self._saved_settings(), strict=True):
            count = len(group[_INNER])
            groups.append({**settings, _INNER: list(range(at, at + count))})
            at += count
        residuals: dict[str, Tensor] = {}
        owned: dict[str, dict[str, Any]] = {}
        for bucket in self.buckets:
            residual = bucket.shard.states[0].get("residual") if len(bucket.shard.states) == 1 else None
            for place, (start, stop) in enumerate(pairwise(bucket.held.starts)):
                if isinstance(residual, Tensor):
                    residuals[places[id(bucket.parameters[place])]] = residual[start:stop]
            if bucket.owned_residual is not None:
                at = 0
                for place, part in bucket.own:
                    length = part.stop - part.start
                    piece = {"first": part.start, "residual": bucket.owned_residual[at : at + length]}
                    owned[places[id(bucket.parameters[place])]] = piece
                    at += length
        several = [bucket.shard.states if len(bucket.shard.states) > 1 else [] for bucket in self.buckets]
        return {
            "format": 1,
            "rank": self.exchange.rank,
            "ranks": self.exchange.size,
            "stage": self.config.stage,
            "undivided": self.config.stage == 0 or self.whole,
            "wrapped": self._kind,
            "plan": self._plan_name(),
            "step": self.buckets[0].shard.step,
            "steps": self.steps,
            "skipped": self.skipped,
            "param_groups": groups,
            "more": packed(self._more(), f"{self._kind}.state_dict()", self._more_made_with),
            "shapes": self._shapes(),
            "pieces": {places[key]: pieces for key, pieces in self._saved_pieces().items()},
            "residuals": residuals,
            "owned": owned,
            "codec_states": [[dict(state) for state in states] for states in several],
        }

    def _shapes(self) -> dict[str, list[int]]:
        return {str(self._places[id(p)]): list(p.shape) for p in self._parameters}

    def _plan_name(self) -> str:
        return f"{crc32(repr(self.plan).encode()):08x}"

    def _saved_settings(self) -> list[dict[str, Any]]:
        places = enumerate(zip(self._settings(), self._made_with, strict=True))
        return [packed(now, f"{self._kind}.param_groups[{place}]", before) for place, (now, before) in places]

    def _saved_state(self, parameter: Tensor, piece: Tensor) -> dict[str, Any]:
        """What the wrapped optimizer knows of what lives here of a parameter."""
        where = f"{self._kind}.state[parameter {self._places[id(parameter)]}]"
        return dict(packed(self.wrapped.state.get(piece, {}), where))

    def _warn_of_what_cannot_be_saved(self) -> None:
        try:
            self._saved_settings()
            packed(self._more(), f"{self._kind}.state_dict()", self._more_made_with)
            self._saved_pieces()
        except ConfigError as error:
            warnings.warn(f"this optimizer can train, but its state cannot be saved: {error}", stacklevel=2)

    def _saved_pieces(self) -> dict[int, list[dict[str, Any]]]:
        found: dict[int, list[dict[str, Any]]] = {}
        for key in self.wrapped.state:
            if not isinstance(key, Tensor):
                raise ConfigError(f"{self._kind}.state[{key!r}] is of no parameter: it cannot be saved.")
        if self.config.stage == 0:
            for p in self._parameters:
                state = self._saved_state(p, p)
                piece = {"first": 0, "last": p.numel(), "weights": p.detach().view(-1), "master": None, "state": state}
                found[id(p)] = [piece]
            return found
        masters = {id(piece): bucket.master is not None for bucket in self.buckets for piece in bucket.pieces}
        for p in self._parameters:
            found[id(p)] = [
                {
                    "first": first,
                    "last": last,
                    "weights": p.detach().view(-1)[first:last],
                    "master": piece.detach().view(-1) if masters[id(piece)] else None,
                    "state": self._saved_state(p, piece),
                }
                for piece, first, last in self._pieces().get(id(p), [])
            ]
        return found

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on from this rank's state, or from the states of all ranks that were saved, if these were others.

        Every rank must call it. Weights are restored too. From the states of all ranks any number of ranks can go on,
        at any stage: what compression has not sent yet is shared among them. A state that one rank cannot take is an
        error on all, and changes nothing.
        """
        self._check_open()
        states: list[Any] = list(state_dict) if isinstance(state_dict, list | tuple) else [state_dict]
        chosen = together(self.peers, lambda: self._chosen(states), 2, "the loading of states")
        agree(self.peers, f"the state of step {states[0]['step']}", 2)
        together(
            self.peers, lambda: self._adopt(chosen), 2, "the loading of states"
        )  # optimizers check some things late
        for bucket in self.buckets:
            bucket.shard.step = int(states[0]["step"])
        self.steps, self.skipped = int(states[0]["steps"]), int(states[0]["skipped"])
        self._share_weights()
        self._note_weights()
        self._begin()

    def _chosen(self, states: Sequence[Any]) -> _Chosen:
        """Check states, and take out of them what is this rank's; nothing of the optimizer changes."""
        for state in states:
            check_state(state)
        shapes = self._shapes()
        if not states or states[0]["shapes"] != shapes:
            raise ConfigError(
                f"the state is of {len(states[0]['shapes']) if states else 0} parameters of other shapes than this "
                f"optimizer's {len(shapes)}."
            )
        if states[0]["wrapped"] != self._kind:
            raise ConfigError(f"the state is of {states[0]['wrapped']}; this optimizer wraps {self._kind}.")
        mine, same = self._division(), self.fits(states[0])
        own = [state for state in states if state["rank"] == self.exchange.rank]
        if not same and len(states) != states[0]["ranks"]:
            there = {name: states[0][name] for name in mine}
            raise ConfigError(
                f"the state is of {there}; this optimizer has {mine}. Give the states of all {states[0]['ranks']} "
                "ranks to divide them anew."
            )
        if same and not own:
            raise ConfigError(f"the state is of rank {states[0]['rank']}; this is rank {self.exchange.rank}.")
        loadable_groups(self.param_groups, (own[0] if same else states[0])["param_groups"])
        if same:
            return _Chosen(own[0], self._own_pieces(own[0]), self._residuals(states, own[0]))
        return _Chosen(states[0], self._cut_pieces(joined(states)), self._residuals(states, None))

    def _division(self) -> dict[str, Any]:
        return {"ranks": self.exchange.size, "stage": self.config.stage, "plan": self._plan_name()}

    def fits(self, *states: Mapping[str, Any]) -> bool:
        """Whether a rank's state is divided as this optimizer is, so that it is enough for that rank."""
        state = states[0]
        sharded = (state["stage"] > 0) == (self.config.stage > 0)
        return bool(sharded and state["ranks"] == self.exchange.size and state["plan"] == self._plan_name())

    def _load_groups(self, state: Mapping[str, Any]) -> None:
        """And what else the wrapped optimizer has saved."""
        if more := unpacked(state.get("more", {})):
            own = self._more()
            with self._inside() as wrapped:
                known = wrapped.state_dict()
                wrapped.load_state_dict({**known, **_updated(own, more), "state": {}})
            self._share_groups()
        load_groups(self.param_groups, state["param_groups"])
        for group, saved, made_with in zip(self.param_groups, state["param_groups"], self._made_with, strict=True):
            for name in [name for name in group if name not in saved and name not in made_with and name != _INNER]:
                del group[name]  # steps since then have added it

    def _places_to_fill(self) -> Iterator[tuple[nn.Parameter, Tensor, int, int]]:
        """Parameters, with the tensors that the wrapped optimizer has of them, and where these begin and end."""
        pieces = self._pieces()
        for p in self._parameters:
            targets = [(p, 0, p.numel())] if self.config.stage == 0 else pieces.get(id(p), [])
            for target, first, last in targets:
                yield p, target, first, last

    def _own_pieces(self, own: Mapping[str, Any]) -> list[Piece]:
        saved = {(place, piece["first"]): piece for place, pieces in own["pieces"].items() for piece in pieces}
        found = []
        for p, _, first, last in self._places_to_fill():
            place = str(self._places[id(p)])
            piece = saved.get((place, first))
            if piece is None or piece["last"] != last:
                raise ConfigError(f"the state lacks the elements {first} to {last} of parameter {place}.")
            found.append(piece)
        return found

    def _cut_pieces(self, whole: Mapping[str, Any]) -> list[Piece]:
        return [
            cut(whole[str(self._places[id(p)])], first, last, target.shape)
            for p, target, first, last in self._places_to_fill()
        ]

    def _adopt(self, chosen: _Chosen) -> None:
        self._load_groups(chosen.settings)
        for bucket, (residual, kept) in zip(self.buckets, chosen.residuals, strict=True):
            bucket.shard.abort()
            bucket.owned_residual, bucket.shard.states = residual, kept
        self.wrapped.state.clear()
        for (p, target, first, last), piece in zip(self._places_to_fill(), chosen.pieces, strict=True):
            p.detach().view(-1)[first:last] = piece["weights"]
            if self.config.stage > 0:
                truth = piece["master"] if piece["master"] is not None else piece["weights"]
                target.detach().view(-1).copy_(truth.reshape(-1))
            if piece["state"]:
                self.wrapped.state[target] = unpacked(piece["state"], target.device)

    def _residuals(
        self, states: Sequence[Mapping[str, Any]], own: Mapping[str, Any] | None
    ) -> list[tuple[Tensor | None, list[State]]]:
        """By bucket: what its owner has not sent, and what the codec keeps."""
        if own is None and any(each for state in states for each in state["codec_states"]):
            raise ConfigError(
                "the state of this codec cannot be divided anew; use one with error feedback, or without."
            )
        if own is not None and len(own["codec_states"]) != len(self.buckets):
            raise ConfigError(
                f"the state has {len(own['codec_states'])} buckets; this optimizer has {len(self.buckets)}."
            )
        places = {key: str(place) for key, place in self._places.items()}
        found: list[tuple[Tensor | None, list[State]]] = []
        for number, bucket in enumerate(self.buckets):
            kept, owned = bucket.shard.states, bucket.owned_residual
            if own is not None and own["codec_states"][number]:
                kept = [_on(bucket.device, state) for state in own["codec_states"][number]]
            if owned is not None:
                owned = torch.zeros_like(owned)
            if own is not None and owned is not None:
                parts = [own["owned"].get(places[id(bucket.parameters[place])]) for place, _ in bucket.own]
                lengths = [part.stop - part.start for _, part in bucket.own]
                if [part and part["residual"].numel() for part in parts] != lengths:
                    raise ConfigError("the state lacks residuals of this rank's own pieces, or has others.")
                owned = torch.cat([torch.empty(0), *(part["residual"] for part in parts)])
            residual = kept[0].get("residual") if len(kept) == 1 else None
            if not isinstance(residual, Tensor):
                found.append((owned, kept))
                continue
            fresh = torch.zeros_like(residual)
            for place, (start, stop) in enumerate(pairwise(bucket.held.starts)):
                key = places[id(bucket.parameters[place])]
                # The mean of what the old ranks have not sent is what each new one has not sent.
                for state in [own] if own is not None else states:
                    if key in state["residuals"]:
                        there = state["residuals"][key].to(fresh.device)
                        fresh[start:stop] += there / (1 if own is not None else len(states))
                    if key in state["owned"] and own is None:
                        piece = state["owned"][key]
                        first = start + piece["first"]
                        fresh[first : first + piece["residual"].numel()] += piece["residual"].to(fresh.device)
            found.append((owned, [{"residual": fresh}]))
        return found

    def _share_exact_weights(self) -> None:
        """Every rank's own slices, as its optimizer has them, to everybody."""
        for bucket in self.buckets:
            if bucket.master is not None:
                bucket.held.write(bucket.shard.own, bucket.master)
        self._share_weights()

    def _share_weights(self) -> None:
        """Every rank's own slices of weights to everybody, as they are."""
        for bucket in self.buckets:
            bucket.shard.share(bucket.held)

    def serialize(self) -> bytes:
        """The state of this rank as bytes, without pickle."""
        return to_bytes(self.state_dict())

    def deserialize(self, data: bytes | Sequence[bytes]) -> None:
        """Go on from what :meth:`serialize` returned on this rank, or on all ranks; see :meth:`load_state_dict`."""
        several: list[Any] = list(data) if isinstance(data, list | tuple) else [data]
        states = [from_bytes(each) for each in several]
        self.load_state_dict(states[0] if len(states) == 1 else states)

    def _everyones_states(self) -> list[dict[str, Any]]:
        mine = torch.frombuffer(bytearray(self.serialize()), dtype=torch.uint8)
        peers, size = self.exchange.peers, self.exchange.size
        sizes = [int(each) for each in tell(peers, str(mine.numel()), 2, "the exchange of states")]
        for rank in range(size):
            if rank != peers.rank:
                self.exchange.put(rank, whole_tag(_STATES), mine)
        states = []
        for rank in range(size):
            block = mine if rank == peers.rank else self.exchange.take(rank, whole_tag(_STATES), sizes[rank])
            assert block is not None
            states.append(from_bytes(block.numpy().tobytes()))
        return states

    def full_state_dict(self) -> dict[str, Any]:
        """The whole state, on every rank, as the wrapped optimizer would save it: load it with its own class.

        Every rank must call it.
        """
        states = self._everyones_states()
        whole = joined(states)
        state = {}
        for p in self._parameters:
            each = whole[str(self._places[id(p)])]
            if each["state"]:
                found = unpacked(each["state"])
                state[self._places[id(p)]] = found if each["undivided"] else in_shape(found, p.shape)
        groups: list[dict[str, Any]] = [dict(each) for each in self._settings()]
        load_groups(groups, states[0]["param_groups"])
        for group, saved in zip(groups, states[0]["param_groups"], strict=True):
            group[_INNER] = saved[_INNER]
        return {"state": state, "param_groups": groups, **self._more()}

    def synchronize_optimizer_state(self) -> None:
        """Make every rank's optimizer state that of the owners; at stage 0, that of the first rank.

        Every rank must call it.
        """
        states = self._everyones_states()
        own = states[self.exchange.rank]
        self._adopt(_Chosen(states[0], self._cut_pieces(joined(states)), self._residuals(states, own)))
        self._share_weights()
        self._note_weights()

    @contextmanager
    def full_precision(self) -> Iterator[None]:
        """Weights as the owners have them, in float32 where parameters are, for validation and export.

        Outside of it parameters hold what travelled, which is behind by what compression has not sent yet. Every rank
        must enter it.
        """
        self._check_open()
        with torch.no_grad():
            self._follow_weights()
            kept = [p.detach().clone() for p in self._parameters]
            self._share_exact_weights()
        try:
            yield
        finally:
            with torch.no_grad():
                for p, before in zip(self._parameters, kept, strict=True):
                    p.detach().copy_(before)
                self._note_weights()

    # What it is, for people.

    @property
    def peers(self) -> ProcessPeers:
        """The ranks it is divided among."""
        return self.exchange.peers

    @property
    def method(self) -> str:
        """How gradients and weights travel, for people: the codecs of the bucket with most parameters."""
        largest = max(self.plan.buckets, key=lambda each: each.slices[-1].stop)
        back = "" if self.config.stage == 0 else f", weights {largest.weights}"
        return f"gradients {largest.gradients}{back}"

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters that are not frozen."""
        return list(self._parameters)

    @property
    def rounds(self) -> int:
        """Steps so far, skipped ones included: the same on every rank that is not late."""
        return self.buckets[0].shard.step

    @property
    def traffic(self) -> ShardTraffic:
        """What the last step moved."""
        return self._traffic

    def metrics(self) -> dict[str, float]:
        """Counts so far."""
        return {
            "steps": self.steps,
            "skipped": self.skipped,
            "dropped": self.stragglers.dropped,
            "stale": self.stragglers.stale,
            "abandoned": self.stragglers.abandoned,
            "sent_bytes": sum(bucket.shard.sent_bytes for bucket in self.buckets),
            "received_bytes": sum(bucket.shard.received_bytes for bucket in self.buckets),
        }

    def request_stop(self) -> None:
        """Ask all ranks to stop: after the next step ``stop_agreed`` is true on every one."""
        self._stop = True

    def close(self) -> None:
        """End the connections."""
        if not self._closed:
            self._closed = True
            self._unhook()
            self.exchange.close()


def _without_keeping(optimizer: ShardedOptimizerBase) -> Callable[[Tensor], None]:
    known = weakref.ref(optimizer)

    def arrived(parameter: Tensor) -> None:
        if (there := known()) is not None:
            there._arrived(parameter)

    return arrived


def _remove(hooks: Iterable[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def _on(device: torch.device, state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in state.items()}


def _updated(own: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """What was saved, and what an optimizer has of its own where nothing was."""
    both = {
        name: each for name, each in own.items() if isinstance(each, Mapping) and isinstance(saved.get(name), Mapping)
    }
    return {**own, **saved, **{name: _updated(each, saved[name]) for name, each in both.items()}}
