"""A parameter in slices, each summed, stepped and published by the partition that owns it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.codecs import Codec, codec
from gradwire.errors import ConfigError, NonFiniteError
from gradwire.sharding.clipping import clip_norm, clip_value, global_norm
from gradwire.sharding.exchange import Exchange, InProcessExchange, ProcessGroupExchange
from gradwire.sharding.ray_exchange import RayExchange
from gradwire.sharding.shard import NONFINITE, Gathered, Shard, Vector, norm_tag
from gradwire.sharding.stragglers import StragglerPolicy, Stragglers
from gradwire.transforms import for_training
from gradwire.transforms.base import SenderTransform

__all__ = ["AllReduceParameter", "FutureResult"]

_MOST_THREADS: Final = 8


class FutureResult:
    """Slices that are being fetched, one future each.

    >>> parameter = AllReduceParameter(0, 1, 3)
    >>> _ = parameter.init(torch.ones(3))
    >>> parameter.get_weights(torch.zeros(3)).result()
    tensor([1., 1., 1.])
    """

    def __init__(self, futures: Sequence[Future[None]], local: Tensor) -> None:
        self.futures, self._local = tuple(futures), local

    def result(self, timeout_s: float | None = None) -> Tensor:
        """The weights, once all are there; raises what went wrong with the first slice that failed."""
        done, under_way = wait(self.futures, timeout_s)
        for future in self.futures:
            if future in done:
                future.result()
        if under_way:
            late = [partition for partition, future in enumerate(self.futures) if future in under_way]
            raise TimeoutError(f"the weights of partitions {late} are not there after {timeout_s:g} s.")
        return self._local

    def done(self) -> bool:
        """Whether nothing is under way any more."""
        return all(future.done() for future in self.futures)


class AllReduceParameter:
    """``size`` elements, split among ``partition_num`` partitions, of which this object is one.

    Each step: :meth:`put_gradients` sends the slices of this partition's gradient to their owners;
    :meth:`aggregate_gradient_partition` sums, in float32, what all sent of the slice that lives here; the caller steps
    ``weight_partition`` with ``gradient_partition``; :meth:`send_weight_partition` publishes it; :meth:`get_weights`
    brings everybody's slices. Weights travel as differences to what all partitions hold already, so that what a codec
    loses is sent later and all hold the same bits.

    ``param_offset`` is the place of the first element in the tensors that are given, counted from 1; the rest of them
    is left alone. ``compress`` is any codec for gradients (biased ones get error feedback), ``compress_weights`` one
    for weights, by default the same without feedback. ``exchange`` says how blocks travel: give an
    :class:`InProcessExchange`, a :class:`ProcessGroupExchange` or a ``RayExchange``; ``"ray"`` is that of all workers
    of a Ray Train. By default partitions are the ranks of ``torch.distributed`` if there are ``partition_num`` of them,
    each of which must then make this parameter; a single partition is this process.

    >>> one, two = (AllReduceParameter(0, 2, 3, exchange=each) for each in InProcessExchange.group(2))
    >>> one.init(torch.zeros(3)), two.init(torch.zeros(3))
    ((0, 0, 2), (1, 2, 1))
    >>> one.put_gradients(torch.tensor([1.0, 2.0, 3.0])), two.put_gradients(torch.tensor([3.0, 4.0, 5.0]))
    (None, None)
    >>> for each in (one, two):
    ...     each.aggregate_gradient_partition(2)
    ...     each.weight_partition.sub_(each.gradient_partition)
    ...     each.send_weight_partition()
    tensor([-2., -3.])
    tensor([-4.])
    >>> one.get_weights(torch.zeros(3)).result()
    tensor([-2., -3., -4.])
    """

    def __init__(
        self,
        id: int,  # noqa: A002 - the document's name
        partition_num: int,
        size: int,
        param_offset: int = 1,
        compress: str | Codec = "fp16",
        *,
        compress_weights: str | Codec | None = None,
        exchange: Exchange | Literal["ray"] | None = None,
        feedback: bool = True,
        stragglers: StragglerPolicy | None = None,
        seed: int = 0,
    ) -> None:
        if isinstance(exchange, str):
            if exchange != "ray":
                raise ConfigError(f"`exchange` must be 'ray', an Exchange, or None; got {exchange!r}.")
            exchange = RayExchange.of_workers()
        for name, value, least in (
            ("partition_num", partition_num, 1),
            ("size", size, 0),
            ("param_offset", param_offset, 1),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"`{name}` must be a whole number of at least {least}; got {value!r}.")
        chosen = for_training(compress) if feedback else codec(compress)
        weights = codec(compress_weights if compress_weights is not None else _without_feedback(compress))
        exchange = exchange if exchange is not None else _default_exchange(partition_num)
        if partition_num != exchange.size:
            raise ConfigError(f"`partition_num` must be that of the exchange, {exchange.size}; got {partition_num}.")
        self.id, self.partition_num, self.size, self.param_offset = id, partition_num, size, param_offset
        self.compress = str(chosen)
        self._shard = Shard(exchange, size, chosen, weights, id, seed, stragglers=Stragglers(stragglers))
        self._window = slice(param_offset - 1, param_offset - 1 + size)
        self._weights: Tensor | None = None
        self._gradient: Tensor | None = None
        self._held: Tensor | None = None
        self._gathered: Gathered | None = None
        self._put = 0  # the step whose gradients were sent
        self._summed = 0
        self._sent = 0
        self._abandoned = False
        self._pool: ThreadPoolExecutor | None = None

    # The partition.

    @property
    def partition_id(self) -> int:
        """Which one this is."""
        return self._shard.me

    @property
    def local_partition_range(self) -> tuple[int, int]:
        """Start and length of the slice that lives here, counted from 0 in the parameter."""
        own = self._shard.own
        return own.start, own.stop - own.start

    @property
    def weight_partition(self) -> Tensor:
        """The weights of the slice that lives here, float32. Change them in place."""
        return _there(self._weights)

    @property
    def gradient_partition(self) -> Tensor:
        """The mean gradient of the slice that lives here, after :meth:`aggregate_gradient_partition`."""
        return _there(self._gradient)

    @property
    def abandoned(self) -> bool:
        """Whether too few gradients came in this step: ``gradient_partition`` is zero, and not to be stepped with."""
        return self._abandoned

    def init(self, parameter: Tensor) -> tuple[int, int, int]:
        """Begin with these weights, and publish the slice that lives here.

        Returns the partition, the start of its slice and the length.
        """
        local = self._windowed("parameter", parameter)
        start, length = self.local_partition_range
        self._held = local.detach().to("cpu", torch.float32, copy=True)
        self._weights = self._held[start : start + length].clone()
        self._gradient = torch.zeros(length)
        self._shard.publish(self._weights, Vector([self._held]), 0)
        return self.partition_id, start, length

    # A step.

    def put_gradients(self, gradients: Tensor | Sequence[Tensor]) -> None:
        """Send the slices of this partition's gradient to their owners.

        Several tensors are those of local replicas: their sum is sent.
        """
        _there(self._held)
        if self._put > self._sent:
            raise ConfigError(f"gradients of step {self._put} were put already: aggregate and send the weights first.")
        replicas = [gradients] if isinstance(gradients, Tensor) else list(gradients)
        if not replicas:
            raise ConfigError("`gradients` must hold at least one tensor; got none.")
        windows = [self._windowed("gradients", each) for each in replicas]
        total = windows[0].to(torch.float32)
        for each in windows[1:]:
            total = total + each
        self._shard.put(Vector([total.contiguous()]))
        self._put = self._shard.step

    def aggregate_gradient_partition(self, avg_numbers: float) -> None:
        """Sum the gradients of the slice that lives here, and divide by ``avg_numbers``.

        If late ones were left out, by that share of it that came. Once a step: again it changes nothing.

        Raises :class:`~gradwire.errors.NonFiniteError` on every partition if any has put NaN or Inf.
        """
        if not isinstance(avg_numbers, int | float) or not avg_numbers > 0:
            raise ConfigError(f"`avg_numbers` must be above 0; got {avg_numbers!r}.")
        if self._put == self._sent:
            raise ConfigError("no gradients were put in this step: call put_gradients first.")
        if self._summed == self._put:
            return
        shard, out = self._shard, self.gradient_partition
        gathered = shard.gather()
        self._summed = self._put
        if gathered.flags & NONFINITE:
            shard.abort()
            self._sent = self._put  # the step is over
            shard.publish(self.weight_partition, Vector([_there(self._held)]), self._put)
            raise NonFiniteError(
                f"step {self._put}: NaN or Inf in the gradients of partitions {list(gathered.nonfinite)}."
            )
        share = len(gathered.arrived) / self.partition_num
        self._abandoned = shard.stragglers.too_few(len(gathered.arrived), self.partition_num) or share == 0
        if self._abandoned:
            shard.stragglers.abandoned += 1
            shard.abort()
            out.zero_()
        else:
            out.copy_(shard.mean(gathered, avg_numbers * share))
            shard.commit()

    def clip_constant(self, least: float, most: float) -> None:
        """Bring every element of the gradient into [least, most]."""
        clip_value([self.gradient_partition], least, most)

    def clip_l2_norm(self, most: float) -> float:
        """Scale the gradient down to that norm, over all partitions, which must all call it. Returns what it was."""
        tag, shard = norm_tag(self._put, self.id), self._shard
        norm = global_norm([self.gradient_partition], shard.exchange, tag, shard.stragglers)
        clip_norm([self.gradient_partition], norm, most)
        return norm

    def send_weight_partition(self) -> None:
        """Publish the weights of the slice that lives here. Once a step: again it changes nothing."""
        if self._sent == self._put:
            return
        if self._summed != self._put:
            raise ConfigError("call aggregate_gradient_partition before send_weight_partition.")
        self._shard.publish(self.weight_partition, Vector([_there(self._held)]), self._put)
        self._sent = self._put

    def get_weights(self, local: Tensor) -> FutureResult:
        """Fetch the newest weights of all slices into ``local``, in the background."""
        held, target = _there(self._held), self._windowed("local", local).detach()
        if self._put > self._sent:
            raise ConfigError("call send_weight_partition before get_weights: others wait for it as well.")
        if self._pool is None:
            threads = max(1, min(_MOST_THREADS, self.partition_num))
            self._pool = ThreadPoolExecutor(threads, thread_name_prefix="gradwire-weights")

        def fetch(partition: int) -> None:
            if partition != self.partition_id and not self._shard.fetch(partition, Vector([held]), self._patience()):
                self._shard.stragglers.count("stale", partition, self._put)
            at = self._shard.slices[partition]
            target[at].copy_(held[at])

        return FutureResult([self._pool.submit(fetch, each) for each in range(self.partition_num)], local)

    def _patience(self) -> float | None:
        return self._shard.stragglers.patience_s()

    # What it did, and what it is.

    def metrics(self) -> dict[str, int]:
        """Counts so far: steps, bytes, gradients left out, slices of weights that were late, steps abandoned."""
        shard = self._shard
        return {
            "steps": shard.step,
            "sent_bytes": shard.sent_bytes,
            "received_bytes": shard.received_bytes,
            "dropped": shard.stragglers.dropped,
            "stale": shard.stragglers.stale,
            "abandoned": shard.stragglers.abandoned,
        }

    def close(self) -> None:
        """End the threads and the exchange."""
        if self._pool is not None:
            self._pool.shutdown()
        self._shard.exchange.close()

    def _windowed(self, name: str, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or not tensor.is_contiguous():
            got = (
                f"{tensor.dtype} of shape {tuple(tensor.shape)}"
                if isinstance(tensor, Tensor)
                else type(tensor).__name__
            )
            raise ConfigError(f"`{name}` must be a contiguous tensor of floats; got {got}.")
        if tensor.numel() < self._window.stop:
            raise ConfigError(
                f"`{name}` must have at least {self._window.stop} elements "
                f"(param_offset {self.param_offset}, size {self.size}); got {tensor.numel()}."
            )
        return tensor.view(-1)[self._window]


def _default_exchange(partitions: int) -> Exchange:
    """The exchange of as many partitions as this process can reach by itself."""
    if partitions == 1:
        return InProcessExchange()
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if partitions == ranks:
        return ProcessGroupExchange.of()
    raise ConfigError(
        f"`partition_num` must be that of the exchange, {ranks}; got {partitions}: give an `exchange` of {partitions}, "
        f"or call torch.distributed.init_process_group in each of {partitions} processes first."
    )


def _there(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise ConfigError("call init(parameter) first.")
    return tensor


def _without_feedback(what: str | Codec) -> str | Codec:
    chosen = for_training(what)
    return chosen.inner if isinstance(chosen, SenderTransform) else what
