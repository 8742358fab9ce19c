"""DistributedDataParallel with compressed gradients."""
# No postponed annotations: DDP reads those of a hook.

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from gradwire.collectives import Method, connect, find_hosts
from gradwire.collectives.processes import ProcessPeers
from gradwire.errors import ConfigError
from gradwire.reducer import GradientReducer, Traffic

__all__ = ["Compression", "compress"]


class _Scaler(Protocol):
    def get_scale(self) -> float: ...


def compress(
    model: DistributedDataParallel,
    codec: str | Method = "int4",
    *,
    feedback: bool = True,
    seed: int = 0,
    nonfinite: Literal["raise", "propagate"] | None = None,
    scaler: _Scaler | None = None,
    timeout_s: float = 300.0,
    hierarchical: bool = False,
) -> "Compression":
    """Let a DDP model exchange its gradients in a codec. The training loop stays as it is.

    ``codec`` is ``"int8"``, ``"int4"``, ``"topk:0.01+int8"`` or any other, or ``"powersgd:16+int8"``. Biased codecs
    below 4 bits get error feedback unless ``feedback`` is false. Give the ``scaler`` if there is one: a step it must
    skip is skipped on all ranks, and residuals follow its scale. ``nonfinite`` says what happens when a rank's gradient
    holds NaN or Inf: ``"raise"`` on every rank (the default without a scaler), or ``"propagate"`` NaN to all.

    ``codec="dense"`` is DDP's own all-reduce. With ``hierarchical`` ranks of one host sum their gradients in float32
    first, and only what travels between hosts is compressed.

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
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(
            f"`model` must be a torch.nn.parallel.DistributedDataParallel; got {type(model).__name__}. "
            "Wrap the model first."
        )
    if getattr(model, "_comm_hooks", None):
        raise ConfigError("`model` has a communication hook already: wrap the module in DistributedDataParallel anew.")
    for name, flag in (("feedback", feedback), ("hierarchical", hierarchical)):
        if not isinstance(flag, bool):
            raise ConfigError(f"`{name}` must be True or False; got {flag!r}.")
    if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
        raise ConfigError(f"`scaler` must be a torch.amp.GradScaler; got {type(scaler).__name__}.")
    peers = connect(model.process_group, timeout_s=timeout_s)
    hosts = find_hosts(peers, tag=1)  # asked by all, so that ranks that want it differently learn so
    reducer = GradientReducer(
        {name: p for name, p in model.module.named_parameters() if p.requires_grad},
        codec,
        peers,
        seed=seed,
        feedback=feedback,
        nonfinite=nonfinite or ("raise" if scaler is None else "propagate"),
        scale=scaler.get_scale if scaler is not None else None,
        hosts=hosts if hierarchical else (),
    )
    compression = Compression(reducer)
    model.register_comm_hook(compression, _hook)
    return compression


class Compression:
    """What :func:`compress` put into a model: its state, and what it moved.

    >>> sorted(name for name in dir(Compression) if not name.startswith("_"))
    ['close', 'load_state_dict', 'method', 'state_dict', 'traffic', 'wire_bytes']
    """

    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = reducer
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in reducer.parameters.items()}
        self._error: BaseException | None = None

    @property
    def method(self) -> str:
        """How gradients travel, as a string that :func:`compress` takes."""
        return str(self._reducer.method)

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

    def state_dict(self) -> dict[str, Any]:
        """Residuals and factors of this rank, by parameter; tensors and numbers only."""
        return self._reducer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a :meth:`state_dict` of the same rank, codec and number of ranks."""
        self._reducer.load_state_dict(state)

    def _raises_after_backward(self) -> bool:
        """Have an error raised when backward ends, after DDP has put its own house in order.

        DDP makes of a failed future an error of another type, and is in disorder then. False if this is no backward,
        as in ``Join``.
        """
        queue = torch.autograd.Variable._execution_engine.queue_callback
        try:
            queue(lambda: queue(self._raise))  # DDP's own callback is queued by then
        except RuntimeError:
            return False
        return True

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """End the threads and connections; the model can no longer be trained."""
        self._reducer.close()


def _hook(compression: Compression, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    buffer = bucket.buffer()
    result: torch.futures.Future[Tensor] = torch.futures.Future(
        devices=[buffer.device] if buffer.device.type == "cuda" else None
    )
    raises = compression._raises_after_backward()

    def finish(done: Future[None]) -> None:
        error = done.exception()
        if error is None:
            result.set_result(buffer)
        elif raises:
            compression._error = compression._error or error
            result.set_result(buffer.fill_(torch.nan))
        else:
            result.set_exception(error)  # type: ignore[arg-type]

    names = [compression._names[parameter] for parameter in bucket.parameters()]
    reducing = compression._reducer.start(names, bucket.gradients(), last=bucket.is_last(), flat=buffer)
    reducing.add_done_callback(finish)
    return result
