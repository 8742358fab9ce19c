"""What a server is told: in Python, or by a file in TOML."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from types import UnionType
from typing import Any, Final, Literal, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from gradwire.coordinator.access import Worker
from gradwire.coordinator.journal import Fsync
from gradwire.coordinator.rules import OptimizerFactory, Staleness, check_mode
from gradwire.errors import ConfigError
from gradwire.files import read_toml

__all__ = [
    "Durability",
    "Limits",
    "ModelRules",
    "ServeSettings",
    "Tls",
    "check_address",
    "is_loopback",
    "load_settings",
]

_T = TypeVar("_T")
_OPTIMIZERS: Final = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta")


@dataclass(frozen=True)
class Limits:
    """What a caller may take: more is refused, and counted.

    ``push_mb``: bytes of a push as it travels. ``pushes_per_s``: of a worker, on average; a burst of two seconds' worth
    is let through. ``workers``: how many names are kept track of. ``queue``: pushes that are being received or
    applied. ``push_s``: how long a push may be in coming, beside a second for every 64 KiB.

    ``connections`` and ``streams``: connections and calls at a time, in all and per address. An eighth of the
    connections may be strangers', whose caller is not identified yet. ``call_s``: how long a stranger may stay, and
    how long the request of a call may be in coming or an answer in being taken. ``read_ahead_kb``: what a call may
    send before it is read, where strangers can: a push has at most 1 MiB and so much under way. Without `workers`, or
    with a ``client_authority``, it follows the link by itself.

    ``reader_mb``: memory for readers, that is, copies of what they have, and parameters under way to them. None is
    1024, or eight times the model if that is more.
    """

    push_mb: float = 1024.0
    pushes_per_s: float | None = None
    workers: int = 10_000
    queue: int = 256
    push_s: float = 30.0
    connections: int = 4096
    connections_per_address: int = 2048
    streams: int = 4096
    streams_per_address: int = 2048
    call_s: float = 10.0
    read_ahead_kb: int = 256
    reader_mb: float | None = None

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if value is not None and not value > 0:
                raise ConfigError(f"`{each.name}` of limits must be above 0; got {value!r}.")


@dataclass(frozen=True)
class Durability:
    """Where the model is kept, and how safe a push is when it is acknowledged.

    ``fsync="each"``: it survives a loss of power. ``"interval"``: one within ``interval_s`` of it may not. ``"off"``:
    it survives the end of the process, and not that of the machine. Without a ``folder`` nothing survives.

    The model is saved, and a new journal begun, after ``snapshot_every`` pushes, or once the journal has more than
    ``snapshot_mb``; unless given, that is four times the model, and at least 256.
    """

    folder: str | None = None
    fsync: Fsync = "each"
    interval_s: float = 0.05
    snapshot_every: int = 10_000
    snapshot_mb: float | None = None

    def __post_init__(self) -> None:
        if self.folder == "":
            raise ConfigError("`folder` must name a folder; got an empty name.")
        if not 0 < self.interval_s < math.inf:
            raise ConfigError(f"`interval_s` must be above 0; got {self.interval_s!r}.")
        if self.snapshot_every < 1:
            raise ConfigError(f"`snapshot_every` must be a whole number of at least 1; got {self.snapshot_every!r}.")
        if self.snapshot_mb is not None and not self.snapshot_mb > 0:
            raise ConfigError(f"`snapshot_mb` must be above 0; got {self.snapshot_mb!r}.")


@dataclass(frozen=True)
class Tls:
    """Files in PEM: the server's certificate and key.

    With ``client_authority`` every caller must show a certificate that it has signed; who has a token too is known by
    the token.
    """

    certificate: str
    key: str
    client_authority: str | None = None


@dataclass(frozen=True)
class ModelRules:
    """How gradients move the model.

    ``mode``: ``"descent"`` or ``"ascent"``, in any case.
    ``optimizer`` is the name of one of torch's, with its ``options``; in Python, :func:`serve` takes a function too.
    """

    mode: str = "descent"
    learning_rate: float = 1.0
    average_over: int = 1
    optimizer: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    file: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", check_mode(self.mode, "mode"))
        if not 0 < self.learning_rate < math.inf:
            raise ConfigError(f"`learning_rate` must be above 0; got {self.learning_rate!r}.")
        if self.average_over < 1:
            raise ConfigError(f"`average_over` must be a whole number of at least 1; got {self.average_over!r}.")

    def factory(self) -> OptimizerFactory | None:
        """A function from parameters to the optimizer; it is tried once, for its options.

        >>> ModelRules(optimizer="Adam", options={"lr": 0.1, "bta": 1}).factory()
        Traceback (most recent call last):
        gradwire.errors.ConfigError: `options` of optimizer 'Adam': ...unexpected keyword argument 'bta'
        """
        if self.optimizer is None:
            if self.options:
                raise ConfigError("`options` are for an `optimizer`; none is given.")
            return None
        if self.optimizer not in _OPTIMIZERS:
            raise ConfigError(f"`optimizer` must be one of {', '.join(_OPTIMIZERS)}; got {self.optimizer!r}.")
        kind: type[Optimizer] = getattr(torch.optim, self.optimizer)
        options = dict(self.options)

        def make(parameters: list[nn.Parameter]) -> Optimizer:
            return kind(parameters, **options)

        try:
            make([nn.Parameter(torch.zeros(1))])
        except (TypeError, ValueError) as error:
            raise ConfigError(f"`options` of optimizer {self.optimizer!r}: {error}") from None
        return make


@dataclass(frozen=True)
class ServeSettings:
    """Everything about a server.

    >>> ServeSettings(address="0.0.0.0:7070")
    Traceback (most recent call last):
    gradwire.errors.ConfigError: `address` is '0.0.0.0:7070', which others can reach, and nobody would be asked who ...
    """

    address: str = "127.0.0.1:7070"
    metrics: str | None = None
    run_dir: str | None = None  # a folder that gradwire dash shows
    model: ModelRules = field(default_factory=ModelRules)
    staleness: Staleness = field(default_factory=Staleness)
    durability: Durability = field(default_factory=Durability)
    limits: Limits = field(default_factory=Limits)
    tls: Tls | None = None
    workers: tuple[Worker, ...] = ()

    def __post_init__(self) -> None:
        for name, value in (("address", self.address), ("metrics", self.metrics)):
            if value is not None:
                check_address(name, value)
        if self.staleness.rule == "compensate":
            raise ConfigError(
                "`staleness.rule` must be 'none' or 'weight' on a server; 'compensate' is for one process."
            )
        names = [worker.name for worker in self.workers]
        if len(set(names)) < len(names):
            raise ConfigError(f"`workers` must have different names; got {', '.join(names)}.")
        if self.tls is None and not self.workers and not is_loopback(self.address):
            raise ConfigError(
                f"`address` is {self.address!r}, which others can reach, and nobody would be asked who they are: give "
                "`tls` or `workers`, or an address of this machine alone, such as 127.0.0.1:7070."
            )
        for worker in self.workers:
            if worker.token_sha256 is None and (self.tls is None or self.tls.client_authority is None):
                raise ConfigError(
                    f"worker {worker.name!r} has no `token_sha256`, and is known by its certificate then: "
                    "`tls` needs a `client_authority`."
                )


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches an address.

    >>> is_loopback("127.0.0.1:1"), is_loopback("[::1]:1"), is_loopback("0.0.0.0:1"), is_loopback("host:1")
    (True, True, False, False)
    """
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def check_address(name: str, value: str) -> None:
    """Raise unless it is HOST:PORT.

    >>> check_address("address", "localhost")
    Traceback (most recent call last):
    gradwire.errors.ConfigError: `address` must be HOST:PORT, such as 127.0.0.1:7070; got 'localhost'.
    """
    host, _, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if not host or "/" in host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"`{name}` must be HOST:PORT, such as 127.0.0.1:7070; got {value!r}.")


