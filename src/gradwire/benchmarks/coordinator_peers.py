"""What a coordinator is compared with: the same bytes to another process and back, by other means.

Each peer has a process, ``python -m gradwire.benchmarks.coordinator_peers JSON``, and a class that
talks to it: ``push`` returns when the other side has all of a tensor, ``pull`` when this side has.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire import CoordinatorClient, Credentials
from gradwire.errors import PeerError
from gradwire.extras import require

__all__ = ["Gloo", "Gradwire", "RayActor", "Socket", "certificates", "peer_process", "serving"]

_PUSH: Final = b"p"
_PULL: Final = b"g"


class Socket:
    """A blocking socket, with TLS if there is a certificate.

    What comes goes to new memory, as a program that keeps it would have it, or with ``kept`` always to the same.
    """

    def __init__(self, port: int, tensor: Tensor, certificate: Path | None, kept: bool = False) -> None:
        self._out = tensor.view(torch.uint8).numpy().data
        self._memory = _Memory(len(self._out), kept)
        self._connection: socket.socket = socket.create_connection(("127.0.0.1", port))
        if certificate is not None:
            context = ssl.create_default_context(cafile=str(certificate))
            self._connection = context.wrap_socket(self._connection, server_hostname="localhost")

    def push(self) -> None:
        """All of it there."""
        self._connection.sendall(_PUSH)
        self._connection.sendall(self._out)
        if self._connection.recv(1) != b"k":
            raise PeerError("the socket's other side is gone.")

    def pull(self) -> None:
        """All of it here."""
        self._connection.sendall(_PULL)
        _fill(self._connection, self._memory.take())

    def close(self) -> None:
        """End it."""
        self._connection.close()


class _Memory:
    """Where a tensor goes that comes by a socket."""

    def __init__(self, nbytes: int, kept: bool) -> None:
        self._nbytes = nbytes
        self._kept = self._new() if kept else None

    def _new(self) -> memoryview:
        return memoryview(bytearray(self._nbytes))

    def take(self) -> memoryview:
        return self._new() if self._kept is None else self._kept


def _fill(connection: socket.socket, target: memoryview) -> None:
    at = 0
    while at < len(target):
        count = connection.recv_into(target[at:])
        if not count:
            raise PeerError("the socket's other side is gone.")
        at += count


def _serve_socket(nbytes: int, folder: str | None, kept: bool) -> None:
    memory = _Memory(nbytes, kept)
    held = memory.take()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(json.dumps({"port": listener.getsockname()[1]}), flush=True)  # noqa: T201
        connection, _ = listener.accept()
        if folder is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(Path(folder) / "certificate.pem", Path(folder) / "key.pem")
            connection = context.wrap_socket(connection, server_side=True)
        while operation := connection.recv(1):
            if operation == _PUSH:
                held = memory.take()
                _fill(connection, held)
                connection.sendall(b"k")
            else:
                connection.sendall(held)


class Gloo:
    """``torch.distributed`` by gloo: send and receive."""

    def __init__(self, port: int, tensor: Tensor) -> None:
        self._tensor, self._in, self._word = tensor, torch.empty_like(tensor), torch.zeros(1)
        _join_gloo(0, port)

    def push(self) -> None:
        """All of it there."""
        dist.send(torch.zeros(1), 1)
        dist.send(self._tensor, 1)
        dist.recv(self._word, 1)

    def pull(self) -> None:
        """All of it here."""
        dist.send(torch.ones(1), 1)
        dist.recv(self._in, 1)

    def close(self) -> None:
        """End it."""
        dist.send(torch.full((1,), 2.0), 1)
        dist.destroy_process_group()


def _join_gloo(rank: int, port: int) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)


def _serve_gloo(nbytes: int, port: int) -> None:
    print(json.dumps({"port": port}), flush=True)  # noqa: T201
    _join_gloo(1, port)
    tensor, word = torch.zeros(nbytes // 4), torch.zeros(1)
    while True:
        dist.recv(word, 0)
        if word.item() == 2:
            break
        if word.item() == 1:
            dist.send(tensor, 0)
        else:
            dist.recv(tensor, 0)
            dist.send(word, 0)
    dist.destroy_process_group()


class RayActor:
    """A parameter server as it is written in an afternoon: a Ray actor that subtracts what it is given.

    Tensors are copied through pickle; arrays of numpy lie in memory that all processes of a host share, and do not
    travel at all.
    """

    def __init__(self, tensor: Tensor, arrays: bool) -> None:
        self._ray = require("ray", purpose="the Ray actor")
        if not self._ray.is_initialized():
            self._ray.init(num_cpus=2, include_dashboard=False, configure_logging=False, log_to_driver=False)

        class Parameters:
            def __init__(self, values: Any) -> None:
                self.values = values.copy() if hasattr(values, "copy") else values.clone()

            def push(self, gradient: Any) -> None:
                self.values -= gradient

            def pull(self) -> Any:
                return self.values

        self._array = tensor.numpy() if arrays else tensor
        self._actor = self._ray.remote(num_cpus=0)(Parameters).remote(self._array)

    def push(self) -> None:
        """Applied there."""
        self._ray.get(self._actor.push.remote(self._array))

    def pull(self) -> None:
        """All of it here."""
        self._ray.get(self._actor.pull.remote())

    def close(self) -> None:
        """End it."""
        self._ray.shutdown()


class Gradwire:
    """Our own: pushes are applied, parameters are read."""

    def __init__(self, address: str, tensor: Tensor, certificate: Path | None, codec: str = "none") -> None:
        known = Credentials(authority=certificate)
        self._client = CoordinatorClient(address, codec=codec, credentials=known)
        self._gradients = {"w": tensor}
        self._client.set_model_parameters({"w": torch.zeros_like(tensor)}, only_if_empty=True)

    def push(self) -> None:
        """Applied there."""
        self._client.add_gradients(self._gradients)

    def pull(self) -> None:
        """All of it here."""
        self._client.read()

    def close(self) -> None:
        """End it."""
        self._client.close()


@contextlib.contextmanager
def peer_process(**asked: Any) -> Iterator[int]:
    """The other side of a peer; its port."""
    command = [sys.executable, "-m", "gradwire.benchmarks.coordinator_peers", json.dumps(asked)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(json.loads(process.stdout.readline())["port"])
        finally:
            process.kill()


@contextlib.contextmanager
def serving(settings: str) -> Iterator[str]:
    """``gradwire serve`` with settings in TOML, in a process of its own; its address."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "serve.toml"
        file.write_text(settings.replace("FOLDER", folder))
        command = [sys.executable, "-m", "gradwire", "serve", "--config", str(file)]
        quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        with subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **quiet) as process:  # type: ignore[call-overload]
            try:
                line = process.stdout.readline()
                if not line.startswith("serving at "):
                    raise PeerError("the server did not start.")
                yield line.split()[2].rstrip(",")
            finally:
                process.kill()


def certificates(folder: Path) -> bool:
    """A certificate of localhost and its key, by the openssl command; whether it is there."""
    openssl = shutil.which("openssl")
    if openssl is None:
        return False
    names = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "certificate.pem")]
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    return subprocess.run([*command, "-days", "1", *names, *subject], capture_output=True).returncode == 0


def _main(asked: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    if asked["role"] == "socket":
        _serve_socket(asked["nbytes"], asked.get("certificates"), asked.get("kept", False))
    elif asked["role"] == "gloo":
        _serve_gloo(asked["nbytes"], asked["port"])


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
