"""The coordinator, from another process or host: the same methods, over the network."""

from __future__ import annotations

import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from gradwire import wire
from gradwire.api import decode_payload
from gradwire.codecs import Codec, State
from gradwire.codecs import codec as make_codec
from gradwire.coordinator.connection import Connection, Credentials
from gradwire.coordinator.copies import add_changes
from gradwire.coordinator.pieces import Piece, cut, joined, pieces_of
from gradwire.coordinator.protocol import messages
from gradwire.coordinator.protocol.parts import SMALL_BYTES, Frames, announced, parts
from gradwire.coordinator.push import exact
from gradwire.coordinator.rules import check_mode
from gradwire.coordinator.settings import check_address
from gradwire.coordinator.structure import (
    Parameters,
    Structure,
    check_kinds,
    check_parameters,
    entries_of,
    label,
    restored,
)
from gradwire.errors import ConfigError, GradwireError, NonFiniteError, StaleGradientError
from gradwire.transforms import EF21, for_training
from gradwire.wire import Key, TensorSpec, frame_pieces

__all__ = ["CoordinatorClient", "Pushed", "Version"]

Version: TypeAlias = int | tuple[int, ...]
"""How often the parameters have changed; with several servers, for each of them."""


@dataclass(frozen=True)
class Pushed:
    """What became of a step of :meth:`CoordinatorClient.compute_and_push`."""

    loss: float
    version: Version
    """Of the parameters that the loss is of."""
    accepted: bool
    """False: the gradient had become too old, and was refused."""


