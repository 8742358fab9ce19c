"""FSDP2 (``fully_shard``) with compressed gradients and weights on the wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.codecs import Codec, codec
from gradwire.collectives import connect
from gradwire.collectives.base import STAGES
from gradwire.collectives.choose import is_elementwise
from gradwire.collectives.frames import Frames
from gradwire.collectives.peers import agree, others
from gradwire.collectives.processes import ProcessPeers
from gradwire.errors import ConfigError
from gradwire.planner.budget import relative_error
from gradwire.torch_internals import fsdp_communication, fsdp_group, fsdp_reduce_scatter
from gradwire.transforms import ErrorFeedback, for_training
from gradwire.wire import Key, TensorSpec

__all__ = ["ShardedCompression", "compress"]

_WORST: Final = 0.05  # relative squared error of weights
_FSDPModule, _AllGatherBase, _ReduceScatterBase = fsdp_communication()
_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)


def compress(
    model: nn.Module,
    gradients: str | Codec = "int8",
    weights: str | Codec = "int8",
    *,
    feedback: bool = True,
    seed: int = 0,
    timeout_s: float = 300.0,
) -> ShardedCompression:
    """Let a model that is sharded by ``fully_shard`` exchange gradients and weights in codecs.

    FSDP2 gathers the weights of a module before it is used, twice a step, and scatters the sums of its gradients once.
    Every rank computes with the decoded weights, its own too; the sharded weights, which the optimizer moves, stay
    exact. ``weights="none"`` gathers them exact. Biased codecs of gradients below 4 bits get error feedback unless
    ``feedback`` is false, which takes the memory of the whole gradient on every rank. A gradient with NaN or Inf
    becomes NaN on all ranks, as without gradwire.

    Every rank must call it, after the last ``fully_shard``.

    >>> import torch, torch.distributed as dist
    >>> from torch.distributed.fsdp import fully_shard
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = fully_shard(torch.nn.Linear(128, 64), mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
    >>> compression = compress(model, "int8")
    >>> model(torch.ones(1, 128)).sum().backward()
    >>> compression.close(); dist.destroy_process_group()
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"`model` must be sharded by fully_shard; got {type(model).__name__}.")
    if not isinstance(feedback, bool):
        raise ConfigError(f"`feedback` must be True or False; got {feedback!r}.")
    modules = {name: each for name, each in model.named_modules() if isinstance(each, _FSDPModule)}
    if not modules:
        raise ConfigError(f"`model` must be sharded by fully_shard; {type(model).__name__} has no such module.")
    both = {"gradients": _codec("gradients", gradients), "weights": _codec("weights", weights)}
    if feedback:
        both["gradients"] = for_training(both["gradients"])
    if relative_error(str(both["weights"])) > _WORST:
        raise ConfigError(f"`weights` must lose little, as 'int8', 'int4' or 'bf16' do; got '{both['weights']}'.")
    links: dict[dist.ProcessGroup, _Link] = {}
    scatters: dict[str, _ReduceScatter] = {}
    for number, (name, module) in enumerate(modules.items()):
        group = fsdp_group(module)
        if group is None:
            continue  # it has no parameters of its own
        if isinstance(fsdp_reduce_scatter(module), _ReduceScatter):
            raise ConfigError("`model` compresses already.")
        if group not in links:
            links[group] = _Link(connect(group, timeout_s=timeout_s))
            agree(links[group].peers, f"FSDP2 with {both['gradients']} and {both['weights']}, seed {seed}")
        scatters[name] = _ReduceScatter(links[group], both["gradients"], seed, number)
        module.set_custom_reduce_scatter(scatters[name])
        module.set_custom_all_gather(_AllGather(links[group], both["weights"], seed, number))
    return ShardedCompression(list(links.values()), scatters)


