"""The dashboard's server: a page and small JSON answers, for whoever has the token.

Requests without the token learn nothing, not even that there are runs. A request's path is looked up in two tables, and
never becomes a path of a file. Pages of other sites cannot ask: the cookie is ``SameSite=Strict``, and the name they
came by must be ours, or a domain that was made to point to this machine could.
"""

from __future__ import annotations

import ipaddress
import json
import math
import secrets
import socket
from collections.abc import Callable
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from gradwire.dashboard import pages, views
from gradwire.dashboard.store import Store
from gradwire.errors import ConfigError

__all__ = ["PORT", "DashboardServer"]

PORT: Final = 8787
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_TEXT: Final = "text/plain; charset=utf-8"
_JSON: Final = "application/json"

Query = dict[str, list[str]]


class DashboardServer(ThreadingHTTPServer):
    """Serves ``store`` at ``url``, which holds the token, until :meth:`shutdown`.

    Without a ``port`` it is 8787, or a free one if that is taken.

    >>> import tempfile, pathlib
    >>> with tempfile.TemporaryDirectory() as folder, Store([pathlib.Path(folder)]) as store:
    ...     with DashboardServer(store, port=0) as server:
    ...         server.url.startswith("http://127.0.0.1:")
    True
    """

    daemon_threads = True
    request_queue_size = 32

    def __init__(self, store: Store, host: str = "127.0.0.1", port: int | None = None) -> None:
        self.store, self.host = store, host
        self.token = secrets.token_urlsafe(24)
        self.assets = pages.assets()
        try:
            self.address_family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
        except OSError as error:
            raise ConfigError(
                f"`--host` must be an address of this machine; got {host!r} ({error.strerror})."
            ) from error
        if port is None:
            try:
                super().__init__((host, PORT), _Handler)
            except OSError:
                port = 0
        if port is not None:
            try:
                super().__init__((host, port), _Handler)
            except (OSError, OverflowError) as error:
                raise ConfigError(f"`--host` {host!r}, `--port` {port} cannot be served at: {error}.") from error
        self.port = int(self.server_address[1])
        self._names = _names(host)

    def server_bind(self) -> None:
        """Bind, without asking anybody for this machine's name."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self.host, int(self.server_address[1])

    @property
    def cookie(self) -> str:
        """The cookie's name; browsers do not tell the ports of a machine apart, but we do."""
        return f"gradwire-{self.port}"

    @property
    def url(self) -> str:
        """What to open in a browser."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/?token={self.token}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away is no news."""

    def knows(self, host: str) -> bool:
        """Whether a request to ``host`` (of its ``Host`` header) was meant for us."""
        try:
            parts = urlsplit(f"//{host}")
            name, port = parts.hostname or "", parts.port
        except ValueError:
            return False
        if (port or 80) != self.port or parts.username is not None or parts.path:
            return False
        return name in self._names or ("*" in self._names and _is_address(name))


