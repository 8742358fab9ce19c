"""A worker's connection to one server: calls that are made again, and pushes that arrive once, whatever happens."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gradwire.coordinator.protocol import grpc_module, messages, method
from gradwire.coordinator.protocol.parts import PART_BYTES, READ_CHUNKS, Frames, read_part, together
from gradwire.errors import (
    AccessError,
    ConfigError,
    GradwireError,
    JournalError,
    NonFiniteError,
    PeerError,
    QueueFullError,
    StaleGradientError,
)

__all__ = ["Connection", "Credentials"]

_LATER: Final = ("FULL", "RATE", "DRAINING", "NO_SPACE", "INCOMPLETE")  # refusals after which a push is sent again
_NEVER: Final = ("CERTIFICATE_VERIFY_FAILED", "security handshaker", "verification failed")  # in what gRPC says
_MOMENT_S: Final = 0.002
_BACKOFF_S: Final = (0.02, 1.0)  # the first pause before it is tried again, and the longest
_CHANNEL: Final = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", 2 * PART_BYTES),
    ("grpc.min_reconnect_backoff_ms", 20),
    ("grpc.initial_reconnect_backoff_ms", 20),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    *READ_CHUNKS,
)


@dataclass(frozen=True)
class Credentials:
    """How a client says who it is, and knows the server: files in PEM, and a token.

    ``authority`` is the certificate that the server's is signed by; with it the connection is encrypted.
    ``certificate`` and ``key`` are the client's own, if the server asks for them.

    >>> Credentials(certificate="worker.pem")
    Traceback (most recent call last):
    gradwire.errors.ConfigError: `certificate` and `key` belong together, and to `authority`; got certificate.
    """

    token: str | None = field(default=None, repr=False)
    authority: str | Path | None = None
    certificate: str | Path | None = None
    key: str | Path | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if self.token is not None and (not self.token or any(each.isspace() for each in self.token)):
            raise ConfigError("`token` must have no spaces or ends of lines, and must not be empty.")
        own = [name for name in ("certificate", "key") if getattr(self, name) is not None]
        if len(own) == 1 or (own and self.authority is None):
            raise ConfigError(f"`certificate` and `key` belong together, and to `authority`; got {' and '.join(own)}.")

    def channel(self, address: str) -> Any:
        """A channel of gRPC."""
        grpc = grpc_module()
        options: list[tuple[str, Any]] = list(_CHANNEL)
        if self.authority is None:
            return grpc.insecure_channel(address, options=options)
        if self.server_name is not None:
            options.append(("grpc.ssl_target_name_override", self.server_name))
        files = [self.authority, self.key, self.certificate]
        try:
            pem = [None if file is None else Path(file).read_bytes() for file in files]
        except OSError as error:
            raise ConfigError(f"`{error.filename}` cannot be read: {error.strerror}.") from None
        for file, data in zip(files, pem, strict=True):
            if data is not None and not data.lstrip().startswith(b"-----BEGIN"):
                raise ConfigError(f"{file} is not in PEM: it does not begin with -----BEGIN.")
        return grpc.secure_channel(address, grpc.ssl_channel_credentials(*pem), options=options)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with every call."""
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)


@dataclass
class _Pending:
    """A push that is not acknowledged."""

    parts: Callable[[], Iterable[bytes]]
    version: int | None
    small: bool
    future: Future[Any] = field(default_factory=Future)