def load_settings(path: str | Path) -> ServeSettings:
    """Settings of a file; a name that is not known is an error.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "serve.toml"
    ...     _ = file.write_text('address = "127.0.0.1:0"\\n[staleness]\\nbuond = 4')
    ...     load_settings(file)
    Traceback (most recent call last):
    gradwire.errors.ConfigError: ...serve.toml: `staleness.buond` is not known; known: bound, rule, strength.
    """
    path = Path(path)
    table = read_toml(path)
    try:
        return _made(ServeSettings, table, "")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _made(kind: type[_T], table: Mapping[str, Any], where: str) -> _T:
    """A dataclass of a table, with those inside of it."""
    hints = typing.get_type_hints(kind)
    known = [each.name for each in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for name in table:
        if name not in known:
            raise ConfigError(f"`{where}{name}` is not known; known: {', '.join(known)}.")
    values = {name: _value(hints[name], value, f"{where}{name}") for name, value in table.items()}
    missing = [
        each.name
        for each in dataclasses.fields(kind)  # type: ignore[arg-type]
        if each.name not in values and each.default is each.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"`{where}{missing[0]}` is missing.")
    return kind(**values)


def _value(kind: Any, value: Any, name: str) -> Any:
    if typing.get_origin(kind) in (UnionType, typing.Union):
        kind = next(each for each in typing.get_args(kind) if each is not type(None))
    if typing.get_origin(kind) is Literal:
        if value not in typing.get_args(kind):
            raise ConfigError(f"`{name}` must be one of {', '.join(typing.get_args(kind))}; got {value!r}.")
        return value
    if dataclasses.is_dataclass(kind):
        _check_type(name, value, dict, "a table")
        return _made(kind, value, f"{name}.")  # type: ignore[arg-type]
    if typing.get_origin(kind) is tuple:
        _check_type(name, value, list, "a list")
        return tuple(_value(typing.get_args(kind)[0], each, f"{name}[{at}]") for at, each in enumerate(value))
    if kind is float:
        _check_type(name, value, int | float, "a number")
        return float(value)
    if kind in (int, str):
        _check_type(name, value, kind, "a whole number" if kind is int else "a string")
        return value
    _check_type(name, value, dict, "a table")
    return value


def _check_type(name: str, value: Any, kind: Any, allowed: str) -> None:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"`{name}` must be {allowed}; got {value!r}.")