def _names(host: str) -> set[str]:
    names = {host.lower(), "localhost"}
    if _is_address(host):
        address = ipaddress.ip_address(host)
        if address.is_loopback:
            names |= {"127.0.0.1"} if address.version == 4 else {"::1"}
        if address.is_unspecified:  # any address of this machine, which we cannot list: but no other name
            names |= {"*", socket.gethostname().lower()}
    return names


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class _Handler(BaseHTTPRequestHandler):
    server: DashboardServer
    protocol_version = "HTTP/1.1"
    timeout = 60

    def __getattr__(self, name: str) -> Callable[[], None]:
        if name.startswith("do_"):
            return self._refuse_method
        raise AttributeError(name)

    def do_GET(self) -> None:
        try:
            url = urlsplit(self.path)
            query = parse_qs(url.query, max_num_fields=20)
        except ValueError:
            self._text(HTTPStatus.BAD_REQUEST, "bad request")
            return
        if not self._allowed(query):
            return
        if url.path == "/":
            self._page(query)
        elif url.path in self.server.assets:
            self._send(HTTPStatus.OK, *self.server.assets[url.path])
        elif url.path in _ANSWERS:
            self._answer(_ANSWERS[url.path], query)
        else:
            self._text(HTTPStatus.NOT_FOUND, "not found")

    def _refuse_method(self) -> None:
        self.close_connection = True  # a body that was not read would be taken for the next request
        try:
            query = parse_qs(urlsplit(self.path).query, max_num_fields=20)
        except ValueError:
            query = {}
        if self._allowed(query):
            self._send(HTTPStatus.METHOD_NOT_ALLOWED, _TEXT, b"only GET\n", {"Allow": "GET"})

    def _allowed(self, query: Query) -> bool:
        if not self._has_token(query):
            self.close_connection = True
            self._text(HTTPStatus.UNAUTHORIZED, "401: open the address that gradwire dash printed, with its token")
            return False
        if not self.server.knows(self.headers.get("Host", "")):
            self._text(HTTPStatus.FORBIDDEN, "403: this server is not known by that name")
            return False
        return True

    def _has_token(self, query: Query) -> bool:
        given = query.get("token", [""])[0]
        if not given:
            try:
                cookie = SimpleCookie(self.headers.get("Cookie", "")).get(self.server.cookie)
            except CookieError:
                cookie = None
            given = cookie.value if cookie is not None else ""
        return secrets.compare_digest(given.encode("utf-8", "replace"), self.server.token.encode())

    def _page(self, query: Query) -> None:
        headers = {}
        if "token" in query:
            headers["Set-Cookie"] = f"{self.server.cookie}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
        self._send(HTTPStatus.OK, "text/html; charset=utf-8", pages.page(), headers)

    def _answer(self, make: Callable[[Store, Query], Any], query: Query) -> None:
        try:
            answer = make(self.server.store, query)
        except KeyError:
            self._text(HTTPStatus.NOT_FOUND, "not found")
        except ValueError as error:
            self._text(HTTPStatus.BAD_REQUEST, str(error))
        else:
            self._send(HTTPStatus.OK, _JSON, json.dumps(answer, separators=(",", ":"), allow_nan=False).encode())

    def _text(self, status: HTTPStatus, text: str) -> None:
        self._send(status, _TEXT, f"{text}\n".encode("utf-8", "replace"))

    def _send(self, status: HTTPStatus, kind: str, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (_HEADERS | (headers or {})).items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        self.close_connection = True
        self.requestline, self.command = self.requestline or "", self.command or ""
        self._text(HTTPStatus(code), "bad request")

    def version_string(self) -> str:
        return "gradwire"

    def log_message(self, *_: Any) -> None:
        pass  # the token is in the first request's line


def _runs(store: Store, query: Query) -> Any:
    return store.overview(int(_one(query, "since", "-1")))


def _series(store: Store, query: Query) -> Any:
    groups = _one(query, "groups", ",".join(views.GROUPS)).split(",")
    low, high = float(_one(query, "from", "-inf")), float(_one(query, "to", "inf"))
    if math.isnan(low) or math.isnan(high):
        raise ValueError("`from` and `to` must be numbers")
    with store.run(_one(query, "run")) as run:
        return views.series(run, groups, _one(query, "axis", "step"), low, high)


def _part(store: Store, query: Query) -> Any:
    make = views.PARTS[_one(query, "part")]
    with store.run(_one(query, "run")) as run:
        return make(run)


def _layer(store: Store, query: Query) -> Any:
    with store.run(_one(query, "run")) as run:
        return views.layer(run, _one(query, "name"))


def _timeline(store: Store, query: Query) -> Any:
    step = _one(query, "step", "")
    with store.run(_one(query, "run")) as run:
        return views.timeline(run, int(step) if step else None)


def _one(query: Query, name: str, default: str | None = None) -> str:
    if name not in query and default is None:
        raise KeyError(name)
    return query[name][0] if name in query else str(default)


_ANSWERS: Final[dict[str, Callable[[Store, Query], Any]]] = {
    "/api/runs": _runs,
    "/api/series": _series,
    "/api/part": _part,
    "/api/layer": _layer,
    "/api/timeline": _timeline,
}
