"""DeMo: every rank has a momentum of its own, and sends only what stands out of it (Peng, Quesnelle, Kingma, 2024)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.codecs import Codec, State
from gradwire.codecs import codec as codec_of
from gradwire.collectives import Gather, Peers, Reduced, run
from gradwire.collectives.base import STAGES
from gradwire.errors import ConfigError
from gradwire.optim.rounds import Group, RoundOptimizer
from gradwire.optim.wrapping import load_groups, require_number, require_whole
from gradwire.transforms import ErrorFeedback
from gradwire.wire import Key, TensorSpec

__all__ = ["DeMo", "cosines"]


def cosines(size: int) -> Tensor:
    """The orthonormal matrix of the discrete cosine transform: it times a vector is the vector's frequencies.

    >>> matrix = cosines(8)
    >>> torch.allclose(matrix @ matrix.t(), torch.eye(8, dtype=torch.float64))
    True
    """
    numbers = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi / (2 * size) * torch.outer(numbers, 2 * numbers + 1)) * math.sqrt(2 / size)
    matrix[0] = math.sqrt(1 / size)
    return matrix


class _Momentum:
    """The momentum in the domain of frequencies, and the exchange of what stands out of it.

    Momentum of which the largest part is sent and taken out *is* error feedback with a decay, so a codec does it.
    """

    def __init__(self, codec: Codec, numel: int, device: torch.device) -> None:
        self.codec, self._spec, self._device = codec, TensorSpec((numel,)), device
        self.state: State = codec.init(self._spec, device)

    def connect(self, peers: Peers, seed: int) -> None:
        self._gather, self._seed = Gather(peers, self.codec), seed

    def leave(self) -> None:
        """Nothing is under way between steps, and what was not sent is the momentum itself."""

    def reduce(self, frequencies: Tensor, number: int) -> Reduced:
        reduced = run(self._gather.reduce(frequencies, self.state, Key(self._seed, number), STAGES))
        self.state = reduced.state
        return reduced

    def state_dict(self) -> dict[str, Any]:
        return {name: value.clone() if isinstance(value, Tensor) else value for name, value in self.state.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state = {"residual": state["residual"].clone().to(self._device).view(self._spec.shape)}

    def share(self, states: Sequence[Mapping[str, Any]]) -> None:
        self.state = self.codec.init(self._spec, self._device)
        if states:
            self.load_state_dict({"residual": torch.stack([state["residual"] for state in states]).mean(0)})


class DeMo(RoundOptimizer):
    """Decoupled momentum: m = ``decay`` m + g on every rank, and what stands out of m is sent and taken out of it.

    A tensor is laid out in chunks of ``chunk`` values, the last filled up with zeros, whatever its shape; in each
    chunk's cosine transform the largest ``density`` of the frequencies are sent, their values in the codec ``values``.
    All ranks step by ``lr`` times the sign of the mean, so they stay the same, to the bit. ``params`` is as for any
    optimizer of torch; the other arguments are those of :class:`~gradwire.LocalAccumulation`.

    The momentum is part of ``state_dict``. It is each rank's own: one that joins begins with none.

    >>> from gradwire.collectives.loopback import Alone
    >>> model = torch.nn.Linear(64, 64)
    >>> optimizer = DeMo(model.parameters(), lr=0.01, group=Alone())
    >>> for _ in range(3):
    ...     optimizer.zero_grad()
    ...     model(torch.ones(1, 64)).square().sum().backward()
    ...     optimizer.step()
    >>> optimizer.round
    3
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        decay: float = 0.999,
        density: float = 1 / 32,
        chunk: int = 64,
        values: str = "int8",
        weight_decay: float = 0.0,
        group: Group = None,
        seed: int = 0,
        timeout_s: float = 300.0,
        join: bool = False,
    ) -> None:
        require_number("lr", lr, "0 or more and finite", low=0, high=math.inf)
        require_number("weight_decay", weight_decay, "0 or more and finite", low=0, high=math.inf)
        require_number("decay", decay, "in (0, 1]", low=0, high=math.nextafter(1, 2), above=True)
        require_number("density", density, "in (0, 1]", low=0, high=math.nextafter(1, 2), above=True)
        require_whole("chunk", chunk, 16, 4096)
        defaults = {"lr": lr, "weight_decay": weight_decay}
        super().__init__(params, defaults, seed=seed, timeout_s=timeout_s, join=join)
        sparse = f"blocktopk:{density!r},block={chunk}" + ("" if values == "none" else f"+{values}")
        try:
            self.codec = ErrorFeedback(codec_of(sparse), decay=decay)
        except ConfigError as error:
            raise ConfigError(f"`values` must be a codec such as 'int8', or 'none'; got {values!r} ({error})") from None
        self.chunk = chunk
        self._sizes = [-(-p.numel() // chunk) * chunk for p in self._parameters.values()]
        device = next(iter(self._parameters.values())).device
        self._cosines = cosines(chunk).to(device)
        self._momentum = _Momentum(self.codec, sum(self._sizes), device)
        self._exchanges = {"momentum": self._momentum}
        self._meet(group)

    def _line(self) -> str:
        return ", ".join([f"{self.codec}", *(f"{name}={value!r}" for name, value in self.defaults.items())])

    def _advance(self) -> None:
        reduced = self._momentum.reduce(self._frequencies(), self.round)
        self._apply(reduced.mean)
        self._took_step()
        self._talked(reduced.sent_bytes)

    def _frequencies(self) -> Tensor:
        """Of all gradients, chunk after chunk. A missing gradient counts as zeros."""
        flat = torch.zeros(sum(self._sizes), device=self._cosines.device)
        for parameter, place in zip(self._parameters.values(), torch.split(flat, self._sizes), strict=True):
            if parameter.grad is not None:
                place[: parameter.numel()] = parameter.grad.reshape(-1)
        return (flat.view(-1, self.chunk) @ self._cosines.t().to(torch.float32)).view(-1)

    def _apply(self, frequencies: Tensor) -> None:
        # In float64: the order in which a machine adds up products must not decide a sign.
        update = (frequencies.view(-1, self.chunk).to(torch.float64) @ self._cosines).sign_().view(-1)
        updates = iter(torch.split(update, self._sizes))
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    signs = next(updates)[: parameter.numel()].view(parameter.shape)
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(signs.to(parameter.dtype), alpha=-group["lr"])

    def _shared(self) -> dict[str, Any]:
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        parameters = {name: p.detach() for name, p in self._parameters.items()}
        return {"round": self.round, "steps": self.steps, "param_groups": groups, "parameters": parameters}

    def _adopt(self, shared: Mapping[str, Any], own: Mapping[str, Any] | None, *, counted: bool) -> None:
        self.round, self.steps = int(shared["round"]), int(shared["steps"])
        load_groups(self.param_groups, shared["param_groups"])
        for name, parameter in self._parameters.items():
            parameter.copy_(shared["parameters"][name])

    def _own(self) -> dict[str, Any]:
        return {}

    def _unshared(self) -> dict[str, Any]:
        return {}

    def _resume(self, unshared: Mapping[str, Any]) -> None:
        """Every step is a round."""
