"""A step for many batches: gradients are summed up where they are, and travel once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from gradwire.collectives import Method
from gradwire.errors import NonFiniteError
from gradwire.optim.exchange import NamedExchange, room_for
from gradwire.optim.rounds import Group, RoundWrapper
from gradwire.optim.wrapping import require_whole

__all__ = ["LocalAccumulation"]


class LocalAccumulation(RoundWrapper):
    """Gradients are summed up here; at every ``every``-th step the wrapped optimizer steps with the mean of them all.

    That is the step of a batch ``every`` times as large, for the bytes of one. ``codec`` is what gradients travel in,
    and may be anything :func:`gradwire.compress` takes. Parameters are the same on every rank, to the bit.

    ``group`` is the process group, ``timeout_s`` how long a silent rank is waited for, ``seed`` that of random codecs;
    ``join`` is for a rank that comes to others which have trained already, and call :meth:`regroup`.

    >>> from gradwire.collectives.loopback import Alone
    >>> weight = torch.nn.Parameter(torch.zeros(1))
    >>> optimizer = LocalAccumulation(torch.optim.SGD([weight], lr=1.0), every=2, group=Alone())
    >>> for gradient in (1.0, 3.0):
    ...     weight.grad = torch.tensor([gradient])
    ...     optimizer.step()
    >>> optimizer.round, weight.item()
    (1, -2.0)
    """

    def __init__(
        self,
        optimizer: Optimizer,
        every: int,
        codec: str | Method = "int4",
        *,
        group: Group = None,
        seed: int = 0,
        timeout_s: float = 300.0,
        join: bool = False,
    ) -> None:
        require_whole("every", every, 1)
        super().__init__(optimizer, seed=seed, timeout_s=timeout_s, join=join)
        self.every, self._count = every, 0
        names = list(self._parameters)
        self._flat, self._sums = room_for(self._parameters, names)
        self._flat.zero_()
        self._exchanges = {
            "gradients": NamedExchange(self._parameters, codec),
            "rest": NamedExchange(self._parameters, "none"),
        }
        self._meet(group)

    def _line(self) -> str:
        return f"every={self.every}, {super()._line()}"

    @property
    def _in_step(self) -> bool:
        return True

    def _advance(self) -> None:
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self._sums[name].add_(parameter.grad)
        self._count += 1
        self._took_step()
        if self._count >= self.every:
            self._apply(self._exchanges["gradients"])

    def _apply(self, exchange: NamedExchange) -> None:
        flat, means = room_for(self._parameters, list(self._parameters))
        torch.div(self._flat, max(1, self._count), out=flat)
        try:
            self._step_with_mean(exchange, means, flat)
        except NonFiniteError:  # on every rank: these gradients are of no use
            self._forget()
            raise
        self._forget()

    def _forget(self) -> None:
        self._flat.zero_()
        self._count = 0

    def flush(self) -> None:
        """Step with what is accumulated and what compression has kept back, in float32. Every rank must call it.

        Nothing is left to send then, so that the state of any rank is enough for any number of ranks.
        """
        self._check_open()
        with torch.no_grad():
            if self._count or self._exchanges["gradients"].keeps:
                self._exchanges["rest"].kept = self._exchanges["gradients"].hold_back()
                self._apply(self._exchanges["rest"])

    def _shared(self) -> dict[str, Any]:
        parameters = {name: p.detach() for name, p in self._parameters.items()}
        return {**super()._shared(), "count": self._count, "parameters": parameters}

    def _adopt(self, shared: Mapping[str, Any], own: Mapping[str, Any] | None, *, counted: bool) -> None:
        super()._adopt(shared, own, counted=counted)
        if counted:
            self._forget()
        self._count = int(shared["count"])
        for name, parameter in self._parameters.items():
            parameter.copy_(shared["parameters"][name])

    def _unshared(self) -> dict[str, Any]:
        return {"sums": {name: each.clone() for name, each in self._sums.items()}} if self._count else {}

    def _resume(self, unshared: Mapping[str, Any]) -> None:
        for name, each in unshared.get("sums", {}).items():
            self._sums[name].copy_(each)
