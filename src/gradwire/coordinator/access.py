"""Who may do what. Tokens are kept as hashes, compared in constant time, and appear in no message."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from gradwire.errors import AccessError, ConfigError

__all__ = ["ROLES", "Access", "Identity", "Worker", "new_token", "token_hash"]

ROLES: Final = ("push", "read", "admin")


@dataclass(frozen=True)
class Worker:
    """Somebody who is let in, by a token or by the name in a certificate.

    >>> Worker("w1", roles=("push", "reed"))
    Traceback (most recent call last):
    gradwire.errors.ConfigError: `roles` of worker 'w1' must be of push, read, admin; got 'reed'.
    """

    name: str
    token_sha256: str | None = None
    roles: tuple[str, ...] = ("push", "read")

    def __post_init__(self) -> None:
        if not self.name or not self.name.isprintable() or "/" in self.name:
            raise ConfigError(f"`name` of a worker must be printable and without '/'; got {self.name!r}.")
        if not self.roles:
            raise ConfigError(f"`roles` of worker {self.name!r} must be of {', '.join(ROLES)}; got none.")
        for role in self.roles:
            if role not in ROLES:
                raise ConfigError(f"`roles` of worker {self.name!r} must be of {', '.join(ROLES)}; got {role!r}.")
        digest = self.token_sha256
        if digest is not None and not (len(digest) == 64 and all(c in "0123456789abcdef" for c in digest)):
            raise ConfigError(
                f"`token_sha256` of worker {self.name!r} must be 64 hexadecimal digits, from: gradwire serve token"
            )


@dataclass(frozen=True)
class Identity:
    """Who calls; without a name it may be anybody."""

    name: str
    roles: frozenset[str]

    def check(self, role: str) -> None:
        """Raise unless it has the role; an admin has them all."""
        if role not in self.roles and "admin" not in self.roles:
            raise AccessError(f"{self.name!r} may not do this: it needs the role {role!r}.", known=True)

    def check_worker(self, worker: str) -> None:
        """Raise unless it may push under that name: its own, or its own with something after a slash."""
        if not worker or len(worker) > 200 or not worker.isprintable():
            raise ConfigError("`worker` must be a printable name of at most 200 characters.")
        if self.name and worker != self.name and not worker.startswith(f"{self.name}/"):
            raise AccessError(
                f"{self.name!r} may not push as {worker!r}: only as itself, or {self.name + '/...'!r}.", known=True
            )


def new_token() -> str:
    """A token that nobody can guess."""
    return secrets.token_urlsafe(32)


def token_hash(token: str) -> str:
    """What the server keeps of a token. It is as random as a key, so that a plain hash is enough.

    >>> token_hash("secret")[:8]
    '2bb80d53'
    """
    return hashlib.sha256(token.encode()).hexdigest()


class Access:
    """The workers of a server. Without any, everybody who reaches it may do everything.

    >>> access = Access([Worker("w1", token_hash("secret"))])
    >>> access.by_token("secret").name
    'w1'
    >>> access.by_token("guess")
    Traceback (most recent call last):
    gradwire.errors.AccessError: the token is not known here.
    """

    def __init__(self, workers: Iterable[Worker] = ()) -> None:
        self._workers = {worker.name: worker for worker in workers}

    @property
    def open(self) -> bool:
        """Whether nobody is asked who they are."""
        return not self._workers

    @property
    def tokens(self) -> bool:
        """Whether somebody has one."""
        return any(worker.token_sha256 is not None for worker in self._workers.values())

    def anybody(self) -> Identity:
        """Who calls, if nobody is asked."""
        return Identity("", frozenset(ROLES))

    def by_token(self, token: str) -> Identity:
        """Who has a token. Every hash is compared, so that the time tells nothing."""
        given, found = token_hash(token), None
        for worker in self._workers.values():
            if worker.token_sha256 is not None and hmac.compare_digest(worker.token_sha256, given):
                found = worker
        if found is None:
            raise AccessError("the token is not known here.")
        return Identity(found.name, frozenset(found.roles))

    def by_certificate(self, names: Iterable[str]) -> Identity:
        """Who has a certificate of one of these names, which the authority has signed."""
        for name in names:
            worker = self._workers.get(name)
            if worker is not None and worker.token_sha256 is None:
                return Identity(worker.name, frozenset(worker.roles))
        raise AccessError("the certificate's name is not known here.")
