"""Parameters that travel together, and what lives here of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gradwire.codecs import codec
from gradwire.errors import ConfigError
from gradwire.optim.configuration import ShardingConfiguration
from gradwire.optim.plan import BucketPlan
from gradwire.sharding import Exchange, Shard, Stragglers, Vector
from gradwire.sharding.shard import NONFINITE
from gradwire.transforms.base import SenderTransform

__all__ = ["Bucket"]


class Bucket:
    """Parameters that travel together, and the pieces of them that live here."""

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[nn.Parameter],
        exchange: Exchange,
        number: int,
        config: ShardingConfiguration,
        stragglers: Stragglers,
        *,
        whole: bool,
    ) -> None:
        self.plan, self.parameters = plan, [parameters[place] for place in plan.places]
        self.replicated = config.stage == 0
        self.held = Vector([p.detach() for p in self.parameters])
        transformed = isinstance(plan.gradients, SenderTransform)
        means = plan.gradients.inner if isinstance(plan.gradients, SenderTransform) else plan.gradients
        back = means if self.replicated else plan.weights
        float32 = all(p.dtype == torch.float32 for p in self.parameters)
        self.aliased = not self.replicated and back == codec("none") and float32
        self.shard = Shard(
            exchange,
            len(self.held),
            plan.gradients,
            back,
            number,
            config.seed,
            differences=not self.replicated and not self.aliased,
            stragglers=stragglers,
            slices=plan.slices,
            note_bytes=plan.note_bytes,
            device=self.parameters[0].device,
        )
        self.device = self.parameters[0].device
        self.own = self.held.pieces(self.shard.own)  # place in the bucket, and which part
        self.master: Tensor | None = None
        self.owned_residual: Tensor | None = None
        if self.replicated:
            if transformed:
                self.owned_residual = torch.zeros(self.shard.own.stop - self.shard.own.start)
        elif not self.aliased:
            self.master = self.held.read(self.shard.own).clone()
        self.pieces: list[nn.Parameter] = []
        if not self.replicated:
            at = 0
            for place, part in self.own:
                length = part.stop - part.start
                flat = self.held.flats[place][part] if self.master is None else self.master[at : at + length]
                shape = self.parameters[place].shape if whole else (length,)
                self.pieces.append(nn.Parameter(flat.view(shape), requires_grad=True))
                at += length
        self.gradient: Tensor | None = None  # the mean of the slice that lives here
        self.missing = 0  # gradients that have not come in this step
        self.sent = False

    def begin(self) -> None:
        """Wait for a new step's gradients."""
        self.missing, self.sent, self.gradient = len(self.parameters), False, None

    def put(self, flags: int, inverse_scale: float, *, free: bool) -> int:
        """Send what gradients there are; a missing one counts as zeros."""
        note, tensors = 0, []
        for bit, parameter in enumerate(self.parameters):
            gradient = parameter.grad
            if gradient is None:
                tensors.append(torch.zeros(parameter.numel(), device=parameter.device))
                continue
            if gradient.is_sparse:
                raise ConfigError(f"sparse gradients cannot be sharded; got one of shape {tuple(gradient.shape)}.")
            note |= 1 << bit
            scaled = gradient.detach().contiguous()
            tensors.append(scaled if inverse_scale == 1.0 else scaled.to(torch.float32) * inverse_scale)
        flags = self.shard.put(Vector(tensors), flags, note)
        self.sent = True
        if free:
            for parameter in self.parameters:
                parameter.grad = None
        return flags

    def receive(self) -> int:
        """Sum up the slice that lives here. Returns what all said."""
        gathered = self.shard.gather()
        self.note, self.arrived = gathered.note, len(gathered.arrived)
        self.bad_ranks = gathered.nonfinite
        ranks = self.shard.exchange.size
        if gathered.flags & NONFINITE or self.shard.stragglers.too_few(self.arrived, ranks) or not self.arrived:
            self.gradient = None
        else:
            self.gradient = self.shard.mean(gathered, self.arrived).to(self.device)
        return gathered.flags

    def give_gradients(self) -> None:
        """To the pieces; those of parameters that no rank used get none."""
        at = 0
        assert self.gradient is not None
        for (place, part), piece in zip(self.own, self.pieces, strict=True):
            length = part.stop - part.start
            used = self.note >> place & 1
            gradient = self.gradient[at : at + length].view(piece.shape)
            piece.grad = gradient.to(piece.dtype) if used else None
            at += length

    def publish(self) -> None:
        """Tell all what this rank's slice has become: weights, or the mean gradient if every rank steps by itself."""
        if not self.replicated:
            self.shard.publish(self.master, self.held, self.shard.step)
            return
        assert self.gradient is not None
        x = self.gradient.to("cpu")
        if self.owned_residual is not None:
            x = x + self.owned_residual
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.means = Vector([p.grad for p in self.parameters if p.grad is not None])
        self.shard.publish(x, self.means, self.shard.step)
        if self.owned_residual is not None:
            self.owned_residual = x - self.means.read(self.shard.own).to("cpu")

    def fetch(self) -> None:
        """Everybody's slices."""
        self.shard.fetch_all(self.means if self.replicated else self.held)
