"""The messages of ``coordinator.proto``.

Classes are made from its descriptor as ``protoc`` compiled it, not from generated code: that works with one or two
releases of protobuf, a descriptor with all of them.
"""

from __future__ import annotations

import functools
import os
from importlib.resources import files
from typing import Any, Final

from gradwire.extras import require

__all__ = ["HEALTH", "SERVICE", "grpc_module", "messages", "method"]

SERVICE: Final = "gradwire.coordinator.v1.Coordinator"
HEALTH: Final = "grpc.health.v1.Health"


def grpc_module() -> Any:
    """gRPC, which keeps its log to itself unless ``GRPC_VERBOSITY`` says otherwise: what fails is an error of ours."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    return require("grpc", purpose="the coordinator's service")


@functools.cache
def messages() -> dict[str, Any]:
    """Message classes by name; those inside of others, too, as ``PushPart.Header``.

    >>> messages()["Entry"](name="w", length=3).SerializeToString()
    b'\\n\\x01w\\x10\\x03'
    """
    descriptor = require("google.protobuf.descriptor_pb2", purpose="the coordinator's service")
    factory = require("google.protobuf.message_factory", purpose="the coordinator's service")
    pool = require("google.protobuf.descriptor_pool", purpose="the coordinator's service").DescriptorPool()
    compiled = descriptor.FileDescriptorSet.FromString(files(__package__).joinpath("protocol.desc").read_bytes())
    found = {}

    def keep(name: str, described: Any) -> None:
        # protobuf holds inner classes weakly and makes them again when needed; a class that is collected while a
        # message of it is being made on another thread ends the process with SIGSEGV.
        found[name] = factory.GetMessageClass(described)
        for inner in described.nested_types:
            keep(f"{name}.{inner.name}", inner)

    for file in compiled.file:
        pool.Add(file)
        for message in file.message_type:
            keep(message.name, pool.FindMessageTypeByName(f"{file.package}.{message.name}"))
    return found


def method(name: str, service: str = SERVICE) -> str:
    """The path of a call.

    >>> method("Push")
    '/gradwire.coordinator.v1.Coordinator/Push'
    """
    return f"/{service}/{name}"