class Connection:
    """Calls of one server. A server that cannot be reached is tried again for ``retry_s``."""

    def __init__(self, address: str, credentials: Credentials, retry_s: float) -> None:
        self.address, self._retry_s = address, retry_s
        self._grpc = grpc_module()
        self._channel = credentials.channel(address)
        self._plain = credentials.authority is None
        self._metadata = credentials.metadata()
        known = messages()
        self._unary = {
            name: self._channel.unary_unary(
                method(name),
                request_serializer=known[f"{name}Request"].SerializeToString,
                response_deserializer=known[reply].FromString,
            )
            for name, reply in (("Describe", "Description"), ("Manage", "ManageReply"), ("Status", "StatusReply"))
        }
        self._push = self._channel.stream_stream(method("Push"), response_deserializer=known["PushReply"].FromString)
        self._pull = self._channel.unary_stream(
            method("Pull"), request_serializer=known["PullRequest"].SerializeToString
        )
        self._set = self._channel.stream_unary(
            method("SetModel"), response_deserializer=known["Description"].FromString
        )
        self._changed = threading.Condition()
        self._pending: OrderedDict[int, _Pending] = OrderedDict()
        self._generation = 0  # of the stream of pushes
        self._call: Any = None
        self._closed = False
        self._thread: threading.Thread | None = None

    # Calls.

    def call(self, name: str, **fields: Any) -> Any:
        """One of the calls that are not streams."""
        request = messages()[f"{name}Request"](**fields)
        return self._again(lambda: self._unary[name](request, metadata=self._metadata, timeout=self._retry_s))

    def pull(self, **fields: Any) -> tuple[Any, Frames]:
        """The header of an answer, and its frames."""
        request = messages()["PullRequest"](**fields)
        found: tuple[Any, Frames] = self._again(lambda: _frames(self._pull(request, metadata=self._metadata)))
        return found

    def set_model(self, parts: Callable[[], Iterable[bytes]]) -> Any:
        """Send parameters; ``parts`` makes the messages, anew if they must be sent again."""
        return self._again(lambda: self._set(iter(parts()), metadata=self._metadata))

    def _again(self, call: Callable[[], Any]) -> Any:
        if self._closed:
            raise ConfigError("the client is closed.")
        end, pause = time.monotonic() + self._retry_s, _BACKOFF_S[0]
        while True:
            try:
                return call()
            except self._grpc.RpcError as error:
                if not self._may_pass(error) or time.monotonic() + pause > end:
                    raise self._translated(error) from None
            time.sleep(pause * random.uniform(0.5, 1))
            pause = min(2 * pause, _BACKOFF_S[1])

    def _may_pass(self, error: Any) -> bool:
        """Whether it may go better the next time."""
        codes = self._grpc.StatusCode
        if any(sign in (error.details() or "") for sign in _NEVER):
            return False
        return error.code() in (codes.UNAVAILABLE, codes.RESOURCE_EXHAUSTED, codes.ABORTED, codes.CANCELLED)

    def _translated(self, error: Any) -> GradwireError:
        codes, text = self._grpc.StatusCode, error.details() or ""
        if error.code() in (codes.UNAUTHENTICATED, codes.PERMISSION_DENIED):
            return AccessError(f"{self.address}: {text}")
        if error.code() in (codes.INVALID_ARGUMENT, codes.FAILED_PRECONDITION, codes.OUT_OF_RANGE):
            return ConfigError(f"{self.address}: {text}")
        if error.code() == codes.RESOURCE_EXHAUSTED:
            return QueueFullError(f"{self.address}: {text}")
        if any(sign in text for sign in _NEVER):
            text = f"its certificate or ours is not accepted ({text})"
        elif self._plain and "closed" in text:
            text += "; does the server want TLS, that is, an `authority`?"
        return PeerError(f"the coordinator at {self.address} cannot be reached: {text} ({error.code().name})")

    # Pushes.

    def push(
        self, sequence: int, parts: Callable[[], Iterable[bytes]], version: int | None, small: bool
    ) -> Future[Any]:
        """Send a push; the future has the reply when it is acknowledged, or why it was not."""
        with self._changed:
            if self._closed:
                raise ConfigError("the client is closed.")
            pending = self._pending[sequence] = _Pending(parts, version, small)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name="gradwire-push")
                self._thread.start()
            self._changed.notify_all()
        return pending.future

    def _run(self) -> None:
        """Keep a stream open while there are pushes; what was not acknowledged on the last one is sent on the next."""
        pause, failing_since = _BACKOFF_S[0], None
        while True:
            with self._changed:
                if not self._pending:
                    failing_since = None  # nothing is tried meanwhile
                self._changed.wait_for(lambda: self._pending or self._closed)
                if self._closed:
                    return
                self._generation += 1
                self._call = self._push(self._requests(self._generation), metadata=self._metadata)
                call = self._call
            progress, error = False, None
            try:
                for answer in call:
                    for reply in (answer, *answer.more):
                        if messages()["PushReply"].Refusal.Name(reply.refusal) in _LATER:
                            error = reply
                            break
                        progress |= self._settle(reply)
                    if error is not None:
                        break
            except self._grpc.RpcError as failure:
                error = failure
            with self._changed:
                self._generation += 1  # its requests end
                self._changed.notify_all()
            call.cancel()
            if self._closed:
                return
            if progress:
                pause, failing_since = _BACKOFF_S[0], None
                if error is None:
                    continue
            failing_since = failing_since if failing_since is not None else time.monotonic()
            failed = isinstance(error, self._grpc.RpcError)
            if time.monotonic() - failing_since > self._retry_s or (failed and not self._may_pass(error)):
                self._fail_all(self._why(error))
                failing_since = None
                continue
            time.sleep(pause * random.uniform(0.5, 1))
            pause = min(2 * pause, _BACKOFF_S[1])

    def _why(self, error: Any) -> GradwireError:
        """Why pushes are given up: a call that failed, a refusal, or a stream that ended without a word."""
        if error is None:
            return PeerError(f"the coordinator at {self.address} does not answer pushes.")
        failed = isinstance(error, self._grpc.RpcError)
        return self._translated(error) if failed else _refusal(error, self.address, None)

    def _requests(self, generation: int) -> Iterator[bytes]:
        """Messages of a stream: pushes in their order, from the first that is not acknowledged."""
        sent = -1
        while True:
            with self._changed:
                while not (news := [each for each in self._pending if each > sent]):
                    if self._generation != generation or self._closed:
                        return
                    self._changed.wait()
                if self._generation != generation:
                    return
                busy = len(self._pending) > len(news) and all(self._pending[each].small for each in news)
            if busy:  # others are on their way: a moment, for more to travel with these
                time.sleep(_MOMENT_S)
            with self._changed:
                if self._generation != generation:
                    return
                news = [each for each in self._pending if each > sent]
                if not news:
                    continue
                pushes, sent = [self._pending[each] for each in news], news[-1]
            for small, run in itertools.groupby(pushes, lambda each: each.small):
                found = itertools.chain.from_iterable(each.parts() for each in run)
                yield from together(found) if small else found

    def _settle(self, reply: Any) -> bool:
        """Take the answer to a push; whether there is such a push."""
        with self._changed:
            pending = self._pending.pop(reply.sequence, None)
            self._changed.notify_all()
        if pending is None:
            return False
        if not reply.refusal:
            pending.future.set_result(reply)
        else:
            pending.future.set_exception(_refusal(reply, self.address, pending.version))
        return True

    def _fail_all(self, error: GradwireError) -> None:
        with self._changed:
            failed = list(self._pending.values())
            self._pending.clear()
            self._changed.notify_all()
        for pending in failed:
            pending.future.set_exception(error)

    def close(self) -> None:
        """End the connection; what was not acknowledged may have been applied or not."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            if self._call is not None:
                self._call.cancel()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._fail_all(PeerError("the client was closed before the push was acknowledged."))
        self._channel.close()


def _frames(call: Any) -> tuple[Any, Frames]:
    """The header of a stream of parts, and its data."""
    header, frames = None, None
    for message in call:
        first, data = read_part("PullPart", message)
        if first is not None:
            header, frames = first, Frames([(entry.name, entry.length) for entry in first.entries])
        if frames is None:
            raise PeerError("the coordinator sent data before it had announced any.")
        frames.add(data)
    if header is None or frames is None or not frames.complete:
        raise PeerError("the coordinator sent less than it had announced.")
    return header, frames


def _refusal(reply: Any, address: str, version: int | None) -> GradwireError:
    name = messages()["PushReply"].Refusal.Name(reply.refusal)
    if name == "STALE":
        return StaleGradientError(version or 0, reply.current, reply.bound)
    kinds: dict[str, type[GradwireError]] = {
        "NONFINITE": NonFiniteError,
        "INVALID": ConfigError,
        "TOO_LARGE": ConfigError,
        "FORBIDDEN": AccessError,
        "FULL": QueueFullError,
        "RATE": QueueFullError,
        "NO_SPACE": JournalError,
    }
    return kinds.get(name, PeerError)(f"{address}: {reply.message}")