class _Shard:
    """What a client keeps about one server."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.states: dict[str, State] = {}  # of the codec, by entry
        self.copy = 0  # the number of the copy that we have, if weights come compressed
        self.values: dict[str, Tensor] = {}


class CoordinatorClient:
    """A :class:`~gradwire.DistributedGradientsCoordinator` that somebody serves, at one address or split over several.

    Gradients travel in ``codec``, with error feedback where it needs it, which is kept here; parameters come back
    exact, or in ``weights``, a codec, as changes to what this client has: the server keeps track of that, so that it
    does not drift. Calls are made again for ``retry_s`` while a server cannot be reached, as during a restart; a push
    is applied once all the same.

    With ``window`` above 1 that many pushes may be on their way: :meth:`add_gradients` returns before they are
    acknowledged, and what was wrong with one is raised by a later call, or by :meth:`flush`.

    ``worker`` is a name that no other client has at the same time; drawn at random unless given.

    >>> from gradwire import ServeSettings, serve
    >>> with serve(ServeSettings(address="127.0.0.1:0")) as server, CoordinatorClient(server.address) as client:
    ...     client.set_model_parameters([torch.zeros(2)])
    ...     client.add_gradients([torch.tensor([0.5, -1.0])], version=0)
    ...     client.get_model_parameters()
    0
    [tensor([-0.5039,  0.9999])]
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        codec: str | Codec = "int8",
        weights: str | Codec | None = None,
        worker: str | None = None,
        token: str | None = None,
        credentials: Credentials | None = None,
        window: int = 1,
        nonfinite: Literal["refuse", "zero"] = "refuse",
        retry_s: float = 60.0,
    ) -> None:
        addresses: list[Any] = list(address) if isinstance(address, list | tuple) else [address]
        if not addresses or len(set(addresses)) < len(addresses):
            raise ConfigError(f"`address` must be HOST:PORT, or several different ones; got {address!r}.")
        for each in addresses:
            check_address("address", each)
        if not isinstance(worker, str | None) or worker == "":
            raise ConfigError(f"`worker` must be a name, or None; got {worker!r}.")
        if not isinstance(credentials, Credentials | None):
            raise ConfigError(f"`credentials` must be Credentials, or None; got {type(credentials).__name__}.")
        if token is not None and credentials is not None:
            raise ConfigError("`token` is part of `credentials` if these are given.")
        if not isinstance(window, int) or window < 1:
            raise ConfigError(f"`window` must be a whole number of at least 1; got {window!r}.")
        if nonfinite not in ("refuse", "zero"):
            raise ConfigError(f"`nonfinite` must be 'refuse' or 'zero'; got {nonfinite!r}.")
        if not retry_s > 0:
            raise ConfigError(f"`retry_s` must be above 0; got {retry_s!r}.")
        self.codec = for_training(codec)
        if isinstance(self.codec, EF21):
            raise ConfigError(f"`codec` must be one whose payloads are gradients; those of {self.codec} are changes.")
        self._weights = None if weights is None else make_codec(weights)
        self._window, self._nonfinite = window, nonfinite
        self._as_it_is = str(self.codec) == "none" and window == 1  # nobody changes it before it is acknowledged
        known = credentials or Credentials(token=token)
        self._shards = [_Shard(Connection(each, known, retry_s)) for each in addresses]
        self._pool = ThreadPoolExecutor(len(addresses), "gradwire-shard") if len(addresses) > 1 else None
        self._lock = threading.RLock()  # of sequence numbers and the codec's states
        self._reading = threading.Lock()
        self._flying: deque[Future[Any]] = deque()  # in the order they were sent, which is that of answers
        self._layout: list[list[tuple[str, int]]] = []  # of several servers: pieces that each of them has
        self._sequence = 0
        self._given_worker = worker
        self._worker, self._session = "", 0

    # About the servers.

    def _each(self, what: Callable[[_Shard], Any]) -> list[Any]:
        """Ask all servers, at the same time."""
        if self._pool is None:
            return [what(self._shards[0])]
        return list(self._pool.map(what, self._shards))

    def _named(self) -> str:
        """The worker's name, and a session above that of any earlier client of this name."""
        with self._lock:
            if not self._worker:
                mine = self._each(lambda shard: shard.connection.call("Describe", worker=self._given_worker or ""))
                prefix = f"{mine[0].identity}/" if mine[0].identity else ""
                name = self._given_worker or f"{prefix}{random.SystemRandom().getrandbits(64):016x}"
                self._session = max([time.time_ns(), *(each.last_session + 1 for each in mine)])
                self._worker = name
            return self._worker

    @property
    def worker(self) -> str:
        """The name under which this client pushes."""
        return self._named()

    @property
    def version(self) -> Version:
        """How often the parameters have changed."""
        return self._version_of([each.version for each in self._describe()])

    def _version_of(self, versions: Iterable[int]) -> Version:
        several = tuple(versions)
        return several[0] if len(several) == 1 else several

    def _describe(self) -> list[Any]:
        found = self._each(lambda shard: shard.connection.call("Describe"))
        if any(each.empty for each in found):
            raise ConfigError("there are no parameters: call set_model_parameters first.")
        return found

    def status(self) -> list[Any]:
        """What every server says about itself: the ``StatusReply`` of ``coordinator.proto``."""
        return self._each(lambda shard: shard.connection.call("Status"))

    # Settings and parameters.

    def set_parameters(self, gradient_change_mode: str | None = None) -> None:
        """Change settings; the next gradient that is applied follows them. Needs the role admin.

        ``gradient_change_mode``: ``"descent"`` or ``"ascent"``, in any case.
        """
        if gradient_change_mode is not None:
            mode = check_mode(gradient_change_mode)
            self._each(lambda shard: shard.connection.call("Manage", mode=mode))

    def clear_gradients(self) -> int:
        """Drop gradients that wait for others to be averaged with; returns how many. Needs the role admin."""
        return max(int(each.cleared) for each in self._manage(clear=True))

    def snapshot(self) -> None:
        """Have every server save its model now. Needs the role admin."""
        self._manage(snapshot=True)

    def drain(self) -> None:
        """Have every server finish, save and end. Needs the role admin."""
        self._manage(drain=True)

    def _manage(self, **fields: bool) -> list[Any]:
        return self._each(lambda shard: shard.connection.call("Manage", **fields))

    def set_model_parameters(self, parameters: Parameters, *, only_if_empty: bool = False) -> Version:
        """Begin with these, or go on with them; the version that they are. Needs the role admin.

        With ``only_if_empty`` nothing happens if there are parameters already, and no role is needed.
        """
        entries, structure = self._checked("parameters", parameters)
        check_parameters(entries)
        whole = self._split(entries)
        if not all(whole):
            raise ConfigError(f"`parameters` must have an element for each of {len(whole)} servers.")
        empty = {each.empty for each in self._each(lambda shard: shard.connection.call("Describe"))}
        if only_if_empty and len(empty) > 1:
            raise ConfigError("some of the servers have parameters, and others none: set them without only_if_empty.")

        def send(shard: _Shard) -> Any:
            mine = whole[self._shards.index(shard)]
            header = messages()["ModelPart"].Header(structure=structure, only_if_empty=only_if_empty)
            pieces = announced(header, {name: frame_pieces(exact(tensor)) for name, tensor in mine.items()})
            return shard.connection.set_model(lambda: parts(header, pieces))

        self._layout = []
        return self._version_of(each.version for each in self._each(send))

    def _checked(self, what: str, given: Parameters) -> tuple[dict[str, Tensor], Structure]:
        entries, structure = entries_of(what, given)
        check_kinds(what, entries)
        return {name: tensor.detach().to("cpu") for name, tensor in entries.items()}, structure

    def _split(self, entries: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        return [entries] if len(self._shards) == 1 else pieces_of(entries, len(self._shards))

    def _cut(self, entries: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """What each server gets of gradients, which may leave some parameters out."""
        if len(self._shards) == 1:
            return [entries]
        if not self._layout:
            for told in self._describe():
                self._layout.append([(each.name, math.prod(each.shape)) for each in told.parameters])
        known = {Piece.parsed(name).name for mine in self._layout for name, _ in mine}
        for name in entries:
            if name not in known:
                raise ConfigError(f"{label('gradients', name)} is not one of the parameters.")
        return [cut(entries, mine) for mine in self._layout]

    def get_model_parameters(self) -> Parameters:
        """The present parameters. Of several servers each has its own version."""
        return self.read()[1]

    def read(self) -> tuple[Version, Parameters]:
        """The present version, and the parameters."""
        if self._weights is not None:
            self._named()  # here: it asks all servers itself
        with self._reading:
            found = self._each(self._pull)
        entries = [values for _, values in found]
        whole = entries[0] if len(entries) == 1 else joined(entries)
        return self._version_of(header.version for header, _ in found), restored(whole, found[0][0].structure)

    def _pull(self, shard: _Shard) -> tuple[Any, dict[str, Tensor]]:
        if self._weights is None:
            header, frames = shard.connection.pull()
            return header, _decoded(frames)
        header, frames = shard.connection.pull(reader=self._worker, codec=str(self._weights), copy=shard.copy)
        if header.changes:
            for name, change in _decoded(frames).items():
                add_changes(shard.values[name], change)
        elif not header.unchanged:
            shard.values = _decoded(frames)
        shard.copy = header.copy
        return header, {name: tensor.clone() for name, tensor in shard.values.items()}

    # Gradients.

    def add_gradients(self, gradients: Parameters, *, version: Version | None = None) -> None:
        """Hand over gradients; with a ``window`` of 1, they are safe when this returns.

        ``version`` is that of the parameters they were computed with (:meth:`read`).
        """
        entries, _ = self._checked("gradients", gradients)
        if self._nonfinite == "zero":
            entries = {name: tensor.nan_to_num(0.0, 0.0, 0.0) for name, tensor in entries.items()}
        versions = self._versions(version)
        with self._lock:
            worker = self._named()
            self._sequence += 1
            sequence = self._sequence
            before = [dict(shard.states) for shard in self._shards]
            ready = []
            try:
                for shard, mine, version_of in zip(self._shards, self._cut(entries), versions, strict=True):
                    if mine:
                        ready.append((shard.connection, *self._encoded(shard, mine, worker, version_of), version_of))
            except GradwireError:
                self._restore(before)
                raise
            flying = [to.push(sequence, send, version_of, small) for to, send, small, version_of in ready]
            if self._window > 1:
                self._flying += flying
        if self._window > 1:
            self._make_room()
            return
        error = None
        for future in flying:
            try:
                future.result()
            except GradwireError as refused:
                error = refused
        if error is not None:
            with self._lock:
                if self._sequence == sequence:  # what was not applied has lost nothing: the residuals are those before
                    self._restore(before)
            raise error

    def _restore(self, states: list[dict[str, State]]) -> None:
        for shard, each in zip(self._shards, states, strict=True):
            shard.states = each

    def _versions(self, version: Version | None) -> Sequence[int | None]:
        if version is None:
            return [None] * len(self._shards)
        several = tuple(version) if isinstance(version, tuple | list) else (version,)
        if len(several) != len(self._shards):
            raise ConfigError(f"`version` must be one for each of {len(self._shards)} servers; got {version!r}.")
        if not all(isinstance(each, int) and not isinstance(each, bool) and 0 <= each < 1 << 63 for each in several):
            raise ConfigError(f"`version` must be a whole number that is not negative; got {version!r}.")
        return several

    def _encoded(
        self, shard: _Shard, entries: Mapping[str, Tensor], worker: str, version: int | None
    ) -> tuple[Callable[[], Iterable[bytes]], bool]:
        """What sends gradients to a server, as often as it must; and whether they are few."""
        header = messages()["PushPart"].Header(worker=worker, session=self._session, sequence=self._sequence)
        if version is not None:
            header.version = version
        frames = {}
        for place, (name, tensor) in enumerate(entries.items()):
            state = shard.states.get(name)
            if state is None:
                state = self.codec.init(TensorSpec.of(tensor), "cpu")
            key = Key(self._session & 0xFFFFFFFF, self._sequence, place)
            if self._as_it_is:
                payload = exact(tensor)
            else:
                payload, shard.states[name] = self.codec.encode(tensor, state, key)
            if int(payload.nonfinite):
                raise NonFiniteError(f"{label('gradients', name)} holds NaN or Inf.")
            frames[name] = frame_pieces(payload)
        pieces = announced(header, frames)
        return lambda: parts(header, pieces), sum(map(len, pieces)) <= SMALL_BYTES

    def _make_room(self) -> None:
        """Wait until there is room for another push, and raise what was wrong with those that arrived."""
        while True:
            with self._lock:
                self._settle()
                if len(self._flying) < self._window * len(self._shards):
                    return
                oldest = self._flying[0]
            oldest.exception()

    def _settle(self) -> None:
        while self._flying and self._flying[0].done():
            error = self._flying.popleft().exception()
            if error is not None:
                raise error

    def flush(self) -> None:
        """Wait until every push is acknowledged; raise if one was not."""
        with self._lock:
            flying = list(self._flying)
        errors = [error for future in flying if (error := future.exception()) is not None]
        with self._lock:
            for future in flying:
                if future in self._flying:
                    self._flying.remove(future)
        if errors:
            raise errors[0]

    # For a module.

    def load_into(self, module: nn.Module) -> Version:
        """Copy the present parameters into a module, by name; the version that they are."""
        if not isinstance(module, nn.Module):
            raise ConfigError(f"`module` must be a torch.nn.Module; got {type(module).__name__}.")
        version, parameters = self.read()
        if not isinstance(parameters, Mapping):
            raise ConfigError("the coordinator's parameters have no names, and do not fit a module.")
        own = dict(module.named_parameters())
        for name, parameter in own.items():
            if name not in parameters:
                raise ConfigError(f"the coordinator has no parameter {name!r}, which the module has.")
            if parameters[name].shape != parameter.shape:
                raise ConfigError(
                    f"the module's {name!r} must have shape {tuple(parameters[name].shape)}, as the coordinator's; "
                    f"got {tuple(parameter.shape)}."
                )
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(parameters[name])
        return version

    def compute_and_push(self, module: nn.Module, loss: Callable[[], Tensor]) -> Pushed:
        """A step of a worker: take the present parameters, compute a loss and its gradients, push them.

        ``loss`` computes it with the module; in ascent mode, what is to become large. A gradient that is refused
        because it has become too old is no error: the next step begins with newer parameters.
        """
        if not callable(loss):
            raise ConfigError(f"`loss` must be a function that computes it; got {type(loss).__name__}.")
        version = self.load_into(module)
        module.zero_grad(set_to_none=True)
        value = loss()
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ConfigError(f"`loss` must return a tensor of one number; got {type(value).__name__}.")
        value.backward()  # type: ignore[no-untyped-call]
        gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        try:
            self.add_gradients(gradients, version=version)
        except StaleGradientError:
            return Pushed(float(value.detach()), version, False)
        return Pushed(float(value.detach()), version, True)

    def add_model_parameters(
        self, parameters: Parameters, since: Parameters, *, version: Version | None = None
    ) -> None:
        """Hand over a model that was trained from ``since``, as the change that makes it.

        On a server with ``average_over=n`` and neither learning rate nor optimizer, n of them that began with the same
        parameters are averaged: federated and local-SGD rounds, compressed.
        """
        after, structure = self._checked("parameters", parameters)
        before, _ = self._checked("since", since)
        if list(after) != list(before):
            raise ConfigError("`parameters` and `since` must have the same entries.")
        change = {name: before[name] - tensor for name, tensor in after.items()}
        self.add_gradients(restored(change, structure), version=version)

    # Its state.

    def state_dict(self) -> dict[str, Any]:
        """What the codec keeps from push to push, for a checkpoint of the worker."""
        with self._lock:
            return {"codec": str(self.codec), "states": [dict(shard.states) for shard in self._shards]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with it."""
        if state.get("codec") != str(self.codec) or len(state.get("states", ())) != len(self._shards):
            raise ConfigError(
                f"`state` must be that of a client with codec {self.codec} and {len(self._shards)} servers; got "
                f"{state.get('codec')} and {len(state.get('states', ()))}."
            )
        with self._lock:
            self._restore([dict(each) for each in state["states"]])

    def close(self) -> None:
        """Wait for what is on its way, and end the connections."""
        try:
            self.flush()
        finally:
            for shard in self._shards:
                shard.connection.close()
            if self._pool is not None:
                self._pool.shutdown()

    def __enter__(self) -> CoordinatorClient:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.close()
            return
        for shard in self._shards:  # what is on its way belongs to work that has failed
            shard.connection.close()


def _decoded(frames: Frames) -> dict[str, Tensor]:
    return {
        name: decode_payload(wire.unpack(frame, copy=False, checksum=frames.checksums.get(name)))
        for name, frame in frames.frames.items()
    }