class ShardedCompression:
    """What :func:`compress` put into a model: residuals, and what it moved.

    >>> ShardedCompression([], {}).sent_bytes
    0
    """

    def __init__(self, links: list[_Link], scatters: dict[str, _ReduceScatter]) -> None:
        self._links, self._scatters = links, scatters

    @property
    def sent_bytes(self) -> int:
        """Bytes of this rank's messages since :func:`compress`."""
        return sum(link.sent_bytes for link in self._links)

    @property
    def wire_bytes(self) -> int | None:
        """The same with TCP/IP and Ethernet headers, as the kernel counts them; None where it does not."""
        counted = [link.peers.wire_bytes for link in self._links]
        return None if None in counted else sum(each for each in counted if each is not None)

    def state_dict(self) -> dict[str, Any]:
        """Residuals of this rank, by module; save it with the model's. Tensors and numbers only."""
        return {
            "ranks": [link.peers.size for link in self._links],
            "modules": {name: each.state() for name, each in self._scatters.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a :meth:`state_dict` of the same rank and number of ranks."""
        if not isinstance(state, Mapping) or set(state.get("modules", ())) != set(self._scatters):
            raise ConfigError("`state` must come from state_dict() of a model with the same sharded modules.")
        ranks = [link.peers.size for link in self._links]
        if list(state["ranks"]) != ranks:
            raise ConfigError(f"`state` is of groups of {state['ranks']} ranks; these have {ranks}.")
        for name, each in self._scatters.items():
            each.load(state["modules"][name])

    def close(self) -> None:
        """End the connections; the model can no longer be trained."""
        for link in self._links:
            link.peers.close()


class _Link:
    """The ranks of a group, and what all modules that share it count together."""

    def __init__(self, peers: ProcessPeers) -> None:
        self.peers, self.sent_bytes = peers, 0
        self._tags = count(STAGES)

    def exchange(self, messages: Mapping[int, Tensor], what: str) -> dict[int, Tensor]:
        """A message to each of the other ranks, and one of the same size from each."""
        swap = self.peers.swap({rank: data.numel() for rank, data in messages.items()}, next(self._tags), what)
        for rank, data in messages.items():
            swap.send(rank, data)
            self.sent_bytes += data.numel()
        received = {rank: swap.receive(rank) for rank in messages}
        swap.wait()
        return received


class _Comm:
    """What both directions have in common."""

    def __init__(self, link: _Link, how: Codec, seed: int, number: int) -> None:
        self._link, self._seed, self._number, self._calls = link, seed, number, 0
        self._feedback = how if isinstance(how, ErrorFeedback) else None
        self._frames = Frames(self._feedback.inner if self._feedback is not None else how)

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def _next_key(self) -> Key:
        self._calls += 1
        return Key(self._seed, self._calls, self._number)


class _ReduceScatter(_Comm, _ReduceScatterBase):  # type: ignore[misc,valid-type]
    """Slices to their owners, who add them up in float32."""

    _residual: Tensor | None = None

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise ConfigError(
                "FSDP2's gradients can be summed or averaged here, nothing else: set no gradient divide factor."
            )
        peers, key = self._link.peers, self._next_key()
        flat = input_tensor.to(torch.float32)
        slices, spec = flat.chunk(peers.size), TensorSpec((output_tensor.numel(),))
        if self._feedback is not None and self._residual is None:
            self._residual = torch.zeros_like(flat)
        rest = None if self._residual is None else torch.zeros_like(flat)
        messages = {
            rank: self._encoded(slices[rank], spec, key.fold(peers.rank * peers.size + rank), rank, rest)
            for rank in others(peers)
        }
        received = self._link.exchange(messages, "FSDP2's gradients")
        total = slices[peers.rank].to("cpu", copy=True)  # where messages arrive
        bad = [
            self._frames.decode([(rank, data)], spec, key.fold(rank * peers.size + peers.rank), total, add=True)
            for rank, data in sorted(received.items())
        ]
        if any(bad):
            total.fill_(torch.nan)
        elif rest is not None and bool(torch.isfinite(rest).all()):
            self._residual = rest
        output_tensor.copy_(total.div_(peers.size) if op == dist.ReduceOp.AVG else total)

    def _encoded(self, x: Tensor, spec: TensorSpec, key: Key, rank: int, rest: Tensor | None) -> Tensor:
        if self._feedback is None or self._residual is None or rest is None:
            return self._frames.encode(x, spec, key)[0]
        size = self._link.peers.size
        before, after = self._residual.chunk(size)[rank], rest.chunk(size)[rank]
        return self._frames.encode(x, spec, key, residual=before, decay=self._feedback.decay, rest=after)[0]

    def state(self) -> dict[str, Any]:
        kept = {} if self._residual is None else {"residual": self._residual.clone()}
        return {"calls": self._calls, **kept}

    def load(self, state: Mapping[str, Any]) -> None:
        self._calls = int(state["calls"])
        self._residual = state["residual"].clone() if "residual" in state else None


class _AllGather(_Comm, _AllGatherBase):  # type: ignore[misc,valid-type]
    """Every rank's slice to all; all decode the same bytes, the owner too."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        peers, key = self._link.peers, self._next_key()
        slices = output_tensor.chunk(peers.size)
        if input_tensor.dtype not in _FLOATS:  # of several dtypes, as bytes
            own = input_tensor.detach().cpu().view(torch.uint8)
            raw = self._link.exchange(dict.fromkeys(others(peers), own), "FSDP2's weights")
            for rank, data in raw.items():
                slices[rank].copy_(data.view(input_tensor.dtype))
            return
        spec = TensorSpec((input_tensor.numel(),))
        message, _ = self._frames.encode(input_tensor.detach().to(torch.float32), spec, key.fold(peers.rank))
        received = self._link.exchange(dict.fromkeys(others(peers), message), "FSDP2's weights")
        for rank, data in {peers.rank: message, **received}.items():
            values = torch.empty(spec.shape)  # where messages arrive
            if self._frames.decode([(rank, data)], spec, key.fold(rank), values, add=False):
                values.fill_(torch.nan)
            slices[rank].copy_(values)


def _codec(name: str, given: str | Codec) -> Codec:
    """A codec that can be cut into slices, each of which is encoded by itself."""
    try:
        how = codec(given)
    except ConfigError as error:
        raise ConfigError(f"`{name}`: {error}") from None
    if not is_elementwise(how):
        raise ConfigError(
            f"`{name}` must be a codec of single elements, such as 'int8', 'int4' or 'bf16', which can be cut into "
            f"slices; got '{how}'."
        )
    return how
